"""Write checkpoints in a thread, while training continues."""

import threading
import time
from collections import deque
from collections.abc import Callable

from dlcontract import CheckpointMark
from dltrain.checkpoint.store import CheckpointStore, Snapshot
from dltrain.protocol.errors import CheckpointError
from dltrain.protocol.rank_messages import Checkpointed
from dltrain.protocol.reporter import RankReporter

RECENT = 3
"""Number of recent checkpoints from which the time that a checkpoint needs is estimated: as long as the slowest one."""


def _writing_error(place: str, error: OSError) -> CheckpointError:
    field = "spec.checkpoint.uri" if place.startswith("s3://") else "spec.checkpoint.volume"
    return CheckpointError(place, error, field)


class Writer:
    """Write one checkpoint at a time in the background.

    Report each durable checkpoint to ``reporter``, if there is one.
    """

    def __init__(
        self,
        checkpoints: CheckpointStore,
        reporter: RankReporter | None,
        on_cost: Callable[[float], float] | None = None,
        *,
        reports: bool = True,
    ) -> None:
        """Create the writer. ``reporter``: None if a failure does not fail the job, which reports no checkpoints.

        ``on_cost``: a function that is called with the seconds of training time that a checkpoint cost, and returns the
        seconds until the next checkpoint. ``reports``: False if another rank reports the checkpoints.
        """
        self.checkpoints = checkpoints
        self._reporter, self._on_cost, self._reports = reporter, on_cost, reports
        self._thread: threading.Thread | None = None
        self._began_s = 0.0
        self._durations_s: deque[float] = deque(maxlen=RECENT)
        """Seconds from the pause of the training until the checkpoint was durable, of the most recent checkpoints."""
        self._error: Exception | None = None
        self.last: CheckpointMark | None = None

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def needed_s(self) -> float:
        """Return the estimated seconds until a checkpoint that begins now is durable; 0 before the first checkpoint.

        The estimate is the longest duration of the last ``RECENT`` checkpoints. If a checkpoint is being written, its
        estimated remaining time is added.
        """
        longest_s = max(self._durations_s, default=0.0)
        rest_s = max(0.0, longest_s - (time.perf_counter() - self._began_s)) if self.busy else 0.0
        return longest_s + rest_s

    def begin(self, snapshot: Snapshot, stall_s: float = 0.0) -> None:
        """Start to write ``snapshot`` in the background, after waiting for the previous checkpoint.

        The tensors of ``snapshot`` must not change until ``wait`` returns. ``stall_s``: seconds that training has
        paused for this checkpoint so far. If writing the previous checkpoint failed, raise its error (see ``wait``).
        """
        self.wait()
        self._began_s = time.perf_counter()
        self._thread = threading.Thread(target=self._write, args=(snapshot, stall_s), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait until the last checkpoint is durable.

        Raise OSError if writing failed, ValueError for unsupported dtypes, FencedError if another coordinator has taken
        over the job, and PeerLostError if a rank was lost that writes a part.
        """
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
        except OSError as error:
            self._error = error if self._reporter is None else _writing_error(self.checkpoints.place, error)
            return
        except Exception as error:  # noqa: BLE001 the thread would lose it
            self._error = error
            return
        duration_s = time.perf_counter() - began
        self.last = CheckpointMark(
            step=snapshot.step, unix_s=time.time(), path=str(path), duration_s=duration_s, nbytes=nbytes
        )
        self._durations_s.append(stall_s + duration_s)
        cost_s = stall_s + time.thread_time() - cpu_began  # Training loses this thread's CPU time.
        next_s = self._on_cost(cost_s) if self._on_cost is not None else None
        if self._reporter is not None and self._reports:
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
