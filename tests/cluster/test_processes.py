"""Tests of the process registry, which identifies processes by PID, start time and marker."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from devcluster.embedded.processes import Registry, alive, end, identify, send, wait_until

SLEEP = [sys.executable, "-c", "import time; time.sleep(120)"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(120)",
]


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    one = Registry(tmp_path / "processes", str(tmp_path))
    yield one
    end(list(one.strays()), grace_s=0)


def test_registry_starts_finds_and_stops_processes(registry: Registry, tmp_path: Path) -> None:
    started = registry.start("part", SLEEP, tmp_path / "log")
    assert registry.get("part") == started
    assert registry.names() == ["part"]
    assert list(registry.strays()) == [started]
    registry.end(["part"], grace_s=5)
    assert not alive(started)
    assert registry.get("part") is None
    assert registry.names() == []


def test_process_with_a_reused_pid_is_not_killed(registry: Registry, tmp_path: Path) -> None:
    innocent = registry.start("part", SLEEP, tmp_path / "log")
    former = replace(innocent, start_ticks=innocent.start_ticks - 1)  # a former process with this PID
    assert not alive(former)
    assert not send(former, signal.SIGKILL)
    end([former], grace_s=0)
    assert alive(innocent)


def test_process_of_an_earlier_boot_is_not_killed(registry: Registry, tmp_path: Path) -> None:
    started = registry.start("part", SLEEP, tmp_path / "log")
    assert not send(replace(started, boot_id="another"), signal.SIGKILL)
    assert alive(started)


def test_process_that_ignores_sigterm_is_killed(registry: Registry, tmp_path: Path) -> None:
    log = tmp_path / "log"
    started = registry.start("part", STUBBORN, log)
    assert wait_until(lambda: "deaf" in log.read_text(), 10)
    registry.end(["part"], grace_s=0.1)
    assert not alive(started)


def test_unrecorded_processes_are_found_by_their_marker(registry: Registry, tmp_path: Path) -> None:
    started = registry.start("part", SLEEP, tmp_path / "log")
    for record in (tmp_path / "processes").iterdir():
        record.unlink()
    assert registry.get("part") is None
    assert list(registry.strays()) == [started]
    other = Registry(tmp_path / "other", str(tmp_path / "other"))
    assert list(other.strays()) == []


def test_zombie_is_not_alive() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert identify(child.pid) is None
    child.wait()


def test_process_name_with_parentheses_and_spaces_is_parsed(tmp_path: Path) -> None:
    program = tmp_path / "odd) S 1 (name"
    program.symlink_to("/bin/sleep")
    child = subprocess.Popen([program, "60"])
    try:
        found = identify(child.pid)
        assert found is not None
        assert found.start_ticks > 1
    finally:
        child.kill()
        child.wait()
