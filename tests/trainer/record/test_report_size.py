"""Tests that the report of a job with many ranks fits into its ConfigMap, and that the operator reads it."""

import random

import pytest

from dlcontract import DatasetRef, ModelRef, Plan, ProbePoint, Rank, RankMeasure, Report
from dljob.kube.objects.bounds import report_problem
from dltrain.record.ledger import MAX_MEASURES, Ledger

GPU, OTHER = "NVIDIA-A100-SXM4-40GB", "Tesla-T4"
PARTS = (
    "compute_s", "wait_s", "comm_s", "data_s", "forward_s", "backward_s", "sum_s", "agree_s", "wait_cpu_s", "fetch_s",
)  # fmt: skip


def ledger(ranks: int, devices: tuple[str, ...]) -> Ledger:
    """Return the ledger of a job whose first ranks have these devices, and all others the last one."""
    placed = tuple(
        Rank(
            rank=n,
            pod=f"p-{n}",
            host=f"p-{n}.d",
            group="g",
            device=devices[min(n, len(devices) - 1)],
            gpu=True,
            share=1,
        )
        for n in range(ranks)
    )
    plan = Plan(
        job="j", namespace="n", uid="u", number=1, ranks=placed, global_batch=ranks, model=ModelRef(name="mlp"),
        dataset=DatasetRef(name="digits"), steps=9,
    )  # fmt: skip
    found, chance = Ledger(plan, None), random.Random(1)
    found._measures = {
        n: RankMeasure(rank=n, device=rank.device, share=1, **{part: chance.random() for part in PARTS})
        for n, rank in enumerate(placed)
    }
    found._probes = {(GPU, n): ProbePoint(device=GPU, batch=n + 1, compute_s=chance.random()) for n in range(1024)}
    return found


@pytest.mark.parametrize("wrong", [False, True], ids=["devices as planned", "wrong devices"])
def test_report_of_4096_ranks_is_read(wrong: bool) -> None:
    found = ledger(4096, (OTHER, GPU))
    if wrong:
        found._found = dict.fromkeys(range(4096), "another device")
    text = found.report(0.0).to_json()
    assert report_problem(text) is None, len(text)
    report = Report.parse(text)
    assert len(report.ranks) <= MAX_MEASURES
    assert {measure.device for measure in report.ranks} == {GPU, OTHER}, "every device is measured"
    assert [measure.rank for measure in report.ranks] == sorted({measure.rank for measure in report.ranks})
    assert bool(report.mismatches) == wrong


def test_report_of_1024_ranks_has_all_measures() -> None:
    assert len(ledger(1024, (GPU,)).report(0.0).ranks) == 1024
