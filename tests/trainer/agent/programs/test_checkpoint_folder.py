"""Tests of the checkpoint folder of an elastic script: what counts as a new checkpoint."""

import asyncio
import time
from pathlib import Path

import pytest

from dlcontract import ModelRef, Plan
from dltrain.agent.coordinator.elastic_script import CheckpointFolder
from dltrain.object_store.staged_folder import SETTLE_S
from dltrain.protocol.volume_layout import job_directory
from support.trainer.plans import make_plan, saving


class Clock:
    """The time that the folder sees."""

    now_s = 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", lambda: clock.now_s)
    return clock


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    model = ModelRef(command=("torchrun", "x.py"), framework="Torchrun", elastic=True)
    plan = make_plan(2, model=model, checkpoint=saving(tmp_path))
    job_directory(plan).mkdir(parents=True, exist_ok=True)
    return plan


async def scanned(folder: CheckpointFolder) -> None:
    folder.tick()
    while folder._tasks:
        await asyncio.gather(*folder._tasks)


def test_first_checkpoint_counts_however_soon_it_is_written(plan: Plan, clock: Clock) -> None:
    """Fixed bug: the content at the first tick, up to a second after the launch, counted as old."""
    (job_directory(plan) / "step").write_text("1")

    async def run() -> None:
        folder = CheckpointFolder()
        await folder.watch(plan)
        (job_directory(plan) / "step").write_text("20")
        clock.now_s += 2.0
        await scanned(folder)
        assert folder.changed_since(1000.0) and not folder.settled_since(1000.0)
        clock.now_s += SETTLE_S
        await scanned(folder)
        assert folder.settled_since(1000.0)

    asyncio.run(run())


@pytest.mark.parametrize(("back_s", "counts"), [(-1.0, True), (0.0, True), (SETTLE_S - 0.1, True), (SETTLE_S, False)])
def test_checkpoint_counts_if_it_settles_after_all_pods_are_back(
    plan: Plan, clock: Clock, back_s: float, counts: bool
) -> None:
    """Fixed bug: one that a scan found just before the coordinator counted the last pod was never used."""

    async def run() -> None:
        folder = CheckpointFolder()
        await folder.watch(plan)
        (job_directory(plan) / "step").write_text("1")
        clock.now_s += 2.0
        await scanned(folder)
        complete_s = clock.now_s + back_s
        clock.now_s += SETTLE_S + 1.0
        await scanned(folder)
        assert folder.settled_since(complete_s) == counts

    asyncio.run(run())


def test_checkpoint_counts_only_after_a_scan_has_found_it_unchanged(plan: Plan, clock: Clock) -> None:
    """Fixed bug: in a folder whose scans are slow, and therefore rare, a checkpoint counted while it was written."""

    async def run() -> None:
        folder = CheckpointFolder()
        await folder.watch(plan)
        for number in range(2):
            (job_directory(plan) / "step").write_text("1" * number)
            clock.now_s += SETTLE_S + 1.0
            assert not folder.settled_since(1000.0)
            await scanned(folder)
            assert folder.changed_since(1000.0) and not folder.settled_since(1000.0)
        clock.now_s += SETTLE_S + 1.0
        await scanned(folder)
        assert folder.settled_since(1000.0)

    asyncio.run(run())


def test_changes_before_a_launch_do_not_count(plan: Plan, clock: Clock) -> None:
    async def run() -> None:
        folder = CheckpointFolder()
        await folder.watch(plan)
        clock.now_s += 2.0
        folder.tick()  # A scan of the earlier launch is under way.
        (job_directory(plan) / "step").write_text("1")
        await folder.watch(plan)
        clock.now_s += 2.0
        await scanned(folder)
        assert not folder.changed_since(0.0)
        await folder.watch(None)
        (job_directory(plan) / "step").write_text("20")
        clock.now_s += 2.0
        await scanned(folder)
        assert not folder.changed_since(0.0)

    asyncio.run(run())
