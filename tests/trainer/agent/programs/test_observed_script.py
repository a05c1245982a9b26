"""Tests of jobs for torchrun whose scripts nobody described: real agents report the structure of the script."""

import os
import shutil
from pathlib import Path

import pytest

from dlcontract import ModelRef, RunPhase
from dltrain.host.pod_memory import held_nbytes
from support.trainer.pods import Job

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(os.getuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2 for namespaces"),
]
SCRIPT = str(Path(__file__).resolve().parents[4] / "examples/scripts/train_torchrun.py")
PARAMETERS = 20 * 64 + 64 + 64 * 2 + 2


@pytest.mark.long
def test_structure_of_an_unmodified_script_is_in_the_report(two: Job) -> None:
    """The script runs in a fork of the agent's zygote, with two ranks over gloo."""
    two.start(two.plan(model=ModelRef(command=("torchrun", SCRIPT), framework="Torchrun")))
    report = two.until(lambda r: r.phase in (RunPhase.SUCCEEDED, RunPhase.FAILED), 180.0)
    assert report.phase is RunPhase.SUCCEEDED, two.logs()
    found = report.structure
    assert found is not None and (found.parameters, found.samples, found.world_size) == (PARAMETERS, 64, 2)
    assert found.flops == pytest.approx(3 * 2 * 64 * (20 * 64 + 64 * 2)) and found.step_s
    assert two.pods[0].text().count("dljob: observed a step: 1,474 parameters, 64 samples") == 1
    assert "dljob: observed" not in two.pods[1].text(), "rank 0 alone is observed"
    assert (report.step, report.step_s) == (0, None), "the script reports no progress by itself"


@pytest.mark.long
@pytest.mark.parametrize(("switch", "seen"), [({}, True), ({"DLJOB_OBSERVE": "off"}, False)])
def test_python_of_a_shell_script_is_observed_unless_it_is_switched_off(
    two: Job, switch: dict[str, str], seen: bool
) -> None:
    command = ("sh", "-c", f"echo begins; python {SCRIPT}")
    two.start(two.plan(model=ModelRef(command=command, framework="Torchrun")), DLTRAIN_IMPORT_AHEAD="off", **switch)
    report = two.until(lambda r: r.phase in (RunPhase.SUCCEEDED, RunPhase.FAILED), 180.0)
    assert report.phase is RunPhase.SUCCEEDED, two.logs()
    assert (report.structure is not None) == seen and ("dljob: observed a step" in two.pods[0].text()) == seen


def test_memory_of_the_pods_is_in_the_report(two: Job) -> None:
    """Also of a script without Python. The pods of this test have no cgroup of their own."""
    two.start(two.plan(model=ModelRef(command=("sleep", "1.5"), framework="Torchrun")), DLTRAIN_IMPORT_AHEAD="off")
    report = two.until(lambda r: r.phase in (RunPhase.SUCCEEDED, RunPhase.FAILED))
    assert report.phase is RunPhase.SUCCEEDED, two.logs()
    found = report.pod_memory
    assert (found is None) == (held_nbytes() is None)
    assert found is None or (found.pod in two.plan().pods and found.ranks == 1 and found.peak_nbytes > 2**20)
