"""Tests of the coordinator's decisions: diagnosis of failures, restarts and succession."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dlcontract import (
    DatasetRef,
    Failure,
    FailureRule,
    ModelRef,
    Outcome,
    Plan,
    Rank,
    RunPhase,
    decided,
)
from dltrain.agent.agent import succession
from dltrain.agent.coordinator import finished_marker
from dltrain.agent.coordinator.diagnosis import Attempt, delay_s, diagnose, explained
from dltrain.agent.coordinator.elastic_script import refusal
from dltrain.agent.job.shrink import shrink_plan
from dltrain.host.processes import Exit
from dltrain.protocol.agent_messages import RankEnded
from dltrain.protocol.rank_messages import EXIT_STOPPED, Evaluated, Step
from dltrain.record.ledger import Ledger


def plan(ranks: int = 3, **fields: Any) -> Plan:
    base: dict[str, Any] = {
        "job": "j", "namespace": "n", "uid": "u", "number": 1, "global_batch": ranks, "steps": 10,
        "ranks": tuple(
            Rank(rank=i, pod=f"p-{i}", host=f"p-{i}.j", group="g", device="cpu", share=1) for i in range(ranks)
        ),
        "model": ModelRef(name="mlp"), "dataset": DatasetRef(name="digits"),
    }  # fmt: skip
    return Plan(**(base | fields))


def ended(rank: int, code: int | None = None, number: int | None = None, **fields: Any) -> RankEnded:
    return RankEnded(attempt="1.1", rank=rank, exit_code=code, signal=number, **fields)


def attempt(*ends: RankEnded, **fields: Any) -> Attempt:
    made = Attempt(fields.pop("plan", plan()), "1.1", **fields)
    made.up = {0, 1, 2}
    made.ended = {end.rank: end for end in ends}
    return made


def reported(reason: str, **fields: Any) -> Failure:
    return Failure(reason=reason, message="as it said", **fields)


ECC = "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be asynchronously"
WATCHDOG = (
    "[rank2]:[E1201] Process group watchdog thread terminated with exception: CUDA error: uncorrectable NVLink error "
    "detected during the execution\nterminate called after throwing an instance of 'c10::DistBackendError'"
)
PEER_FAILED = "  world.Barrier()\nmpi4py.MPI.Exception: MPI_ERR_PROC_FAILED: Process Failure\n"
MPI_PLAN = plan(model=ModelRef(command=("x",), framework="MPI"))

CASES: dict[str, tuple[Attempt, str, int | None, bool, bool]] = {
    # attempt, reason, rank, counts, retry
    "killed, survivors leave": (attempt(ended(0, 75), ended(2, 75), ended(1, number=9)), "RankKilled", 1, True, True),
    "killed inside a shell": (attempt(ended(1, 137)), "RankKilled", 1, True, True),
    "kernel killed it for memory": (attempt(ended(0, 75), ended(1, number=9, out_of_memory=True)), "OutOfMemory", 1, True, True),
    "segmentation fault": (attempt(ended(2, number=11)), "RankCrashed", 2, True, True),
    "exit 1": (attempt(ended(0, 1, tail="Traceback")), "RankFailed", 0, True, True),
    "bad input": (attempt(ended(0, 64)), "BadInput", 0, True, False),
    "different parameters": (attempt(ended(1, 77)), "ParametersDiverged", 1, True, True),
    "diverged": (attempt(ended(0, 76)), "Diverged", 0, True, True),
    "shell that found no command": (attempt(ended(0, 127)), "CommandNotFound", 0, True, True),
    "reported failure": (attempt(ended(1, 1), failures=[(1, reported("TrainingError"))]), "TrainingError", 1, True, True),
    "failure reported by a survivor": (attempt(ended(1, number=9), failures=[(0, reported("PeerLost"))]), "RankKilled", 1, True, True),
    "hung": (attempt(hung=(2, 7.0)), "Hung", 2, True, True),
    "pod received SIGTERM": (attempt(ended(0, 143), ended(1, 143), ended(2, 143), left={"p-1"}), "PodStopped", None, False, True),
    "pod lost, survivors leave": (attempt(ended(0, 75), lost={"p-1": "silent for 5 s"}), "PodLost", None, False, True),
    "device failed after others had noticed": (
        attempt(failures=[(0, reported("TrainingError")), (2, reported("DeviceFailed"))]), "DeviceFailed", 2, True, True,
    ),
    "device of a torchrun script failed": (attempt(ended(0, 1, tail="NCCL timeout"), ended(1, 1, tail=ECC)), "DeviceFailed", 1, True, True),
    "watchdog of NCCL": (attempt(ended(2, number=6, tail=WATCHDOG)), "DeviceFailed", 2, True, True),
    "rank of an MPI program ended, others noticed first": (
        attempt(ended(0, 1, tail=PEER_FAILED), ended(2, 5), plan=MPI_PLAN), "RankFailed", 2, True, True,
    ),
    "all ranks of an MPI program noticed": (
        attempt(ended(0, 1, tail=PEER_FAILED), ended(1, 1, tail=PEER_FAILED), plan=MPI_PLAN), "PeerLost", 0, True, True,
    ),
    "script that is no MPI program": (attempt(ended(0, 1, tail=PEER_FAILED), ended(2, 5)), "RankFailed", 0, True, True),
    "other words about a lost device": (attempt(ended(0, 1, tail="the audio device is lost")), "RankFailed", 0, True, True),
    "wrong kernel of a script": (attempt(ended(0, 1, tail="CUDA error: device-side assert triggered")), "RankFailed", 0, True, True),
    "device failed in a drained pod": (attempt(ended(1, 1, tail=ECC), left={"p-1"}), "PodStopped", None, False, True),
    "mpirun failed": (attempt(launcher=Exit(code=1)), "LaunchFailed", None, True, True),
    "only consequences": (attempt(ended(0, 75), ended(1, 75), ended(2, 75)), "PeerLost", 0, True, True),
    "exit as if stopped": (attempt(ended(0, 143)), "RankStopped", 0, True, True),
    "built-in without a result": (attempt(ended(0, 0), ended(1, 0), ended(2, 0), launcher=Exit(code=0)), "NoResult", None, True, True),
}  # fmt: skip


NOT_STARTED = "cannot start: found ./train, which cannot be started (Permission denied: './train'); expected a file"


@pytest.mark.parametrize("action", ["", "FailJob", "Ignore", "Count"])
def test_command_that_the_agent_cannot_start_fails_the_job_unless_a_rule_asks_for_restarts(action: str) -> None:
    """Fixed bug: the job restarted until backoffLimit, although a restart cannot help."""
    rules = (FailureRule(action=action, reasons=("CommandNotFound",)),) if action else ()
    facts = attempt(
        ended(0, 127, tail=NOT_STARTED), plan=plan(model=ModelRef(command=("./train",)), failure_rules=rules)
    )
    facts.up = {1, 2}
    failure = diagnose(facts)
    assert (failure.reason, failure.retry, failure.exit_code) == ("CommandNotFound", bool(action), 127)
    assert decided(rules, failure).retry is (action in ("Ignore", "Count"))
    assert failure.message.startswith("found ./train, which cannot be started")
    assert "rank 0 in pod p-0" in failure.message and explained(facts)


def test_command_that_could_not_be_started_this_time_is_tried_again() -> None:
    facts = attempt(ended(0, 126, tail="cannot start: [Errno 11] Resource temporarily unavailable"))
    facts.up = {1, 2}
    assert (diagnose(facts).reason, diagnose(facts).retry) == ("LaunchFailed", True)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_diagnosis_names_reason_and_rank(case: tuple[Attempt, str, int | None, bool, bool]) -> None:
    facts, reason, rank, counts, retry = case
    assert facts.troubled and not facts.succeeded
    failure = diagnose(facts)
    assert (failure.reason, failure.rank, failure.counts, failure.retry) == (reason, rank, counts, retry)
    assert failure.message


def test_consequences_do_not_explain_a_failure() -> None:
    assert not explained(attempt(ended(0, 75)))
    assert not explained(attempt(launcher=Exit(code=1)))
    assert not explained(attempt(failures=[(1, reported("TrainingError"))])), "the end of its log has not arrived yet"
    assert explained(attempt(ended(1, 1), failures=[(1, reported("TrainingError"))]))
    assert explained(attempt(ended(0, 75), ended(1, number=9)))
    assert explained(attempt(lost={"p-1": "silent"}))


@pytest.mark.parametrize(
    ("lost", "unreachable", "alone"),
    [
        ({"p-1": "silent"}, {"p-1"}, True),
        ({"p-1": "the connection ended"}, set(), False),
        ({"p-1": "silent", "p-2": "silent"}, {"p-1", "p-2"}, False),
    ],
    ids=["node or network", "agent ended", "several at once"],
)
def test_one_unreachable_pod_is_reported_as_such(lost: dict[str, str], unreachable: set[str], alone: bool) -> None:
    failure = diagnose(attempt(lost=lost, unreachable=unreachable))
    assert (failure.reason, failure.host, failure.unreachable) == ("PodLost", "p-1", alone)


def test_hung_rank_is_the_one_that_does_not_wait_for_others() -> None:
    """The stacks in the logs of all running ranks decide. A stopped rank writes no stack."""
    where = {n: f'Thread 0x1 (most recent call first):\n  File "{file}"' for n, file in (
        (0, "/x/dltrain/comm/core/waiting.py"), (1, "/app/train.py"), (2, "/x/dltrain/comm/core/waiting.py"),
    )}  # fmt: skip
    facts = attempt(hung=(2, 7.0))
    assert not explained(facts)
    facts.logs = where
    assert explained(facts)
    failure = diagnose(facts)
    assert (failure.rank, failure.host, failure.log_tail) == (1, "p-1", where[1])
    facts.logs = where | {1: where[0], 2: "step 3"}
    assert diagnose(facts).rank == 2, "all others wait for a process that cannot answer"


def test_hung_rank_is_the_one_that_never_came_to_the_process_group() -> None:
    """Fixed bug: the failure named a rank that waited in dltrain.init, and not the one for which it waited."""
    facts = attempt(hung=(2, 900.0), heard={0, 2}, logs={1: "waiting for a lock", 2: "the log of rank 2"})
    failure = diagnose(facts)
    assert (failure.reason, failure.rank, failure.host) == ("Hung", 1, "p-1")
    assert (
        failure.log_tail == "waiting for a lock" and "rank 1 in pod p-1 has not reached dltrain.init" in failure.message
    )
    for other in (
        attempt(hung=(2, 900.0), heard={0, 1, 2}),
        attempt(hung=(2, 900.0), heard={0, 2}, progressed=True),
        attempt(hung=(2, 900.0), heard={0, 2}, plan=MPI_PLAN),  # It may report on some ranks only.
        attempt(ended(1, 0), hung=(2, 900.0), heard={0, 2}),
    ):
        assert diagnose(other).rank == 2


def test_agent_completes_a_failure_that_the_rank_reported() -> None:
    facts = attempt(ended(1, number=6, tail="the log's end"), failures=[(1, reported("TrainingError"))])
    failure = diagnose(facts)
    assert (failure.rank, failure.host, failure.exit_code, failure.log_tail) == (1, "p-1", 134, "the log's end")


def test_script_that_trains_with_dltrain_needs_a_result() -> None:
    done = (ended(0, 0), ended(1, 0), ended(2, 0))
    assert not attempt(*done).succeeded
    assert attempt(*done, outcome=Outcome(steps=1, seconds=1)).succeeded
    custom = Attempt(plan(model=ModelRef(command=("x",))), "1.1")
    custom.ended = {end.rank: end for end in done}
    assert custom.succeeded and not custom.troubled
    custom.progressed, custom.launcher = True, Exit(code=0)
    assert not custom.succeeded and custom.troubled and diagnose(custom).reason == "NoResult", (
        "it ended in the middle of training"
    )
    custom.only_reports = True
    assert custom.succeeded and not custom.troubled, "a script that only reports ends when its ranks do"


@pytest.mark.parametrize("only_reports", [False, True])
def test_failure_that_was_reported_is_no_success_although_all_ranks_exited_with_0(only_reports: bool) -> None:
    """The exit code of ``python train.py | tee log`` is that of tee. The job was complete, but had trained nothing."""
    facts = Attempt(plan(model=ModelRef(command=("x",))), "1.1", only_reports=only_reports)
    facts.ended = {end.rank: end for end in (ended(0, 0), ended(1, 0), ended(2, 0))}
    facts.failures = [(0, reported("TrainingError"))]
    assert not facts.succeeded and facts.troubled and diagnose(facts).reason == "TrainingError"
    facts.outcome = Outcome(steps=1, seconds=1)
    assert facts.succeeded and not facts.troubled, "the result had been reported before"


def test_rank_that_fails_while_it_stops_prevents_the_last_checkpoint() -> None:
    assert not attempt(ended(0, EXIT_STOPPED), ended(1, EXIT_STOPPED)).failed_to_stop
    assert not attempt(ended(0, 0), ended(1, 0)).failed_to_stop, "the last step came before the request"
    assert attempt(ended(0, EXIT_STOPPED), ended(1, number=9)).failed_to_stop
    assert attempt(failures=[(1, reported("CheckpointFailed"))]).failed_to_stop
    assert not attempt(ended(1, number=15), only_reports=True).failed_to_stop, "a script may end in any way"


def test_killed_ranks_that_others_survive_do_not_fail_the_attempt() -> None:
    facts = attempt(ended(1, number=9), progressed=True)
    assert facts.troubled and facts.survivable and not facts.losses
    facts.absent = {1}
    assert not facts.troubled and [end.rank for end in facts.losses] == [1] and facts.missing(plan()) == 1
    facts.handled = {1}
    assert not facts.losses
    facts.ended |= {0: ended(0, 0), 2: ended(2, 0)}
    facts.outcome = Outcome(steps=1, seconds=1)
    assert facts.succeeded and facts.over
    for change, value in (("progressed", False), ("hung", (0, 6.0)), ("left", {"p-0"}), ("lost", {"p-0": "silent"})):
        assert not attempt(ended(1, number=9), **({"progressed": True} | {change: value})).survivable
    for end in (ended(1, 1), ended(1, number=9, out_of_memory=True)):
        other = attempt(end, progressed=True, absent={1})
        assert other.troubled and not other.survivable, "the rank failed by itself"
    reported_failure = attempt(
        ended(1, number=9), progressed=True, absent={1}, failures=[(1, reported("TrainingError"))]
    )
    assert reported_failure.troubled and not reported_failure.survivable
    needed = Attempt(plan(min_ranks=3), "1.1", progressed=True, ended={1: ended(1, number=9)})
    assert needed.troubled and not needed.survivable


def test_lowest_rank_that_reports_represents_a_script_without_the_api() -> None:
    def reported(rank: int, number: int) -> Step:
        fields = {"steps": 10, "step_s": 1.0, "samples_per_s": 0.0, "world_size": 3, "loss": float(rank)}
        return Step(rank=rank, step=number, reported=True, **fields)  # type: ignore[arg-type]

    ledger = Ledger(plan(), None)
    ledger.record(reported(2, 5), 0.0)
    assert (ledger.report(0.0).step, ledger.report(0.0).loss) == (5, 2.0)
    ledger.record(reported(1, 4), 0.0)
    ledger.record(reported(2, 6), 0.0)
    assert (ledger.report(0.0).step, ledger.report(0.0).loss) == (4, 1.0)
    ledger.record(Evaluated(rank=1, step=4, accuracy=0.5), 0.0)
    ledger.record(Evaluated(rank=2, step=4, accuracy=0.7), 0.0)
    assert ledger.report(0.0).accuracy == 0.5 and ledger.report(0.0).ranks == ()
    ledger.begin_attempt(plan(), 0.0)
    ledger.record(reported(2, 7), 0.0)
    assert ledger.report(0.0).step == 7, "in the next attempt, other ranks may report"


def test_shrink_plan_keeps_the_global_batch_on_remaining_pods() -> None:
    whole = plan(4, min_ranks=2, global_batch=4)
    assert shrink_plan(whole, whole.pods) is whole
    left = shrink_plan(whole, {"p-3", "p-1"})
    assert left is not None and Plan.parse(left.to_json()) == left, "it is valid"
    assert [(r.rank, r.pod, r.share) for r in left.ranks] == [(0, "p-1", 2), (1, "p-3", 2)]
    assert shrink_plan(whole, {"p-3"}) is None, "too few"
    torchrun = plan(model=ModelRef(command=("x",), framework="Torchrun"))
    assert shrink_plan(torchrun, {"p-0", "p-1"}) is None
    assert shrink_plan(MPI_PLAN, {"p-0", "p-1"}) is None


ELASTIC = ModelRef(command=("x",), framework="Torchrun", elastic=True)


@pytest.mark.parametrize(
    ("ranks", "pods", "shares"),
    [
        (3, {"p-1", "p-2"}, (6, 6)),
        (3, {"p-2"}, None),
        (3, {"p-0"}, None),
        (4, {"p-0", "p-3"}, (6, 6)),
        (4, {"p-1", "p-2"}, None),
        (2, {"p-0"}, (12,)),
        (2, {"p-1"}, None),
    ],
)
def test_elastic_script_shrinks_on_one_side_of_a_partition_alone(
    ranks: int, pods: set[str], shares: tuple[int, ...] | None
) -> None:
    small = plan(ranks, model=ELASTIC)
    placed = tuple(rank.model_copy(update={"share": 12 // ranks}) for rank in small.ranks)
    left = shrink_plan(small.model_copy(update={"ranks": placed, "global_batch": 12}), pods)
    assert (None if left is None else tuple(rank.share for rank in left.ranks)) == shares
    unknown = shrink_plan(plan(ranks, model=ELASTIC, batch_known=False), pods)
    assert (unknown is None) == (shares is None)
    if unknown is not None:
        assert unknown.global_batch == len(unknown.ranks) and Plan.parse(unknown.to_json()) == unknown


def test_smaller_script_that_fails_before_it_trains_refuses_its_number_of_ranks() -> None:
    whole = plan(model=ELASTIC)
    smaller = shrink_plan(whole, {"p-0", "p-2"})
    assert smaller is not None
    failed = attempt(ended(1, 1, tail="Traceback\nValueError: 3 ranks"), plan=smaller, started_s=time.monotonic())
    found = refusal(failed, whole, diagnose(failed), saved=True)
    assert found is not None and found.ranks == 2 and found.message.endswith("ValueError: 3 ranks")
    for changes in ({"progressed": True}, {"plan": whole}, {"ended": {1: ended(1, number=9)}}):
        other = replace(failed, **changes)
        assert refusal(other, whole, diagnose(other), saved=False) is None, changes
    long = replace(failed, started_s=time.monotonic() - 100)
    assert refusal(long, whole, diagnose(long), saved=True) is None
    assert refusal(long, whole, diagnose(long), saved=False)
    memory = replace(failed, progressed=True, ended={1: ended(1, number=9, out_of_memory=True)})
    assert refusal(memory, whole, diagnose(memory), saved=True), "fewer ranks have larger batches"
    rigid = plan(model=ELASTIC.model_copy(update={"elastic": False}))
    assert refusal(failed, rigid, diagnose(failed), saved=False) is None


@pytest.mark.parametrize(
    ("fields", "phase", "pod", "place"),
    [
        ({}, RunPhase.RUNNING, "p-1", 1),
        ({}, RunPhase.RESTARTING, "p-2", 2),
        ({}, RunPhase.RUNNING, "p-0", 0),
        ({}, RunPhase.RUNNING, "stranger", 0),
        ({}, RunPhase.WAITING, "p-1", 0),
        ({}, RunPhase.STOPPED, "p-1", 0),
        ({}, RunPhase.SUCCEEDED, "p-1", 0),
        ({"min_ranks": 3}, RunPhase.RUNNING, "p-1", 0),
        ({"ranks": 2}, RunPhase.RUNNING, "p-1", 0),
    ],
)
def test_succession_orders_pods_that_may_take_over(
    fields: dict[str, Any], phase: RunPhase, pod: str, place: int
) -> None:
    assert succession(plan(**fields), phase, pod) == place
    assert succession(None, phase, pod) == 0


def test_restart_delays_grow_without_progress_up_to_a_limit() -> None:
    assert [delay_s(n) for n in range(7)] == [0, 1, 2, 4, 8, 10, 10]
    assert sum(delay_s(n) for n in range(1, 4)) < 30, "the default back-off limit of 3"


def test_finished_marker_belongs_to_one_job(tmp_path: Path) -> None:
    checkpoint = {"directory": str(tmp_path / "new")}
    outcome = Outcome(steps=10, seconds=5)
    assert finished_marker.read(plan(checkpoint=checkpoint)) is None
    finished_marker.write(plan(checkpoint=checkpoint), outcome)
    assert finished_marker.read(plan(checkpoint=checkpoint)) == outcome
    assert finished_marker.read(plan(checkpoint=checkpoint, uid="other")) is None
    finished_marker.marker_path(plan(checkpoint=checkpoint)).write_text("{")
    assert finished_marker.read(plan(checkpoint=checkpoint)) is None
