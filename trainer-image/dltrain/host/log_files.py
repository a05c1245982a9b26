"""The output of each rank on the job's volume: ``<folder>/rank-<n>.log``, with older output in ``rank-<n>.1.log``.

A thread writes the files, because a slow or missing volume must not delay the job. Output that the thread cannot write
in time is left out, and the file says how many bytes are missing. ``record.job_logs`` packs the last output of all
ranks into the object ``<job>-logs``.
"""

import asyncio
import logging
import os
import queue
import threading
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

LIMIT_NBYTES = 64 * 2**20
"""Maximum size in bytes of the files of all ranks of a job together. The oldest output of a rank is deleted first."""
LEAST_NBYTES = 128 * 2**10
"""Maximum size in bytes of one rank's files if ``LIMIT_NBYTES`` divided by the number of ranks is less than this."""
WAITING_NBYTES = 4 * 2**20
"""Maximum size in bytes of the output that waits for the thread to write it. Output beyond this size is left out."""
LEAST_FREE = 0.1
"""Fraction of the volume that must stay free for checkpoints. If less is free, no output is written."""


@dataclass(frozen=True)
class _Target:
    folder: Path
    limit_nbytes: int


class LogFiles:
    """The files with the output of the ranks of one pod. A thread writes them."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[_Target, int, bytes] | threading.Event] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting_nbytes = 0
        self._omitted: dict[int, int] = defaultdict(int)
        self._target: _Target | None = None
        self._failed = False
        self._thread: threading.Thread | None = None

    def begin(self, folder: Path | None, ranks: int) -> None:
        """Write the ranks' output to ``folder`` from now on, or discard it if ``folder`` is None.

        ``ranks``: number of ranks of the job, among which ``LIMIT_NBYTES`` is divided.
        """
        self._failed = False
        limit_nbytes = max(LIMIT_NBYTES // max(ranks, 1), LEAST_NBYTES)
        self._target = _Target(folder, limit_nbytes) if folder is not None else None
        if folder is not None and self._thread is None:
            self._thread = threading.Thread(target=self._work, name="log files", daemon=True)
            self._thread.start()

    def write(self, rank: int, data: bytes) -> None:
        """Queue output of a rank for the thread that writes it to the rank's file. Never wait and never fail."""
        if self._target is None:
            return
        with self._lock:
            if self._waiting_nbytes + len(data) > WAITING_NBYTES:
                self._omitted[rank] += len(data)
                return
            if omitted := self._omitted.pop(rank, 0):
                data = b"\n... %d bytes left out, because the volume was slow ...\n" % omitted + data
            self._waiting_nbytes += len(data)
        self._queue.put((self._target, rank, data))

    async def flush(self, limit_s: float) -> None:
        """Wait until all output so far is written, but at most ``limit_s`` seconds."""
        if self._thread is not None:
            written = threading.Event()
            self._queue.put(written)
            await asyncio.to_thread(written.wait, limit_s)

    def _work(self) -> None:
        while True:
            items = [self._queue.get()]
            while not self._queue.empty():
                items.append(self._queue.get())
            batches: dict[tuple[_Target, int], list[bytes]] = defaultdict(list)
            for item in items:
                if not isinstance(item, threading.Event):
                    batches[item[:2]].append(item[2])
            for (target, rank), parts in batches.items():
                self._append(target, rank, b"".join(parts))
            for item in items:
                if isinstance(item, threading.Event):
                    item.set()

    def _append(self, target: _Target, rank: int, data: bytes) -> None:
        path = target.folder / f"rank-{rank}.log"
        try:
            target.folder.mkdir(parents=True, exist_ok=True)
            volume = os.statvfs(target.folder)
            if volume.f_bavail < LEAST_FREE * volume.f_blocks:
                raise OSError(f"less than {LEAST_FREE:.0%} of the volume is free, and checkpoints need this space")
            append(path, data, target.limit_nbytes)
            self._failed = False
        except OSError as error:
            if not self._failed:
                log.warning("cannot write the output of rank %d to %s (%s); this file is incomplete", rank, path, error)
            self._failed = True
        finally:
            with self._lock:
                self._waiting_nbytes -= len(data)


def append(path: Path, data: bytes, limit_nbytes: int) -> None:
    """Append ``data`` to the file ``path``. If the file would exceed half of ``limit_nbytes``, start a new file.

    The full file is renamed to ``<stem>.1.log`` and replaces an older file of this name. The two files therefore have
    at most ``limit_nbytes`` bytes together. Raise OSError if a file cannot be written.
    """
    half = limit_nbytes // 2
    for start in range(0, len(data), half):
        part = data[start : start + half]
        if path.exists() and path.stat().st_size + len(part) > half:
            path.replace(path.with_suffix(".1.log"))
        with path.open("ab") as file:
            file.write(part)
