"""When and how training state goes to the volume and comes back.

Data parallel ranks hold equal state, so rank 0 writes it, in the background: training stops only for a copy in memory.
"""

import json
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from math import inf
from typing import Any

from torch import Tensor

from dlcontract import CheckpointMark, Plan
from dltrain.checkpoint import memory_copy
from dltrain.checkpoint.interval import Interval
from dltrain.checkpoint.memory_copy import NOTHING, held, step_of
from dltrain.checkpoint.state import Staging, capture, restore
from dltrain.checkpoint.store import Checkpoints, Snapshot, decode, identity
from dltrain.comm.process_group import ProcessGroup
from dltrain.protocol.errors import BadInputError, CheckpointError, FencedError
from dltrain.protocol.rank_messages import Checkpointed
from dltrain.protocol.reporter import RankReporter
from dltrain.protocol.volume_layout import job_directory

SLOWEST_S, SLOWEST_BPS = 60.0, 10e6
"""The slowest volume that is waited for: this time, and this many bytes a second."""


def patience_s(nbytes: int) -> float:
    """How long a checkpoint of this size may take."""
    return SLOWEST_S + nbytes / SLOWEST_BPS


class Writer:
    """One checkpoint at a time, each announced to the agent (if there is a ``reporter``) once it is durable."""

    def __init__(
        self, checkpoints: Checkpoints, reporter: RankReporter | None, paid: Callable[[float], float] | None = None
    ) -> None:
        """``paid``: told what each cost the training; answers in how many seconds the next one comes."""
        self.checkpoints = checkpoints
        self._reporter, self._paid = reporter, paid
        self._thread: threading.Thread | None = None
        self._error: OSError | FencedError | ValueError | None = None
        self.last: CheckpointMark | None = None

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def begin(self, snapshot: Snapshot, stall_s: float = 0.0) -> None:
        """Write ``snapshot``, whose tensors nobody changes any more, and for which training stood still for
        ``stall_s``. Raises OSError of the one before.
        """
        self.wait()
        self._thread = threading.Thread(target=self._write, args=(snapshot, stall_s), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Until what was begun is durable. Raises OSError when it could not be written, ValueError for its dtypes."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _write(self, snapshot: Snapshot, stall_s: float) -> None:
        began, cpu_began = time.perf_counter(), time.thread_time()
        try:
            path, nbytes = self.checkpoints.save(snapshot)
        except (FencedError, ValueError) as error:
            self._error = error
            return
        except OSError as error:
            self._error = error if self._reporter is None else CheckpointError(self.checkpoints.directory, error)
            return
        self.last = CheckpointMark(step=snapshot.step, unix_s=time.time(), path=str(path))
        duration_s = time.perf_counter() - began
        cost_s = stall_s + time.thread_time() - cpu_began  # this thread's CPU time is taken from the steps beside it
        next_s = self._paid(cost_s) if self._paid is not None else None
        if self._reporter is not None:
            self._reporter.send(
                Checkpointed(
                    rank=self._reporter.rank,
                    mark=self.last,
                    duration_s=duration_s,
                    nbytes=nbytes,
                    cost_s=cost_s,
                    interval_s=next_s,
                )
            )


class CheckpointManager:
    """A run's checkpoints as its ranks see them: rank 0 reads and writes, the others receive."""

    def __init__(self, plan: Plan, world: ProcessGroup, reporter: RankReporter) -> None:
        self.plan, self.world, self.reporter = plan, world, reporter
        self._writer: Writer | None = None
        self._begun: int | None = None
        """Step of the newest checkpoint, which may still be under way."""
        self._saved_at = time.monotonic()
        self._identity = ""
        self._memory: Writer | None = None
        self._pace = memory_copy.Pace()
        self._interval = Interval(plan.checkpoint, len(plan.pods))
        self._launched = time.monotonic()
        self._staging = Staging()

    @property
    def last(self) -> CheckpointMark | None:
        return self._writer.last if self._writer else None

    @property
    def due(self) -> bool:
        """Whether this rank wants a checkpoint after this step. Only rank 0 ever does."""
        if self._writer is None or self._writer.busy:
            return False
        return time.monotonic() - self._saved_at >= self.interval_s

    @property
    def interval_s(self) -> float:
        """Between checkpoints on the volume."""
        return self._interval.seconds(time.monotonic() - self._launched)

    def _paid(self, cost_s: float) -> float:
        self._interval.paid(cost_s)
        return self.interval_s

    @property
    def memory_due(self) -> bool:
        """Whether the pods should keep the state after this step in memory. Only rank 0 ever says so."""
        return self._writer is not None and not self.plan.splits_model and self._pace.due

    def resume(
        self,
        shapes: Mapping[str, Tensor],
        load_model: Callable[[dict[str, Tensor]], object],
        load_optimizer: Callable[[dict[str, Any]], object],
    ) -> Snapshot | None:
        """Restore the newest state, of a pod's memory or of the volume, on every rank; None when there is none.

        ``shapes``: the whole model's tensors, of which names, shapes and dtypes matter.

        One rank alone reads it, so that all take the same. Raises BadInputError when it is another job's.
        """
        if not self.plan.checkpoint.enabled:
            return None
        self._identity = identity(self.plan.model.name or "script", shapes)
        self._memory = self._open_memory()
        files = held(self._memory.checkpoints) if self._memory is not None else {}
        steps = [row[0] for row in self.world.gather([step_of(files)])]
        holder, folder = steps.index(max(steps)), None
        if self.world.rank == 0:
            checkpoints = self._open()
            newer = max(checkpoints.steps(), default=NOTHING) > max(steps)
            if newer and (found := checkpoints.load()) is not None and step_of(found[1]) > max(steps):
                holder, (folder, files) = 0, found
        holder = int(self.world.broadcast(str(holder).encode()))
        names = json.loads(self.world.broadcast(json.dumps(sorted(files)).encode(), holder))
        files = {name: self.world.broadcast(files.get(name, b""), holder) for name in names}
        if not files:
            return None
        snapshot = decode(files)
        self._check(snapshot.state)
        restore(snapshot, load_model, load_optimizer)
        if folder is not None and self._writer is not None:
            self._writer.last = CheckpointMark(step=snapshot.step, unix_s=folder.stat().st_mtime, path=str(folder))
            self._begun = snapshot.step
        if self.world.rank == 0:
            place = folder if folder is not None else f"the memory of rank {holder}'s pod"
            print(f"dltrain: goes on from step {snapshot.step}, found in {place}", file=sys.stderr, flush=True)  # noqa: T201
        return snapshot

    def _open_memory(self) -> Writer | None:
        """None on ranks that keep nothing, and where there is no such place."""
        if self.plan.splits_model:
            return None  # the whole state, gathered for each pod, every few seconds
        try:
            place = memory_copy.directory(self.world)
            return Writer(Checkpoints(place, self._identity, keep=1), None) if place is not None else None
        except BadInputError as error:
            self._complain(error)
            return None

    def _open(self) -> Checkpoints:
        checkpoints = Checkpoints(job_directory(self.plan), self._identity, self.plan.checkpoint.keep, self.plan.term)
        self._writer = Writer(checkpoints, self.reporter, self._paid)
        return checkpoints

    def take_over(self) -> None:
        """Ranks were lost: the lowest one left writes from now on, and soon, since nobody knows what was written."""
        if self.plan.checkpoint.enabled and self.world.rank == 0 and self._writer is None:
            self._open()
            self._saved_at = -inf

    def _check(self, state: dict[str, Any]) -> None:
        for key, field, here in (
            ("global_batch", "spec.globalBatchSize", self.plan.global_batch),
            ("seed", "spec.seed", self.plan.seed),
        ):
            if state[key] != here:
                expected = f"{state[key]}, as in the checkpoint in {job_directory(self.plan)}"
                raise BadInputError(field, str(here), expected, "set it back, or use another volume")

    def save(
        self,
        step: int,
        model: Mapping[str, Tensor],
        optimizer: dict[str, Any],
        state: dict[str, Any],
        kept: Mapping[str, Tensor] | None = None,
        *,
        durable: bool = True,
        gathered_s: float = 0.0,
    ) -> None:
        """Begin a checkpoint of the state after ``step`` steps, unless it is there; all ranks call it.

        It goes to the pods' memory, too, and only there where it need not be ``durable``. ``gathered_s``: what it took
        to have the state of all ranks here. Raises OSError.
        """
        writers = []
        if durable:
            self._saved_at = time.monotonic()
            if self._writer is not None and step != self._begun:
                self._begun = step
                writers.append(self._writer)
        if self._memory is not None and not self._memory.busy:
            writers.append(self._memory)
        began = time.monotonic()
        if writers:
            agreed = {"global_batch": self.plan.global_batch, "seed": self.plan.seed}
            # What is still being written lies in the staging memory.
            free = not any(writer is not None and writer.busy for writer in (self._writer, self._memory))
            snapshot = capture(step, model, optimizer, state | agreed, self._staging if free else None, kept)
            for writer in writers:
                self._begin(writer, snapshot, gathered_s + time.monotonic() - began)
        self._pace.kept(time.monotonic() - began)

    def _begin(self, writer: Writer, snapshot: Snapshot, stall_s: float) -> None:
        if writer is not self._memory:
            writer.begin(snapshot, stall_s)
            return
        try:
            gpus = self.world.local_size if self.plan.ranks[self.world.rank].gpu else 0
            if not memory_copy.room_for(writer.checkpoints.directory, snapshot, gpus):
                raise OSError(f"{writer.checkpoints.directory}: no room for the state twice")
            writer.begin(snapshot)
        except OSError as error:
            self._memory = None
            self._complain(error)

    def _complain(self, error: Exception) -> None:
        message = f"dltrain: state is not kept in memory, relaunches start from the volume: {error}"
        print(message, file=sys.stderr, flush=True)  # noqa: T201

    def wait(self) -> None:
        """Until the last checkpoint is durable. Raises OSError when it could not be written."""
        if self._writer is not None:
            self._writer.wait()
        if self._memory is not None:
            with suppress(OSError):  # the volume has it
                self._memory.wait()
