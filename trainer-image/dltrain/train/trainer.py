"""The public training API: the loop over the remaining steps, and the work after each step."""

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dlcontract import Outcome, Plan
from dltrain.batch.micro_batches import MicroBatches
from dltrain.checkpoint.state import replicate
from dltrain.checkpoint.user_objects import UserObjects
from dltrain.checkpoint.writer import CheckpointManager
from dltrain.comm.process_group import ProcessGroup
from dltrain.data.feeding.in_worker import TrainerInWorker
from dltrain.data.feeding.loader import AnyLoader, check_loader
from dltrain.device import randomness
from dltrain.device.energy import meter
from dltrain.device.rank_device import peak_nbytes
from dltrain.elastic.team import Team
from dltrain.optim.grad_scaler import LossScale
from dltrain.optim.lr_scaling import Scaling
from dltrain.optim.lr_schedulers import Schedules
from dltrain.optim.noise_scale import NoiseScale
from dltrain.parallel import gradient_summing
from dltrain.protocol.errors import MisuseError
from dltrain.protocol.rank_messages import EXIT_STOPPED
from dltrain.protocol.reporter import RankReporter
from dltrain.timing.stopwatch import Budget, Stopwatch
from dltrain.train import replay, sharded_data, usage_checks
from dltrain.train.data_calls import DataCalls
from dltrain.train.frozen_base import TRAINED, FrozenBase, check_save, frozen_base
from dltrain.train.model_calls import ModelCalls
from dltrain.train.progress import Progress
from dltrain.train.saving import EarlyEnd, Saved, Saving
from dltrain.train.steps import several
from dltrain.train.steps.batches import StepBatches
from dltrain.train.steps.gathering import Participants, averaged, differing_buffers, gathered, participants
from dltrain.train.steps.normalization import warn_of_batch_norm, with_batch_norm
from dltrain.train.steps.optimizer_updates import skip_partial, watch_updates
from dltrain.train.steps.order import Order
from dltrain.train.steps.step import Step, StepRequests
from dltrain.train.steps.streams import Streams
from dltrain.train.steps.update_hooks import others_noticed

Models = TypeVar("Models", bound=nn.Module | Sequence[nn.Module])
Optimizers = TypeVar("Optimizers", bound=Optimizer | Sequence[Optimizer])


class Trainer(DataCalls, ModelCalls):
    """The training of one or several models together with the other ranks. ``dltrain`` shows how to use a Trainer."""

    def __init__(
        self, plan: Plan, process_group: ProcessGroup, reporter: RankReporter, device: torch.device, device_name: str
    ) -> None:
        """Create the objects that a run needs: the workers' process group, checkpoints, progress updates and others.

        ``device``: this rank's torch device. ``device_name``: the name of this hardware in reports of measurements.
        """
        self._replay = replay.asked(plan)
        if self._replay is not None:
            plan = plan.model_copy(update={"rebalance": False})
        self.plan, self.process_group, self.reporter = plan, process_group, reporter
        self.device, self.device_name = device, device_name
        self.rank, self.size = process_group.rank, process_group.size
        self._team = Team(plan, process_group, reporter, self._lost, on_cpu=device.type == "cpu")
        self.step = 0
        """Number of completed steps."""
        self.total_steps = plan.steps or 0
        """Total number of steps. If the plan contains epochs instead, the method ``steps`` computes this number.

        With epochs of a stream, it is 0 until the last step begins."""
        self.epoch = 0
        self.end_of_epoch = False
        """True if the current batch is the last one of its epoch."""
        self.settled = not plan.rebalance
        """True if the probe must not rebalance local batch sizes: the plan fixes them, or a resumed run set them."""
        self.stopped = False
        """True if the ranks have stopped the training after a request to stop."""
        self.checkpoint_manager = CheckpointManager(plan, process_group, reporter)
        self.noise = NoiseScale(plan.global_batch)
        """Estimate of the run's gradient noise scale in samples, a measure of the useful batch size."""
        self.budget = Budget()
        """Estimate of the fraction of a CPU that this rank gets, which is below 1 under a CPU quota."""
        self._scaling, self._early_end = Scaling(plan.optimizer, plan.global_batch), EarlyEnd()
        self._schedules, self._loss_scale, self._user_objects = Schedules(), LossScale(), UserObjects()
        energy = meter(device, process_group.local_rank)
        self.progress = Progress(reporter, process_group.rank, device_name, self.noise, self._loss_scale, energy)
        self.progress.gpu_memory_nbytes = partial(peak_nbytes, device)
        parts: dict[str, Saved] = {"scaling": self._scaling, "noise": self.noise}
        parts |= {"schedules": self._schedules, "loss_scale": self._loss_scale, "early_end": self._early_end}
        self._streams = parts["streams"] = Streams(self._team, self.progress)
        self._saving = Saving(self.checkpoint_manager, self._team, self.progress, self._user_objects, parts)
        self._base = FrozenBase()
        watch = Stopwatch(self.budget)
        self._step = Step(self._team, self.progress, self._scaling, self.noise, self._loss_scale, watch, device)
        self._began = time.monotonic()
        self._first, self._passed = 0, False
        """First step of this process; True once ``steps`` has yielded all steps: another call is then a mistake."""

    def __reduce__(self) -> tuple[type[TrainerInWorker], tuple[int, int, Plan]]:
        """Send workers, whose dataset names this object, only what the dataset may use."""
        return TrainerInWorker, (self.rank, self.size, self.plan)

    @property
    def end_of_step(self) -> bool:
        """Return True if ``optimizer.step()`` updates the model after the current batch.

        It is False in all micro-batches of a step but the last one. Work that must follow each update, such as that of
        averaged weights, belongs under ``if t.end_of_step``.
        """
        return not self._step.partial

    def wrap(
        self,
        model: Models,
        optimizer: Optimizers,
        *,
        sync_batch_norm: bool | None = None,
        sample: Tensor | None = None,
        save: Literal["all", "trained"] = "all",
    ) -> tuple[Models, Optimizers]:
        """Move the model to this rank's device and let ranks reduce gradients before each ``optimizer.step()``.

        ``model``, ``optimizer``: one, or a list of several, as for a GAN; the result has the same form. Each of several
        optimizers has parameters of its own, and ranks reduce their gradients in its step. All ranks start from equal
        parameters, or from the newest checkpoint if there is one. The loss must be the mean over this rank's batch.
        ``sync_batch_norm``: compute BatchNorm statistics over the global batch instead of this rank's batch (default:
        as in the plan). ``sample``: inputs, at least one, from which a pipeline counts the cost of each layer.
        ``save``: "trained" to leave the parameters that are frozen now out of checkpoints, such as for LoRA; the script
        must then build them with the same values at each start. Raise MisuseError for invalid arguments or on a second
        call, and BadInputError if the checkpoint belongs to another job or to a model with other frozen parameters.
        """
        whole, combined = several.checked(model, optimizer, sample, self._team)
        check_save(save)
        synchronize = self.plan.model.sync_batch_norm if sync_batch_norm is None else sync_batch_norm
        whole = with_batch_norm(whole, self._team, self._step, synchronize=synchronize)
        self.model: nn.Module = whole if self._team.places(whole) else whole.to(self.device)
        self.optimizer: Optimizer = combined
        replicate(self.model, self.process_group)
        if save == TRAINED and self.plan.checkpoint.enabled:
            self._base = frozen_base(self.model, self.process_group)
        self._team.take(self.model, combined, sample, self.device)
        if self._replay is not None:
            gradient_summing.reuse(self.parallel, gradient_summing.choices_from_record(self._replay.sums))
        self.progress.gradient_nbytes = self.parallel.gradient_nbytes
        watch_updates(
            self.model, combined, self._step, self._after_update, self._loss_scale, lambda: self._team.parallel
        )
        if (snapshot := self._saving.resume(self.model, combined, self._base)) is not None:
            self.step, self.epoch = snapshot.step, snapshot.state["epoch"]
            self._first = self.step
            self.settled = self.settled or self._saving.same_ranks(snapshot)
        self._base.watch(self.model)
        gradient_summing.report(self.parallel, self.reporter)
        return several.like(model, self.model), optimizer

    def divide(self, dataset: Any) -> None:
        """Assign the shards of a sharded dataset to nodes, and set its number of classes. Otherwise, do nothing.

        All ranks call it together. Training scripts need not call it, because ``steps`` does.
        """
        if self.plan.dataset.sharded:
            sharded_data.divide(self._team, self.progress, dataset)

    def log(self, *, loss: Tensor | float | None = None, accuracy: float | None = None, **metrics: float) -> None:
        """Report the mean loss of this rank's batch, an accuracy from 0 to 1 on held-out data, and any other metrics.

        Call it with the loss before ``backward()``; otherwise the loss may be reported one step later. The job shows
        the ``metrics`` of its first rank: at most 16 names.
        """
        if loss is not None:
            self._step.log(loss)
        self.progress.log(self.step, accuracy, metrics)

    def weigh(self, tokens: float) -> None:
        """Weight this rank's loss by ``tokens`` instead of samples. The loss must be the mean over ``tokens`` tokens.

        The gradient is then that of the mean over all tokens of the global batch, however the batch is split. Call
        this method on every rank or on none, before ``log`` and ``backward()``. A rank that has only padding passes 0;
        its loss may be NaN.
        """
        self._step.weigh(tokens)

    def finish(self) -> None:
        """End the training successfully after the current step.

        Call it on every rank in the same step. The decision must depend on a value that is equal on all ranks,
        such as a result of ``sum``. After a restart, ``steps`` then yields nothing.
        """
        self._early_end.request(self.total_steps)
        self.total_steps = self.step + int(self._step.open)

    def schedule(self, scheduler: LRScheduler, *, each_epoch: bool = False) -> None:
        """Run a torch learning-rate scheduler after each step or epoch, and save its state in checkpoints.

        Call it after ``wrap``, and in the same order after a restart. Do not call ``scheduler.step()`` yourself. Raise
        ValueError for a scheduler that dltrain cannot run.
        """
        self._schedules.add(scheduler, each_epoch)

    def keep(self, **objects: Any) -> None:
        """Save further objects in checkpoints under these names, and restore them after a restart.

        An object is a list, a dictionary, or has ``state_dict()`` and ``load_state_dict()``. Call it after ``wrap`` and
        before ``steps``. Checkpoints contain only rank 0's objects, which should be equal on all ranks. Change objects
        only after ``opt.step()``: if a step is computed again, earlier changes may apply twice. Raise ValueError for
        an object that cannot be saved, and MisuseError before ``wrap``.
        """
        if not self._team.taken:
            raise MisuseError("t.keep: found no model; expected t.wrap(model, optimizer) first")
        for name, given in objects.items():
            self._user_objects.add(name, given)

    @property
    def learning_rate_factor(self) -> float:
        """Return the factor for the learning rate in this step that ``spec.optimizer.learningRateScaling`` requires."""
        return self._scaling.factor

    def busy(self, what: str, limit_s: float) -> None:
        """Announce a pause of up to ``limit_s`` seconds between steps, so that the agent does not report a hang.

        At the end of an epoch, the trainer announces a pause itself: 60 s or the duration of the epoch, whichever is
        longer.
        """
        self.progress.busy(what, limit_s)

    def steps(self, loader: AnyLoader, *, accumulate: bool = False) -> Iterator[Any]:
        """Yield this rank's batch for each remaining step, on its device. Call ``optimizer.step()`` once per batch.

        ``accumulate``: yield the micro-batches into which the plan divides batches, so that their gradients add up. The
        optimizer, clipping and a GradScaler then have an effect only in the last micro-batch of a step. If the job asks
        its ranks to stop, save the training's state after the step, and then raise SystemExit. Raise MisuseError if the
        script has not called ``optimizer.step()`` for a batch, or what the plan needs, such as ``autocast``.
        """
        check_loader("t.steps", loader)
        self._check_loop(accumulate=accumulate)
        order, step, micro_batches = self._order(loader), self._step, MicroBatches(self.plan, accumulate)
        if self._passed:
            usage_checks.warn_of_a_second_pass(self.step)
        self.total_steps, unknown = self._early_end.total_steps(order.planned_steps, self.step), not order.planned_steps
        self._user_objects.close()
        if accumulate:
            skip_partial(self.optimizer, step, lambda: self._team.parallel)
            warn_of_batch_norm(self.model, micro_batches.most(self.shares), self.rank)
        noticing = others_noticed(self.model, self.optimizer, self.rank)
        with noticing, StepBatches(order, micro_batches, lambda: self.shares, self.total_steps) as batches:
            while self.step < self.total_steps or (unknown and not self.total_steps):
                if self._replay is not None and (shares := self._replay.shares(self.step)) not in (None, self.shares):
                    self.reshard(shares, "replayed")
                part = batches.begin(self.step)
                self.epoch, self.end_of_epoch = part.epoch, part.last
                if order.is_last(part):
                    self.total_steps = self.step + 1
                step.watch.begin()
                batch = batches.take(0)
                step.watch.fetched()
                randomness.seed_step(self.plan.seed, self.step, self._team.random_rank, self.device)
                manager, stop = self.checkpoint_manager, self.reporter.stop.is_set()
                requests = StepRequests(stop, manager.due, manager.memory_due, manager.copies, order.ending)
                step.begin(part, self.step, self.total_steps, requests, accumulates=batches.accumulates)
                self._user_objects.begin(undoable=self._team.elastic.active)
                if batch is None:
                    self.optimizer.step()  # a parameter server computes no gradients; it takes part in the reduction
                else:
                    for micro_batch, self.end_of_epoch in batches.each(step, batch):
                        yield micro_batch
                if step.end():
                    self._complete()
                if step.open:
                    raise MisuseError(usage_checks.NO_UPDATE)
                if step.given_up:
                    self._loss_scale.restore()
                    self._user_objects.restore()
                else:
                    self._conclude(batches.spent_s, order)
        self._passed = True
        self._saving.save(self.step, self.epoch, last=True)
        self._saving.wait()

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the element-wise sum over the workers, for example of numbers of correct predictions.

        If ranks are lost during the call, the sum covers the remaining ranks.
        """
        given = usage_checks.numbers(values)
        return self._team.together(self.step, lambda: self._team.worker_group.sum(given))

    def gather(self, rows: Tensor) -> Tensor:
        """Gather the rows of all ranks in the order of the global batch, for a loss that compares all samples.

        A rank with n samples passes a tensor of shape (n, …). All ranks get a tensor of shape (N, …), where N is the
        global batch size. The result has a gradient: compute the loss of the global batch from it on every rank. All
        ranks must call this method equally often.
        """
        return gathered(rows, self._participants("t.gather"))

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean over the global batch. ``value``: the mean over this rank's samples, of any shape.

        Use this method for statistics that ``forward`` stores in a buffer. The result has no gradient. During a step,
        the weight of a rank is its number of samples, or its argument of ``weigh``. Between steps, all ranks have equal
        weights. All ranks must call this method equally often.
        """
        return averaged(value, self._participants("t.mean"))

    @property
    def complete(self) -> bool:
        """Return True if all steps are done. If the plan has epochs, it is False before ``t.steps`` begins."""
        return 0 < self.total_steps <= self.step

    def outcome(self) -> Outcome:
        """Return the result of the run so far for the job's report, with the loss, accuracy and last checkpoint."""
        last = self.checkpoint_manager.last
        return self.progress.outcome(self.step, time.monotonic() - self._began, last.path if last else None)

    def close(self) -> None:
        """Wait for a pending checkpoint, then free the collective. Raise OSError if writing the checkpoint fails."""
        self.checkpoint_manager.wait()
        self._team.close()

    def abandon(self) -> None:
        """Abort the operations in which other ranks wait for this rank, without waiting. The process must exit next."""
        self._team.abandon()

    def _participants(self, call: str = "") -> Participants:
        return participants(self._team, self._step, self.step, call)

    def _after_update(self) -> None:
        """Count the current step after ``optimizer.step()``, unless the step was abandoned."""
        if self._step.updated():
            self._complete()

    def _complete(self) -> None:
        """Count the current step, and announce a pause if it ends an epoch or the training."""
        self.step += 1
        if self.end_of_epoch or self.complete:
            self.progress.end_epoch()

    def _lost(self) -> None:
        """Abandon the current step after the process group has shrunk, so that the remaining ranks compute it again."""
        self.checkpoint_manager.take_over()
        if self._step.open:
            if not self._step.given_up:
                self._loss_scale.freeze()
                self._user_objects.freeze()
            self._step.give_up()
            self.end_of_epoch = False

    def _conclude(self, fetch_s: float, order: Order) -> None:
        """Finish a step: send a progress update if it is due, and save or stop if a rank requested it.

        ``fetch_s``: seconds to load the step's batch. ``order``: the order of the samples.
        """
        step, agreed = self._step, self._step.agreed_step.shared
        order.conclude(ending=agreed.ending > 0)
        self._base.check_unchanged()
        self._check_first_step()
        if self.step == self._first + 1 and self.workers > 1:
            usage_checks.warn_of_differing_buffers(differing_buffers(self.model, self._participants()), self.rank)
        step.count(fetch_s, first=self.step == self._first + 1)
        if step.update_due:
            rate, norm = float(self.optimizer.param_groups[0]["lr"]), step.gradient_norm
            self.progress.report_step(
                self.step, self.total_steps, self.epoch, rate, norm, self.shares[self.rank], self.alive
            )
        self._schedules.step(end_of_epoch=self.end_of_epoch)
        self.checkpoint_manager.copied_anywhere = agreed.copies > 0
        saving, every, began = agreed.save or agreed.stop, self.plan.compare_steps, time.monotonic()
        if saving or agreed.keep or self.complete or (every and self.step % every == 0):
            # Ranks also compare parameters before each checkpoint, so that corrupt ones are never saved.
            self._team.together(self.step, lambda: self._team.agree_on_parameters(self.step))
        if saving or agreed.keep:
            durable = bool(saving) and (not agreed.stop or self._saving.fits(self.step, self.reporter.grace_left_s))
            self._saving.save(self.step, self.epoch, durable=durable, began=began, last=bool(agreed.stop))
        if agreed.stop:
            self._saving.wait()
            self.stopped = True
            raise SystemExit(EXIT_STOPPED)
