"""The loop as scripts see it: batches of the steps left, and what is done after each."""

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dlcontract import DATASET_VARIABLE, Outcome, Plan
from dltrain.batch.sampling import Part, Sampler
from dltrain.checkpoint.state import replicate
from dltrain.checkpoint.user_objects import UserObjects
from dltrain.checkpoint.writer import CheckpointManager
from dltrain.comm.process_group import ProcessGroup
from dltrain.data.feeding.feed import Feed
from dltrain.data.feeding.loader import Loader, check_loader
from dltrain.data.feeding.source import Collate
from dltrain.device import randomness
from dltrain.device.energy import meter
from dltrain.device.rank_device import peak_nbytes
from dltrain.elastic.team import Team
from dltrain.host.cgroup import cpus
from dltrain.optim.grad_scaler import LossScale
from dltrain.optim.lr_scaling import Scaling
from dltrain.optim.lr_schedulers import Schedules
from dltrain.optim.noise_scale import NoiseScale
from dltrain.parallel import gradient_summing
from dltrain.parallel.batch_norm import Ranks, local_layers, synchronized, unsynchronized
from dltrain.parallel.data_parallel import DataParallel
from dltrain.protocol.errors import BadInputError, MisuseError
from dltrain.protocol.rank_messages import EXIT_STOPPED
from dltrain.protocol.reporter import RankReporter
from dltrain.timing.stopwatch import Budget, Stopwatch
from dltrain.train import replay, usage_checks
from dltrain.train.progress import Progress
from dltrain.train.saving import Saving
from dltrain.train.step import Step, Wishes
from dltrain.train.together import Together
from dltrain.train.update_hooks import UpdateHooks

Model = TypeVar("Model", bound=nn.Module)
Opt = TypeVar("Opt", bound=Optimizer)


class Trainer(Together):
    """Trains one model on this rank, together with the others. See ``dltrain.init`` for how a script uses it."""

    def __init__(
        self, plan: Plan, world: ProcessGroup, reporter: RankReporter, device: torch.device, device_name: str
    ) -> None:
        """``device_name``: what ``device`` really is, for measurements."""
        self._replay = replay.asked(plan)
        if self._replay is not None:
            plan = plan.model_copy(update={"rebalance": False})
        self.plan, self.world, self.reporter = plan, world, reporter
        self.device, self.device_name = device, device_name
        self.rank, self.size = world.rank, world.size
        self._team = Team(plan, world, reporter, self._lost, on_cpu=device.type == "cpu")
        self.step = 0
        """Steps done."""
        self.total_steps = plan.steps or 0
        """Steps of the whole training; with epochs, known once the data is, so before ``steps`` ask the loader."""
        self.epoch = 0
        self.end_of_epoch = False
        """Whether the batch just given out is the last of its epoch."""
        self.settled = not plan.rebalance
        """Whether ``shares`` are to stay as they are: dictated by the plan, or those of the run that is resumed."""
        self.stopped = False
        """Whether the ranks agreed to end early."""
        self.checkpoint_manager = CheckpointManager(plan, world, reporter)
        self.noise = NoiseScale(plan.global_batch)
        """The gradient noise scale of the run, as far as it was measured."""
        self.budget = Budget()
        """What part of a CPU this rank gets."""
        self._scaling = Scaling(plan.optimizer, plan.global_batch)
        self._schedules, self._loss_scale, self._user_objects = Schedules(), LossScale(), UserObjects()
        energy = meter(device, world.local_rank)
        self.progress = Progress(reporter, world.rank, device_name, self.noise, self._loss_scale, energy)
        self.progress.gpu_memory_nbytes = partial(peak_nbytes, device)
        beside = self._scaling, self.noise, self._schedules, self._loss_scale, self._user_objects
        self._saving = Saving(self.checkpoint_manager, self._team, self.progress, *beside)
        watch = Stopwatch(self.budget)
        self._step = Step(self._team, self.progress, self._scaling, self.noise, self._loss_scale, watch, device)
        self._began = time.monotonic()
        self._first = 0
        self._passed = False
        """Whether ``steps`` has come to its end."""

    def wrap(
        self, model: Model, optimizer: Opt, *, sync_batch_norm: bool | None = None, sample: Tensor | None = None
    ) -> tuple[Model, Opt]:
        """Put the model on this rank's device, equal on all ranks, and sum its gradients in ``optimizer.step()``.

        Continues from the newest checkpoint when there is one. The loss must be the mean over the batch given.
        ``sync_batch_norm``: BatchNorm over the whole batch instead of this rank's part; default: as the plan says.
        ``sample``: the input of a batch of one, for ranks that split the model by what its layers cost.
        """
        usage_checks.check_wrapped(model, optimizer, again=self._team.taken)
        model = self._normalized(model, self.plan.model.sync_batch_norm if sync_batch_norm is None else sync_batch_norm)
        self.model: nn.Module = model.to(self.device)
        self.optimizer: Optimizer = optimizer
        replicate(self.model, self.world.broadcast)
        self._team.take(self.model, optimizer, sample)
        if self._replay is not None:
            gradient_summing.reuse(self.parallel, gradient_summing.known_from_record(self._replay.sums))
        self.progress.gradient_nbytes = self.parallel.buffer.gradient.nbytes
        UpdateHooks(self.model, optimizer, self._step.sum, self._after_update, lambda p: self.parallel.stands_in(p))
        self._loss_scale.watch(optimizer, self._step, self._after_update)
        if (snapshot := self._saving.resume(self.model, optimizer)) is not None:
            self.step = self._first = snapshot.step
            self.settled = self.settled or self._saving.same_ranks(snapshot)
        gradient_summing.tell(self.parallel, self.reporter)
        return model, optimizer

    def loader(
        self,
        dataset: Any,
        *,
        workers: int | None = None,
        prefetch: int | None = None,
        collate_fn: Collate | None = None,
    ) -> Loader:
        """Batches of a dataset: a torch map-style ``Dataset``, or a tuple of tensors.

        ``workers``: processes that make batches of a ``Dataset`` while steps compute; default: as many as keep up, of
        the CPUs that this rank has beside its own, and none where samples cost little; 0: between steps. ``prefetch``:
        batches made ahead, default two for each worker; 0: none. ``collate_fn``: samples to a batch, default torch's.
        What is trained does not depend on any of it but ``collate_fn``. Raises ValueError.
        """
        most = max(0, int(cpus(self.world.local_size)) - 1)
        return Loader(
            dataset,
            self.device,
            workers=workers,
            prefetch=prefetch,
            collate_fn=collate_fn,
            most_workers=most,
            ranks_here=self.world.local_size,
            plan=self.plan,
        )

    @property
    def dataset_path(self) -> Path:
        """The file or folder behind spec.dataset.uri; without a manifest what $DLJOB_DATASET names."""
        if self.plan.dataset.path is None:
            found = f"nothing, and ${DATASET_VARIABLE} unset"
            raise BadInputError("spec.dataset.uri", found, "where the data is", "set one of them")
        return Path(self.plan.dataset.path)

    def log(self, *, loss: Tensor | float | None = None, accuracy: float | None = None) -> None:
        """Show the mean loss of this rank's batch, best before ``backward()``; or an accuracy on held-out data."""
        if loss is not None:
            self._step.log(loss)
        if accuracy is not None:
            self.progress.tell_accuracy(self.step, accuracy)

    def weigh(self, tokens: float) -> None:
        """Say that the loss is the mean over so many tokens of this rank: the gradient is then that of the mean over
        the tokens of the whole batch, however they fall on the ranks.

        On every rank, at every step or at none, before ``log`` and ``backward()``. A rank without a token (padding
        only) passes 0; its loss may be NaN.
        """
        self._step.weigh(tokens)

    def clip_gradients(self, max_norm: float) -> float:
        """Between ``backward()`` and ``opt.step()``, on every rank: scale the whole batch's gradient to a norm of at
        most ``max_norm``, whatever the strategy. Returns the norm that it had.
        """
        if not 0 < max_norm < inf:
            raise MisuseError(f"t.clip_gradients: max_norm: found {max_norm}, expected more than 0")
        return self.parallel.clip(max_norm)

    def no_sync(self) -> AbstractContextManager[None]:
        """Around all backward passes of a step but the last: gradients of a batch's parts add up, are summed once."""
        return self.parallel.accumulating()

    def finish(self) -> None:
        """End the training early and well: the step under way is the last one. On every rank in the same step, so
        decide by what is the same on all, such as what ``sum`` returned.
        """
        self.total_steps = self.step + int(self._step.open)

    def schedule(self, scheduler: LRScheduler, *, each_epoch: bool = False) -> None:
        """Step a torch scheduler of the optimizer after each step, or each epoch, and keep its state in checkpoints.

        After ``wrap``, in the same order at every start; do not call ``scheduler.step()``. Raises ValueError.
        """
        self._schedules.add(scheduler, each_epoch)

    def keep(self, **objects: Any) -> None:
        """Keep in checkpoints, by these names, what a script has beside model and optimizer, and go on with it after a
        restart: anything with ``state_dict()`` and ``load_state_dict()``, lists and dictionaries.

        After ``wrap``, before ``steps``. It should be the same on all ranks: rank 0's is what is saved. Change objects
        after ``opt.step()``: a step that is computed again undoes that, and not what was before. Raises ValueError.
        """
        if not self._team.taken:
            raise MisuseError("t.keep: found no model, expected t.wrap(model, optimizer) first")
        for name, given in objects.items():
            self._user_objects.add(name, given)

    @property
    def learning_rate_factor(self) -> float:
        """What optimizer.learningRateScaling makes of the learning rate for the base batch, at this step."""
        return self._scaling.factor

    def busy(self, what: str, limit_s: float) -> None:
        """Say that no step will come for up to ``limit_s``; else silence means to the agent that this rank hangs.

        The end of an epoch says so by itself, for an evaluation of a minute or of the epoch's own length.
        """
        self.progress.busy(what, limit_s)

    def steps(self, loader: Loader) -> Iterator[Any]:
        """This rank's batch of every step left, on its device. The body must call ``optimizer.step()`` once.

        Ends with SystemExit when the run was asked to stop, once its checkpoint is durable.
        """
        check_loader("t.steps", loader)
        team = self._team.among_workers
        counts = self._team.together(self.step, lambda: team.gather([loader.samples]))
        usage_checks.check_samples([int(count) for (count,) in counts])
        if self._passed:
            usage_checks.warn_of_a_second_pass(self.step)
        sampler, step = Sampler.planned(self.plan, loader.samples), self._step
        self.total_steps = sampler.steps(self.plan)

        def part_of(number: int) -> Part:
            return self.parallel.part(sampler, number, self.shares, self.rank)

        self._user_objects.close()
        with Feed(loader, part_of, self.plan.seed, self.total_steps) as feed:
            while self.step < self.total_steps:
                self._replay_shares()
                part = part_of(self.step)
                self.epoch, self.end_of_epoch = part.epoch, part.last
                step.watch.begin()
                batch = feed.take(self.step, part)
                step.watch.fetched()
                randomness.seed(randomness.of_step(self.plan.seed, self.step, self.rank), self.device)
                wishes = Wishes(
                    self.reporter.stop.is_set(), self.checkpoint_manager.due, self.checkpoint_manager.memory_due
                )
                step.begin(part, self.step, self.total_steps, wishes)
                self._user_objects.begin(undoable=self._team.elastic.active)
                if batch is None:
                    self.optimizer.step()  # a parameter server: its part is the sum
                else:
                    yield batch
                if step.open:
                    raise MisuseError(
                        "t.steps: found no opt.step() (or scaler.step(opt)) in the loop's body, expected one for each "
                        "batch" + usage_checks.IN_PARTS
                    )
                if step.given_up:
                    self._loss_scale.restore()
                    self._user_objects.restore()
                else:
                    self._conclude(feed.spent_s)
        self._passed = True
        self._saving.save(self.step, self.epoch)
        self._saving.wait()

    @property
    def complete(self) -> bool:
        """Whether all steps are done."""
        return 0 < self.total_steps <= self.step

    @property
    def parallel(self) -> DataParallel:
        """Raises MisuseError before ``wrap``."""
        return self._team.parallel

    @property
    def worker(self) -> int:
        """This rank's number among the ranks that compute (a server's among the servers)."""
        return self._team.worker

    @property
    def workers(self) -> int:
        """How many ranks compute."""
        return self._team.workers

    @property
    def alive(self) -> int:
        """Ranks that train: those of the plan, without those that were lost and did not come back yet."""
        return len(self._team.elastic.alive)

    def reshard(self, shares: Sequence[int], reason: str) -> None:
        """Give the ranks other shares from the next step on; every rank must call it with the same ones."""
        self._team.reshard(self.step, shares, reason)

    def outcome(self) -> Outcome:
        """What the run came to."""
        last = self.checkpoint_manager.last
        return Outcome(
            steps=self.step,
            seconds=time.monotonic() - self._began,
            loss=self.progress.loss,
            accuracy=self.progress.accuracy,
            checkpoint=last.path if last else None,
        )

    def close(self) -> None:
        """Wait for a checkpoint under way, free the collective. Raises OSError when it could not be written."""
        self.checkpoint_manager.wait()
        self._team.close()

    def abandon(self) -> None:
        """Leave alone, so that no rank waits for this one. The process must exit next."""
        self._team.abandon()

    def _normalized(self, model: Model, synchronize: bool) -> Model:
        """With BatchNorm over all ranks, or a warning that it is not."""
        if self.workers == 1 or not (layers := local_layers(model)):
            return model
        if not synchronize:
            if self.rank == 0:
                warnings.warn(unsynchronized(layers), stacklevel=3)
            return model
        team, step = self._team, self._step  # whose ranks and weights change
        team.elastic.active = False  # a rank lost within forward leaves others in the middle of it
        counts, weight = lambda: step.weight_by_samples > 0, lambda: step.weight
        return synchronized(model, Ranks(lambda of: team.among_workers.sum(of), counts, weight))

    def _replay_shares(self) -> None:
        """Those of the recorded run at the step to come, if there is one to be replayed."""
        shares = self._replay.shares(self.step) if self._replay is not None else None
        if shares is not None and shares != self.shares:
            self.reshard(shares, "replayed")

    def _after_update(self) -> None:
        """Hook of ``optimizer.step()``."""
        if self._step.updated():
            self.step += 1
            if self.end_of_epoch or self.complete:
                self.progress.end_epoch()

    def _lost(self) -> None:
        """Ranks were lost, and the others go on."""
        self.checkpoint_manager.take_over()
        if self._step.open:
            if not self._step.given_up:
                self._loss_scale.freeze()
                self._user_objects.freeze()
            self._step.give_up()
            self.end_of_epoch = False

    def _conclude(self, fetch_s: float) -> None:
        """After a step: news, and what the ranks agreed on."""
        step, agreed = self._step, self._step.agreed_step.shared
        if self.step == self._first + 1 and self.workers > 1:
            usage_checks.warn_of_unlike_buffers(self._unlike_buffers(), self.rank)
        step.count(fetch_s, first=self.step == self._first + 1)
        if step.news_due:
            rate, norm = float(self.optimizer.param_groups[0]["lr"]), step.gradient_norm
            self.progress.tell(self.step, self.total_steps, self.epoch, rate, norm, self.shares[self.rank], self.alive)
        self._schedules.step(end_of_epoch=self.end_of_epoch)
        saving, every = agreed.save or agreed.stop, self.plan.compare_steps
        if saving or agreed.keep or self.complete or (every and self.step % every == 0):
            # Before each checkpoint, too, so that none is made of wrong parameters.
            self._team.together(self.step, lambda: self._team.agree_on_parameters(self.step))
        if saving or agreed.keep:
            self._saving.save(self.step, self.epoch, durable=bool(saving))
        if agreed.stop:
            self._saving.wait()
            self.stopped = True
            raise SystemExit(EXIT_STOPPED)
