"""Tests of the GPU check that users run: its CPU mode passes, and it reports a missing GPU."""

import re

import pytest
import torch
from benchmarks.gpu import check


@pytest.mark.mpi
def test_gpu_check_passes_on_cpus(capfd: pytest.CaptureFixture[str]) -> None:
    code = check.main(["--device", "cpu", "--steps", "5"])
    out = capfd.readouterr().out
    found = dict(re.findall(r"^(\w+) +(.*)$", out, re.MULTILINE))
    assert found["devices"] == "cpu (no GPU), sums by gloo"
    assert re.fullmatch(r"gradient of shares 16 … 32 off by \S+, parameters equal after 5 steps", found["exactness"])
    assert found["batches"].startswith("0 of 50") and found["resume"] == "from step 4 of 8: equal to the bit"
    assert found["memory"] == "told as OutOfMemory" and "energy" in found
    found.pop("step")  # times, which are irrelevant here
    assert code == int("MISSED" in out) and not any("MISSED" in text for text in found.values()), out


def test_gpu_check_reports_a_missing_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check.main([]) == 2
    assert re.fullmatch(r"gpu_check: found no GPU: .+; --device cpu runs what needs none\n", capsys.readouterr().err)
