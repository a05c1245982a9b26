"""Tests of the load by other processes, which the hardware probe reads from recorded contents of /proc/stat."""

import os
from pathlib import Path

import pytest

pytest.importorskip("torch")

from dltrain.hardware_probe.background import MIN_INTERVALS, Account, Background, account, covers_machine

TWO_CPUS = """\
cpu  7146138 1212346 1985638 1380983 20900 0 115976 11118 0 0
cpu0 3533546 603144 973171 760471 5206 0 53769 5599 0 0
cpu1 3612591 609201 1012467 620512 15693 0 62206 5518 0 0
intr 259630557 0 0 0 0
ctxt 1234
"""
"""Recorded in a virtual machine of a host that also has other work: 111 s were stolen."""
GUESTS = "cpu  500 100 60 9000 40 10 20 0 300 50\ncpu0 500 100 60 9000 40 10 20 0 300 50\n"
"""Recorded on a host of virtual machines, whose time is a part of user and nice."""
OLD = "cpu 500 100 60 9000 40 10 20\ncpu0 500 100 60 9000 40 10 20\n"
"""The form of kernels before 2.6.11, which do not count stolen time."""
SANDBOX = "cpu  0 0 0 0 0 0 0 0 0 0\ncpu0  0 0 0 0 0 0 0 0 0 0\n"
"""Recorded in gVisor, which counts nothing."""


@pytest.mark.parametrize(
    ("text", "niced", "expected"),
    [
        (TWO_CPUS, False, Account(92588.70, 118730.99, 2)),
        (TWO_CPUS, True, Account(104712.16, 118730.99, 2)),
        (GUESTS, False, Account(5.9, 97.3, 1)),
        (OLD, False, Account(5.9, 97.3, 1)),
        (SANDBOX, False, Account(0.0, 0.0, 1)),
        ("", False, None),
        ("cpu  1 2 3\n", False, None),
        ("cpu  a b c d e f g h\ncpu0 1 2 3 4 5 6 7 8\n", False, None),
        ("cpu  1 2 3 4 5 6 7 8\n", False, None),
    ],
)
def test_the_account_has_the_time_of_others_and_of_the_host(text: str, niced: bool, expected: Account | None) -> None:
    found = account(text, 0.01, niced)
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert (found.busy_s, found.total_s) == pytest.approx((expected.busy_s, expected.total_s))
        assert found.cpus == expected.cpus


class Machine:
    """A machine with two CPUs. Its file and its clocks advance by given CPU times of the probe and of others."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "stat"
        self.elapsed_s = self.own_s = self.busy_s = self.idle_s = 0.0
        self.advance(0, 0, 0)
        self.background = Background(self.file, lambda: self.elapsed_s, lambda: self.own_s)
        self.background.sample()

    def advance(
        self, elapsed_s: float, own: float, others: float, accounted: float = 2.0, own_accounted: float = 1.0
    ) -> None:
        """Let time pass. ``own``, ``others``: CPUs in use; ``accounted``: CPUs whose time the file counts."""
        self.elapsed_s += elapsed_s
        self.own_s += own * elapsed_s
        busy = own * own_accounted + others
        self.busy_s += busy * elapsed_s
        self.idle_s += (accounted - busy) * elapsed_s
        hz = os.sysconf("SC_CLK_TCK")
        row = f"{self.busy_s * hz:.0f} 0 0 {self.idle_s * hz:.0f} 0 0 0 0 0 0"
        self.file.write_text(f"cpu  {row}\ncpu0 {row}\ncpu1 {row}\n")

    def interval(self, others: float, own: float = 1.0, **fields: float) -> None:
        self.advance(0.5, own, others, **fields)
        self.background.sample()


@pytest.mark.parametrize("others", [0.0, 0.2, 0.9])
def test_others_use_what_the_probe_did_not(tmp_path: Path, others: float) -> None:
    machine = Machine(tmp_path)
    for _ in range(8):
        machine.interval(others)
    assert machine.background.cores() == pytest.approx(others, abs=0.03)


def test_a_job_or_a_probe_that_starts_meanwhile_does_not_count(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    for others in (1.0, 0.2, 0.2, 1.0, 0.2, 0.2, 0.2, 0.9, 0.2):
        machine.interval(others)
    assert machine.background.cores() == pytest.approx(0.2, abs=0.03)


def test_the_end_of_an_installation_does_not_count(tmp_path: Path) -> None:
    """The probe after ``hack/quickstart`` found 0.9 CPUs in use, and one on the idle cluster found 0.24."""
    machine = Machine(tmp_path)
    for others in (1.0, 1.0, 0.9, 1.0, 0.9, 0.9, 1.0, 0.3, 0.25, 0.2, 0.25):
        machine.interval(others)
    assert machine.background.cores() == pytest.approx(0.3, abs=0.03)


def test_samples_in_quick_succession_make_one_interval(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    for _ in range(MIN_INTERVALS + 1):
        machine.advance(0.1, 1.0, 0.2)
        machine.background.sample()
    assert machine.background.cores() is None


def test_few_intervals_tell_nothing(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    assert machine.background.cores() is None
    for _ in range(MIN_INTERVALS - 1):
        machine.interval(0.2)
    assert machine.background.cores() is None
    machine.interval(0.2)
    assert machine.background.cores() is not None


@pytest.mark.parametrize("fields", [{"accounted": 0.0, "own": 0.0}, {"accounted": 1.0}, {"own_accounted": 0.0}])
def test_an_account_that_is_not_the_machines_counts_as_none(tmp_path: Path, fields: dict[str, float]) -> None:
    """Sandboxes count nothing, not all CPUs, or not the time of the probe."""
    machine = Machine(tmp_path)
    for _ in range(8):
        machine.interval(0.0, **fields)
    assert machine.background.cores() is None


def test_an_account_of_the_container_alone_counts_as_none(tmp_path: Path) -> None:
    """LXCFS mounts a file of its own over /proc/stat."""
    (tmp_path / "stat").symlink_to("/proc/self/stat")
    assert not covers_machine(tmp_path / "stat")
    assert not covers_machine(tmp_path / "missing")
    (tmp_path / "own").write_text(TWO_CPUS)
    assert covers_machine(tmp_path / "own")
    background = Background(tmp_path / "missing")
    background.sample()
    assert background.cores() is None


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="the kernel is not Linux")
def test_this_machine_has_an_account() -> None:
    found = account(Path("/proc/stat").read_text(), 1 / os.sysconf("SC_CLK_TCK"))
    assert found is None or found.total_s >= found.busy_s >= 0
