"""When and how training state goes to the volume and comes back. Users: ``loop``.

Data parallel ranks hold equal state, so rank 0 writes it, in the background: training stops only for a copy in memory.
"""

import json
import threading
import time
from collections.abc import Callable
from typing import Any

from torch import nn

from dljob.contract import CheckpointMark, Plan
from dltrain.checkpoint import Checkpoints, Snapshot, decode, identity
from dltrain.errors import BadInputError
from dltrain.layout import job_directory
from dltrain.messages import Checkpointed
from dltrain.report import Reporter
from dltrain.state import capture, restore
from dltrain.world import World


class Writer:
    """One checkpoint at a time, each announced to the agent once it is durable."""

    def __init__(self, checkpoints: Checkpoints, reporter: Reporter) -> None:
        self._checkpoints = checkpoints
        self._reporter = reporter
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None
        self.last: CheckpointMark | None = None

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def begin(self, snapshot: Snapshot) -> None:
        """Write ``snapshot``, whose tensors nobody changes any more. Raises OSError of the one before."""
        self.wait()
        self._thread = threading.Thread(target=self._write, args=(snapshot,), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Until what was begun is durable. Raises OSError when it could not be written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _write(self, snapshot: Snapshot) -> None:
        began = time.perf_counter()
        try:
            path, nbytes = self._checkpoints.save(snapshot)
        except OSError as error:
            self._error = error
            return
        self.last = CheckpointMark(step=snapshot.step, unix_s=time.time(), path=str(path))
        duration_s = time.perf_counter() - began
        self._reporter.send(
            Checkpointed(rank=self._reporter.rank, mark=self.last, duration_s=duration_s, nbytes=nbytes)
        )


class Keeper:
    """A run's checkpoints as its ranks see them: rank 0 reads and writes, the others receive."""

    def __init__(self, plan: Plan, world: World, reporter: Reporter) -> None:
        self.plan, self.world, self.reporter = plan, world, reporter
        self._writer: Writer | None = None
        self._begun: int | None = None
        """Step of the newest checkpoint, which may still be under way."""
        self._saved_at = time.monotonic()

    @property
    def last(self) -> CheckpointMark | None:
        return self._writer.last if self._writer else None

    @property
    def due(self) -> bool:
        """Whether this rank wants a checkpoint after this step. Only rank 0 ever does."""
        if self._writer is None or self._writer.busy:
            return False
        return time.monotonic() - self._saved_at >= self.plan.checkpoint.interval_s

    def resume(self, model: nn.Module, load_optimizer: Callable[[dict[str, Any]], object]) -> Snapshot | None:
        """Restore the newest checkpoint on every rank; None when there is none, or checkpoints are off.

        Rank 0 alone reads it, so that all ranks take the same. Raises BadInputError when it is another job's.
        """
        if not self.plan.checkpoint.enabled:
            return None
        folder, files = job_directory(self.plan), dict[str, bytes]()
        if self.world.rank == 0:
            known = identity(self.plan.model.name or "script", model.state_dict())
            checkpoints = Checkpoints(job_directory(self.plan), known, self.plan.checkpoint.keep)
            self._writer = Writer(checkpoints, self.reporter)
            if (found := checkpoints.load()) is not None:
                folder, files = found
        names = json.loads(self.world.broadcast(json.dumps(list(files)).encode()))
        files = {name: self.world.broadcast(files.get(name, b"")) for name in names}
        if not files:
            return None
        snapshot = decode(files)
        self._check(snapshot.state)
        restore(snapshot, model, load_optimizer)
        if self._writer is not None:
            self._writer.last = CheckpointMark(step=snapshot.step, unix_s=folder.stat().st_mtime, path=str(folder))
            self._begun = snapshot.step
        return snapshot

    def _check(self, state: dict[str, Any]) -> None:
        for key, field, here in (
            ("global_batch", "spec.globalBatchSize", self.plan.global_batch),
            ("seed", "spec.seed", self.plan.seed),
        ):
            if state[key] != here:
                expected = f"{state[key]}, as in the checkpoint in {job_directory(self.plan)}"
                raise BadInputError(field, str(here), expected, "set it back, or use another volume")

    def save(self, step: int, model: nn.Module, optimizer: dict[str, Any], state: dict[str, Any]) -> None:
        """Begin a checkpoint of the state after ``step`` steps, unless it is there. Raises OSError."""
        self._saved_at = time.monotonic()
        if self._writer is not None and step != self._begun:
            self._begun = step
            agreed = {"global_batch": self.plan.global_batch, "seed": self.plan.seed}
            self._writer.begin(capture(step, model, optimizer, state | agreed))

    def wait(self) -> None:
        """Until the last checkpoint is durable. Raises OSError when it could not be written."""
        if self._writer is not None:
            self._writer.wait()
