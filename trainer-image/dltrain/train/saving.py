"""Save the state of a synchronous training in checkpoints, and resume the training from a checkpoint."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dltrain.checkpoint.state import WeightLoader
from dltrain.checkpoint.store import MODEL, OPTIMIZER, Extents, Snapshot
from dltrain.checkpoint.user_objects import UserObjects
from dltrain.checkpoint.writer import CheckpointManager, patience_s
from dltrain.elastic.team import Team
from dltrain.optim.combined import parts_of
from dltrain.optim.options import constant, like
from dltrain.parallel import gradient_summing
from dltrain.parallel.placement import Placement
from dltrain.protocol.errors import BadInputError
from dltrain.train.frozen_base import FrozenBase
from dltrain.train.progress import Progress

FROZEN = "frozen"
"""Name of the digests of parameters that a checkpoint does not contain, in its state. Most checkpoints have none."""


def check_optimizer(kept: Sequence[Mapping[str, Any]], optimizer: Optimizer) -> None:
    """Raise BadInputError if the parameter groups ``kept`` from a checkpoint do not fit ``optimizer``.

    Options that only one side has are accepted, because a newer version of torch may have added them. If each side has
    options that the other lacks, the checkpoint belongs to another kind of optimizer, which is an error.
    """
    remedy = "use the optimizer that wrote the checkpoint, or another checkpoint volume"
    if len(kept) != len(optimizer.param_groups):
        found, expected = f"{len(optimizer.param_groups)} groups of parameters", f"{len(kept)} groups"
        raise BadInputError("spec.optimizer", found, f"{expected}, as in the checkpoint", remedy)
    first = 0
    for one in parts_of(optimizer):
        saved = {name for name, option in one.param_groups[0].items() if not constant(option)}
        options, theirs = saved - {"initial_lr"}, set(kept[first]) - {"initial_lr"}
        if not (options <= theirs or theirs <= options):
            expected = f"an optimizer with the options {', '.join(sorted(theirs - options))}"
            raise BadInputError("spec.optimizer", type(one).__name__, f"{expected}, as in the checkpoint", remedy)
        first += len(one.param_groups)


class Saved(Protocol):
    """Interface of an object whose state checkpoints contain. ``state`` returns it as JSON types; ``load`` sets it."""

    def state(self) -> Any: ...

    def load(self, state: Any, /) -> None: ...


class EarlyEnd:
    """The end of a training by ``t.finish`` before its last planned step, which a restart must not undo."""

    def __init__(self) -> None:
        self._planned: int | None = None
        """Number of steps that the training would have had; None if it has not been ended early."""

    def request(self, planned: int) -> None:
        """End the training early. ``planned``: its number of steps so far. Later calls change nothing."""
        if self._planned is None:
            self._planned = planned

    def total_steps(self, planned: int, done: int) -> int:
        """Return the number of steps of a training that begins or resumes after ``done`` steps.

        ``planned``: the number of steps according to the plan. If it has changed since the early end, the user asks for
        another length, and the training continues.
        """
        if self._planned != planned:
            self._planned = None
            return planned
        return done

    def state(self) -> int | None:
        return self._planned

    def load(self, state: int | None, /) -> None:
        self._planned = state


class LoadingTarget:
    """A model and an optimizer into which a checkpoint is loaded, one tensor at a time. See ``state.Target``.

    ``base``: the parameters of the model that its checkpoints do not contain; None: there are none.
    """

    def __init__(
        self, placement: Placement, model: nn.Module, optimizer: Optimizer, base: FrozenBase | None = None
    ) -> None:
        self._placement, self._optimizer, self._weights = placement, optimizer, WeightLoader(model)
        self._base = base or FrozenBase()

    def check(self, state: Mapping[str, Any]) -> None:
        self._base.check_same(state.get(FROZEN, {}))
        check_optimizer(state["optimizer"]["groups"], self._optimizer)

    def load_weight(self, name: str, whole: Tensor) -> None:
        if not self._placement.load_weight(name, whole):
            self._weights(name, whole)

    def optimizer_part(self, index: int, key: str, whole: Tensor) -> Tensor | None:
        return self._placement.optimizer_part(self._optimizer, index, key, whole)

    def group(self) -> Any:
        return self._placement.checkpoint_group()

    def weight_part(self, name: str) -> tuple[Tensor, int]:
        return self._placement.weight_part(name)

    def optimizer_space(
        self, index: int, key: str, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> tuple[Tensor, Tensor, int]:
        return self._placement.optimizer_space(self._optimizer, index, dtype, shape)

    def load_optimizer(self, parts: dict[str, Any]) -> None:
        self._weights.finish()
        groups = zip(self._optimizer.param_groups, parts["param_groups"], strict=True)
        parts = parts | {"param_groups": [_constants(own) | like(own, saved) for own, saved in groups]}
        self._placement.load_optimizer(self._optimizer, parts)


def _constants(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: option for name, option in group.items() if constant(option)}


class Saving:
    """Save and restore the model, the optimizer and all other state on which the next step depends.

    ``parts``: the trainer's own objects with state, such as schedulers, by their name in the checkpoint.
    """

    def __init__(
        self,
        checkpoint_manager: CheckpointManager,
        team: Team,
        progress: Progress,
        user_objects: UserObjects,
        parts: Mapping[str, Saved],
    ) -> None:
        self._checkpoint_manager, self._team, self._progress = checkpoint_manager, team, progress
        self._user_objects, self._parts = user_objects, parts

    def resume(self, model: nn.Module, optimizer: Optimizer, base: FrozenBase) -> Snapshot | None:
        """Load the newest checkpoint into ``model`` and ``optimizer`` and restore all other state.

        All ranks must call it. ``base``: the parameters that checkpoints do not contain. Return the checkpoint without
        the tensors of model and optimizer, or None if there is no checkpoint. Raise BadInputError if the checkpoint
        belongs to another job or another base.
        """
        self._model, self._optimizer, self._base = model, optimizer, base
        team, parallel = self._team, self._team.parallel
        target = LoadingTarget(parallel, model, optimizer, base)
        parts = target if parallel.writes_rows else None
        if (snapshot := self._checkpoint_manager.resume(parallel.shape_of(model), target, parts)) is None:
            return None
        state = snapshot.state
        for name, part in self._parts.items():
            if name in state:  # a checkpoint of an older version may lack some
                part.load(state[name])
        self._user_objects.load(snapshot.step, state.get("kept", {}), snapshot.kept)
        self._progress.accuracy, self._progress.loss = state["accuracy"], state["loss"]
        if self.same_ranks(snapshot):
            team.shares = tuple(state["shares"])  # with the same shares, results continue bit for bit
            gradient_summing.reuse(parallel, state.get("summing", []))
        return snapshot

    def same_ranks(self, snapshot: Snapshot) -> bool:
        """Return True if this plan has the same local batch sizes as the plan of the run that wrote the checkpoint.

        ``snapshot``: the checkpoint. If True, a resumed run continues with the local batch sizes that the checkpoint
        contains, which may have been rebalanced.
        """
        return tuple(snapshot.state["planned_shares"]) == self._team.planned_shares

    def save(
        self, step: int, epoch: int, *, durable: bool = True, began: float | None = None, last: bool = False
    ) -> None:
        """Start to write a checkpoint of the state after ``step`` steps. All ranks must call it.

        ``durable``: write the checkpoint to the volume; otherwise only to the pods' memory. ``began``: the time
        (``time.monotonic()``) at which work for this checkpoint began, such as the comparison of parameters; by default
        now. ``last``: True if the training ends or stops now. A sharded checkpoint then also has the whole model. Raise
        OSError if writing the previous checkpoint failed, and PeerLostError if a rank is lost.
        """
        if not self._team.plan.checkpoint.enabled:
            return
        parallel, began = self._team.parallel, time.monotonic() if began is None else began
        kept, tensors = self._user_objects.state()
        state = {
            **{name: part.state() for name, part in self._parts.items()},
            "epoch": epoch,
            "kept": kept,
            "shares": self._team.whole or self._team.shares,
            "planned_shares": self._team.planned_shares,
            "accuracy": self._progress.accuracy,
            "loss": self._progress.loss,
            "summing": gradient_summing.choices(parallel),
            **({FROZEN: self._base.digests} if self._base.digests else {}),
        }
        frozen = self._base.digests.keys()
        extents: Extents = {}
        if self._checkpoint_manager.sharded:
            weights, optimizer, rows = parallel.own_rows(self._model, self._optimizer)
            weights = {name: own for name, own in weights.items() if name not in frozen}
            extents = {f"{MODEL}/{name}": extent for name, extent in rows.weights.items()}
            extents |= {f"{OPTIMIZER}/{name}": extent for name, extent in rows.optimizer.items()}
        else:
            if parallel.copies_state:
                self._checkpoint_manager.wait()  # rank 0 has memory for one gathered state, not for two
            optimizer = parallel.optimizer_state(self._optimizer)
            weights = parallel.weights(self._model, frozen)
        gathered_s = time.monotonic() - began
        self._checkpoint_manager.save(
            step,
            weights,
            optimizer,
            state,
            tensors,
            durable=durable,
            gathered_s=gathered_s,
            copied=parallel.copies_state and not self._checkpoint_manager.sharded,
            extents=extents,
            export=last,
        )

    def fits(self, step: int, left_s: float) -> bool:
        """Return True if a checkpoint that begins now is durable before the first rank is killed.

        If not, report that the checkpoint is skipped. If checkpoints are disabled, return True. ``step``: number of
        completed steps. ``left_s``: seconds until this rank is killed. All ranks must call it, and get the same answer.
        Raise PeerLostError if the run cannot continue after a loss of ranks.
        """
        manager = self._checkpoint_manager
        if not self._team.plan.checkpoint.enabled or self._team.together(step, lambda: manager.fits(left_s)):
            return True
        manager.report_skipped(step)
        return False

    def wait(self) -> None:
        """Wait until the checkpoints that this rank writes are complete, and announce the pause to the agent.

        Rank 0 writes to the volume. Raise OSError if this failed.
        """
        if self._team.plan.checkpoint.enabled:
            parallel = self._team.parallel
            nbytes = 3 * parallel.gradient_nbytes  # up to three values of the optimizer for each trained parameter
            nbytes *= self._team.process_group.size if parallel.writes_rows else 1  # rank 0 may write the whole state
            whole = parallel.shape_of(self._model)
            nbytes += sum(tensor.nbytes for name, tensor in whole.items() if name not in self._base.digests)
            nbytes += sum(tensor.nbytes for tensor in self._user_objects.state()[1].values())
            self._progress.busy("checkpoint", patience_s(nbytes))
            self._checkpoint_manager.wait()
