"""Elastic scripts for torchrun: which numbers of ranks they refuse, and when they have written a checkpoint.

Without ``dltrain.init``, the coordinator does not know the script's steps and checkpoints. It therefore scans the
checkpoint folder. Once the folder stays unchanged for some seconds (``SETTLE_S``) after a change, its content counts as
a checkpoint.
"""

import asyncio
import time
from collections.abc import Iterable
from math import inf
from pathlib import Path

from dlcontract import Failure, Plan, RefusedSize, reasons
from dltrain.agent.coordinator.diagnosis import Attempt
from dltrain.host.tasks import Tasks
from dltrain.object_store.content import Seen, without_logs
from dltrain.object_store.staged_folder import SETTLE_S, scan
from dltrain.protocol.volume_layout import is_own_file, job_directory
from dltrain.record.ledger import with_earlier

TRIAL_S = 60.0
"""Seconds after its launch from which a script that has changed its checkpoint folder counts as training. A script may
write its settings before it fails."""
RESTLESS_S = 600.0
"""Seconds after the launch from which a folder that changes all the time counts as one with a checkpoint."""
PARTS_S = 10.0
"""Seconds that pods have to complete their parts of a checkpoint in folders of their own after that of this pod.

Without a shared volume, this pod sees only its own folder."""
POLL_S = 1.0
FIRST_SCAN_S = 10.0
"""Maximum time in seconds that a launch waits for the first scan of the folder."""
_BUSY_PART = 0.1
"""Largest part of the time in which the folder is scanned. A scan of many files on a network volume is slow."""
_OF_SIZE = frozenset(
    {reasons.BAD_INPUT, reasons.OUT_OF_MEMORY, reasons.RANK_CRASHED, reasons.RANK_FAILED, reasons.TRAINING_ERROR}
)
"""Reasons of failures that can mean that a script does not support its number of ranks."""


def refusal(attempt: Attempt, whole: Plan, failure: Failure, *, saved: bool) -> RefusedSize | None:
    """Return the number of ranks that the script refuses, if that explains ``failure``; otherwise None.

    ``attempt``: the launch that failed. It must be one of an elastic script with fewer ranks than the plan ``whole``.
    ``saved``: True if the script has changed its checkpoint folder in this launch.

    A script that reported a step, or changed its checkpoint folder after ``TRIAL_S`` seconds, does not refuse the
    number. If its memory is too small, the number is refused in any case, because fewer ranks have larger batches.
    """
    size = len(attempt.plan.ranks)
    if not whole.model.elastic or size == len(whole.ranks) or failure.reason not in _OF_SIZE:
        return None
    lasted = saved and time.monotonic() - attempt.started_s > TRIAL_S
    if failure.reason != reasons.OUT_OF_MEMORY and (attempt.progressed or lasted):
        return None
    last_line = failure.log_tail.strip().rpartition("\n")[2]
    text = failure.message if not last_line or last_line in failure.message else f"{failure.message}: {last_line}"
    return RefusedSize(ranks=size, message=text[:1024])


def still_refused(sizes: Iterable[RefusedSize], before: Plan, plan: Plan) -> tuple[RefusedSize, ...]:
    """Return which of the numbers of ranks that a script refused under the plan ``before`` it refuses under ``plan``.

    None if the script or its batch has changed, and otherwise those that are fewer than planned. Those that the plan
    itself names are among them.
    """
    if (before.model, before.global_batch) != (plan.model, plan.global_batch):
        return with_earlier(plan, ())
    return with_earlier(plan, (size for size in sizes if size.ranks < len(plan.ranks)))


class CheckpointFolder:
    """The checkpoint folder of an elastic script that trains with fewer ranks than planned."""

    def __init__(self) -> None:
        self._tasks: Tasks[None] = Tasks()
        self._folder: Path | None = None
        self._seen: dict[str, Seen] | None = None
        self._changed_s: float | None = None
        self._unchanged_s = -inf
        """Time at which the last scan that found no change began."""
        self._next_s = 0.0
        self._settle_s = SETTLE_S
        self._scan_task: asyncio.Task[None] | None = None

    async def watch(self, plan: Plan | None) -> None:
        """Watch the folder of ``plan`` from now on; None: watch no folder. Forget earlier changes.

        Return when the present content of the folder is known, or after ``FIRST_SCAN_S`` seconds. What ranks
        write after that is a change. If the folder is slower, its content at the end of the first scan counts as old.
        """
        self._folder = None if plan is None else job_directory(plan)
        self._settle_s = SETTLE_S if plan is None or plan.checkpoint.uri is None else SETTLE_S + PARTS_S
        self._seen, self._changed_s, self._next_s = None, None, 0.0
        if self._folder is not None:
            await asyncio.wait({self._start_scan(self._folder)}, timeout=FIRST_SCAN_S)

    def tick(self) -> None:
        """Start a scan of the folder in a thread, unless the last one has not ended or is too recent."""
        busy = self._scan_task is not None and not self._scan_task.done()
        if self._folder is not None and not busy and time.monotonic() >= self._next_s:
            self._start_scan(self._folder)

    def changed_since(self, start_s: float) -> bool:
        """Return True if the script has changed the folder after ``start_s``, in seconds of the monotonic clock."""
        return self._changed_s is not None and self._changed_s > start_s

    def settled_since(self, start_s: float) -> bool:
        """Return True if the script has probably completed a checkpoint after ``start_s``.

        A checkpoint is complete if the folder has changed, and a scan has found it unchanged ``SETTLE_S`` seconds later
        (with an object store, when other pods had ``PARTS_S`` seconds for their parts). This time must end after
        ``start_s`` (seconds of the monotonic clock). A folder that changes all the time counts as complete
        ``RESTLESS_S`` seconds after ``start_s``.
        """
        if self._changed_s is None or (settled_s := self._changed_s + self._settle_s) <= start_s:
            return False
        return self._unchanged_s >= settled_s or time.monotonic() - start_s >= RESTLESS_S

    def _start_scan(self, folder: Path) -> asyncio.Task[None]:
        self._scan_task = self._tasks.spawn(self._scan(folder))
        return self._scan_task

    async def _scan(self, folder: Path) -> None:
        begin_s, before, own_task = time.monotonic(), self._seen, asyncio.current_task()
        found = await asyncio.to_thread(scan, folder)
        if self._scan_task is not own_task or folder != self._folder:
            return  # Another launch has begun meanwhile.
        end_s = time.monotonic()
        self._next_s = end_s + max(POLL_S, (end_s - begin_s) / _BUSY_PART)
        self._seen = {path: state for path, state in without_logs(found).items() if not is_own_file(path)}
        if before is not None and self._seen != before:
            self._changed_s = end_s
        elif before is not None:
            self._unchanged_s = begin_s
