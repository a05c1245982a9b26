"""Tests of jobs whose pods or ranks stop, with real agents: output, grace period, repeated steps, and waits."""

import gzip
import os
import re
import shutil
from typing import Any

import pytest

from dlcontract import CheckpointRef, ModelRef, RunPhase
from dltrain.record.run_report.document import Document
from support.trainer.debugger import debugging
from support.trainer.pods import KILL, TERM, UID, Job, leave, logged_rank
from support.trainer.ranks import speaking

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(os.getuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2 for namespaces"),
]
NO_TORCH = {"DLTRAIN_IMPORT_AHEAD": "off"}
NO_VOLUME = CheckpointRef(enabled=False)


def stored(job: Job) -> dict[str, bytes]:
    """Return the files that outlive the pods, as in the ConfigMap JOB-logs."""
    folder = job.report_file.with_suffix(".logs")
    return {path.name: gzip.decompress(path.read_bytes()) for path in folder.glob("*.gz")}


def test_output_is_stored_when_the_operator_stops_the_pods(two: Job) -> None:
    """The operator ends a job at its deadline, for example. Without a volume, nothing else stores the output."""
    checkpoint = CheckpointRef(enabled=False, directory=str(two.checkpoints))
    two.start(two.plan(speaking("4000", "mpi=1"), checkpoint=checkpoint), **NO_TORCH)
    two.until(lambda r: r.step >= 1)
    assert stored(two) == {}
    assert leave(two) == [143, 143]
    files = stored(two)
    for rank in range(2):
        assert f"rank {rank} of 2 is process" in files[f"rank-{rank}.log.gz"].decode()
    assert Document.parse(files["report.json.gz"]).phase is RunPhase.STOPPED


def test_pod_that_is_stopped_while_its_agent_is_imported_ends_at_once(two: Job) -> None:
    """The agent is PID 1, for which the kernel discards signals without a handler."""
    pod = two.pods[0]
    imported, module = pod.directory / "tmp/imported", pod.directory / "tmp/prometheus_client.py"
    module.write_text(f"import pathlib, signal\npathlib.Path('{imported}').touch()\nwhile True: signal.pause()\n")
    pod.start(PYTHONPATH=f"{module.parent}:{pod.environ['PYTHONPATH']}")
    two.wait(imported.exists)
    pod.signal(TERM)
    assert pod.wait() == 0


def test_stop_of_all_pods_is_no_restart_even_if_that_of_the_coordinator_stops_last(two: Job) -> None:
    two.start(two.plan(speaking("4000", "mpi=1"), grace_s=600), **NO_TORCH)
    two.until(lambda r: r.step >= 1)
    two.pods[1].signal(TERM)
    two.until(lambda r: r.phase is RunPhase.RESTARTING)
    two.pods[0].signal(TERM)
    assert [pod.wait() for pod in two.pods] == [143, 143]
    report = two.report
    assert report is not None and report.phase is RunPhase.STOPPED and report.restarts == {}


def test_output_of_ranks_that_have_to_be_killed_is_stored(two: Job) -> None:
    command = ["sh", "-c", "trap '' TERM; echo I stay; while true; do sleep 1; done"]
    two.start(two.plan(command, checkpoint=NO_VOLUME, grace_s=6.0), **NO_TORCH)
    two.until(lambda r: r.phase is RunPhase.RUNNING)
    two.wait(lambda: all("I stay" in pod.text() for pod in two.pods))
    leave(two)
    assert b"I stay" in stored(two)["rank-0.log.gz"]


def test_pods_that_stop_before_the_first_launch_do_not_replace_stored_output(two: Job) -> None:
    folder = two.report_file.with_suffix(".logs")
    folder.mkdir()
    (folder / "rank-0.log.gz").write_bytes(gzip.compress(b"before"))
    two.put(two.plan(speaking("4000")))
    two.pods[0].start(**NO_TORCH)  # It waits for the second pod.
    two.until(lambda r: r.phase is RunPhase.WAITING)
    two.pods[0].signal(15)
    two.pods[0].wait()
    assert stored(two) == {"rank-0.log.gz": b"before"}


def test_coordinator_that_launched_nothing_adds_output_to_what_is_stored(three: Job) -> None:
    """Pod 0 is drained and stores all output. Its successor gets the output of pod 1 again, and waits for pod 2."""
    start_and_hear(three)
    first, _, third = three.pods
    term = three.until(lambda r: r.term).term
    first.signal(TERM)
    first.wait()
    before = stored(three)
    assert before.keys() == {*(f"rank-{rank}.log.gz" for rank in range(3)), "report.json.gz", "report.html.gz"}
    third.kill()
    start_first_and_stop_before_a_launch(three, term)
    assert stored(three) == before


def start_and_hear(job: Job, **fields: Any) -> None:
    """Start a job whose ranks print a line, and wait until each pod's agent has read it."""
    command = ["sh", "-c", "echo I am rank $RANK; while true; do sleep 1; done"]
    model = ModelRef(command=tuple(command), framework="Torchrun")
    job.start(job.plan(model=model, checkpoint=NO_VOLUME, **fields), **NO_TORCH)
    job.until(lambda r: r.phase is RunPhase.RUNNING)
    job.wait(lambda: all(f"I am rank {i}" in pod.text() for i, pod in enumerate(job.pods)))


def start_first_and_stop_before_a_launch(job: Job, term: int) -> None:
    """Start the first pod again, whose ranks wait for the third, and stop both pods when the second has sent its output.

    ``term``: that of the coordinator before.
    """
    first, second, _ = job.pods
    first.start(**NO_TORCH)
    job.until(lambda r: r.term > term)
    job.wait(lambda: "sent the output of 1 ended ranks to the coordinator again" in second.text())
    for pod in (first, second):
        pod.signal(TERM)
    first.wait()
    second.wait()


def test_next_coordinator_stores_the_output_that_the_lost_one_never_got(three: Job) -> None:
    """The members keep the output of their ranks, and send it to the coordinator that comes next."""
    start_and_hear(three)
    first, _, third = three.pods
    term = three.until(lambda r: r.term).term
    for pod in (first, third):
        pod.kill()
    start_first_and_stop_before_a_launch(three, term)
    files = stored(three)
    assert b"I am rank 1" in files["rank-1.log.gz"]
    assert files.keys() <= {"rank-1.log.gz", "report.json.gz", "report.html.gz"}


def test_pod_stores_the_output_of_its_ranks_itself_if_no_coordinator_is_left(two: Job) -> None:
    start_and_hear(two)
    folder = two.report_file.with_suffix(".logs")
    folder.mkdir()
    (folder / "rank-0.log.gz").write_bytes(gzip.compress(b"before"))
    os.chown(folder, UID, 0)
    first, second = two.pods
    first.kill()
    two.wait(lambda: "the connection to the coordinator ended" in second.text())
    second.signal(TERM)
    assert second.wait() == 143
    files = stored(two)
    assert b"I am rank 1" in files["rank-1.log.gz"]
    assert files["rank-0.log.gz"] == b"before", "a pod replaces only the output of its own ranks"


def test_stop_without_a_checkpoint_is_in_the_report(two: Job) -> None:
    two.start(two.plan(speaking("4000", "mpi=1", "skip=1")), **NO_TORCH)
    two.until(lambda r: r.step >= 1)
    leave(two)
    report = two.report
    assert report is not None and report.checkpoints_skipped == 1 and report.last_checkpoint is None
    assert Document.parse(stored(two)["report.json.gz"]).totals.checkpoints_skipped == 1


@pytest.mark.long
def test_steps_that_are_done_twice_are_in_the_report(two: Job) -> None:
    two.start(two.plan(speaking("4000", "mpi=1", "back=3")), **NO_TORCH)
    two.until(lambda r: r.step >= 10)
    os.kill(logged_rank(two.pods[1], 1), KILL)
    report = two.until(lambda r: r.restarts and r.phase is RunPhase.RUNNING and r.steps_repeated)
    assert 1 <= report.steps_repeated <= 3
    for pod in two.pods:
        pod.kill()
        pod.start(**NO_TORCH)
    later = two.until(lambda r: r.term > report.term and r.steps_repeated > report.steps_repeated)
    assert later.steps_repeated >= report.steps_repeated + 1


@pytest.mark.long
def test_report_says_that_a_killed_rank_has_not_ended(two: Job) -> None:
    """A debugger holds the rank, as a volume that does not answer would. The job goes on when it lets go."""
    two.start(two.plan(speaking("400", "mpi=1")), **NO_TORCH)
    two.until(lambda r: r.step >= 1)
    debugger = debugging(logged_rank(two.pods[1], 1))
    try:
        os.kill(logged_rank(two.pods[0], 0), KILL)
        report = two.until(lambda r: r.waits_for is not None and "killed" in r.waits_for)
        text = re.sub(r"process \d+", "process N", report.waits_for or "")
        assert text == "pod test-cpu-1: killed, but not ended: rank 1 (process N, state Z)"
        assert report.phase is RunPhase.RESTARTING
    finally:
        debugger.kill()
        debugger.wait()
    report = two.until(lambda r: r.phase is RunPhase.RUNNING and r.restarts)
    assert report.waits_for is None and report.restarts == {"RankKilled": 1}
