"""Writes checkpoints in the background: training stops only for a copy in memory. Users: ``loop``."""

import threading
import time

from dljob.contract import CheckpointMark
from dltrain.checkpoint import Checkpoints, Snapshot
from dltrain.messages import Checkpointed
from dltrain.report import Reporter


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
