"""Errors for scripts that use gradients in a way in which ranks could not reduce them correctly."""

from dltrain.protocol.errors import MisuseError


def thawed(shapes: list[tuple[int, ...]]) -> MisuseError:
    """Return the error for parameters with these shapes, which the script has made trainable after ``t.wrap``."""
    return MisuseError(
        f"model: found trainable parameters {shapes} that were frozen in t.wrap; expected no new ones, because "
        "ranks do not reduce their gradients. Freeze parameters only after t.wrap"
    )


def changed(because: str) -> MisuseError:
    """Return the error for gradients that the script has changed too early. ``because``: why it is too early."""
    return MisuseError(
        "gradients: found a change by the script between backward() and opt.step(); expected none, because "
        f"{because}. Clip with t.clip_gradients(max_norm)"
    )


def changed_too_early(*, sharded: bool, unused: int) -> MisuseError:
    """Return the error for gradients that the script has changed before their reduction.

    ``sharded``: True with a sharded optimizer. ``unused``: number of parameters that had no part in the loss.
    """
    if sharded:
        return changed("each rank holds only a part of the gradients (spec.parallelism.strategy Optimizer)")
    return changed(f"ranks have not reduced the gradients yet: {unused} parameters had no part in the loss")


def second_pass() -> MisuseError:
    """Return the error for a second backward pass in a step after the reduction of the first one has begun."""
    return MisuseError(
        "backward: found a second backward pass in one step; expected one. Call opt.step() after each "
        "backward(), or add up the losses and call backward() once, or use `with t.no_sync():` around all "
        "passes but the last. A layer that torch.utils.checkpoint computes several times in a step needs "
        "use_reentrant=False"
    )


def uneven_updates(updates: int, micro_batches: int) -> MisuseError:
    """Return the error for an optimizer whose step the script has not called once for each micro-batch.

    ``updates``: number of calls in this step. ``micro_batches``: number of its micro-batches so far.
    """
    return MisuseError(
        f"opt.step(): found {updates} calls in {micro_batches} micro-batches of t.steps(…, accumulate=True); expected "
        "one call of each optimizer in each micro-batch, so that its gradients add up. Call the optimizer every time, "
        "or turn off gradient accumulation (spec.parallelism.gradientAccumulation: Never)"
    )
