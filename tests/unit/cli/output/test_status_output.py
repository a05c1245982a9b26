"""Tests of what the command line prints of jobs: ``top``, ``run``, ``logs`` and ``report``."""

import asyncio
import base64
import gzip
from pathlib import Path
from typing import Any

import pytest

from dljob.cli import main
from dljob.cli.commands import records
from dljob.cli.commands.top import lines
from dljob.cli.follow import Follower
from dljob.client.output.records import MAX_UNPACKED_NBYTES, attempts_of, outputs_of, report_of
from dljob.kube import Api, ApiError
from dljob.kube.kinds import CONFIG_MAP, Kind

ROOT = Path(__file__).resolve().parents[4]
DIGITS = str(ROOT / "examples/digits.yaml")


def job(phase: str, generation: int = 1, **status: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "j", "namespace": "n", "generation": generation},
        "spec": {},
        "status": {"phase": phase, "observedGeneration": generation, **status},
    }


PREDICTED = {"stepSeconds": 0.012, "stepSecondsP90": 0.02, "totalSeconds": 60, "samplesPerSecond": 1000}
PLAN = {
    "number": 1, "digest": "d", "summary": "3 x cpu, Ring, 32+32+32", "nodes": 3, "ranks": 3, "collective": "Ring",
    "predicted": PREDICTED,
    "candidates": [{"summary": "3 x cpu", "chosen": True, "predicted": PREDICTED}],
    "rejected": [{"summary": "1 x t4", "reason": "no free device"}],
}  # fmt: skip


class TestTop:
    def test_top_prints_a_line_per_job(self) -> None:
        running = job(
            "Running", plan=PLAN, nodes=3, ready="3/3", remaining="1m", restarts=2,
            progress={"step": 50, "steps": 200, "percent": 25},
            measured={"stepSeconds": 0.010, "samplesPerSecond": 9600, "stepError": 0.2},
        )  # fmt: skip
        pending = job("Pending")
        pending["metadata"]["name"] = "a"
        head, first, second = lines([running, pending], with_namespace=True)
        assert head.split()[:3] == ["NAME", "PHASE", "NODES"]
        assert first.split() == ["n/a", "Pending", "0", "0/0", "-", "-", "-", "-", "-", "-", "0"]
        assert second.split() == [
            "n/j", "Running", "3", "3/3", "25", "%", "100", "10ms", "12ms", "+20", "%", "1m", "2",
        ]  # fmt: skip

    def test_rates_are_shown_on_request(self) -> None:
        measured = {"stepSeconds": 0.010, "samplesPerSecond": 9600, "stepError": 0.2}
        running, pending = job("Running", plan=PLAN, measured=measured), job("Pending")
        pending["metadata"]["name"] = "a"
        head, first, second = lines([running, pending], with_namespace=False, with_rates=True)
        assert head.split()[-4:] == ["SAMPLES/S", "PER", "STEP", "S"]
        assert (first.split()[-2:], second.split()[-2:]) == (["-", "-"], ["9600", "960000"])

    def test_queues_are_shown_if_a_job_is_in_one(self) -> None:
        queued, other = job("Suspended"), job("Running")
        queued["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "team-a"}
        other["metadata"]["name"] = "z"
        head, first, second = lines([queued, other], with_namespace=False)
        assert (head.split()[-1], first.split()[-1], second.split()[-1]) == ("QUEUE", "team-a", "-")

    def test_place_and_start_are_shown_if_a_job_waits(self) -> None:
        queue = {"position": 2, "jobs": 7, "forecastStart": "2026-03-01T12:16:40Z"}
        waits, unknown, other = (
            job("Pending", queue=queue),
            job("Pending", queue={"position": 3, "jobs": 7}),
            job("Running"),
        )
        unknown["metadata"]["name"], other["metadata"]["name"] = "k", "z"
        head, *rows = lines([waits, unknown, other], with_namespace=False)
        assert head.split()[-2:] == ["PLACE", "STARTS"]
        assert [row.split()[-2:] for row in rows] == [["2/7", "2026-03-01T12:16Z"], ["3/7", "?"], ["-", "-"]]

    def test_preemptions_are_shown_if_a_job_was_preempted(self) -> None:
        first, other = job("Pending", preemptions=2), job("Running")
        other["metadata"]["name"] = "z"
        head, *rows = lines([first, other], with_namespace=False)
        assert [line.split()[-1] for line in (head, *rows)] == ["PREEMPTED", "2", "0"]

    def test_rest_is_shown_if_it_leaves_devices_free(self) -> None:
        condition = {"type": "Resizing", "status": "False", "reason": "Resting", "message": "m",
                     "observedGeneration": 1, "lastTransitionTime": "2026-01-01T00:05:30Z"}  # fmt: skip
        first, other = job("Running", conditions=[condition]), job("Running")
        other["metadata"]["name"] = "z"
        head, *rows = lines([first, other], with_namespace=False)
        assert head.split()[-2:] == ["RESTS", "UNTIL"]
        assert [row.split()[-1] for row in rows] == ["2026-01-01T00:15Z", "-"]

    def test_fields_of_a_later_release_are_ignored(self) -> None:
        """Fixed bug: jobs of an operator of a later release had a question mark."""
        assert lines([job("Running", added={"a": 1}, plan={**PLAN, "added": 1})], False)[1].split()[1] == "Running"

    def test_status_of_another_version_is_shown_as_a_question_mark(self) -> None:
        odd = job("Sleeping")
        assert lines([odd], with_namespace=False)[1].split()[:2] == ["j", "?"]


class TestFollow:
    @pytest.mark.parametrize(("reason", "said"), [("Queued", True), ("NoKueue", True), ("Starting", False)])
    def test_wait_in_a_queue_is_printed(self, reason: str, said: bool, capsys: pytest.CaptureFixture[str]) -> None:
        condition = {"type": "Admitted", "status": "False", "reason": reason, "message": "waits for quota",
                     "observedGeneration": 1, "lastTransitionTime": "2026-01-01T00:00:00Z"}  # fmt: skip
        assert Follower(1).look(job("Suspended", conditions=[condition])) is None
        assert (f"not Admitted ({reason}): waits for quota" in capsys.readouterr().out) is said

    def test_each_change_is_printed_once(self, capsys: pytest.CaptureFixture[str]) -> None:
        follower = Follower(1)
        condition = {"type": "Planned", "status": "True", "reason": "Planned", "message": "plan 1: 3 x cpu",
                     "observedGeneration": 1, "lastTransitionTime": "2026-01-01T00:00:00Z"}  # fmt: skip
        starting = job("Starting", plan=PLAN, conditions=[condition])
        assert follower.look(starting) is None
        assert capsys.readouterr().out == "Planned (Planned): plan 1: 3 x cpu\nphase Starting\n"
        assert follower.look(starting) is None
        assert capsys.readouterr().out == ""
        running = job(
            "Running", plan=PLAN, conditions=[condition], remaining="20s", restarts=1, restartsByCause={"PeerLost": 1},
            progress={"step": 50, "steps": 100, "percent": 50, "loss": 0.25, "accuracy": 0.9},
            measured={"stepSeconds": 0.010, "samplesPerSecond": 9600},
        )  # fmt: skip
        assert follower.look(running) is None
        assert capsys.readouterr().out.splitlines() == [
            "phase Running",
            "ranks restarted; restarts: 1; faults by cause: PeerLost 1",
            " 50 %  step 50/100  loss 0.25  accuracy 90.0 %  step 10ms (predicted 12ms)  20s left",
        ]
        done = job("Complete", result={"steps": 100, "seconds": 3.5, "accuracy": 0.981})
        assert follower.look(done) == 0
        assert capsys.readouterr().out.splitlines()[-1] == "100 steps in 3.5s, accuracy 98.1 %"
        assert follower.look(job("Complete", result={"steps": 0, "seconds": 3.5})) == 0
        assert not capsys.readouterr().out, "the condition Complete says that the script reported no step"

    def test_end_of_a_job_shows_its_analysis_and_findings(self, capsys: pytest.CaptureFixture[str]) -> None:
        analysis = {"task": "classification", "samples": 360, "metric": "accuracy", "value": 0.9722, "baseline": 0.1194,
                    "calibrationError": 0.0213, "worstClasses": [{"name": "8", "f1": 0.8493, "samples": 40}],
                    "otherModels": [{"name": "linear model", "value": 0.96}]}  # fmt: skip
        findings = [{"name": "Overfitting", "message": "The loss is 0.1 and 0.4. Stop earlier"}]
        text = "this model: accuracy 0.9722, better than linear model (0.96)"
        result = {"steps": 100, "seconds": 3.5, "analysis": analysis, "findings": findings, "comparison": text}
        assert Follower(1).look(job("Complete", result=result)) == 0
        assert capsys.readouterr().out.splitlines()[-3:] == [
            "held-out accuracy 0.9722, without inputs 0.1194, linear model 0.96, calibration error 0.021, class 8: F1 0.849",
            text,
            "Overfitting: The loss is 0.1 and 0.4. Stop earlier",
        ]

    def test_steps_of_an_unknown_number_are_printed_as_they_grow(self, capsys: pytest.CaptureFixture[str]) -> None:
        follower = Follower(1)
        for number in (1000, 1001, 1101, 1102):
            follower.look(job("Running", progress={"step": number, "display": f"step {number}"}))
        assert capsys.readouterr().out.splitlines() == ["phase Running", "step 1000", "step 1101"]

    def test_move_is_printed_and_looks_for_a_better_plan_are_not(self, capsys: pytest.CaptureFixture[str]) -> None:
        follower = Follower(1)
        condition = {"type": "Resizing", "status": "False", "reason": "NotWorthwhile", "message": "1 s sooner",
                     "observedGeneration": 1, "lastTransitionTime": "2026-01-01T00:00:00Z"}  # fmt: skip
        follower.look(job("Running", conditions=[condition]))
        moves = {**condition, "status": "True", "reason": "BetterPlan", "message": "from 2 x cpu to 3 x cpu"}
        follower.look(job("Running", conditions=[moves]))
        assert capsys.readouterr().out == "phase Running\nResizing (BetterPlan): from 2 x cpu to 3 x cpu\n"

    def test_status_of_a_later_release_is_followed(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Fixed bug: a new field of the status ended the command with exit code 1, and the job went on."""
        follower = Follower(1)
        assert follower.look(job("Running", added={"a": 1}, plan={**PLAN, "added": "text"})) is None
        assert follower.look(job("Migrating", added={"a": 1})) is None
        assert follower.look(job("Complete", result={"steps": 5, "seconds": 1, "added": []})) == 0
        said = capsys.readouterr().out.splitlines()
        assert said == ["phase Running", "phase Migrating", "phase Complete", "5 steps in 1s"]

    def test_each_upload_of_a_script_is_printed_once(self, capsys: pytest.CaptureFixture[str]) -> None:
        follower = Follower(1)
        saved = {"time": "2026-11-23T06:00:00Z", "name": "checkpoint-500", "bytes": 1_200_000, "writeSeconds": 2.5}
        for upload in (saved, saved, {**saved, "time": "2026-11-23T06:01:00Z", "step": 900}):
            follower.look(job("Running", lastCheckpoint=upload))
        follower.look(job("Running", lastCheckpoint={"time": "2026-11-23T06:02:00Z", "step": 1}))
        assert capsys.readouterr().out.splitlines()[1:] == [
            "checkpoint checkpoint-500 is in the object store, 1.2 MB in all, uploaded in 2.5s",
            "checkpoint checkpoint-500 is in the object store, step 900, 1.2 MB in all, uploaded in 2.5s",
        ]

    def test_failed_job_gives_exit_code_1(self) -> None:
        assert Follower(1).look(job("Failed")) == 1

    def test_status_of_an_earlier_generation_is_not_printed(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert Follower(2).look(job("Complete", generation=1)) is None
        assert capsys.readouterr().out == ""

    def test_plan_only_job_ends_with_the_plan(self, capsys: pytest.CaptureFixture[str]) -> None:
        planned = job("Planned", plan=PLAN)
        planned["spec"] = {"planning": {"mode": "PlanOnly"}}
        assert Follower(1).look(planned) == 0
        text = capsys.readouterr().out
        assert "* 3 x cpu: 12ms a step" in text
        assert "- 1 x t4: no free device" in text and "links" not in text
        planned["status"]["plan"] = {**PLAN, "links": "between nodes 10 Gbit/s, 60us (an assumed network)"}
        assert Follower(1).look(planned) == 0
        assert "links: between nodes 10 Gbit/s, 60us (an assumed network)" in capsys.readouterr().out.splitlines()


def test_logs_are_unpacked_by_rank() -> None:
    packed = {
        f"rank-{rank}.log.gz": base64.b64encode(gzip.compress(f"rank {rank}\n".encode())).decode() for rank in (10, 2)
    }
    assert list(outputs_of({"binaryData": {**packed, "other": "AA=="}}).items()) == [(2, "rank 2\n"), (10, "rank 10\n")]
    assert outputs_of({}) == {}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"attempt": b"2.3"}, {0: "2.3", 1: "2.3"}),
        ({"attempt": b"2.3", "earlier-attempts.json": b'{"rank-1.log.gz": "1.1"}'}, {0: "2.3", 1: "1.1"}),
        ({"attempt": b"2.3", "earlier-attempts.json": b"{"}, {0: "2.3", 1: "2.3"}),
        ({"attempt": b"2.3", "earlier-attempts.json": b"[]"}, {}),
        ({"attempt": b"2.3", "earlier-attempts.json": b'{"rank-1.log.gz": 1.1}'}, {0: "2.3"}),
        ({"attempt": b"\x1b[2J"}, {}),
        ({}, {}),
    ],
    ids=["one attempt", "two attempts", "cut", "a list", "a number", "control characters", "an older image"],
)
def test_attempt_of_each_rank_is_read(files: dict[str, bytes], expected: dict[int, str]) -> None:
    """Pods without a coordinator store only the output of their own ranks, beside that of earlier attempts."""
    names = {f"rank-{rank}.log.gz": b"" for rank in range(2)} | {"report.json.gz": b""} | files
    assert (
        attempts_of({"binaryData": {name: base64.b64encode(data).decode() for name, data in names.items()}}) == expected
    )


@pytest.mark.parametrize("given", [[], ["--rank", "1"]])
def test_logs_say_the_attempt_of_each_rank(
    given: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = {f"rank-{rank}.log.gz": gzip.compress(f"I am {rank}\n".encode()) for rank in range(2)}
    files = {**texts, "attempt": b"2.3", "earlier-attempts.json": b'{"rank-1.log.gz": "1.1"}'}
    stored = {"binaryData": {name: base64.b64encode(data).decode() for name, data in files.items()}}
    monkeypatch.setattr(records.remote, "reach", lambda _: stored)
    assert main(["logs", "digits", "-n", "mine", *given]) == 0
    found = capsys.readouterr()
    if given:
        assert found.out == "I am 1\n" and "attempt 1.1" in found.err
    else:
        assert found.out == "=== rank 0 (attempt 2.3)\nI am 0\n=== rank 1 (attempt 1.1)\nI am 1\n"


def test_damaged_output_is_named_after_that_of_the_other_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fixed bug: the command ended with a traceback of zlib."""
    files = {"rank-0.log.gz": b"no gzip", "rank-1.log.gz": gzip.compress(b"I am 1\n"), "report.html.gz": b"no gzip"}
    stored = {"binaryData": {name: base64.b64encode(data).decode() for name, data in files.items()}}
    monkeypatch.setattr(records.remote, "reach", lambda _: {"metadata": {"name": "digits-logs"}, **stored})
    assert main(["logs", "digits", "-n", "mine"]) == 2
    found = capsys.readouterr()
    assert "I am 1\n" in found.out and "rank-0.log.gz in ConfigMap digits-logs: found a damaged entry" in found.err
    assert main(["logs", "digits", "-n", "mine", "--rank", "1"]) == 0
    assert main(["report", "digits", "-n", "mine", "-o", "-"]) == 2
    assert "report.html.gz in ConfigMap digits-logs: found a damaged entry" in capsys.readouterr().err


def test_output_that_unpacks_to_more_memory_than_there_is_is_cut() -> None:
    """The pods of the job, and whoever may edit ConfigMaps, write it."""
    bomb = base64.b64encode(gzip.compress(bytes(2**27), 1)).decode()
    body = {"binaryData": {"rank-0.log.gz": bomb, "report.html.gz": bomb}}
    assert len(outputs_of(body)[0]) == len(report_of(body, "html") or "") == MAX_UNPACKED_NBYTES


def stored_report(**files: str) -> dict[str, Any]:
    data = {
        f"report.{kind}.gz": base64.b64encode(gzip.compress(text.encode())).decode() for kind, text in files.items()
    }
    return {"binaryData": data}


def test_report_is_unpacked_and_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    body = stored_report(html="<html/>", json="{}")
    assert (report_of(body, "html"), report_of(body, "json"), report_of({}, "html")) == ("<html/>", "{}", None)
    monkeypatch.setattr(records.remote, "reach", lambda _: body)
    monkeypatch.chdir(tmp_path)
    assert main(["report", "digits", "-n", "a"]) == 0
    assert (
        tmp_path / "digits-report.html"
    ).read_text() == "<html/>" and capsys.readouterr().out == "digits-report.html\n"
    assert main(["report", "digits", "-n", "a", "--json", "-o", "-"]) == 0
    assert capsys.readouterr().out == "{}"
    assert main(["report", "digits", "-n", "a", "-o", "no/such/folder/x"]) == 2
    assert "--output: found no/such/folder/x, which cannot be written" in capsys.readouterr().err


def test_job_without_a_stored_report_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(records.remote, "reach", lambda _: {})
    assert main(["report", "digits", "-n", "a"]) == 2
    assert "digits: found no run report in ConfigMap digits-logs of namespace a" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["logs", "report"])
@pytest.mark.parametrize("code", [404, 403])
def test_name_of_no_job_is_named(
    command: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fixed bug: for a wrong name, the commands expected a job that has ended."""

    class NoObjects(Api):
        def __init__(self) -> None:
            pass

        async def get(self, kind: Kind, namespace: str, name: str) -> Any:
            raise ApiError(404 if kind is CONFIG_MAP else code, "NotFound", f"{kind.plural} {name}")

    monkeypatch.setattr(records.remote, "reach", lambda work: asyncio.run(work(NoObjects())))
    assert main([command, "digits", "-n", "a"]) == 2
    unnamed = "digits: found no DLJob with this name in namespace a; expected an existing job."
    assert (unnamed in (error := capsys.readouterr().err)) is (code == 404), error
