"""The GPU check: the checks that need no GPU pass here, and without a GPU it exits with a message."""

import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from benchmarks.gpu import check

from support.trainer.ranks import alone


def run_as_forks(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command of ``mpirun`` with forks of the zygote as ranks, which need not import torch."""
    at = command.index(sys.executable)
    return RUN([*command[:at], *alone(), *command[at + 1 :]], **options)


RUN: Any = subprocess.run


@pytest.mark.mpi
@pytest.mark.patient
def test_checks_that_need_no_gpu_pass_on_cpus(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check.subprocess, "run", run_as_forks)
    code = check.main(["--device", "cpu", "--steps", "5"])
    out = capfd.readouterr().out
    found = dict(re.findall(r"^(\w+) +(.*)$", out, re.MULTILINE))
    assert found["devices"] == "cpu (no GPU), all-reduce by gloo"
    assert re.fullmatch(
        r"gradient of local batches 16 … 32 off by \S+, parameters equal after 5 steps", found["exactness"]
    )
    assert re.fullmatch(
        r"gradient of local batches 16 … 32 off by \S+, parameters equal after 5 steps; reads skipped without a GPU",
        found["ddp"],
    )
    assert re.fullmatch(
        r"parameters off by \S+ after 5 steps, in bfloat16 by \S+; layers compute with torch.bfloat16", found["sharded"]
    )
    assert found["batches"].startswith("0 of 50") and found["resume"] == "from step 4 of 8: bit-identical"
    assert found["memory"] == "reported as OutOfMemory" and "energy" in found
    del found["step"], found["ddp_step"]  # timings mean nothing here
    assert code == int("MISSED" in out) and not any("MISSED" in text for text in found.values()), out


def test_exits_with_a_message_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check.main([]) == 2
    assert capsys.readouterr().err.startswith("gpu_check: found no GPU: ")
