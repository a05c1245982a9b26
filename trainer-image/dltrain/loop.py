"""The training loop: steps, sums, news, checkpoints and the agreed end. Users: ``api`` (user scripts), ``rank``.

Ranks agree on what happens after a step by a few numbers that travel with the gradients (the tail of the buffer), so
that a wish to stop or to save costs no message and takes effect on all of them at the same step.
"""

import hashlib
import time
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from math import inf, isfinite, sqrt
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dljob.contract import Outcome, Plan, Role
from dltrain.agreement import compare
from dltrain.balance import Balance
from dltrain.batchnorm import Ranks, local_layers, synchronized
from dltrain.comm.choose import choose
from dltrain.elastic import Elastic, inherit
from dltrain.errors import DivergedError, ParametersDivergedError, PeerLostError
from dltrain.loader import Loader
from dltrain.measure import Times
from dltrain.messages import EXIT_STOPPED, Compared, Resharded, Shrunk
from dltrain.parallel import DataParallel
from dltrain.progress import Progress
from dltrain.report import Reporter
from dltrain.sampling import Part, Sampler
from dltrain.scaling import Scaling
from dltrain.sharded import optimizer_parallel
from dltrain.state import replicate
from dltrain.world import World
from dltrain.writer import Keeper

CHECKPOINT_S = 60.0
CHECKPOINT_BPS = 10e6
"""Slowest volume that is waited for: this time, and this many bytes a second."""
Model = TypeVar("Model", bound=nn.Module)
Opt = TypeVar("Opt", bound=Optimizer)


class Shared(NamedTuple):
    """What ranks share at every step, before the times of each rank; the sum over ranks is what counts."""

    loss: float = 0.0
    """This rank's part of the batch's mean loss."""
    logged: float = 0.0
    """Part of the batch whose loss was logged."""
    stop: float = 0.0
    save: float = 0.0
    keep: float = 0.0
    square: float = 0.0
    """Squared norm of the gradient before, where no rank holds all of it."""
    within: float = 0.0
    """Weight times squared norm of the rank's own gradient; what AdaScale measures."""
    weighed: float = 0.0
    """Ranks that weigh their loss themselves."""
    weight: float = 0.0
    """What they weigh it by, such as tokens."""


_WEIGHED = Shared._fields.index("weighed")
_WITHIN = Shared._fields.index("within")


def step_seed(seed: int, step: int, rank: int) -> int:
    """Seed of torch's generator for one step of one rank."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {step} {rank}".encode(), digest_size=7).digest(), "big")


class Trainer:
    """Trains one model on this rank, together with the others. See ``dltrain.init`` for how a script uses it."""

    def __init__(self, plan: Plan, world: World, reporter: Reporter, device: torch.device, device_name: str) -> None:
        """``device_name``: what ``device`` really is, for measurements."""
        self.plan, self.world, self.reporter = plan, world, reporter
        self.device, self.device_name = device, device_name
        self.rank, self.size = world.rank, world.size
        self.shares: tuple[int, ...] = tuple(rank.share for rank in plan.ranks)
        computes = [rank.role is Role.WORKER for rank in plan.ranks]
        self._among_workers = world.split(computes)
        self.worker, self.workers = self._among_workers.rank, sum(computes)
        """This rank's number among the ranks that compute (a server's among the servers), and how many compute."""
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
        self._parallel: DataParallel | None = None
        self._retired: list[DataParallel] = []
        self._keeper = Keeper(plan, world, reporter)
        self._elastic = Elastic(plan, world, on_cpu=device.type == "cpu")
        self._whole: tuple[int, ...] | None = None
        """Shares before ranks were lost, for when they are back."""
        self._again = False
        """Whether the step under way was given up and will be computed again."""
        self._progress = Progress(reporter, world.rank, device_name)
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
        self._balance: Balance | None = None

    # What a script calls.

    def wrap(self, model: Model, optimizer: Opt, *, sync_batch_norm: bool | None = None) -> tuple[Model, Opt]:
        """Put the model on this rank's device, equal on all ranks, and sum its gradients in ``optimizer.step()``.

        Continues from the newest checkpoint when there is one. The loss must be the mean over the batch given.
        ``sync_batch_norm``: BatchNorm over the whole batch instead of this rank's part; default: as the plan says.
        """
        model = self._normalized(model, self.plan.model.sync_batch_norm if sync_batch_norm is None else sync_batch_norm)
        self.model: nn.Module = model.to(self.device)
        self.optimizer: Optimizer = optimizer
        replicate(self.model, self.world.broadcast)
        self._rebuild()
        optimizer.register_step_pre_hook(lambda *_: self._before_update())
        optimizer.register_step_post_hook(lambda *_: self._after_update())
        if (snapshot := self._keeper.resume(self.model, partial(self.parallel.load_optimizer, optimizer))) is not None:
            self.step = self._first = snapshot.step
            self._scaling.load(snapshot.state.get("scaling", self._scaling.state()))
            self._progress.accuracy, self._progress.loss = snapshot.state["accuracy"], snapshot.state["loss"]
            if snapshot.state["planned_shares"] == self._planned_shares:
                self.shares = tuple(snapshot.state["shares"])  # the same ranks: go on to the last bit
                self.settled = True
        return model, optimizer

    def loader(self, dataset: Any) -> Loader:
        """Batches of a dataset: a torch map-style ``Dataset``, or a tuple of tensors."""
        return Loader(dataset, self.device)

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
        self.parallel.share(_WEIGHED, (1.0, self._weight))

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
        while True:
            total = self._elastic.attempt(lambda: self._among_workers.sum(values), self._among_workers.abandon)
            if total is not None:
                return total
            self._go_on()

    def steps(self, loader: Loader) -> Iterator[Any]:
        """This rank's batch of every step left, on its device. The body must call ``optimizer.step()`` once.

        Ends with SystemExit when the run was asked to stop, once its checkpoint is durable.
        """
        sampler = Sampler(loader.samples, min(self.plan.global_batch, loader.samples), self.plan.seed)
        self.total_steps = self.plan.steps or (self.plan.epochs or 0) * sampler.steps_per_epoch
        while self.step < self.total_steps:
            part = sampler.part(self.step, self.shares, self.rank)
            self._weight = self._part_weight = part.weight
            self.epoch, self.end_of_epoch = part.epoch, part.last
            # Randomness of a step (dropout) is a function of (seed, step, rank): nothing to save, equal on resume.
            torch.manual_seed(step_seed(self.plan.seed, self.step, self.rank))
            began = time.perf_counter()
            batch = loader.fetch(part.indices) if len(part.indices) else None
            self._fetched = time.perf_counter()
            self._full = part.batch == self.plan.global_batch
            self._data_s = self._fetched - began
            self.parallel.begin(part.weight, self._shared())
            self._kept = [buffer.clone() for buffer in self.model.buffers()] if self._elastic.active else []
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

    @property
    def complete(self) -> bool:
        """Whether all steps are done."""
        return 0 < self.total_steps <= self.step

    @property
    def parallel(self) -> DataParallel:
        """Raises RuntimeError before ``wrap``."""
        if self._parallel is None:
            raise RuntimeError("found no model, expected t.wrap(model, optimizer) first")
        return self._parallel

    @property
    def alive(self) -> int:
        """Ranks that train: those of the plan, without those that were lost and did not come back yet."""
        return len(self._elastic.alive)

    def reshard(self, shares: Sequence[int], reason: str) -> None:
        """Give the ranks other shares from the next step on; every rank must call it with the same ones."""
        self.shares = tuple(shares)
        self.reporter.send(Resharded(rank=self.rank, step=self.step, shares=self.shares, reason=reason))

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
        if self._parallel is not None:
            self._parallel.close()
            self._parallel = None

    def abandon(self) -> None:
        """Leave alone, so that no rank waits for this one. The process must exit next."""
        if self._parallel is not None:
            self._parallel.abandon()
        self._among_workers.abandon()
        self.world.abandon()

    def _normalized(self, model: Model, synchronize: bool) -> Model:
        """With BatchNorm over all ranks, or a warning that it is not."""
        if self.workers == 1 or not (layers := local_layers(model)):
            return model
        if synchronize:
            ranks = Ranks(
                sum=lambda values: self._among_workers.sum(values),
                counts=lambda: self._part_weight > 0,
                weight=lambda: self._weight,
            )
            self._elastic.active = False  # a rank lost within forward leaves others in the middle of it
            return synchronized(model, ranks)
        if self.rank == 0:
            warnings.warn(
                f"{len(layers)} BatchNorm layers ({layers[0]}, …) see the samples of one rank only: what is learned "
                "depends on the split of the batch; set spec.model.syncBatchNorm, or wrap(…, sync_batch_norm=True)",
                stacklevel=3,
            )
        return model

    # Within a step.

    @property
    def _planned_shares(self) -> list[int]:
        return [rank.share for rank in self.plan.ranks]

    def _rebuild(self) -> DataParallel:
        """Buffers and strategy for the ranks there are; what served others before is kept, but rests."""
        if self._parallel is not None:
            self._parallel.retire()
            self._retired.append(self._parallel)
        tail = len(Shared()) + 2 * self.size
        made: DataParallel
        if self.plan.parallelism == "Optimizer" and self.size > 1:
            made = optimizer_parallel(self.plan, self.world, self.model, self.optimizer, tail)
        else:
            made = DataParallel(self.model.parameters(), self._collective, self.plan.bucket_nbytes, tail)
        made.square_at = _WITHIN if self._scaling.measures else None
        self._parallel = made
        return made

    def _go_on(self) -> None:
        """Ranks were lost: go on without them from the same step. Raises PeerLostError where that cannot be."""
        began = time.perf_counter()
        if self._parallel is None:
            raise PeerLostError("lost a peer before training began")
        rebuilt = None
        while rebuilt is None:  # again, when another one dies meanwhile
            self._elastic.regroup(self.step)
            rebuilt = self._elastic.attempt(self._rebuild, self.world.abandon)
        self.worker, self.workers = self.world.rank, self.world.size
        self._keeper.take_over()
        if self._in_step:
            self._give_up_step()
        alive = self._elastic.alive
        spent_s = time.perf_counter() - began
        self.reporter.send(Shrunk(rank=self.rank, step=self.step, alive=alive, shrink_s=spent_s))
        self._whole = self._whole or self.shares
        lost = [rank for rank, share in enumerate(self.shares) if share and rank not in alive]
        self.reshard(inherit(self.shares, alive), f"lost ranks {lost}")

    def _give_up_step(self) -> None:
        """Leave model and optimizer as they were before the step under way: it will be computed again."""
        self._again, self.end_of_epoch = True, False
        for parameter in self.model.parameters():
            parameter.grad = None  # which optimizers pass over
        with torch.no_grad():
            for buffer, kept in zip(self.model.buffers(), self._kept, strict=True):
                buffer.copy_(kept)  # running statistics that forward has moved on

    def _collective(self, buffers: list[Tensor]) -> Any:
        return choose(
            self.plan.collective,
            self.world.comm,
            buffers,
            segment_nbytes=self.plan.segment_nbytes,
            servers=[rank.rank for rank in self.plan.ranks if rank.role is Role.SERVER],
            host=self.plan.ranks[0].host,
        )

    def _shared(self) -> list[float]:
        stop, save, keep = self.reporter.stop.is_set(), self._keeper.due, self._keeper.memory_due
        shared = Shared(*self._late, float(stop), float(save), float(keep), square=self.parallel.square)
        self._late = (0.0, 0.0)
        by_rank = [0.0] * (2 * self.size)
        by_rank[self.rank] = self._progress.times.compute_s
        by_rank[self.size + self.rank] = self._progress.times.exposed_s
        return [*shared, *by_rank]

    def _before_update(self) -> None:
        """Hook of ``optimizer.step()``: wait for the sum; nothing is updated when it is not finite."""
        if not self._in_step:
            return  # a step outside of the loop is the script's own business
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # else backward would count as communication
        self._computed_s = time.perf_counter() - self._fetched
        if self._again:  # ranks were lost in a sum of the script's own
            self._give_up_step()
            return
        shared = self._elastic.attempt(self.parallel.finish, self.parallel.abandon)
        if shared is None:
            self._go_on()
            return
        self._summed = time.perf_counter()
        self._agreed = Shared(*shared[: len(Shared())])
        self._computed_by_rank = shared[len(Shared()) : len(Shared()) + self.size]
        exposed = shared[len(Shared()) + self.size :]
        if self._agreed.weighed:
            self._divide(self._agreed)
        if self._scaling.measures and self._full:
            within = self._agreed.within / (self._agreed.weight or 1.0)
            self._scaling.observe(within, self.parallel.gradient_norm() ** 2, self.workers)
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

    def _divide(self, agreed: Shared) -> None:
        """From the sum of gradients times tokens to the mean over tokens."""
        if agreed.weighed != self.workers:
            raise RuntimeError(f"found t.weigh() on {agreed.weighed:g} of {self.workers} ranks, expected all or none")
        if not agreed.weight:
            raise RuntimeError(f"found no token in the whole batch at step {self.step}, expected some")
        self.parallel.buffer.gradient.div_(agreed.weight)

    def _after_update(self) -> None:
        """Hook of ``optimizer.step()``: the step's time ends here; what the body does next is not the step's."""
        if not self._in_step:
            return
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self._in_step = False
        if self._again:
            return
        self._computed_s += time.perf_counter() - self._summed
        self.parallel.spread()
        self.step += 1
        if self.end_of_epoch:
            self._progress.end_epoch()

    def _conclude(self, part: Part) -> None:
        """After a step: news, and what the ranks agreed on."""
        agree_s = self._elastic.agree_s
        times = Times(self._data_s, self._computed_s, self.parallel.exposed_s + agree_s, agree_s)
        if self.step == self._first + 1:
            self.reporter.mark("first_step")
            self._progress.warm_up(times, part.batch)
        else:
            self._progress.add(times, part.batch, self._exposed)
            self._balance_shares()
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

    def _balance_shares(self) -> None:
        """Move shares by the times of the step before, which came with this one's gradients."""
        if not self.plan.rebalance or self.workers == 1 or not self._exposed:
            return
        if self._balance is None or self._balance.shares != self.shares:
            # A GPU has shown in the probe that it holds twice its share; a CPU's memory is not what bounds it.
            limits = [2 * rank.share if rank.gpu else self.plan.global_batch for rank in self.plan.ranks]
            self._balance = Balance(self.shares, limits)
        step_s = max(self._computed_by_rank) + min(self._exposed)
        if (shares := self._balance.add(self._computed_by_rank, step_s)) is not None:
            self.reshard(shares, "measured while training")

    def _compare(self) -> None:
        """All ranks hold the same parameters; before each checkpoint too, so that none is made of wrong ones."""
        if self.workers == 1 or not self.shares[self.rank]:
            return
        told = partial(Compared, rank=self.rank, step=self.step)
        try:
            while not self._elastic.attempt(self._agree_on_parameters, self._among_workers.abandon):
                self._go_on()
        except ParametersDivergedError:
            self.reporter.send(told(agree=False))
            raise
        self.reporter.send(told(agree=True))

    def _agree_on_parameters(self) -> bool:
        ranks = [self.plan.ranks[number] for number in self._elastic.alive]
        kinds = {rank.rank: rank.device for rank in ranks if rank.role is Role.WORKER}
        compare(self._among_workers, self.model.parameters(), kinds, self.step)
        return True

    def _wait_for_checkpoint(self) -> None:
        """All ranks end together, so all wait for rank 0's volume."""
        if self.plan.checkpoint.enabled:
            nbytes = 4 * self.parallel.buffer.flat.nbytes  # parameters and up to three values of the optimizer for each
            self.busy("checkpoint", CHECKPOINT_S + nbytes / CHECKPOINT_BPS)
            self._keeper.wait()

    def _save(self, *, durable: bool = True) -> None:
        if not self.plan.checkpoint.enabled:
            return
        state = {
            "epoch": self.epoch,
            "scaling": self._scaling.state(),
            "shares": self._whole or self.shares,
            "planned_shares": self._planned_shares,
            "accuracy": self._progress.accuracy,
            "loss": self._progress.loss,
        }
        optimizer = self.parallel.optimizer_state(self.optimizer)
        self._keeper.save(self.step, self.model, optimizer, state, durable=durable)
