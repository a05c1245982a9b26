"""The operator as a local process that uses a real API server."""

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Protocol, Self

from support.cluster.kubectl import wait_for

COMMAND = ("-m", "dljob.app.main")
"""Arguments of the interpreter that runs the operator."""


class Process(Protocol):
    """The part of ``subprocess.Popen`` that is used here."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int, /) -> None: ...


class OperatorProcess:
    """An operator that watches one namespace and serves metrics on ``port``."""

    def __init__(
        self,
        kubeconfig: str,
        namespace: str,
        log: Path,
        identity: str = "one",
        python: Sequence[str] = (sys.executable,),
        **env: str,
    ) -> None:
        """``python``: the interpreter and its options, for example to profile the process."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._log, self._python = log, python
        self._env = {
            "PATH": os.environ["PATH"],
            "HOME": os.environ.get("HOME", "/"),
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "KUBECONFIG": kubeconfig,
            "DLJOB_TRAINER_IMAGE": "example.invalid/dljob-trainer:test",
            "DLJOB_NAMESPACE": namespace,
            "DLJOB_WATCH_NAMESPACES": namespace,
            "DLJOB_POD_NAME": identity,
            "DLJOB_METRICS_PORT": str(self.port),
            **env,
        }
        self._process: Process | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the operator, unless the test did. It must end without an error."""
        if self.running:
            assert self.stop() == 0, self.log

    def start(self, *, ready: bool = True, within_s: float = 30.0) -> None:
        """Start the operator. ``ready``: also wait until it is ready, at most ``within_s`` seconds."""
        with self._log.open("ab") as log:
            self._process = self._spawn(log)
        if ready:
            wait_for("the operator to be ready", self.is_ready, within_s, self._log.read_text)

    def _spawn(self, log: BinaryIO) -> Process:
        return subprocess.Popen([*self._python, *COMMAND], env=self._env, stdout=log, stderr=log)

    def is_ready(self) -> bool:
        assert self._process is not None and self._process.poll() is None, self._log.read_text()
        return self._get("/readyz") is not None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def metrics(self) -> str:
        """Return all metrics as Prometheus reads them."""
        return self._get("/metrics") or ""

    def readiness(self) -> str:
        """Return the answer of the readiness probe, also if it is negative."""
        return self._probe("/readyz")

    def liveness(self) -> str:
        """Return the answer of the liveness probe, also if it is negative."""
        return self._probe("/healthz")

    def _probe(self, path: str) -> str:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            return str(error.read().decode())
        except OSError:
            return ""

    def send(self, how: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(how)

    def metric(self, name: str) -> float:
        """Return the value of a series, or 0 if it does not exist yet."""
        text = self.metrics()
        found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    def _get(self, path: str) -> str | None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                text: str = answer.read().decode()
                return text
        except (urllib.error.URLError, OSError):
            return None

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """Stop the process and return its exit code."""
        assert self._process is not None
        self._process.send_signal(how)
        return self._process.wait(20)

    def kill(self) -> None:
        """Kill the process, also if it is paused."""
        if self.running:
            self.send(signal.SIGCONT)
            self.stop(signal.SIGKILL)

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        return self._log.read_text()
