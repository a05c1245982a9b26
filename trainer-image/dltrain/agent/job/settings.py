"""The settings of an agent, read once from its environment."""

import logging
import os
import pwd
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path

from dlcontract import AGENT_PORT, METRICS_PORT, TLS_DIR, pods
from dltrain.record.hang_detection import HANG_MIN_S

log = logging.getLogger(__name__)

MAX_SOCKET_PATH = 107
RETURN_AFTER_S = 10.0
SHRINK_AFTER_S = 30.0


@dataclass(frozen=True)
class Settings:
    """The settings of an agent, from the environment variables that the operator sets in the pod template.

    Ports, directories and times have defaults, which only tests change. Without a Kubernetes API
    (``DLJOB_API=off``), the files ``plan_file`` and ``report_file`` replace the job's two ConfigMaps.
    """

    job: str
    namespace: str
    uid: str
    pod: str
    pod_ip: str
    use_api: bool
    plan_file: Path | None
    report_file: Path | None
    tls_dir: Path
    run_dir: Path
    memory_dir: Path
    """A directory in memory for a copy of the newest training state. The copy remains when the ranks end."""
    agent_port: int
    metrics_port: int
    hang_min_s: float
    """Lower bound, in seconds, of the silence after which a rank counts as hung."""
    return_after_s: float
    """Minimum time in seconds between a loss of ranks and a restart of the job that adds them again. It limits the cost
    of a rank that fails often."""
    shrink_after_s: float
    """Seconds that an elastic script for torchrun waits for lost pods before it starts again without them. A script may
    lose its steps since its last checkpoint at every start, so a pod that is soon replaced must not cost two starts."""

    @classmethod
    def of(cls, env: Mapping[str, str]) -> "Settings":
        """Read the settings from the environment variables ``env``. Raise ValueError if one is missing or invalid."""

        def required(name: str, what: str) -> str:
            if not (value := env.get(name, "")):
                raise ValueError(
                    f"{name}: found nothing; expected {what}. Set this environment variable as the operator's pod "
                    "template does"
                )
            return value

        def port(name: str, default: int) -> int:
            value = env.get(name) or str(default)
            if not value.isdecimal() or not 0 < int(value) < 65536:
                raise ValueError(f"{name}: found {value!r}; expected a TCP port from 1 to 65535")
            return int(value)

        def seconds(name: str, default: float) -> float:
            value = env.get(name) or str(default)
            try:
                found = float(value)
            except ValueError:
                found = -1.0
            if not 0 <= found < inf:
                raise ValueError(f"{name}: found {value!r}; expected a number of seconds, at least 0")
            return found

        use_api = env.get("DLJOB_API", "on") != "off"
        plan_file = report_file = None
        if not use_api:
            plan_file = Path(required("DLTRAIN_PLAN_FILE", "the path of a plan, because DLJOB_API is off"))
            report_file = Path(required("DLTRAIN_REPORT_FILE", "a path for the report, because DLJOB_API is off"))
        run_dir = Path(env.get(pods.RUN_DIR_VARIABLE) or Path(tempfile.gettempdir()) / "dljob")
        if len(str(run_dir / "zygote.sock")) > MAX_SOCKET_PATH:
            raise ValueError(
                f"DLTRAIN_RUN_DIR: found {run_dir}, too long for Unix sockets; expected {run_dir}/zygote.sock to have "
                f"at most {MAX_SOCKET_PATH} characters. Set a shorter path"
            )
        return cls(
            job=required(pods.JOB_VARIABLE, "the job's name"),
            namespace=env.get(pods.NAMESPACE_VARIABLE) or "default",
            uid=required(pods.UID_VARIABLE, "the job's uid"),
            pod=required(pods.POD_VARIABLE, "this pod's name"),
            pod_ip=required(pods.POD_IP_VARIABLE, "this pod's address"),
            use_api=use_api,
            plan_file=plan_file,
            report_file=report_file,
            tls_dir=Path(env.get("DLTRAIN_TLS_DIR") or TLS_DIR),
            run_dir=run_dir,
            memory_dir=Path(env.get("DLTRAIN_MEMORY_DIR") or "/dev/shm"),
            agent_port=port("DLTRAIN_AGENT_PORT", AGENT_PORT),
            metrics_port=port("DLTRAIN_METRICS_PORT", METRICS_PORT),
            hang_min_s=seconds("DLTRAIN_HANG_MIN_S", HANG_MIN_S),
            return_after_s=seconds("DLTRAIN_RETURN_AFTER_S", RETURN_AFTER_S),
            shrink_after_s=seconds("DLTRAIN_SHRINK_AFTER_S", SHRINK_AFTER_S),
        )


def _is_writable(folder: str) -> bool:
    with suppress(OSError):
        Path(folder).mkdir(parents=True, exist_ok=True)
    return Path(folder).is_dir() and os.access(folder, os.W_OK | os.X_OK)


def complete_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment, plus variables that libraries need and that a pod with an arbitrary UID lacks.

    A folder of HOME or TMPDIR that does not exist is created. If a process cannot write there, the variable becomes the
    temporary directory, which is writable even with a read-only root file system; the log says so. USER is set because
    ``getpass`` fails without a passwd entry. OpenBLAS gets one thread, because numpy would otherwise start a thread
    pool on import.
    """
    result = dict(env)
    for name in ("TMPDIR", "HOME"):
        folder = result.get(name)
        if not folder or not _is_writable(folder):
            result[name] = temporary = tempfile.gettempdir()
            if folder:
                log.warning(
                    "%s: found %s, in which this user cannot write; expected a folder of a volume that the pod mounts. "
                    "The ranks use %s",
                    name,
                    folder,
                    temporary,
                )
    result.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        result.setdefault("USER", "dljob")
        result.setdefault("LOGNAME", "dljob")
    return result
