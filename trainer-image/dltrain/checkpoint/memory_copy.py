"""The newest training state in the memory of every pod, where it outlives the ranks.

A relaunch in the same pods starts from it, without the volume and without the steps since the last checkpoint there
being lost. It is written and verified like a checkpoint (whole or not at all, with hashes), by each pod's first rank.
"""

import json
import os
import time
from pathlib import Path

from dltrain.checkpoint.store import STATE, Checkpoints, Snapshot
from dltrain.comm.process_group import ProcessGroup
from dltrain.protocol.rank_messages import MEMORY_ENV

INTERVAL_S = 5.0
STALL_PART = 0.02
"""Of the training time, at most, for copies: a large state is kept less often."""
RESERVE_NBYTES, RESERVE_GPU_NBYTES = 32 * 2**20, 192 * 2**20
"""Left to Open MPI, and for each GPU to NCCL, whose shared memory lies in the same place; NCCL may take it late, for it
connects when it first needs to."""
NOTHING = -1.0
"""The step of a pod that holds no state."""


def directory(world: ProcessGroup) -> Path | None:
    """Where this rank keeps state, None if it does not: not its pod's first, or without an agent."""
    path = os.environ.get(MEMORY_ENV)
    return Path(path) if path and world.local_rank == 0 else None


def room_for(folder: Path, snapshot: Snapshot, gpus: int = 0) -> bool:
    """Whether a state fits in beside the one before it, in a pod with ranks on so many GPUs."""
    parts = (snapshot.model, snapshot.optimizer, snapshot.kept)
    nbytes = sum(tensor.nbytes for part in parts for tensor in part.values())
    there = os.statvfs(folder)
    return there.f_bavail * there.f_frsize >= nbytes + RESERVE_NBYTES + gpus * RESERVE_GPU_NBYTES


def step_of(files: dict[str, bytes]) -> float:
    """Of a checkpoint's files; ``NOTHING`` of none."""
    return float(json.loads(files[STATE])["step"]) if files else NOTHING


def held(checkpoints: Checkpoints | None) -> dict[str, bytes]:
    """The files of the newest state that is whole, none if there is none."""
    found = checkpoints.load() if checkpoints is not None else None
    return found[1] if found is not None else {}


class Pace:
    """When to keep state again: every ``INTERVAL_S``, or less often where the copy takes long."""

    def __init__(self) -> None:
        self._at, self._interval_s = time.monotonic(), INTERVAL_S

    @property
    def due(self) -> bool:
        return time.monotonic() - self._at >= self._interval_s

    def kept(self, stall_s: float) -> None:
        """Just now, and training stopped for so long."""
        self._at, self._interval_s = time.monotonic(), max(INTERVAL_S, stall_s / STALL_PART)
