"""Run the baseline in the look pod of a job with ``spec.task``: no failure of it may fail the pod, and thereby the job.

The baseline runs in a process with a limit of memory below that of the pod. A file marks that it runs: if Kubernetes
restarts the container in spite of the limit, the baseline does not run again.
"""

from collections.abc import Callable, Mapping
from mmap import PAGESIZE
from pathlib import Path

from dljob.suggest.recommendation.model import Baseline
from dljob.suggest.subject import Subject
from dljob.suggest.trial import TrialError, baseline

Judge = Callable[[Subject, float], Baseline]
"""A function that runs the baseline for up to a number of seconds. It raises TrialError if there is no result."""

RESERVE_NBYTES = 64 * 2**20
"""Memory of the pod that neither this process nor the baseline uses."""
MIN_NBYTES = 384 * 2**20
"""Memory that Python with scikit-learn needs before it has data."""
MAX_THREADS = 4
"""Threads of linear algebra. Each one takes memory, and a node may have more cores than the pod may use."""
_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")
"""Files with the memory limit of a container: of cgroup v2 and v1."""


def bounded(
    data: Path,
    environment: Mapping[str, str],
    cores: int,
    marker: Path | None,
    cgroup: Path = Path("/sys/fs/cgroup"),
) -> Judge:
    """Return a function that runs the baseline on ``data`` within the memory that the pod has left.

    ``environment``: environment variables of this process. ``cores``: cores that it may use. ``marker``: file that
    exists while the baseline runs, on a volume that outlives the container; None: no file. ``cgroup``: folder with the
    limits of the container.
    """
    own = _environment(data, environment, cores)

    def judge(subject: Subject, limit_s: float) -> Baseline:
        if marker is not None and marker.exists():
            raise TrialError(
                "the baseline ended its container, probably for lack of memory. Set spec.resources.memory to more than "
                "before"
            )
        try:
            if (left_nbytes := memory_left(cgroup)) < MIN_NBYTES:
                raise TrialError(
                    f"the data leaves {max(left_nbytes, 0) >> 20} MiB of the pod's memory for the baseline; expected "
                    f"at least {MIN_NBYTES >> 20} MiB. Raise spec.resources.memory"
                )
            if marker is not None:
                marker.touch()
            try:
                return baseline(subject, own, limit_s, left_nbytes)
            finally:
                if marker is not None:
                    marker.unlink(missing_ok=True)
        except (OSError, ValueError, LookupError, TypeError) as error:  # such as a full disk, or an unexpected output
            raise TrialError(f"the baseline failed: {type(error).__name__}: {error}"[:300]) from error

    return judge


def memory_left(cgroup: Path) -> int:
    """Return the bytes of memory that the container has left, or the machine if the container has no limit."""
    for name in _LIMITS:
        if (cgroup / name).is_file() and (text := (cgroup / name).read_text().strip()).isdecimal():
            return int(text) - _own_nbytes() - RESERVE_NBYTES
    found = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(found["MemAvailable"].split()[0]) * 1024 - RESERVE_NBYTES


def _own_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGESIZE


def _environment(data: Path, given: Mapping[str, str], cores: int) -> dict[str, str]:
    """Return the environment of the baseline. It reads ``data`` as the job's training does, and splits it likewise."""
    threads = str(min(MAX_THREADS, cores))
    own = {name: given[name] for name in ("PATH", "HOME", "TMPDIR", "PYTHONPATH") if name in given}
    libraries = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    return {**own, **dict.fromkeys(libraries, threads), "DLJOB_DATASET": str(data), "PYTHONDONTWRITEBYTECODE": "1"}
