"""Tests of lost ranks and pods, of shrinking and of the report, with real agents and ranks."""

import os
import shutil
from typing import Any

import pytest

from dlcontract import ModelRef, Role, RunPhase
from dltrain.protocol.rank_messages import AttemptPlan
from dltrain.record.run_report import files
from support.trainer.pods import KILL, Job, leave, process, rank_process, rank_processes, steps_in_memory

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(os.getuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2 for namespaces"),
]


@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.long)])
def test_job_continues_without_a_killed_rank_and_adds_it_again(victim: int, three: Job) -> None:
    three.start(three.plan(model=ModelRef(name="mlp"), steps=20_000, min_ranks=2))
    three.until(lambda r: r.step >= 1)
    os.kill(rank_process(three.pods[victim]), KILL)
    report = three.until(lambda r: r.world_size == 2 and r.restarts)
    assert report.phase is RunPhase.RUNNING and report.restarts == {"RankKilled": 1} and report.failures == 0
    assert report.failure is not None and report.failure.rank == victim and report.failure.exit_code == 137
    # While local batch sizes change, ranks may report a mix of old and new ones.
    later = three.until(lambda r: r.step > report.step and sum(m.share for m in r.ranks) == 60)
    assert "phase Restarting" not in three.pods[0].text()
    assert [m.rank for m in later.ranks] == [n for n in range(3) if n != victim]

    back = three.until(lambda r: r.world_size == 3 and r.step > later.step)
    assert back.restarts == {"RankKilled": 1} and back.failures == 0
    assert back.last_checkpoint is not None and back.last_checkpoint.step >= later.step, "no step was repeated"
    assert all(pod.starts == 1 for pod in three.pods)
    assert leave(three) == [143, 143, 143]
    document = files.read(three.plan())
    assert document is not None and document.phase is RunPhase.STOPPED
    assert [attempt.size for attempt in document.attempts] == [3, 2, 0, 3, 0]
    killed, *later_faults = document.faults
    assert killed.failure.reason == "RankKilled" and killed.resumed_unix_s
    assert {fault.failure.reason for fault in later_faults} <= {"PodStopped"}, (
        "the end of another pod may be reported first"
    )
    assert document.totals.steps_repeated == 0 and sum(p.steps for p in document.points) <= document.step
    assert any(f"lost ranks [{victim}]" == split.reason for split in document.splits)


@pytest.mark.parametrize(("program", "at"), [pytest.param("prterun", 0, marks=pytest.mark.long), ("prted", 1)])
def test_ranks_restart_from_memory_after_loss_of_mpirun_or_a_daemon(program: str, at: int, three: Job) -> None:
    three.start(three.plan(model=ModelRef(name="mlp"), steps=20_000, min_ranks=3))
    three.wait(lambda: all(steps_in_memory(pod) for pod in three.pods))
    step = max(steps_in_memory(three.pods[0]))
    os.kill(process(three.pods[at], program), KILL)
    detected = three.until(lambda r: r.restarts)
    assert detected.last_checkpoint is None, "the volume has no checkpoint"
    report = three.until(lambda r: r.phase is RunPhase.RUNNING and r.restarts and r.world_size == 3)
    assert sum(report.restarts.values()) == 1 and report.step >= step, three.logs()
    assert "in the memory of rank" in three.pods[0].text()
    assert all(pod.starts == 1 for pod in three.pods)
    plan = AttemptPlan.parse((three.pods[0].directory / "tmp/dljob/plan.json").read_text())
    assert plan.prior_faults == 1 and plan.prior_trained_s > 0, "ranks choose the checkpoint interval from these"


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.long) for k in ("Pipeline", "StaleSynchronous", "DDP")]
)
def test_lost_stage_server_or_rank_of_ddp_restarts_from_the_last_checkpoint(kind: str, two: Job) -> None:
    """Rank 1 is the second stage, the server, or a rank of DDP. In all cases, rank 0 writes the checkpoints."""
    fields: dict[str, Any] = {"parallelism": "Pipeline", "micro_batches": 2}
    shares, roles = (60, 60), (Role.WORKER, Role.WORKER)
    if kind == "DDP":
        fields, shares = {"collective": "DDP"}, (40, 20)
    elif kind != "Pipeline":
        fields = {"synchronization": kind, "staleness_bound": 3, "collective": "ParameterServer"}
        shares, roles = (60, 0), (Role.WORKER, Role.SERVER)
    plan = two.plan(model=ModelRef(name="mlp"), steps=20_000, rebalance=False)
    ranks = zip(plan.ranks, shares, roles, strict=True)
    fields["ranks"] = tuple(rank.model_copy(update={"share": share, "role": role}) for rank, share, role in ranks)
    fields["checkpoint"] = plan.checkpoint.model_copy(update={"interval_s": 0.1})
    two.start(plan.model_copy(update=fields))
    saved = two.until(lambda r: r.last_checkpoint is not None).last_checkpoint
    os.kill(rank_process(two.pods[1]), KILL)
    report = two.until(lambda r: r.restarts and r.phase is RunPhase.RUNNING and r.world_size == 2)
    assert report.restarts == {"RankKilled": 1} and report.failure is not None and report.failure.rank == 1
    assert saved is not None and report.step > saved.step > 0 and all(pod.starts == 1 for pod in two.pods)
    assert "resumed from step" in two.pods[0].text()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["Pipeline", "Tensor"])
def test_lost_rank_of_a_replica_restarts_all_ranks_from_the_last_checkpoint(kind: str, two: Job) -> None:
    """The second replica is in pod 1. No rank of the first one waits for the lost rank itself in each operation."""
    plan = two.plan(model=ModelRef(name="mlp"), steps=20_000, rebalance=False, per_pod=2)
    fields: dict[str, Any] = {"parallelism": kind, "replicas": 2, "collective": "Ring"}
    fields["ranks"] = tuple(rank.model_copy(update={"share": 30}) for rank in plan.ranks)
    fields["checkpoint"] = plan.checkpoint.model_copy(update={"interval_s": 0.1})
    two.start(plan.model_copy(update=fields))
    saved = two.until(lambda r: r.last_checkpoint is not None).last_checkpoint
    os.kill(rank_processes(two.pods[1])[0], KILL)
    report = two.until(lambda r: r.restarts and r.phase is RunPhase.RUNNING and r.world_size == 4)
    assert report.restarts == {"RankKilled": 1} and report.failure is not None and report.failure.rank in (2, 3)
    assert saved is not None and report.step > saved.step > 0 and all(pod.starts == 1 for pod in two.pods)


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
def test_lost_layered_server_or_worker_is_named_and_restarts_from_the_last_checkpoint(victim: int, two: Job) -> None:
    """Rank 0 is the server, which owns the parameters and writes the checkpoints. Rank 1 is the worker."""
    plan = two.plan(model=ModelRef(name="mlp"), steps=20_000, rebalance=False)
    parts = zip(plan.ranks, (0, 60), (Role.SERVER, Role.WORKER), strict=True)
    ranks = tuple(rank.model_copy(update={"share": share, "role": role}) for rank, share, role in parts)
    checkpoint = plan.checkpoint.model_copy(update={"interval_s": 0.1})
    fields = {"collective": "LayeredServer", "global_batch": 60, "ranks": ranks, "checkpoint": checkpoint}
    two.start(plan.model_copy(update=fields))
    saved = two.until(lambda r: r.last_checkpoint is not None).last_checkpoint
    os.kill(rank_process(two.pods[victim]), KILL)
    report = two.until(lambda r: r.restarts and r.phase is RunPhase.RUNNING and r.world_size == 2)
    assert report.restarts == {"RankKilled": 1} and report.failure is not None
    assert report.failure.rank == victim and report.failure.exit_code == 137
    assert saved is not None and report.step > saved.step > 0 and all(pod.starts == 1 for pod in two.pods)
    assert "resumed from step" in two.pods[0].text()


@pytest.mark.long
def test_next_pod_takes_over_as_coordinator(three: Job) -> None:
    three.start(three.plan(model=ModelRef(name="mlp"), steps=20_000, min_ranks=2))
    three.wait(lambda: all(steps_in_memory(pod) for pod in three.pods))
    before = three.until(lambda r: r.world_size == 3)
    step = max(steps_in_memory(three.pods[1]))
    three.pods[0].kill()
    report = three.until(lambda r: r.term > before.term and r.phase is RunPhase.RUNNING and r.world_size == 2)
    assert report.restarts == {"CoordinatorLost": 1} and report.failures == 0 and report.step >= step
    assert "taking over as coordinator" in three.pods[1].text() and "taking over" not in three.pods[2].text()

    three.pods[0].start()
    back = three.until(lambda r: r.term > report.term and r.phase is RunPhase.RUNNING and r.world_size == 3)
    assert back.step >= report.step and back.failures == 0 and back.restarts["CoordinatorLost"] == 1, back.restarts
    assert "no longer the coordinator" in three.pods[1].text()
    assert [pod.starts for pod in three.pods] == [2, 1, 1]


@pytest.mark.long
def test_job_continues_without_a_lost_pod_and_adds_it_again(three: Job) -> None:
    three.start(three.plan(model=ModelRef(name="mlp"), steps=20_000, min_ranks=2))
    three.until(lambda r: r.step >= 1)
    three.pods[1].kill()
    report = three.until(lambda r: r.restarts and r.phase is RunPhase.RUNNING and r.world_size == 2)
    assert report.restarts == {"PodLost": 1} and report.failures == 0
    assert report.failure is not None and not report.failure.unreachable, "its kernel closed the connection"
    three.pods[1].start()
    back = three.until(lambda r: r.world_size == 3 and r.step > report.step)
    assert back.restarts == {"PodLost": 1} and back.term == report.term


@pytest.mark.long
def test_partition_is_detected_and_an_isolated_pod_does_not_take_over(three: Job) -> None:
    three.start(three.plan(model=ModelRef(name="mlp"), steps=20_000, min_ranks=2))
    before = three.until(lambda r: r.step >= 1)
    three.pods[1].link("down")
    three.until(lambda r: r.restarts)
    report = three.until(lambda r: r.phase is RunPhase.RUNNING and r.world_size == 2)
    assert report.restarts == {"PodLost": 1}
    assert report.failure is not None
    assert (report.failure.host, report.failure.unreachable) == (three.pods[1].name, True)
    three.wait(lambda: "taking over as coordinator" in three.pods[1].text())

    three.pods[1].link("up")
    back = three.until(lambda r: r.world_size == 3 and r.step > report.step)
    assert back.term == before.term and back.restarts == {"PodLost": 1}
    assert all(pod.starts == 1 for pod in three.pods)
