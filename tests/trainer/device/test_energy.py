"""Tests of energy measurement with counters that may be missing."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from dlcontract import RankMeasure
from dltrain.agent.member.local_ranks import LocalRanks
from dltrain.agent.member.member import Member
from dltrain.agent.member.rank_watch import RankWatch
from dltrain.agent.member.running_rank import Running
from dltrain.agent.metrics import TrainerCollector
from dltrain.device import energy
from dltrain.device.energy import Meter, Packages, meter
from dltrain.host import cgroup
from dltrain.protocol.rank_messages import Energy, Step


def rapl(root: Path, name: str, label: str, counted_uJ: int, span_uJ: int = 1000) -> Path:
    """Create a RAPL domain with the layout of Linux (Documentation/power/powercap)."""
    (root / name).mkdir(exist_ok=True)
    for file, text in (("name", label), ("energy_uj", counted_uJ), ("max_energy_range_uj", span_uJ)):
        (root / name / file).write_text(f"{text}\n")
    return root


def test_energy_of_cpu_packages_is_summed_across_counter_overflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rapl(tmp_path, "intel-rapl:0", "package-0", 900)
    rapl(tmp_path, "intel-rapl:1", "package-1", 100)
    rapl(tmp_path, "intel-rapl:0:0", "core", 5)  # part of the package
    rapl(tmp_path, "intel-rapl:2", "psys", 7)  # contains the packages
    monkeypatch.setattr(energy, "POWERCAP", tmp_path)
    monkeypatch.setattr(energy, "PodPart", lambda: lambda: 1.0)
    made = meter(torch.device("cpu"), 0)
    assert made is not None and made.used() == Energy(joules=0, source="RAPL")
    rapl(tmp_path, "intel-rapl:0", "package-0", 50)
    rapl(tmp_path, "intel-rapl:1", "package-1", 300)
    assert made.used() == Energy(joules=350e-6, source="RAPL")
    assert meter(torch.device("cpu"), 1) is None, "only local rank 0 measures the node"
    (tmp_path / "intel-rapl:1" / "energy_uj").unlink()
    assert made.used() is None


def test_energy_of_cpus_counts_for_a_pod_by_its_part_of_the_cpu_time(tmp_path: Path) -> None:
    rapl(tmp_path, "intel-rapl:0", "package-0", 0, 10_000_000)
    pod_s, node_s = iter([1.0, 2.0, 2.0, None, 9.0, 9.5]), iter([10.0, 14.0, 16.0, 17.0, 18.0, 18.0])
    packages = Packages(tmp_path, energy.PodPart(lambda: next(pod_s), lambda: next(node_s)))
    found = []
    for counted_uJ in (1_000_000, 2_000_000, 3_000_000, 4_000_000, 5_000_000):
        rapl(tmp_path, "intel-rapl:0", "package-0", counted_uJ, 10_000_000)
        found.append(packages())
    parts = [0.25, 0.0, 1.0, 1.0, 1.0]  # Without readable times, the whole counts.
    assert found == pytest.approx([sum(parts[: n + 1]) for n in range(5)])


def test_cpu_times_are_read_from_both_versions_of_cgroups(tmp_path: Path) -> None:
    assert cgroup.cpu_time_s(tmp_path) is None and cgroup.node_cpu_time_s(tmp_path / "stat") is None
    (tmp_path / "cpuacct").mkdir()
    (tmp_path / "cpuacct" / "cpuacct.usage").write_text("2500000000\n")
    assert cgroup.cpu_time_s(tmp_path) == 2.5
    (tmp_path / "cpu.stat").write_text("usage_usec 1500000\nuser_usec 1\n")
    assert cgroup.cpu_time_s(tmp_path) == 1.5
    (tmp_path / "stat").write_text("cpu  100 20 30 900 40 5 6 7 0 0\ncpu0 1 1\n")
    assert cgroup.node_cpu_time_s(tmp_path / "stat") == 161 / os.sysconf("SC_CLK_TCK")
    assert cgroup.node_cpu_time_s() is not None, "this machine's own"


def test_metric_shows_energy_reported_by_the_rank() -> None:
    measure = RankMeasure(rank=0, device="cpu", share=1, sum_s=0.5)
    update = Step(
        rank=0, step=1, steps=2, step_s=1.0, samples_per_s=1.0, world_size=1, measure=measure, gradient_nbytes=100,
        energy=Energy(joules=7.5, source="RAPL"),
    )  # fmt: skip
    local = LocalRanks.__new__(LocalRanks)  # the constructor would reap the children of this process
    run = Running.__new__(Running)
    run.latest, run.heard_unix_s = {Step: update}, 1.0
    local.watch = RankWatch(lambda _: None)
    local.running, local.last_ranks = {}, {0: run}
    found = {f.name: f.samples for f in TrainerCollector(Member("a-0", "a"), local, lambda: None).collect()}
    (joules,) = found["dljob_trainer_energy_joules"]
    assert (joules.name, joules.labels, joules.value) == (
        "dljob_trainer_energy_joules_total", {"rank": "0", "source": "RAPL"}, 7.5,
    )  # fmt: skip
    assert [s.value for s in found["dljob_trainer_gradient_bandwidth_bytes_per_second"]] == [200.0]
    assert found["dljob_trainer_step_backward_seconds"] == [], "a missing value is not exported as 0"


def test_unreadable_counter_is_not_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "POWERCAP", tmp_path)
    assert meter(torch.device("cpu"), 0) is None
    with pytest.raises(OSError, match="no-such-library"):
        energy._gpu("GPU-0", "no-such-library.so")
    rapl(tmp_path, "intel-rapl:0", "package-0", 1)
    (tmp_path / "intel-rapl:0" / "energy_uj").unlink()
    (tmp_path / "intel-rapl:0" / "energy_uj").mkdir()  # a directory, which root cannot read either
    assert meter(torch.device("cpu"), 0) is None
    with pytest.raises(OSError, match="intel-rapl"):
        Meter("RAPL", Packages(tmp_path, lambda: 1.0))


class Nvml:
    """A stand-in for NVML with one GPU, as declared in NVIDIA's header."""

    def __init__(self) -> None:
        self.counted_mJ = iter([1000, 3500])

    def nvmlInit_v2(self) -> int:  # noqa: N802 - NVML's name
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:  # noqa: N802
        handle._obj.value = 7
        return 0 if uuid == b"GPU-6f1c2f36-0a4e-4b0a-9d5c-1f2e3d4c5b6a" else 6  # NVML_ERROR_NOT_FOUND

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any, energy: Any) -> int:  # noqa: N802
        assert handle.value == 7
        energy._obj.value = next(self.counted_mJ, 0)
        return 0 if energy._obj.value else 15  # NVML_ERROR_GPU_IS_LOST


@pytest.mark.parametrize("prefix", ["", "GPU-"])
def test_gpu_is_identified_by_its_uuid(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index is ambiguous if the pod sees only some GPUs of the node."""
    monkeypatch.setattr(energy.ctypes, "CDLL", lambda _: Nvml())
    made = Meter("NVML", energy._gpu(f"{prefix}6f1c2f36-0a4e-4b0a-9d5c-1f2e3d4c5b6a"))
    assert made.used() == Energy(joules=2.5, source="NVML")
    assert made.used() is None, "a lost GPU is not an error here"
    with pytest.raises(OSError, match="nvmlDeviceGetHandleByUUID: NVML error 6"):
        energy._gpu("MIG-1")
