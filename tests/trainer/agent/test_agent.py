"""Tests of whole jobs from plan to report, with real agents, mpirun and ranks in separate namespaces."""

import gzip
import os
import re
import shutil
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dlcontract import (
    AGENT_PORT,
    FAILURES_KEY,
    METRICS_PORT,
    MPI_PORTS,
    ExitCodes,
    FailureAllowance,
    FailureRule,
    ModelRef,
    RunPhase,
)
from dltrain.protocol import volume_layout
from dltrain.protocol.agent_messages import HEARTBEAT_S, SILENCE_S
from dltrain.protocol.volume_layout import logs_directory
from dltrain.record.run_report import files
from dltrain.record.run_report.document import Document
from support.trainer.pods import CONT, KILL, STOP, TERM, UID, Job, job, leave, logged_rank
from support.trainer.ranks import SPEAKING, speaking

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(os.getuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2 for namespaces"),
]
NO_TORCH = {"DLTRAIN_IMPORT_AHEAD": "off"}


def test_three_pods_train_and_restarted_pods_do_not_train_again(three: Job) -> None:
    three.start(three.plan(speaking("20", "mpi=1")), **NO_TORCH)
    report = three.until(lambda r: r.phase is RunPhase.SUCCEEDED)
    assert report.outcome is not None and report.outcome.accuracy == 0.5
    assert report.restarts == {} and report.failures == 0 and report.failure is None
    assert report.step == report.steps == 20 and [m.rank for m in report.ranks] == [0, 1, 2]
    marks = report.startup
    assert marks.agents_up_unix_s and marks.launched_unix_s and marks.rendezvous_unix_s and marks.first_step_unix_s
    assert marks.agents_up_unix_s < marks.launched_unix_s < marks.rendezvous_unix_s < marks.first_step_unix_s
    for rank, pod in enumerate(three.pods):
        assert f"[rank {rank}] rank {rank} of 3 is process" in pod.text()
        assert f"uid {UID}" in pod.text()
        three.wait(lambda pod=pod: pod.get("/readyz")[0] == 200)
        assert list((pod.directory / "tmp/dljob").glob("mpi/*")) == []

    families = {f.name: f for f in text_string_to_metric_families(three.pods[1].get("/metrics")[1])}
    assert [(s.labels, s.value) for s in families["dljob_trainer_step"].samples] == [({"rank": "1"}, 20.0)]
    job_metrics = {f.name: f for f in text_string_to_metric_families(three.pods[0].get("/metrics")[1])}
    assert {s.labels["phase"]: s.value for s in job_metrics["dljob_trainer_phase"].samples}["Succeeded"] == 1

    assert leave(three) == [0, 0, 0]
    three.report_file.unlink()
    for pod in three.pods:
        pod.start(**NO_TORCH)
    again = three.until(lambda r: r.phase is RunPhase.SUCCEEDED)
    assert again.outcome == report.outcome
    assert three.pods[0].text().count("rank 0 of 3 is process") == 1, "it was trained twice"


@pytest.mark.long
def test_built_in_model_from_the_zygote(two: Job) -> None:
    two.start(two.plan(steps=30))
    two.until(lambda r: r.step >= 1)
    for pod in two.pods:  # A fork of the zygote has its command line.
        assert sum("dltrain.launch.zygote" in line for line in pod.command_lines()) == 2, pod.command_lines()
    report = two.until(lambda r: r.phase is RunPhase.SUCCEEDED)
    families = {f.name: f for f in text_string_to_metric_families(two.pods[0].get("/metrics")[1])}
    parts = ["compute", "forward", "backward", "wait", "communication", "data", "sum", "fetch"]
    shown = [f"step_{part}_seconds" for part in parts] + [
        "samples_per_second", "throughput_per_latency", "loss", "accuracy_ratio", "learning_rate", "gradient_norm", "world_size",
        "gradient_bandwidth_bytes_per_second", "link_bandwidth_bytes_per_second", "checkpoint_duration_seconds",
        "checkpoint_timestamp_seconds", "checkpoint_cost_seconds", "checkpoint_interval_seconds", "parameters_agree",
    ]  # fmt: skip
    assert not [name for name in shown if not families[f"dljob_trainer_{name}"].samples], "every metric is exported"
    assert report.step == 30 and report.last_checkpoint is not None and report.world_size == 2
    assert report.probes and report.mismatches == ()
    assert report.outcome is not None and report.outcome.report is not None
    document = files.read(two.plan())
    assert document is not None and document.phase is RunPhase.SUCCEEDED and document.outcome is not None
    assert document.outcome.accuracy == report.outcome.accuracy and document.totals.checkpoints == 1
    assert document.points[-1].step == sum(point.steps for point in document.points) == 30
    assert [(rank.place, rank.steps) for rank in document.ranks] == [("test-cpu-0/0", 30), ("test-cpu-1/0", 30)]
    assert [attempt.size for attempt in document.attempts] == [2, 0] and document.faults == ()
    logs = logs_directory(two.plan())
    assert logs is not None
    for rank, pod in enumerate(two.pods):
        text = (logs / f"rank-{rank}.log").read_text()
        assert text.startswith("=== attempt ") and all(
            f"[rank {rank}] {line}" in pod.text() for line in text.splitlines()[1:]
        )
    stored = two.report_file.with_suffix(".logs")  # What outlives the pods in the ConfigMap JOB-logs.
    assert ElementTree.fromstring(gzip.decompress((stored / "report.html.gz").read_bytes())).findall(".//table")
    assert len(Document.parse(gzip.decompress((stored / "report.json.gz").read_bytes())).points) == len(document.points)
    page = ElementTree.parse(report.outcome.report)
    assert len(page.findall(".//table[@id='series']/tbody/tr")) == len(document.points)
    # mpirun warns about setpgid if it loses a harmless race with its child.
    assert not [
        line for pod in two.pods for line in pod.text().splitlines() if "Warning" in line and "setpgid" not in line
    ]


def test_killed_rank_is_restarted_in_the_same_pods(three: Job) -> None:
    three.start(three.plan(speaking("400", "mpi=1")), **NO_TORCH)
    three.until(lambda r: r.step >= 1)
    for pod in three.pods:  # The ports that the network policy allows.
        mpi = pod.listening() - {AGENT_PORT, METRICS_PORT}
        assert mpi and all(MPI_PORTS[0] <= port <= MPI_PORTS[1] for port in mpi), mpi
    os.kill(logged_rank(three.pods[1], 1), KILL)
    report = three.until(lambda r: r.restarts and r.phase is RunPhase.RUNNING)
    assert report.restarts == {"RankKilled": 1} and report.failures == 1
    assert report.failure is not None and report.failure.rank == 1 and report.failure.exit_code == 137
    assert report.failure.host == "test-cpu-1" and "process" in report.failure.log_tail
    assert all(pod.starts == 1 for pod in three.pods)


def test_hung_rank_is_detected_and_restarted(two: Job) -> None:
    two.start(two.plan(speaking("4000", "mpi=1")), **NO_TORCH)
    two.until(lambda r: r.step >= 1)
    os.kill(logged_rank(two.pods[1], 1), STOP)
    report = two.until(lambda r: r.phase is RunPhase.RUNNING and r.restarts)
    assert report.restarts == {"Hung": 1}


@pytest.mark.long
def test_failure_of_a_hung_rank_shows_its_stack(two: Job) -> None:
    """It is the rank that hangs, not the one that waits for it, whichever was silent for longer."""
    two.start(two.plan(["python", SPEAKING.replace("speaking_rank", "stuck")], backoff_limit=0))
    report = two.until(lambda r: r.phase is RunPhase.FAILED)
    failure = report.failure
    assert failure is not None and failure.reason == "Hung" and failure.rank == 1, failure
    assert failure.host == "test-cpu-1" and "t.busy(what, seconds)" in failure.message
    assert "stuck.py" in failure.log_tail and " in stuck\n" in failure.log_tail, failure.log_tail


def test_stopped_process_is_detected_even_while_busy(two: Job) -> None:
    """The processes are a rank that has announced an hour of work, and mpirun, which nothing waits for."""
    two.start(two.plan(speaking("4000", "mpi=1", "busy=3600")), **NO_TORCH)
    two.until(lambda r: r.step >= 1)
    two.wait(lambda: "busy from now on" in two.pods[1].text())
    os.kill(logged_rank(two.pods[1], 1), STOP)
    report = two.until(lambda r: r.phase is RunPhase.RUNNING and r.restarts)
    assert report.restarts == {"Hung": 1} and report.failure is not None
    assert report.failure.rank == 1 and report.failure.host == "test-cpu-1"
    (mpirun,) = [pid for pid in two.pods[0].pids() if Path(f"/proc/{pid}/comm").read_text().strip() == "prterun"]
    os.kill(mpirun, STOP)
    again = two.until(lambda r: sum(r.restarts.values()) == 2 and r.phase is RunPhase.RUNNING)
    assert again.restarts["Hung"] == 1 and all(pod.starts == 1 for pod in two.pods)


def test_exception_in_a_rank_reaches_the_report(two: Job) -> None:
    two.start(two.plan(speaking("40", "mpi=1", "fail_rank=1", "fail_step=5", "fail_code=1")), **NO_TORCH)
    report = two.until(lambda r: r.failure is not None)
    assert report.failure is not None and report.failure.reason == "TrainingError"
    assert report.failure.message == "ValueError: as requested" and report.failure.exit_code == 1
    assert "the traceback would be here" in report.failure.log_tail
    final = two.until(lambda r: r.phase is RunPhase.SUCCEEDED)
    assert final.restarts == {"TrainingError": 1}


def test_command_that_fails_at_once_fails_the_job(two: Job) -> None:
    plan = two.plan(["sh", "-c", "echo no such luck >&2; exit 1"], backoff_limit=1)
    two.start(plan, **NO_TORCH)
    first = two.until(lambda r: r.failure is not None)
    assert first.phase is RunPhase.RESTARTING and first.failures == 1
    report = two.until(lambda r: r.phase is RunPhase.FAILED)
    assert report.failures == 2 and report.restarts == {"RankFailed": 1}
    assert report.failure is not None and report.failure.log_tail.endswith("no such luck\n")
    assert report.failure.exit_code == 1 and "exit code 1" in report.failure.message
    stored = {path.name for path in two.report_file.with_suffix(".logs").iterdir()}
    # A rank that was ended before its first output, because the other one had failed, has no file.
    assert stored >= {"report.html.gz", "report.json.gz", f"rank-{report.failure.rank}.log.gz"}, stored
    assert leave(two) == [0, 0]


def test_out_of_memory_kills_the_rank_and_the_agent_reports_it(two: Job) -> None:
    two.pods[1].limit_memory(150 * 2**20)
    greedy = "import os\nif os.environ['RANK'] == '1': hog = bytearray(os.urandom(1)) * 2**28\nprint('fine')"
    two.start(two.plan(["python", "-c", greedy], backoff_limit=0), **NO_TORCH)
    report = two.until(lambda r: r.phase is RunPhase.FAILED)
    assert report.failure is not None and report.failure.reason == "OutOfMemory" and report.failure.rank == 1
    assert two.pods[1].starts == 1 and two.pods[1].get("/healthz")[0] == 200


def test_bad_input_fails_the_job_without_retry(two: Job) -> None:
    two.start(two.plan(["sh", "-c", "exit 64"]), **NO_TORCH)
    report = two.until(lambda r: r.phase is RunPhase.FAILED)
    assert report.failures == 1 and report.restarts == {}
    assert report.failure is not None and report.failure.reason == "BadInput" and not report.failure.retry


@pytest.mark.parametrize(
    "command",
    [["no-such-program"], pytest.param(["python", "/no/such/script.py"], marks=pytest.mark.long), ["/etc/passwd"]],
    ids=["program", "script", "not executable"],
)
def test_command_that_cannot_be_started_fails_the_job_at_once(two: Job, command: list[str]) -> None:
    """Fixed bug: the job restarted until backoffLimit, although a restart cannot help."""
    two.start(two.plan(command, backoff_limit=3), **NO_TORCH)
    report = two.until(lambda r: r.phase is RunPhase.FAILED)
    assert report.failure is not None and report.failure.reason == "CommandNotFound"
    assert report.failures == 1 and report.restarts == {}
    assert report.failure.message.startswith("found ") and "; expected " in report.failure.message
    assert Path(command[-1]).name in report.failure.message


def test_shell_that_finds_no_command_is_started_again(two: Job) -> None:
    """What it did not find may be there at the next attempt, such as a program on a volume."""
    two.start(two.plan(["sh", "-c", "no-such-program"], backoff_limit=1), **NO_TORCH)
    report = two.until(lambda r: r.phase is RunPhase.FAILED)
    assert report.failures == 2 and report.restarts == {"CommandNotFound": 1}


def test_forks_of_the_zygote_are_ordinary_programs() -> None:
    program = SPEAKING.replace("faults/speaking_rank", "scripts/ordinary_program")
    model = ModelRef(command=("python", "-u", program, "--flag", "a b", ""), framework="Torchrun")
    with job(1) as one:
        one.start(one.plan(model=model, backoff_limit=0, per_pod=2))
        report = one.until(lambda r: r.phase in (RunPhase.SUCCEEDED, RunPhase.FAILED))
        assert report.phase is RunPhase.SUCCEEDED, report.failure
        lines = one.pods[0].text().splitlines()
        assert sum("exit handlers ran" in line for line in lines) == 2
        drawn = [line.split()[-2:] for line in lines if "] random " in line]
        assert len({first for first, _ in drawn}) == len({second for _, second in drawn}) == 2, (
            "forks must not share a seed"
        )


WITHOUT_UPDATES = "silent_rank=2"
"""Rank 2 sends no progress update. The checkpoint needs that rank as well."""


def test_deleted_job_ends_well_within_the_grace_period(three: Job) -> None:
    """A rank that does not exit would use the whole grace period."""
    three.start(three.plan(speaking("4000", "mpi=1", WITHOUT_UPDATES), grace_s=600), **NO_TORCH)
    three.until(lambda r: r.step >= 1)
    own_mpi_files = [bool(list(pod.directory.glob("tmp/dljob/mpi/*/hwloc.sm"))) for pod in three.pods]
    assert all(own_mpi_files), (
        "each pod must have its own MPI files, because processes of different pods can have the same number"
    )
    assert leave(three) == [143, 143, 143]
    report = three.report
    assert report is not None and report.phase is RunPhase.STOPPED and report.last_checkpoint is not None
    assert report.failures == 0, f"{report.restarts}; {report.failure}"
    assert report.failure is None or report.failure.reason == "PodStopped"


def test_evicted_pod_stops_the_attempt_and_its_return_resumes_it(three: Job) -> None:
    three.start(three.plan(speaking("4000", "mpi=1"), grace_s=600), **NO_TORCH)
    running = three.until(lambda r: r.step >= 1)
    three.pods[2].signal(TERM)
    assert three.pods[2].wait() == 143
    report = three.until(lambda r: r.failure is not None and r.failure.reason == "PodStopped")
    assert report.failures == running.failures, f"{running.restarts} before, {report.restarts} after; {report.failure}"
    assert report.last_checkpoint is not None
    assert three.pods[0].get("/readyz")[0] == 503
    three.pods[2].start(**NO_TORCH)
    resumed = three.until(lambda r: r.phase is RunPhase.RUNNING and r.step > report.step)
    assert resumed.restarts == {"PodStopped": 1}
    assert three.pods[0].starts == 1


def test_job_waits_for_a_lost_pod(two: Job) -> None:
    two.start(two.plan(speaking("4000", "mpi=1")), **NO_TORCH)
    two.until(lambda r: r.step >= 1)
    two.pods[1].kill()
    report = two.until(lambda r: r.restarts)
    assert report.restarts == {"PodLost": 1} and report.failures == 0
    two.pods[1].start(**NO_TORCH)
    two.until(lambda r: r.phase is RunPhase.RUNNING and r.step > report.step)


def test_lost_coordinator_returns_with_a_higher_term(two: Job) -> None:
    two.start(two.plan(speaking("4000", "mpi=1")), **NO_TORCH)
    before = two.until(lambda r: r.step >= 1)
    two.pods[0].kill()
    two.pods[0].start(**NO_TORCH)
    report = two.until(lambda r: r.phase is RunPhase.RUNNING and r.term > before.term)
    assert report.restarts == {"CoordinatorLost": 1} and report.failures == 0
    assert two.pods[1].starts == 1


def test_term_survives_on_the_volume(two: Job) -> None:
    plan = two.plan(speaking("4000", "mpi=1"))
    claimed = volume_layout.job_directory(plan) / volume_layout.TERM
    claimed.parent.mkdir()
    claimed.write_text("7")
    two.start(plan, **NO_TORCH)
    assert two.until(lambda r: r.step >= 1).term == 8


def test_new_plan_takes_over_at_a_checkpoint(three: Job) -> None:
    command = speaking("4000", "mpi=1", WITHOUT_UPDATES)
    three.start(three.plan(command), **NO_TORCH)
    three.until(lambda r: r.step >= 1)
    three.put(three.plan(command, ranks=2, number=2))
    report = three.until(lambda r: r.plan_number == 2 and r.world_size == 2)
    assert report.phase is RunPhase.RUNNING and report.last_checkpoint is not None
    assert report.restarts == {} and report.failures == 0
    three.wait(lambda: three.pods[2].get("/readyz")[0] == 200)
    assert len(three.pods[2].pids()) == 2, "the agent and its zygote"

    same = three.plan(command, ranks=2, number=3)
    three.put(same)
    three.until(lambda r: r.plan_number == 3)
    assert three.pods[0].text().count("rank 0 of 2 is process") == 1, "the same training was launched again"


def test_two_ranks_in_a_pod_and_another_device_than_planned(two: Job) -> None:
    two.start(two.plan(speaking("5", "mpi=1", "device=other"), per_pod=2, ranks=3), **NO_TORCH)
    report = two.until(lambda r: r.phase is RunPhase.SUCCEEDED)
    assert {(m.rank, m.planned, m.found) for m in report.mismatches} == {(n, "cpu", "other") for n in range(3)}
    assert len(re.findall(r"rank [01] of 3 is process", two.pods[0].text())) == 2


def test_agent_reaps_what_ranks_leave_behind(two: Job) -> None:
    left = f"import os,sys; os.fork() or (os.setsid(), os.execv({sys.executable!r}, ['python','-c','pass']))"
    two.start(two.plan(["python", "-c", left]), **NO_TORCH)
    two.until(lambda r: r.phase is RunPhase.SUCCEEDED)
    for pod in two.pods:
        two.wait(lambda pod=pod: len(pod.pids()) == 2)


def test_misconfigured_agent_names_the_missing_variable(two: Job) -> None:
    pod = two.pods[0]
    pod.start(DLJOB_UID="")
    assert pod.wait() == 64
    assert "DLJOB_UID: found nothing; expected the job's uid" in pod.text()


def test_failure_rules_decide_what_exit_codes_lead_to(two: Job) -> None:
    rules = (
        FailureRule(action="Ignore", exit_codes=ExitCodes(values=(3,))),
        FailureRule(action="FailJob", exit_codes=ExitCodes(operator="NotIn", values=(3,))),
    )
    mark = f"{two.checkpoints}/mark-"
    first = f"test -e {mark}b && exit 7; test -e {mark}a && touch {mark}b; touch {mark}a; exit 3"
    command = ["sh", "-c", f"test $RANK = 0 || exec sleep 1000; {first}"]
    two.start(two.plan(command, backoff_limit=0, failure_rules=rules), **NO_TORCH)
    report = two.until(lambda r: r.phase is RunPhase.FAILED)
    assert report.restarts == {"RankFailed": 2} and report.failures == 1
    assert report.failure is not None and report.failure.exit_code == 7 and not report.failure.retry
    assert report.failure.message.endswith("spec.runPolicy.failureRules[1] says FailJob")


def test_last_failure_waits_for_the_operator_to_ignore_it(two: Job) -> None:
    allowance = two.plan_file.with_name(FAILURES_KEY)
    allowance.write_text(FailureAllowance(wait_s=60).model_dump_json())
    mark = f"{two.checkpoints}/mark-"
    first = f"test -e {mark}a || {{ touch {mark}a; exit 3; }}; until test -e {mark}b; do sleep 0.1; done; exit 4"
    command = ["sh", "-c", f"test $RANK = 0 || exec sleep 1000; {first}"]
    two.start(two.plan(command, backoff_limit=0), **NO_TORCH)
    report = two.until(lambda r: r.failures == 1)
    assert report.phase is RunPhase.RESTARTING and report.failure is not None and report.failure.counts
    allowance.write_text(FailureAllowance(ignored=1, wait_s=0.1).model_dump_json())
    two.until(lambda r: r.phase is RunPhase.RUNNING)
    Path(f"{mark}b").touch()
    report = two.until(lambda r: r.phase is RunPhase.FAILED)
    assert report.failures == 2 and report.restarts == {"RankFailed": 1}


@pytest.mark.long
def test_agent_that_gets_no_processor_time_is_not_lost(two: Job) -> None:
    """Its kernel acknowledges messages. A pod that has lost its network or power does not (test_shrink)."""
    two.start(two.plan(speaking("4000", "mpi=1")), **NO_TORCH)
    two.until(lambda r: r.step >= 1)
    agent = two.pods[1].pids()[0]
    os.kill(agent, STOP)
    silence_s = time.monotonic() + SILENCE_S + HEARTBEAT_S
    two.wait(lambda: time.monotonic() > silence_s)
    os.kill(agent, CONT)
    two.wait(lambda: "had no processor time" in two.pods[0].text())
    step = two.until(lambda r: r.step >= 1).step
    report = two.until(lambda r: r.step > step)
    assert report.restarts == {} and report.phase is RunPhase.RUNNING, two.logs()
    assert "Hung" not in two.pods[0].text()
