"""Methods that a training script must call so that its loop follows the plan, and checks that the script calls them."""

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from dltrain.checkpoint.state import check_optimizer_state
from dltrain.elastic.team import NOT_WRAPPED, Team
from dltrain.models.recomputation import has_run, recompute
from dltrain.optim.combined import parts_of
from dltrain.protocol.errors import MisuseError
from dltrain.train import usage_checks
from dltrain.train.steps.mixed_precision import MixedPrecision
from dltrain.train.steps.normalization import check_no_layers_of_torch

_CALL = "t.checkpoint_activations(model.blocks)"
_FIELD = "with a plan that checkpoints activations (spec.activationCheckpointing)"


class AsPlanned(MixedPrecision):
    """The part of ``Trainer`` with which a training loop computes as the plan says: its precision, and its memory."""

    model: nn.Module
    optimizer: Optimizer
    _team: Team
    _blocks: tuple[nn.Module, ...] | None = None
    """The modules that the script has named; None before that."""
    _first_checked = False

    def checkpoint_activations(self, blocks: Iterable[nn.Module]) -> None:
        """Name the modules that the backward pass may compute again instead of keeping their activations.

        ``blocks``: the modules whose activations take most of the memory, such as the layers of a transformer
        (``model.blocks``), or the residual blocks of a ResNet; none inside another. Call this method before ``steps``.
        It does nothing unless the plan checkpoints activations. A block must compute the same if it is called twice
        with the same inputs; random numbers of torch, such as those of dropout, are repeated, and BatchNorm counts its
        batch once. Raise MisuseError for other arguments.
        """
        found = _modules(blocks)
        self._blocks = (*(self._blocks or ()), *found)
        if self.plan.activation_checkpointing:
            for block in found:
                recompute(block)

    def _check_loop(self, *, accumulate: bool) -> None:
        """Raise MisuseError before the first step if the loop would need more memory than the plan has.

        Raise it also before ``wrap``, and for a model with SyncBatchNorm of torch. ``accumulate``: as of ``steps``.
        """
        if not self._team.taken:
            raise MisuseError(NOT_WRAPPED)
        check_no_layers_of_torch(self.model)
        usage_checks.check_accumulates(self.plan, accumulate=accumulate)
        if self.plan.activation_checkpointing and self._blocks is None:
            raise MisuseError(
                f"t.steps: found no call of t.checkpoint_activations {_FIELD}; expected {_CALL} before the loop, "
                "because a batch may not fit into memory otherwise. Add it, or remove spec.activationCheckpointing"
            )

    def _check_first_step(self) -> None:
        """Raise MisuseError after the first step if the loop has not computed it as the plan says.

        Raise it also if checkpoints cannot contain the optimizer's state, before hours of training would be lost.
        """
        first, self._first_checked = not self._first_checked, True
        if first and self.plan.checkpoint.enabled:
            divided = self.plan.splits_model or self.plan.shards_model
            for optimizer in parts_of(self.optimizer):
                check_optimizer_state(optimizer, self.model, divided=divided)
            self._team.parallel.check_divided_state(self.optimizer)
        if not first or not self._step.weight_by_samples:
            return  # a rank without samples has no loop
        self._check_precision()
        if self.plan.activation_checkpointing and not any(map(has_run, self._blocks or ())):
            raise MisuseError(
                f"t.checkpoint_activations: found modules that the first step did not call {_FIELD}; expected blocks "
                "of the model that the loop trains. Pass the modules that its forward calls"
            )


def _modules(blocks: Any) -> list[nn.Module]:
    """Return the argument of ``checkpoint_activations`` as a list. Raise MisuseError if it is something else."""
    where = "t.checkpoint_activations: found"
    if isinstance(blocks, nn.Module) and not hasattr(blocks, "__iter__"):
        raise MisuseError(f"{where} a single {type(blocks).__name__}; expected its blocks. Pass a list of modules")
    try:
        found = list(blocks)
    except TypeError:
        raise MisuseError(f"{where} {type(blocks).__name__}; expected a list of modules, such as {_CALL}") from None
    if odd := [type(each).__name__ for each in found if not isinstance(each, nn.Module)]:
        raise MisuseError(f"{where} {odd[0]} in the list; expected modules, such as {_CALL}")
    if not found:
        raise MisuseError(f"{where} an empty list; expected the blocks of the model, such as {_CALL}")
    outer = {id(each) for each in found}
    for block in found:
        if any(id(inner) in outer for inner in block.modules() if inner is not block):
            raise MisuseError(
                f"{where} a {type(block).__name__} with another of the blocks inside; expected blocks that do not "
                "contain each other. Pass either the outer or the inner ones"
            )
    return found
