"""Several optimizers as one, for checkpoints and checks, which need the parameter groups and the state of all."""

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from dltrain.protocol.errors import MisuseError


class CombinedOptimizer(Optimizer):
    """The parameter groups and the state of several optimizers, in order. The script makes the updates with each."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = tuple(optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all optimizers. The parameters of later optimizers have the next indices.

        A key that belongs to no parameter gets the number of its optimizer as a prefix, such as ``1/common``. Raise
        MisuseError if such a key is no string.
        """
        state: dict[int | str, Any] = {}
        groups: list[dict[str, Any]] = []
        first = 0
        for number, optimizer in enumerate(self.optimizers):
            own = optimizer.state_dict()
            for key, entry in own["state"].items():
                if not isinstance(key, int | str):
                    raise MisuseError(
                        f"{type(optimizer).__name__}: found state under the key {key!r} of {type(key).__name__}; "
                        "expected a string, which checkpoints of several optimizers can contain. Use another optimizer"
                    )
                state[first + key if isinstance(key, int) else f"{number}/{key}"] = entry
            for group in own["param_groups"]:
                groups.append(group | {"params": [first + index for index in group["params"]]})
            first += sum(len(group["params"]) for group in own["param_groups"])
        return {"state": state, "param_groups": groups}

    def parts(self, saved: dict[str, Any]) -> list[dict[str, Any]]:
        """Divide ``saved``, a result of ``state_dict``, into the ``state_dict()`` of each optimizer."""
        divided, position, first = [], 0, 0
        for number, optimizer in enumerate(self.optimizers):
            groups = saved["param_groups"][position : position + len(optimizer.param_groups)]
            stop = first + sum(len(group["params"]) for group in groups)
            state: dict[int | str, Any] = {}
            for key, entry in saved["state"].items():
                if isinstance(key, int):
                    if first <= key < stop:
                        state[key - first] = entry
                elif key.startswith(f"{number}/"):
                    state[key.removeprefix(f"{number}/")] = entry
            own = [group | {"params": [index - first for index in group["params"]]} for group in groups]
            divided.append({"state": state, "param_groups": own})
            position, first = position + len(groups), stop
        return divided


def parts_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """Return the optimizers of a combined one in order, or ``optimizer`` itself."""
    return optimizer.optimizers if isinstance(optimizer, CombinedOptimizer) else (optimizer,)
