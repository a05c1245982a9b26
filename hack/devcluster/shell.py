"""Run external commands with a time limit, end their whole process group, and report why a command failed."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from devcluster.errors import ClusterError

TAIL_LINES = 25
_running: set[subprocess.Popen[str]] = set()


def have(program: str) -> bool:
    """Return True if `program` is on PATH or in an sbin folder, which may be missing in the PATH of a normal user."""
    return find(program) is not None


def find(program: str) -> str | None:
    """Return the absolute path of `program` on PATH or in an sbin folder, or None if it is missing."""
    path = os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin"
    return shutil.which(program, path=path)


def run(
    command: Sequence[str | Path],
    *,
    timeout_s: float = 60.0,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    input_text: str | None = None,
    check: bool = True,
    log: Path | None = None,
    nice: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a command until it ends, and return its output and exit status.

    Raise ClusterError if the command runs longer than `timeout_s`. With `check`, also raise ClusterError if its exit
    status is not 0; the message contains the end of the output. The command runs in its own process group, which is
    ended at the time limit and on Ctrl-C, so that for example a compiler does not continue unnoticed. `input_text`:
    standard input; None for an empty one. `log`: file to write the whole output to. `nice`: True to run the command
    with a lower CPU priority.
    """
    words = [str(word) for word in command]
    extra: dict[str, Any] = {"preexec_fn": lambda: os.nice(10)} if nice else {}
    process = subprocess.Popen(
        words,
        cwd=cwd,
        env={**os.environ, **(env or {})},
        stdin=subprocess.PIPE if input_text is not None else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if log else subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        **extra,
    )
    _running.add(process)
    try:
        output, errors = process.communicate(input_text, timeout=timeout_s)
    except BaseException as failure:
        _end_group(process)
        if isinstance(failure, subprocess.TimeoutExpired):
            raise ClusterError(
                f"command {shlex.join(words)}: found it running after its time limit of {timeout_s:.0f} s, and ended "
                "it; expected it to end by itself. Run it yourself to find the cause"
            ) from failure
        raise
    finally:
        _running.discard(process)
    if log:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(output)
    if check and process.returncode:
        tail = "\n".join(((output or "") + (errors or "")).strip().splitlines()[-TAIL_LINES:])
        where = f"\n(whole output: {log})" if log else ""
        raise ClusterError(
            f"command {shlex.join(words)}: found exit status {process.returncode}; expected 0. The end of its "
            f"output:\n{tail}{where}"
        )
    return subprocess.CompletedProcess(words, process.returncode, output or "", errors or "")


def end_running() -> None:
    """End all commands that `run` has started in any thread. Ctrl-C itself interrupts only the main thread."""
    for process in list(_running):
        _end_group(process)


def _end_group(process: subprocess.Popen[str]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(timeout=5)
        except (ProcessLookupError, PermissionError):
            break
        except subprocess.TimeoutExpired:
            continue
    process.wait()
