"""The training loop: steps, sums, news, checkpoints and the agreed end. Users: ``api`` (user scripts), ``rank``.

Ranks agree on what happens after a step by a few numbers that travel with the gradients (the tail of the buffer), so
that a wish to stop or to save costs no message and takes effect on all of them at the same step.
"""

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dljob.contract import Outcome, Plan, Role
from dltrain.checkpoint import Checkpoints, decode, identity
from dltrain.comm.choose import choose
from dltrain.errors import BadInputError, DivergedError
from dltrain.layout import job_directory
from dltrain.loader import Loader
from dltrain.measure import Times, Window
from dltrain.messages import EXIT_STOPPED, Evaluated, Resharded, Step
from dltrain.parallel import DataParallel
from dltrain.report import Reporter
from dltrain.sampling import Part, Sampler
from dltrain.state import capture, replicate, restore
from dltrain.world import World
from dltrain.writer import Writer

NEWS_INTERVAL_S = 0.25


class Shared(NamedTuple):
    """The numbers that ranks share at every step, before those of each rank: their sum over ranks is what counts."""

    loss: float = 0.0
    """This rank's part of the batch's mean loss."""
    logged: float = 0.0
    """Part of the batch whose loss was logged."""
    stop: float = 0.0
    save: float = 0.0


def step_seed(seed: int, step: int, rank: int) -> int:
    """Seed of torch's generator for one step of one rank."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {step} {rank}".encode(), digest_size=7).digest(), "big")


class Trainer:
    """Trains one model on this rank, together with the others. See ``dltrain.init`` for how a script uses it."""

    def __init__(self, plan: Plan, world: World, reporter: Reporter, device: torch.device) -> None:
        self.plan, self.world, self.reporter, self.device = plan, world, reporter, device
        self.rank, self.size = world.rank, world.size
        self.me = plan.ranks[world.rank]
        self.shares: tuple[int, ...] = tuple(rank.share for rank in plan.ranks)
        self._among_workers = world.split([rank.role is Role.WORKER for rank in plan.ranks])
        self.worker, self.workers = self._among_workers.rank, self._among_workers.size
        """This rank's number among the ranks that compute, and how many they are."""
        self.device_name = self.me.device
        self.step = 0
        """Steps done."""
        self.total_steps = plan.steps or 0
        """Steps of the whole training; with epochs known once the data is."""
        self.epoch = 0
        self.end_of_epoch = False
        """Whether the batch just given out is the last of its epoch."""
        self.accuracy: float | None = None
        self.loss: float | None = None
        """Mean over the batches since the news before."""
        self._losses: list[float] = []
        self._late: tuple[Tensor | float, float] = (0.0, 0.0)
        """Loss logged after its step had been summed: shared with the next."""
        self._first = 0
        self.resumed_shares = False
        """Whether ``shares`` are those of the run that wrote the checkpoint."""
        self._window = Window()
        self._writer: Writer | None = None
        self._began = time.monotonic()
        self._saved_at = time.monotonic()
        self._news_at = 0.0
        self._times = Times(0.0, 0.0, 0.0)
        self._in_step = False

    # What a script calls.

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """Put the model on this rank's device, equal on all ranks, and sum its gradients in ``optimizer.step()``.

        Continues from the newest checkpoint when there is one. The loss must be the mean over the batch given.
        """
        self.model = model.to(self.device)
        self.optimizer = optimizer
        replicate(self.model, self.world.broadcast)
        self._parallel = DataParallel(
            self.model.parameters(), self._collective, self.plan.bucket_nbytes, len(Shared()) + 2 * self.size
        )
        optimizer.register_step_pre_hook(lambda *_: self._before_update())
        optimizer.register_step_post_hook(lambda *_: self._after_update())
        self._resume()
        return model, optimizer

    def loader(self, dataset: Any) -> Loader:
        """Batches of a dataset: a torch map-style ``Dataset``, or a tuple of tensors."""
        return Loader(dataset, self.device)

    def log(self, *, loss: Tensor | float | None = None, accuracy: float | None = None) -> None:
        """Show the mean loss of this rank's batch, best before ``backward()``; or an accuracy on held-out data."""
        if loss is not None:
            part = torch.as_tensor(loss).detach() * self._part.weight
            if not self._parallel.share(0, (part, self._part.weight)):
                self._late = (part, self._part.weight)
        if accuracy is not None:
            self.accuracy = accuracy
            self.reporter.send(Evaluated(rank=self.rank, step=self.step, accuracy=accuracy, loss=self.loss))

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise sum over the ranks that compute, such as of correct answers."""
        return self._among_workers.sum(values)

    def steps(self, loader: Loader) -> Iterator[Any]:
        """This rank's batch of every step left, on its device. The body must call ``optimizer.step()`` once.

        Ends with SystemExit when the run was asked to stop, once its checkpoint is durable.
        """
        sampler = Sampler(loader.samples, min(self.plan.global_batch, loader.samples), self.plan.seed)
        self.total_steps = self.plan.steps or (self.plan.epochs or 0) * sampler.steps_per_epoch
        self._saved_at = time.monotonic()
        while self.step < self.total_steps:
            part = sampler.part(self.step, self.shares, self.rank)
            self.epoch, self.end_of_epoch = part.epoch, part.last
            self._part = part
            # Randomness of a step (dropout) as a function of (seed, step, rank): nothing to save, equal on resume.
            torch.manual_seed(step_seed(self.plan.seed, self.step, self.rank))
            began = time.perf_counter()
            batch = loader.fetch(part.indices) if len(part.indices) else None
            self._fetched = time.perf_counter()
            self._data_s = self._fetched - began
            self._parallel.begin(part.weight, self._shared())
            self._in_step = True
            if batch is None:
                self.optimizer.step()  # a parameter server: its part is the sum
            else:
                yield batch
            if self._in_step:
                raise RuntimeError("found no optimizer.step() in the loop's body, expected one for each batch")
            self._conclude(part)
        self._save(wait=True)

    def outcome(self) -> Outcome:
        """What the run came to."""
        last = self._writer.last if self._writer else None
        return Outcome(
            steps=self.step,
            seconds=time.monotonic() - self._began,
            loss=self.loss,
            accuracy=self.accuracy,
            checkpoint=last.path if last else None,
        )

    def close(self) -> None:
        """Wait for a checkpoint under way, free the collective."""
        if self._writer:
            self._writer.wait()
        self._parallel.close()

    # Within a step.

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
        save = self.rank == 0 and self._writer is not None and not self._writer.busy
        save = save and time.monotonic() - self._saved_at >= self.plan.checkpoint.interval_s
        loss, logged = self._late
        self._late = (0.0, 0.0)
        shared = Shared(float(loss), logged, stop=float(self.reporter.stop.is_set()), save=float(save))
        by_rank = [0.0] * (2 * self.size)
        by_rank[self.rank] = self._times.compute_s
        by_rank[self.size + self.rank] = self._times.exposed_s
        return [*shared, *by_rank]

    def _before_update(self) -> None:
        """Hook of ``optimizer.step()``: wait for the sum; nothing is updated when it is not finite."""
        if not self._parallel.is_open:
            return  # a step outside of the loop is the script's own business
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # so that backward is not counted as communication
        self._computed_s = time.perf_counter() - self._fetched
        shared = self._parallel.finish()
        self._summed = time.perf_counter()
        self._agreed = Shared(*shared[: len(Shared())])
        by_rank = shared[len(Shared()) :]
        if self.step > self._first:
            self._window.add_exposed([e for e, share in zip(by_rank[self.size :], self.shares, strict=True) if share])
        if self._agreed.logged:
            self._losses.append(self._agreed.loss / self._agreed.logged)
            if not isfinite(self._losses[-1]):
                raise DivergedError(f"loss is {self._losses[-1]} at step {self.step}: lower the learning rate")
        now = time.monotonic()
        ends = self.step in (self._first, self.total_steps - 1)
        self._news_due = ends or now - self._news_at >= NEWS_INTERVAL_S
        self._gradient_norm = None
        if self._news_due or self._agreed.save or self._agreed.stop:
            self._gradient_norm = float(torch.linalg.vector_norm(self._parallel.buffer.gradient))
            if not isfinite(self._gradient_norm):
                raise DivergedError(f"gradient is not finite at step {self.step}: lower the learning rate")

    def _after_update(self) -> None:
        """Hook of ``optimizer.step()``: the step's time ends here; what the body does next is not the step's."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        if self._in_step:
            self._in_step = False
            self._computed_s += time.perf_counter() - self._summed
            self.step += 1

    def _conclude(self, part: Part) -> None:
        """After the update of a step: news, and what the ranks agreed on."""
        if self.step == self._first + 1:
            self.reporter.mark("first_step")
        self._times = Times(self._data_s, self._computed_s, self._parallel.exposed_s)
        self._window.add(self._times, part.batch)
        if self._news_due:
            self._tell()
        if self._agreed.stop:
            self._save(wait=True)
            raise SystemExit(EXIT_STOPPED)
        if self._agreed.save:
            self._save(wait=False)

    def _tell(self) -> None:
        if self._losses:
            self.loss = sum(self._losses) / len(self._losses)
            self._losses = []
        self._news_at = time.monotonic()
        self.reporter.send(
            Step(
                rank=self.rank,
                step=self.step,
                steps=self.total_steps,
                epoch=self.epoch,
                loss=self.loss,
                learning_rate=self.optimizer.param_groups[0]["lr"],
                gradient_norm=self._gradient_norm,
                step_s=self._window.step_s,
                samples_per_s=self._window.samples_per_s,
                world_size=self.size,
                measure=self._window.measure(self.rank, self.device_name, self.shares[self.rank]),
            )
        )

    # Between steps.

    def reshard(self, shares: Sequence[int], reason: str) -> None:
        """Give every rank another share from the next step on; every rank must call it with the same ones."""
        self.shares = tuple(shares)
        self.reporter.send(Resharded(rank=self.rank, step=self.step, shares=self.shares, reason=reason))

    def _save(self, *, wait: bool) -> None:
        """Checkpoint the state after the last step; all ranks hold the same, so rank 0 writes it."""
        self._saved_at = time.monotonic()
        if self._writer is None:
            return
        if self._writer.last is None or self._writer.last.step != self.step:
            state = {
                "epoch": self.epoch,
                "shares": self.shares,
                "planned_shares": [rank.share for rank in self.plan.ranks],
                "global_batch": self.plan.global_batch,
                "seed": self.plan.seed,
                "accuracy": self.accuracy,
                "loss": self.loss,
            }
            self._writer.begin(capture(self.step, self.model, self.optimizer, state))
        if wait:
            self._writer.wait()

    def _resume(self) -> None:
        """From the newest checkpoint, read by rank 0 alone, so that all ranks take the same."""
        self._first = 0
        if not self.plan.checkpoint.enabled:
            return
        files: dict[str, bytes] = {}
        if self.rank == 0:
            name = self.plan.model.name or "script"
            known = identity(name, self.model.state_dict())
            checkpoints = Checkpoints(job_directory(self.plan), known, self.plan.checkpoint.keep)
            self._writer = Writer(checkpoints, self.reporter)
            files = checkpoints.load() or {}
        names = json.loads(self.world.broadcast(json.dumps(list(files)).encode()))
        files = {name: self.world.broadcast(files.get(name)) for name in names}
        if not files:
            return
        snapshot = decode(files)
        self._check(snapshot.state)
        restore(snapshot, self.model, self.optimizer)
        self.step = self._first = snapshot.step
        self.accuracy, self.loss = snapshot.state["accuracy"], snapshot.state["loss"]
        if snapshot.state["planned_shares"] == [rank.share for rank in self.plan.ranks]:
            self.shares = tuple(snapshot.state["shares"])  # the same shape: resume to the last bit
            self.resumed_shares = True

    def _check(self, state: dict[str, Any]) -> None:
        for key, field, here in (
            ("global_batch", "spec.globalBatchSize", self.plan.global_batch),
            ("seed", "spec.seed", self.plan.seed),
        ):
            if state[key] != here:
                raise BadInputError(
                    field, str(here), f"{state[key]}, as in the checkpoint", "restore it, or use another volume"
                )
