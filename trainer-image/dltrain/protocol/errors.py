"""How a run ends early: the exceptions, and what each says to the agent and to the shell."""

import re
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


class PeerLostError(RuntimeError):
    """A rank died or was cut off; the operation did not finish anywhere that matters.

    Buffers hold garbage afterwards; parameters do not, since a step commits only after its collective.
    """


class FencedError(PeerLostError):
    """A run under a higher term has begun: this one may not commit anything more."""


class BadInputError(ValueError):
    """The job as written cannot succeed; names the field of the DLJob, what it holds and what to do."""

    def __init__(self, field: str, found: str, expected: str, remedy: str) -> None:
        super().__init__(f"{field}: found {found}, expected {expected}: {remedy}")


class MisuseError(ValueError):
    """A script calls what dltrain gives it in a way that cannot work, whenever it is tried again."""


class CheckpointError(OSError):
    """The volume did not take a checkpoint: full, gone, or read-only by now."""

    def __init__(self, directory: object, error: OSError) -> None:
        super().__init__(
            f"spec.checkpoint.volume: found {directory}: {error.strerror or error}, expected room for one checkpoint "
            "more than checkpoint.keep: enlarge the volume, or keep fewer; what was saved before is untouched"
        )


class SampleError(RuntimeError):
    """The user's dataset or collate_fn failed; says for which sample. Its cause is what they raised."""


class DeviceMissingError(RuntimeError):
    """Some ranks have the GPU that they were promised, and others have not."""


class WorkerLostError(RuntimeError):
    """A process that makes batches ended."""


class DivergedError(ArithmeticError):
    """The loss or the gradient is no longer finite."""


class ParametersDivergedError(ArithmeticError):
    """Ranks hold different parameters, which they must not."""


_REASONS: tuple[tuple[type[BaseException], str, int], ...] = (
    (BadInputError, reasons.BAD_INPUT, EXIT_BAD_INPUT),
    (MisuseError, reasons.BAD_INPUT, EXIT_BAD_INPUT),
    (ParametersDivergedError, reasons.PARAMETERS_DIVERGED, EXIT_PARAMETERS_DIVERGED),
    (DivergedError, "Diverged", EXIT_DIVERGED),
    (PeerLostError, "PeerLost", EXIT_PEER_LOST),
    (CheckpointError, "CheckpointFailed", EXIT_USER_ERROR),
    (MemoryError, "OutOfMemory", EXIT_USER_ERROR),
    (DeviceMissingError, "DeviceMissing", EXIT_USER_ERROR),
    (BaseException, reasons.TRAINING_ERROR, EXIT_USER_ERROR),
)


_KNOWN = (
    BadInputError,
    CheckpointError,
    DeviceMissingError,
    DivergedError,
    MisuseError,
    ParametersDivergedError,
    PeerLostError,
)
"""Say all that there is to say, without a traceback."""
_REASONS_BY_WORDS: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(
            r"uncorrectable (ECC|NVLink)|hardware stack error|hardware error|fallen off the bus|(GPU|device) is lost"
            r"|busy or unavailable|(CUDA|HIP) error: unknown error"
        ),
        "DeviceFailed",
    ),
    (re.compile(r"out of memory|STATUS_ALLOC_FAILED|can't allocate memory"), "OutOfMemory"),
)
"""Of a RuntimeError, for which torch mostly has no better class: CUDA's words (of cudaGetErrorString) where the device
is to blame and no program; and those of torch, NCCL, cuBLAS and cuDNN where a device's or the machine's memory ends."""
_OURS = str(Path(__file__).parents[1])


def _line(error: BaseException) -> str:
    """The line of the script that called dltrain: ``train.py, line 12: ``."""
    script = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((_OURS, "<"))]
    return f"{Path(script[-1].filename).name}, line {script[-1].lineno}: " if script else ""


def failure(error: BaseException, rank: int, host: str) -> Failure:
    """What to tell the agent of an exception that ends this rank; ``exit_code`` is the code to exit with."""
    reason, code = next((reason, code) for kind, reason, code in _REASONS if isinstance(error, kind))
    if reason == reasons.TRAINING_ERROR and isinstance(error, RuntimeError):
        reason = next((better for words, better in _REASONS_BY_WORDS if words.search(str(error))), reason)
    last = traceback.format_exception_only(error)[-1].strip()
    known = isinstance(error, _KNOWN)
    tail = "" if known else "".join(traceback.format_exception(error))[-MAX_LOG_TAIL:]
    where = _line(error) if isinstance(error, MisuseError) else ""
    return Failure(
        reason=reason,
        message=(f"{where}{error}" if known else last)[:8192],
        rank=rank,
        host=host,
        exit_code=code,
        log_tail=tail,
        retry=code != EXIT_BAD_INPUT,
        counts=code != EXIT_PEER_LOST,
    )
