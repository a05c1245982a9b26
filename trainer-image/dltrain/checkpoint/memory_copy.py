"""A copy of the newest training state in the memory of every pod, which outlives the ranks.

A restart in the same pods resumes from this copy. The copy needs no volume and is usually newer than the last
checkpoint. The first rank of each pod writes the copy. Like a checkpoint, it is written atomically and verified by
hashes.
"""

import os
import time
from pathlib import Path

from dltrain.checkpoint.store import Snapshot
from dltrain.comm.process_group import ProcessGroup
from dltrain.protocol.rank_messages import MEMORY_ENV

INTERVAL_S = 5.0
STALL_PART = 0.02
"""Maximum fraction of the training time that copies may take. A large state is therefore copied less often."""
RESERVE_NBYTES, RESERVE_GPU_NBYTES = 32 * 2**20, 192 * 2**20
"""Bytes left free for the shared memory of Open MPI, and of NCCL per GPU, which is in the same file system as the copy.
NCCL may allocate late, because it connects on first use."""
NOTHING = -1.0
"""Step number that stands for "no copy", in place of the training step after which a pod's copy was made."""


def directory(process_group: ProcessGroup) -> Path | None:
    """Return the directory for this pod's copy of the training state in memory.

    Return None if no agent started this rank, or if another rank of the pod writes the copy.
    """
    path = os.environ.get(MEMORY_ENV)
    return Path(path) if path and process_group.local_rank == 0 else None


def room_for(folder: Path, snapshot: Snapshot, gpus: int = 0) -> bool:
    """Return True if the file system of ``folder`` has room for a copy of ``snapshot`` beside the previous copy.

    ``gpus``: number of GPUs of the pod's ranks. NCCL needs shared memory for each of them in the same file system.
    """
    parts = (snapshot.model, snapshot.optimizer, snapshot.kept)
    nbytes = sum(tensor.nbytes for part in parts for tensor in part.values())
    system = os.statvfs(folder)
    return system.f_bavail * system.f_frsize >= nbytes + RESERVE_NBYTES + gpus * RESERVE_GPU_NBYTES


class Pace:
    """Decide when to copy the training state to memory: every ``INTERVAL_S``, or less often if a copy takes long."""

    def __init__(self) -> None:
        self._at, self._interval_s = time.monotonic(), INTERVAL_S

    @property
    def due(self) -> bool:
        return time.monotonic() - self._at >= self._interval_s

    def copied(self, stall_s: float) -> None:
        """Record that a copy has just been made, for which training paused for ``stall_s`` seconds."""
        self._at, self._interval_s = time.monotonic(), max(INTERVAL_S, stall_s / STALL_PART)
