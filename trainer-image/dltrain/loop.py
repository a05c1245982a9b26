"""The training loop: steps, sums, news, checkpoints and the agreed end. Users: ``api`` (user scripts), ``rank``.

Ranks agree on what happens after a step by a few numbers that travel with the gradients (the tail of the buffer), so
that a wish to stop or to save costs no message and takes effect on all of them at the same step.
"""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import inf, isfinite, sqrt
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dljob.contract import DATASET_VARIABLE, Outcome, Plan
from dltrain import randomness, summing
from dltrain.batchnorm import Ranks, local_layers, synchronized, unsynchronized
from dltrain.cgroup import cpus
from dltrain.energy import meter
from dltrain.errors import BadInputError, DivergedError, ParametersDivergedError
from dltrain.feeding.feed import Feed
from dltrain.feeding.source import Collate, Request
from dltrain.loader import Loader
from dltrain.measure import Budget, Clock, Lap, Times
from dltrain.messages import EXIT_STOPPED, Compared
from dltrain.noise import NoiseScale
from dltrain.parallel import DataParallel
from dltrain.progress import Progress
from dltrain.report import Reporter
from dltrain.sampling import Part, Sampler
from dltrain.scaling import Scaling
from dltrain.state import replicate
from dltrain.tail import WEIGHED, Shared, pack, unpack
from dltrain.team import Team
from dltrain.world import World
from dltrain.writer import Keeper, patience_s

Model = TypeVar("Model", bound=nn.Module)
Opt = TypeVar("Opt", bound=Optimizer)
T = TypeVar("T")


class Trainer:
    """Trains one model on this rank, together with the others. See ``dltrain.init`` for how a script uses it."""

    def __init__(self, plan: Plan, world: World, reporter: Reporter, device: torch.device, device_name: str) -> None:
        """``device_name``: what ``device`` really is, for measurements."""
        self.plan, self.world, self.reporter = plan, world, reporter
        self.device, self.device_name = device, device_name
        self.rank, self.size = world.rank, world.size
        self._team = Team(plan, world, reporter, on_cpu=device.type == "cpu")
        self.step = 0
        """Steps done."""
        self.total_steps = plan.steps or 0
        """Steps of the whole training; with epochs, known once the data is."""
        self.epoch = 0
        self.end_of_epoch = False
        """Whether the batch just given out is the last of its epoch."""
        self.settled = not plan.rebalance
        """Whether ``shares`` are to stay as they are: dictated by the plan, or those of the run that is resumed."""
        self.stopped = False
        """Whether the ranks agreed to end early."""
        self._keeper = Keeper(plan, world, reporter)
        self._again = False
        """Whether the step under way was given up and will be computed again."""
        self.noise = NoiseScale(plan.global_batch)
        """The gradient noise scale of the run, as far as it was measured."""
        self._measuring = False
        """Whether ranks tell the norms of their own gradients at the step under way."""
        self._progress = Progress(reporter, world.rank, device_name, self.noise, meter(device, world.local_rank))
        self._began = time.monotonic()
        self._first = 0
        self._in_step = False
        self._weight = 1.0
        """Of this rank's part of the batch just given out: by samples, or as the script weighs it."""
        self._part_weight = 1.0
        """By samples."""
        self._late = (0.0, 0.0)
        """Loss logged after its step had been summed, and its weight: shared with the next step."""
        self._gradient_norm = 0.0
        self._scaling = Scaling(plan.optimizer, plan.global_batch)
        self.budget = Budget()
        """What part of a CPU this rank gets."""
        self._demanded_s = 0.0
        """Time that the CPU time of the last step takes to come by; 0 on a GPU."""
        self._clock = Clock()

    # What a script calls.

    def wrap(
        self, model: Model, optimizer: Opt, *, sync_batch_norm: bool | None = None, sample: Tensor | None = None
    ) -> tuple[Model, Opt]:
        """Put the model on this rank's device, equal on all ranks, and sum its gradients in ``optimizer.step()``.

        Continues from the newest checkpoint when there is one. The loss must be the mean over the batch given.
        ``sync_batch_norm``: BatchNorm over the whole batch instead of this rank's part; default: as the plan says.
        ``sample``: the input of a batch of one, for ranks that split the model by what its layers cost.
        """
        model = self._normalized(model, self.plan.model.sync_batch_norm if sync_batch_norm is None else sync_batch_norm)
        self.model: nn.Module = model.to(self.device)
        self.optimizer: Optimizer = optimizer
        replicate(self.model, self.world.broadcast)
        self._team.take(self.model, optimizer, sample)
        optimizer.register_step_pre_hook(lambda *_: self._before_update())
        optimizer.register_step_post_hook(lambda *_: self._after_update())
        shapes, load_model = self.parallel.shape_of(self.model), partial(self.parallel.load_weights, self.model)
        load_optimizer = partial(self.parallel.load_optimizer, optimizer)
        if (snapshot := self._keeper.resume(shapes, load_model, load_optimizer)) is not None:
            self.step = self._first = snapshot.step
            self._scaling.load(snapshot.state.get("scaling", self._scaling.state()))
            self.noise.load(snapshot.state.get("noise", self.noise.state()))
            self._progress.accuracy, self._progress.loss = snapshot.state["accuracy"], snapshot.state["loss"]
            if tuple(snapshot.state["planned_shares"]) == self._team.planned_shares:
                self._team.shares = tuple(snapshot.state["shares"])  # the same ranks: go on to the last bit
                self.settled = True
                summing.reuse(self.parallel, snapshot.state.get("summing", []))
        summing.tell(self.parallel, self.reporter)
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
            part = torch.as_tensor(loss).detach() * self._weight if self._weight else 0.0
            if not self.parallel.share(0, (part, self._weight)):
                self._late = (float(part), self._weight)
        if accuracy is not None:
            self._progress.tell_accuracy(self.step, accuracy)

    def weigh(self, tokens: float) -> None:
        """Say that the loss is the mean over so many tokens of this rank: the gradient is then that of the mean over
        the tokens of the whole batch, however they fall on the ranks.

        On every rank, at every step or at none, before ``log`` and ``backward()``. A rank without a token (padding
        only) passes 0; its loss may be NaN.
        """
        if not 0 <= tokens < inf:
            raise ValueError(f"weigh: found {tokens} tokens, expected the number that the loss is the mean of")
        self._weight = float(tokens) if self._part_weight else 0.0  # 0: a sample that was not this rank's to count
        self.parallel.weigh(self._weight)
        self.parallel.share(WEIGHED, (1.0, self._weight))

    @property
    def learning_rate_factor(self) -> float:
        """What optimizer.learningRateScaling makes of the learning rate for the base batch, at this step."""
        return self._scaling.factor

    def busy(self, what: str, limit_s: float) -> None:
        """Say that no step will come for up to ``limit_s``; else silence means to the agent that this rank hangs.

        The end of an epoch says so by itself, for an evaluation of a minute or of the epoch's own length.
        """
        self._progress.busy(what, limit_s)

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise sum over the ranks that compute, such as of correct answers.

        When ranks are lost meanwhile: over those that are left.
        """
        return self._together(lambda: self._team.among_workers.sum(values))

    def steps(self, loader: Loader) -> Iterator[Any]:
        """This rank's batch of every step left, on its device. The body must call ``optimizer.step()`` once.

        Ends with SystemExit when the run was asked to stop, once its checkpoint is durable.
        """
        given: Any = loader
        if not isinstance(given, Loader):
            found = type(given).__name__
            raise ValueError(f"loader: found {found}, expected what t.loader(dataset) returns")  # noqa: TRY004
        sampler = Sampler.planned(self.plan, loader.samples)
        self.total_steps = sampler.steps(self.plan)
        with Feed(loader, lambda step: self._request(self._part(sampler, step)), self.total_steps) as feed:
            while self.step < self.total_steps:
                part = self._part(sampler, self.step)
                self._weight = self._part_weight = part.weight
                self.epoch, self.end_of_epoch = part.epoch, part.last
                self._clock.lap()
                request = self._request(part)
                batch = feed.take(self.step, request) if request is not None else None
                self._data, self._fetch_s = self._clock.lap(), feed.spent_s
                randomness.seed(randomness.of_step(self.plan.seed, self.step, self.rank), self.device)
                full = part.batch == self.plan.global_batch
                self._measuring = (
                    self._team.measure(self.step, self.total_steps, always=self._scaling.measures) and full
                )
                self.parallel.begin(part.weight, self._shared())
                self._kept = [buffer.clone() for buffer in self.model.buffers()] if self._team.elastic.active else []
                self._in_step, self._again = True, False
                if batch is None:
                    self.optimizer.step()  # a parameter server: its part is the sum
                else:
                    yield batch
                if self._in_step:
                    raise RuntimeError("found no optimizer.step() in the loop's body, expected one for each batch")
                if not self._again:
                    self._conclude(part)
        self._save()
        self._wait_for_checkpoint()

    def _part(self, sampler: Sampler, step: int) -> Part:
        return self.parallel.part(sampler, step, self.shares, self.rank)

    def _request(self, part: Part) -> Request | None:
        return Request.of(part, self.plan.seed)

    @property
    def complete(self) -> bool:
        """Whether all steps are done."""
        return 0 < self.total_steps <= self.step

    @property
    def parallel(self) -> DataParallel:
        """Raises RuntimeError before ``wrap``."""
        return self._team.parallel

    @property
    def keeper(self) -> Keeper:
        """The checkpoints, for a strategy with steps of its own."""
        return self._keeper

    @property
    def progress(self) -> Progress:
        """The news, for a strategy with steps of its own."""
        return self._progress

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of the batch for each rank, by the plan's numbers."""
        return self._team.shares

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
        last = self._keeper.last
        return Outcome(
            steps=self.step,
            seconds=time.monotonic() - self._began,
            loss=self._progress.loss,
            accuracy=self._progress.accuracy,
            checkpoint=last.path if last else None,
        )

    def close(self) -> None:
        """Wait for a checkpoint under way, free the collective. Raises OSError when it could not be written."""
        self._keeper.wait()
        self._team.close()

    def abandon(self) -> None:
        """Leave alone, so that no rank waits for this one. The process must exit next."""
        self._team.abandon()

    def _normalized(self, model: Model, synchronize: bool) -> Model:
        """With BatchNorm over all ranks, or a warning that it is not."""
        if self.workers == 1 or not (layers := local_layers(model)):
            return model
        if synchronize:
            self._team.elastic.active = False  # a rank lost within forward leaves others in the middle of it
            team = self._team  # whose ranks change
            ranks = Ranks(lambda of: team.among_workers.sum(of), lambda: self._part_weight > 0, lambda: self._weight)
            return synchronized(model, ranks)
        if self.rank == 0:
            warnings.warn(unsynchronized(layers), stacklevel=3)
        return model

    # Within a step.

    def _go_on(self) -> None:
        """Ranks were lost: go on without them from the same step. Raises PeerLostError where that cannot be."""
        self._team.go_on(self.step)
        self._keeper.take_over()
        if self._in_step:
            self._give_up_step()

    def _together(self, operation: Callable[[], T]) -> T:
        """What the workers do together; without those that are lost meanwhile."""
        result = None
        while result is None:
            result = self._team.elastic.attempt(operation, self._team.among_workers.abandon)
            if result is None:
                self._go_on()
        return result

    def _give_up_step(self) -> None:
        """Leave model and optimizer as they were before the step under way: it will be computed again."""
        self._again, self.end_of_epoch = True, False
        for parameter in self.model.parameters():
            parameter.grad = None  # which optimizers pass over
        with torch.no_grad():
            for buffer, kept in zip(self.model.buffers(), self._kept, strict=True):
                buffer.copy_(kept)  # running statistics that forward has moved on

    def _shared(self) -> list[float]:
        stop, save, keep = self.reporter.stop.is_set(), self._keeper.due, self._keeper.memory_due
        shared = Shared(*self._late, float(stop), float(save), float(keep), square=self.parallel.square)
        self._late = (0.0, 0.0)
        times = self._progress.times
        return pack(shared, self.rank, self.size, times.compute_s, times.exposed_s, self._demanded_s)

    def _before_update(self) -> None:
        """Hook of ``optimizer.step()``: wait for the sum; nothing is updated when it is not finite."""
        if not self._in_step:
            return  # a step outside of the loop is the script's own business
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # else backward would count as communication
        self._waited = Lap(self.parallel.waited_s)
        self._computed = self._clock.lap() - self._waited
        if self._again:  # ranks were lost in a sum of the script's own
            self._give_up_step()
            return
        total = self._team.elastic.attempt(self.parallel.finish, self.parallel.abandon)
        if total is None:
            self._go_on()
            return
        self._waited += self._clock.lap()
        self._agreed, self._computed_by_rank, exposed, self._demanded_by_rank = unpack(total, self.size)
        if self._agreed.weighed:
            self._team.divide(self._agreed, self.step)
        if self._measuring:
            within = self._agreed.within / (self._agreed.weight or 1.0)
            together = self.parallel.gradient_norm() ** 2
            self._scaling.observe(within, together, self.workers)
            self.noise.observe(within, together, self.workers)
        self._exposed = [e for e, share in zip(exposed, self.shares, strict=True) if share] if any(exposed) else []
        if self._agreed.logged:
            loss = self._agreed.loss / self._agreed.logged
            if not isfinite(loss):
                raise DivergedError(f"loss is {loss} at step {self.step}: lower the learning rate")
            self._progress.add_loss(loss)
        self._news_due = self._progress.due(last=self.step == self.total_steps - 1)
        if self._news_due or self._agreed.save or self._agreed.stop or self._agreed.keep:
            self._gradient_norm = self.parallel.gradient_norm()
            if not isfinite(self._gradient_norm):
                raise DivergedError(f"gradient is not finite at step {self.step}: lower the learning rate")
            if 0 < self._agreed.square < inf:
                self._gradient_norm = sqrt(self._agreed.square)

    def _after_update(self) -> None:
        """Hook of ``optimizer.step()``: the step's time ends here; what the body does next is not the step's."""
        if not self._in_step:
            return
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self._in_step = False
        if self._again:
            return
        self._computed += self._clock.lap()
        self.parallel.spread()
        self._waited += self._clock.lap()
        self.step += 1
        if self.end_of_epoch or self.complete:
            self._progress.end_epoch()

    def _conclude(self, part: Part) -> None:
        """After a step: news, and what the ranks agreed on."""
        agree_s = self._team.elastic.agree_s
        exposed_s = self.parallel.exposed_s + agree_s
        waited_cpu_s = self._waited.process_s
        times = Times(self._data.wall_s, self._computed.wall_s, exposed_s, agree_s, waited_cpu_s, self._fetch_s)
        if self.step == self._first + 1:
            self.reporter.mark("first_step")
            self._progress.warm_up(times, part.batch)
        else:
            self._progress.add(times, part.batch, self._exposed)
            if self.device.type == "cpu":
                self._demanded_s = self.budget.add(self._computed, self._data + self._computed + self._waited)
            self._team.balance(self.step, self._computed_by_rank, self._exposed, self._demanded_by_rank)
        if self._news_due:
            rate, norm = float(self.optimizer.param_groups[0]["lr"]), self._gradient_norm
            self._progress.tell(self.step, self.total_steps, self.epoch, rate, norm, self.shares[self.rank], self.alive)
        saving = self._agreed.save or self._agreed.stop
        every = self.plan.compare_steps
        if saving or self._agreed.keep or self.complete or (every and self.step % every == 0):
            self._compare()
        if saving:
            self._save()
        elif self._agreed.keep:
            self._save(durable=False)
        if self._agreed.stop:
            self._wait_for_checkpoint()
            self.stopped = True
            raise SystemExit(EXIT_STOPPED)

    def _compare(self) -> None:
        """All ranks hold the same parameters; before each checkpoint too, so that none is made of wrong ones."""
        if self.workers == 1 or not self.shares[self.rank] or not self.parallel.replicated(self.model):
            return
        told = partial(Compared, rank=self.rank, step=self.step)
        try:
            self._together(lambda: self._team.agree_on_parameters(self.step))
        except ParametersDivergedError:
            self.reporter.send(told(agree=False))
            raise
        self.reporter.send(told(agree=True))

    def _wait_for_checkpoint(self) -> None:
        """All ranks end together, so all wait for rank 0's volume."""
        if self.plan.checkpoint.enabled:
            nbytes = 4 * self.parallel.buffer.flat.nbytes  # parameters and up to three values of the optimizer for each
            self.busy("checkpoint", patience_s(nbytes))
            self._keeper.wait()

    def _save(self, *, durable: bool = True) -> None:
        if not self.plan.checkpoint.enabled:
            return
        state = {
            "epoch": self.epoch,
            "scaling": self._scaling.state(),
            "noise": self.noise.state(),
            "shares": self._team.whole or self.shares,
            "planned_shares": self._team.planned_shares,
            "accuracy": self._progress.accuracy,
            "loss": self._progress.loss,
            "summing": summing.known(self.parallel),
        }
        optimizer = self.parallel.optimizer_state(self.optimizer)
        self._keeper.save(self.step, self.parallel.weights(self.model), optimizer, state, durable=durable)
