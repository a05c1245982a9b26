"""The check that a person with a GPU runs: what of it needs none holds here, and without a GPU it says so."""

import re

import pytest
import torch
from benchmarks.gpu import check


@pytest.mark.mpi
def test_what_needs_no_gpu_runs_on_cpus_by_the_same_code(capfd: pytest.CaptureFixture[str]) -> None:
    code = check.main(["--device", "cpu", "--steps", "5"])
    out = capfd.readouterr().out
    found = dict(re.findall(r"^(\w+) +(.*)$", out, re.MULTILINE))
    assert found["devices"] == "cpu (no GPU), sums by gloo"
    assert re.fullmatch(r"gradient of shares 16 … 32 off by \S+, parameters equal after 5 steps", found["exactness"])
    assert found["batches"].startswith("0 of 50") and found["resume"] == "from step 4 of 8: equal to the bit"
    assert found["memory"] == "told as OutOfMemory" and "energy" in found
    found.pop("step")  # figures of times, which say nothing here
    assert code == int("MISSED" in out) and not any("MISSED" in text for text in found.values()), out


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check.main([]) == 2
    assert re.fullmatch(r"gpu_check: found no GPU: .+; --device cpu runs what needs none\n", capsys.readouterr().err)
