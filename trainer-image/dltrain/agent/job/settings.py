"""What an agent is told by its environment, read once."""

import os
import pwd
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path

from dlcontract import AGENT_PORT, METRICS_PORT, TLS_DIR, pods

MAX_SOCKET_PATH = 107
RETURN_AFTER_S = 10.0


@dataclass(frozen=True)
class Settings:
    """Set by the operator's pod template; ports, directories and times differ from the defaults only in tests.

    Without a Kubernetes API (``DLJOB_API=off``) the plan is read from ``plan_file`` and the report written to
    ``report_file``; both are watched and written like the ConfigMaps.
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
    """In memory, and outliving the ranks: the newest training state is kept there."""
    agent_port: int
    metrics_port: int
    return_after_s: float
    """A rank that others go on without stays away for so long: one that dies again and again shall not cost much."""

    @classmethod
    def of(cls, env: Mapping[str, str]) -> "Settings":
        """Raises ValueError naming the variable that is missing or wrong."""

        def need(name: str, what: str) -> str:
            if not (value := env.get(name, "")):
                raise ValueError(f"{name}: found nothing, expected {what}; the operator's pod template sets it")
            return value

        def port(name: str, default: int) -> int:
            value = env.get(name) or str(default)
            if not value.isdecimal() or not 0 < int(value) < 65536:
                raise ValueError(f"{name}: found {value!r}, expected a TCP port")
            return int(value)

        def seconds(name: str, default: float) -> float:
            value = env.get(name) or str(default)
            try:
                found = float(value)
            except ValueError:
                found = -1.0
            if not 0 <= found < inf:
                raise ValueError(f"{name}: found {value!r}, expected seconds, 0 or more")
            return found

        use_api = env.get("DLJOB_API", "on") != "off"
        plan_file = report_file = None
        if not use_api:
            plan_file = Path(need("DLTRAIN_PLAN_FILE", "a plan's file, as DLJOB_API is off"))
            report_file = Path(need("DLTRAIN_REPORT_FILE", "a file for the report, as DLJOB_API is off"))
        run_dir = Path(env.get("DLTRAIN_RUN_DIR") or Path(tempfile.gettempdir()) / "dljob")
        if len(str(run_dir / "zygote.sock")) > MAX_SOCKET_PATH:
            raise ValueError(f"DLTRAIN_RUN_DIR: {run_dir} is too long a path for Unix sockets; use a shorter one")
        return cls(
            job=need(pods.JOB_VARIABLE, "the job's name"),
            namespace=env.get(pods.NAMESPACE_VARIABLE) or "default",
            uid=need(pods.UID_VARIABLE, "the job's uid"),
            pod=need(pods.POD_VARIABLE, "this pod's name"),
            pod_ip=need(pods.POD_IP_VARIABLE, "this pod's address"),
            use_api=use_api,
            plan_file=plan_file,
            report_file=report_file,
            tls_dir=Path(env.get("DLTRAIN_TLS_DIR") or TLS_DIR),
            run_dir=run_dir,
            memory_dir=Path(env.get("DLTRAIN_MEMORY_DIR") or "/dev/shm"),
            agent_port=port("DLTRAIN_AGENT_PORT", AGENT_PORT),
            metrics_port=port("DLTRAIN_METRICS_PORT", METRICS_PORT),
            return_after_s=seconds("DLTRAIN_RETURN_AFTER_S", RETURN_AFTER_S),
        )


def livable(env: Mapping[str, str]) -> dict[str, str]:
    """The environment with what libraries take for granted and a pod with an arbitrary UID has not.

    HOME where there is none that can be written (a read-only root has /tmp alone), a user's name (``getpass``
    fails without a passwd entry), and one BLAS thread in numpy, which would start a pool when it is imported.
    """
    result = dict(env)
    temporary = tempfile.gettempdir()
    if not os.access(result.get("HOME") or "/nonexistent", os.W_OK):
        result["HOME"] = temporary
    result.setdefault("TMPDIR", temporary)
    result.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        result.setdefault("USER", "dljob")
        result.setdefault("LOGNAME", "dljob")
    return result
