"""Tests of what real agents report about the memory of a script whose model ranks split."""

import os
import shutil
from pathlib import Path

import pytest

from dlcontract import CheckpointRef, Report, RunPhase
from dltrain.host.pod_memory import held_nbytes
from support.trainer.pods import Job

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(os.getuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2 for namespaces"),
]
MIB = 2**20
SCRIPT = """
import sys, time
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import dltrain

t = dltrain.init(batch=60, strategy="Pipeline")
digits = dltrain.data.load("digits")
model = t.create(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 4096), nn.ReLU(),
                                       nn.Linear(4096, 10)))
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, opt = t.wrap(model, opt, sample=digits.test(torch.arange(1).numpy())[0])
for x, y in t.steps(t.loader(digits)):
    t.run(model, x, y, cross_entropy)
    opt.step()
while not Path(sys.argv[1]).exists():
    time.sleep(0.05)
"""
STAGE_NBYTES = 4 * 4 * 2048 * 4096
"""Parameters, gradients and state of AdamW of the second stage's large layer."""


def test_report_has_the_memory_of_each_stage(two: Job, tmp_path: Path) -> None:
    script, go = tmp_path / "train.py", tmp_path / "go"
    script.write_text(SCRIPT)
    plan = two.plan(["python", str(script), str(go)], steps=4, rebalance=False)
    ranks = tuple(rank.model_copy(update={"share": 60}) for rank in plan.ranks)
    split = {"ranks": ranks, "parallelism": "Pipeline", "micro_batches": 2}
    # Without checkpoints, for which rank 0 gathers the state of both stages.
    two.start(plan.model_copy(update=split | {"checkpoint": CheckpointRef(enabled=False, directory=str(tmp_path))}))

    def seen(report: Report) -> bool:
        found = report.pod_memory.parts if report.pod_memory is not None else ()
        complete = len(found) == 2 and 0 < found[0] < found[1] - 0.5 * STAGE_NBYTES
        return report.phase is RunPhase.FAILED or complete

    if held_nbytes() is not None:
        report = two.until(seen, 180.0)
        assert report.phase is not RunPhase.FAILED and report.pod_memory is not None, two.logs()
        first, second = report.pod_memory.parts
        assert 20 * MIB < first < second < first + 2 * STAGE_NBYTES
    go.touch()
    report = two.until(lambda r: r.phase in (RunPhase.SUCCEEDED, RunPhase.FAILED), 180.0)
    assert report.phase is RunPhase.SUCCEEDED, two.logs()
    assert (report.pod_memory is None) == (held_nbytes() is None)
