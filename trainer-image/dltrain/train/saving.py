"""What a run in lockstep keeps in its checkpoints, and takes from them."""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from dltrain.checkpoint.store import Snapshot
from dltrain.checkpoint.user_objects import UserObjects
from dltrain.checkpoint.writer import CheckpointManager, patience_s
from dltrain.elastic.team import Team
from dltrain.optim.grad_scaler import LossScale
from dltrain.optim.lr_scaling import Scaling
from dltrain.optim.lr_schedulers import Schedules
from dltrain.optim.noise_scale import NoiseScale
from dltrain.parallel import gradient_summing
from dltrain.protocol.errors import BadInputError
from dltrain.train.progress import Progress


def check_optimizer(kept: Sequence[Mapping[str, Any]], optimizer: Optimizer) -> None:
    """Whether groups of a checkpoint can be those of ``optimizer``. Raises BadInputError.

    Versions of torch add options to an optimizer; another optimizer has some that this one has not, and lacks others.
    """
    here = optimizer.param_groups
    if len(kept) != len(here):
        found, expected = f"{len(here)} groups of parameters", f"{len(kept)}"
    else:
        options, theirs = set(here[0]) - {"initial_lr"}, set(kept[0]) - {"initial_lr"}
        if options <= theirs or theirs <= options:
            return
        found = type(optimizer).__name__
        expected = f"one with {', '.join(sorted(theirs - options))}"
    remedy = "set it back, or use another volume"
    raise BadInputError("spec.optimizer", found, f"{expected}, as in the checkpoint", remedy)


class Saving:
    """Model and optimizer as the ranks hold them together, and all else that the next step depends on."""

    def __init__(
        self,
        checkpoint_manager: CheckpointManager,
        team: Team,
        progress: Progress,
        scaling: Scaling,
        noise: NoiseScale,
        schedules: Schedules,
        loss_scale: LossScale,
        kept: UserObjects,
    ) -> None:
        self._checkpoint_manager, self._team, self._progress = checkpoint_manager, team, progress
        self._scaling, self._noise, self._schedules = scaling, noise, schedules
        self._loss_scale, self._user_objects = loss_scale, kept

    def resume(self, model: nn.Module, optimizer: Optimizer) -> Snapshot | None:
        """Go on from the newest state, if there is one; all ranks call it. Raises BadInputError for another job's."""
        self._model, self._optimizer = model, optimizer
        team, parallel = self._team, self._team.parallel

        def load_optimizer(whole: dict[str, Any]) -> None:
            check_optimizer(whole["param_groups"], optimizer)
            parallel.load_optimizer(optimizer, whole)

        load_model = partial(parallel.load_weights, model)
        if (snapshot := self._checkpoint_manager.resume(parallel.shape_of(model), load_model, load_optimizer)) is None:
            return None
        state = snapshot.state
        self._scaling.load(state.get("scaling", self._scaling.state()))
        self._noise.load(state.get("noise", self._noise.state()))
        self._schedules.load(state.get("schedules", []))
        self._loss_scale.load(state.get("loss_scale"))
        self._user_objects.load(snapshot.step, state.get("kept", {}), snapshot.kept)
        self._progress.accuracy, self._progress.loss = state["accuracy"], state["loss"]
        if self.same_ranks(snapshot):
            team.shares = tuple(state["shares"])  # go on to the last bit
            gradient_summing.reuse(parallel, state.get("summing", []))
        return snapshot

    def same_ranks(self, snapshot: Snapshot) -> bool:
        """Whether the ranks are those that the snapshot is of, as far as the plan tells."""
        return tuple(snapshot.state["planned_shares"]) == self._team.planned_shares

    def save(self, step: int, epoch: int, *, durable: bool = True) -> None:
        """Begin a checkpoint of the state after ``step`` steps; all ranks call it. Raises OSError, PeerLostError."""
        if not self._team.plan.checkpoint.enabled:
            return
        parallel, began = self._team.parallel, time.monotonic()
        kept, tensors = self._user_objects.state()
        state = {
            "epoch": epoch,
            "scaling": self._scaling.state(),
            "noise": self._noise.state(),
            "schedules": self._schedules.state(),
            "loss_scale": self._loss_scale.state(),
            "kept": kept,
            "shares": self._team.whole or self._team.shares,
            "planned_shares": self._team.planned_shares,
            "accuracy": self._progress.accuracy,
            "loss": self._progress.loss,
            "summing": gradient_summing.known(parallel),
        }
        optimizer = parallel.optimizer_state(self._optimizer)
        weights = parallel.weights(self._model)
        gathered_s = time.monotonic() - began
        self._checkpoint_manager.save(step, weights, optimizer, state, tensors, durable=durable, gathered_s=gathered_s)

    def wait(self) -> None:
        """Until it is durable: all ranks end together, so all wait for rank 0's volume. Raises OSError."""
        if self._team.plan.checkpoint.enabled:
            nbytes = 4 * self._team.parallel.buffer.flat.nbytes  # parameters, and up to three values for each
            nbytes += sum(tensor.nbytes for tensor in self._user_objects.state()[1].values())
            self._progress.busy("checkpoint", patience_s(nbytes))
            self._checkpoint_manager.wait()
