"""The exceptions that end a run, each with its failure reason and exit code."""

import re
import sysconfig
import traceback
from pathlib import Path

from dlcontract import MAX_LOG_TAIL, Failure, reasons
from dltrain.protocol.rank_messages import (
    EXIT_BAD_INPUT,
    EXIT_DIVERGED,
    EXIT_PARAMETERS_DIVERGED,
    EXIT_PEER_LOST,
    EXIT_USER_ERROR,
)

_CHECKPOINT_FIELD = "spec.checkpoint.volume"


class PeerLostError(RuntimeError):
    """A rank died or was disconnected, so a collective operation failed.

    Communication buffers are invalid afterwards. Parameters remain valid, because a step updates them only after its
    collective operation has succeeded.
    """


class FencedError(PeerLostError):
    """Another coordinator has taken over the job and restarted its ranks, so this run must no longer write checkpoints.

    A coordinator is the agent that directs all pods of a job.
    """


class BadInputError(ValueError):
    """The job cannot succeed as specified. The message states the field, its value, the expected value and a remedy."""

    def __init__(self, field: str, found: str, expected: str, remedy: str) -> None:
        super().__init__(f"{field}: found {found}; expected {expected}. {remedy[:1].upper()}{remedy[1:]}")


class MisuseError(ValueError):
    """A script uses the dltrain API incorrectly, so a restart would fail in the same way."""


class CheckpointError(OSError):
    """Writing a checkpoint failed: the volume is full, missing or read-only.

    ``field``: the field of the job's spec that says where the checkpoints are.
    """

    def __init__(self, directory: object, error: Exception, field: str = _CHECKPOINT_FIELD) -> None:
        if field == _CHECKPOINT_FIELD:
            expected = "room for one more checkpoint than checkpoint.keep. Enlarge the volume or lower checkpoint.keep"
        else:
            expected = (
                "an object store that takes checkpoints. Check the store, the permissions of the job's credentials "
                "and the quota of the bucket"
            )
        super().__init__(
            f"{field}: found {directory}: {getattr(error, 'strerror', None) or error}; expected {expected}; saved "
            "checkpoints are intact"
        )


class VolumeError(OSError):
    """Operations on a volume failed even after repetitions. The volume may work later, so a restart may succeed.

    ``field``: the field of the job's spec that configures the volume.
    """

    def __init__(self, field: str, path: object, error: OSError) -> None:
        if str(path).startswith("s3://"):
            expected = "an object store that can be read and written. Check the store, its endpoint and the network"
        else:
            expected = (
                "a volume that can be read and written. Check the storage server, the node's mount and the "
                "PersistentVolume"
            )
        super().__init__(f"{field}: found {path}: {error.strerror or error}; expected {expected}; nothing was deleted")


class CheckpointVolumeError(VolumeError):
    """Operations on the checkpoint volume failed even after repetitions. A restart may succeed."""

    def __init__(self, path: object, error: OSError, field: str = _CHECKPOINT_FIELD) -> None:
        super().__init__(field, path, error)


class ShardError(OSError):
    """A shard of the training data could not be fetched or stored. The message names it. A restart may succeed."""


class SampleError(RuntimeError):
    """The user's dataset or collate_fn raised the exception ``__cause__``. The message names the sample."""


class DeviceMissingError(RuntimeError):
    """Some ranks have their planned GPU and others do not.

    All ranks raise it. ``rank``, ``pod``: the first rank without its GPU, and its pod; None if unknown.
    """

    def __init__(self, message: str, rank: int | None = None, pod: str | None = None) -> None:
        super().__init__(message)
        self.rank, self.pod = rank, pod


class WorkerLostError(RuntimeError):
    """A data-loading worker process ended unexpectedly."""


class DivergedError(ArithmeticError):
    """The loss or the gradient is no longer finite."""


class ParametersDivergedError(ArithmeticError):
    """Ranks that must hold equal parameters hold different ones."""


_REASONS: tuple[tuple[type[BaseException], str, int], ...] = (
    (BadInputError, reasons.BAD_INPUT, EXIT_BAD_INPUT),
    (MisuseError, reasons.BAD_INPUT, EXIT_BAD_INPUT),
    (ParametersDivergedError, reasons.PARAMETERS_DIVERGED, EXIT_PARAMETERS_DIVERGED),
    (DivergedError, reasons.DIVERGED, EXIT_DIVERGED),
    (PeerLostError, reasons.PEER_LOST, EXIT_PEER_LOST),
    (CheckpointError, reasons.CHECKPOINT_FAILED, EXIT_USER_ERROR),
    (CheckpointVolumeError, reasons.CHECKPOINT_FAILED, EXIT_USER_ERROR),
    (MemoryError, reasons.OUT_OF_MEMORY, EXIT_USER_ERROR),
    (DeviceMissingError, reasons.DEVICE_MISSING, EXIT_USER_ERROR),
    (BaseException, reasons.TRAINING_ERROR, EXIT_USER_ERROR),
)


_SELF_EXPLANATORY = (
    BadInputError,
    CheckpointError,
    DeviceMissingError,
    DivergedError,
    MisuseError,
    ParametersDivergedError,
    PeerLostError,
    ShardError,
    VolumeError,
)
"""Exceptions whose messages are sufficient without a traceback."""
_HARDWARE = (
    r"uncorrectable (ECC|NVLink)|hardware stack error|hardware error|fallen off the bus|(GPU|device) is lost"
    r"|busy or unavailable"
)
_REASONS_BY_MESSAGE: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(rf"{_HARDWARE}|(CUDA|HIP) error: unknown error"), reasons.DEVICE_FAILED),
    (re.compile(r"out of memory|STATUS_ALLOC_FAILED|can't allocate memory"), reasons.OUT_OF_MEMORY),
)
"""Pairs (pattern, failure reason): a RuntimeError whose message matches the pattern gets this reason. The message
decides, because torch has no specific class for most errors. The first pattern matches CUDA's messages
(cudaGetErrorString) about hardware faults. The second matches messages of torch, NCCL, cuBLAS and cuDNN about exhausted
memory of the device or the machine."""
_DEVICE_LINE = re.compile(rf"\b(cuda|hip|nvml|nccl)[^\n]{{0,200}}({_HARDWARE})", re.IGNORECASE)
"""Matches a line of CUDA, HIP, NVML or NCCL about a hardware fault. Other lines of a log may use the same words."""
_OURS = str(Path(__file__).parents[1])
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_INSTALLED = ("/site-packages/", "/dist-packages/")
"""Parts of the paths of installed packages, such as torch, whose ``Optimizer.step`` calls dltrain."""


def _line(error: BaseException) -> str:
    """Return the place in the user's script that called dltrain, such as ``train.py, line 12: ``.

    It is the last line outside of installed packages and, if there is none, the last one outside of dltrain. Return an
    empty string if no script is in the error's traceback.
    """
    others = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((_OURS, "<"))]
    script = [f for f in others if not _is_installed(f.filename)] or others
    return f"{Path(script[-1].filename).name}, line {script[-1].lineno}: " if script else ""


def _is_installed(path: str) -> bool:
    return path.startswith(_STANDARD_LIBRARY) or any(part in path for part in _INSTALLED)


def log_names_device_fault(text: str) -> bool:
    """Return True if the end of a rank's log names a hardware fault of its device."""
    return _DEVICE_LINE.search(text) is not None


def failure(error: BaseException, rank: int, host: str) -> Failure:
    """Return the failure that a rank reports for the exception ``error``, which ends the rank.

    The rank must then exit with the result's ``exit_code``. ``rank``, ``host``: its number and host name.
    """
    reason, code = next((reason, code) for kind, reason, code in _REASONS if isinstance(error, kind))
    if reason == reasons.TRAINING_ERROR and isinstance(error, RuntimeError):
        reason = next((better for pattern, better in _REASONS_BY_MESSAGE if pattern.search(str(error))), reason)
    if isinstance(error, DeviceMissingError) and error.rank is not None and error.pod is not None:
        rank, host = error.rank, error.pod
    last = traceback.format_exception_only(error)[-1].strip()
    self_explanatory = isinstance(error, _SELF_EXPLANATORY)
    tail = "" if self_explanatory else "".join(traceback.format_exception(error))[-MAX_LOG_TAIL:]
    where = _line(error) if isinstance(error, MisuseError) else ""
    return Failure(
        reason=reason,
        message=(f"{where}{error}" if self_explanatory else last)[:8192],
        rank=rank,
        host=host,
        exit_code=code,
        log_tail=tail,
        retry=code != EXIT_BAD_INPUT,
        counts=code != EXIT_PEER_LOST,
    )
