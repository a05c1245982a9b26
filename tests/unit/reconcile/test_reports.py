"""Tests of what the trainer's reports change: untrusted input that must not stop a reconcile."""

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from dlcontract import Failure, RunPhase
from dljob.status import find
from support.builders import after, report
from support.job_lifecycle import OUTCOME, condition_of, status, step, training, verdict

FAILURE = Failure(reason="ProgramFailed", message="the program ended", rank=1, exit_code=1)


def _numbers(node: Any, place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the paths of the numbers in a JSON document."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield from _numbers(value, (*place, key))
    if isinstance(node, int | float) and not isinstance(node, bool):
        yield place


def _other_uid(text: str) -> str:
    return json.dumps({**json.loads(text), "uid": "another"})


class TestReports:
    """Reports are untrusted input."""

    @pytest.mark.parametrize(
        ("broken", "words"),
        [
            (lambda text: "no JSON", "JSON"),
            (lambda text: text.replace('"schema":1', '"schema":2'), "schema"),
            (lambda text: json.dumps({**json.loads(text), "step": -1}), "step"),
            (lambda text: json.dumps({**json.loads(text), "phase": "Owned"}), "phase"),
            (lambda text: "[" * 10_000, "recursion"),
            (lambda text: " " * (2**20 + 1), "1048576"),
        ],
    )
    def test_invalid_report_is_ignored_and_shown(self, broken: Callable[[str], str], words: str) -> None:
        observed = training()
        assert observed.report is not None
        desired = step(replace(observed, report=broken(observed.report)))
        assert verdict(desired, "ReportValid") == ("False", "InvalidReport")
        assert words in condition_of(desired, "ReportValid").message
        before = observed.job.status
        assert status(desired).manifest()["progress"] == before["progress"]
        assert (desired.scales, desired.deletes) == ((), ())

    @pytest.mark.parametrize("huge", [10**400, 2**53, 2**53 - 1, 10**12, 250_000_000_000, 10**9, 1e308, 1e15, 5e-324])
    def test_huge_numbers_in_reports_do_not_stop_a_reconcile(self, huge: float) -> None:
        """With any value in place of a number, the status is still written and the end of the job is still detected."""
        observed = training()
        checkpoint: dict[str, object] = {"step": 1, "unix_s": 1.0}
        measures: list[dict[str, object]] = [{"rank": 0, "share": 1, "compute_s": 1.0}]
        for phase in (RunPhase.RUNNING, RunPhase.SUCCEEDED):
            valid = json.loads(
                report(observed, phase, last_checkpoint=checkpoint, ranks=measures, outcome=OUTCOME, restarts={"A": 1},
                       failure=FAILURE, link_latency_s=1.0, link_bandwidth_Bps=1.0, samples_per_s=1.0, loss=1.0,
                       startup={"first_step_unix_s": 1.0}, probes=[{"device": "cpu", "batch": 1, "compute_s": 1.0}])
            )  # fmt: skip
            for place in _numbers(valid):
                claimed = copy.deepcopy(valid)
                holder = claimed
                for part in place[:-1]:
                    holder = holder[part]
                holder[place[-1]] = huge
                status(step(replace(observed, report=json.dumps(claimed))))

    def test_result_shows_the_analysis_and_the_findings(self) -> None:
        observed = training()
        analysis = {
            "task": "classification", "samples": 360, "metric": "accuracy", "value": 0.97222222222, "baseline": 0.1,
            "calibration_error": 0.0123456, "worst_classes": [{"name": "8", "f1": 0.84931506, "samples": 40}],
            "other_models": [{"name": "trees", "value": 0.96388888888}],
        }  # fmt: skip
        findings = [{"name": "Overfitting", "message": "The loss is 0.1 and 0.4. Stop earlier"}]
        outcome = OUTCOME.model_dump(mode="json") | {"analysis": analysis, "findings": findings}
        shown = status(step(replace(observed, report=report(observed, RunPhase.SUCCEEDED, outcome=outcome)))).result
        assert shown is not None and shown.analysis is not None
        assert shown.manifest()["analysis"] == {
            "task": "classification", "samples": 360, "metric": "accuracy", "value": 0.972222, "baseline": 0.1,
            "calibrationError": 0.0123, "worstClasses": [{"name": "8", "f1": 0.8493, "samples": 40}],
            "otherModels": [{"name": "trees", "value": 0.963889}],
        }  # fmt: skip
        assert shown.comparison == "this model: accuracy 0.9722, better than trees (0.9639)"
        assert shown.manifest()["findings"] == findings
        earlier = status(step(replace(observed, report=report(observed, RunPhase.SUCCEEDED, outcome=OUTCOME)))).result
        assert earlier is not None and "analysis" not in earlier.manifest() and "findings" not in earlier.manifest()

    def test_unknown_fields_of_a_newer_trainer_are_ignored(self) -> None:
        observed = training()
        measures: list[dict[str, object]] = [{"rank": 0, "share": 1, "compute_s": 1.0}]
        newer = json.loads(report(observed, RunPhase.SUCCEEDED, ranks=measures, outcome=OUTCOME))
        for part in (newer, newer["ranks"][0], newer["outcome"]):
            part["of_a_later_version"] = 1
        desired = step(replace(observed, report=json.dumps(newer)))
        assert verdict(desired, "Complete") == ("True", "Complete")
        assert find(status(desired).conditions, "ReportValid") is None

    @pytest.mark.parametrize("samples", ["-1.0", "NaN", "1e400", "1e15", '"many"', "null"])
    def test_invalid_noise_scale_is_ignored_and_updates_no_profile(self, samples: str) -> None:
        observed = training()
        noise = {"samples": 77.0, "steps": 500}
        text = report(observed, RunPhase.SUCCEEDED, outcome=OUTCOME, noise=noise, step_s=0.5)
        desired = step(replace(observed, report=text.replace('"samples":77.0', f'"samples":{samples}')))
        assert verdict(desired, "Complete") == ("True", "Complete")
        assert verdict(desired, "ReportValid") == ("False", "InvalidNoiseScale")
        message = condition_of(desired, "ReportValid").message
        assert message.startswith("the noise scale of this run is ignored: noise.samples: ") and "\n" not in message
        assert desired.measurements is not None and desired.measurements.report.noise is None
        measured = status(desired).measured
        assert measured is not None and measured.noise_scale is None

    def test_valid_report_resets_the_condition(self) -> None:
        observed = training()
        broken = replace(observed, report="{}")
        again = replace(after(broken, step(broken)), report=observed.report)
        assert verdict(step(again), "ReportValid") == ("True", "Valid")

    @pytest.mark.parametrize("phase", [RunPhase.SUCCEEDED, RunPhase.FAILED])
    def test_report_of_another_job_does_not_end_the_job(self, phase: RunPhase) -> None:
        observed = training()
        desired = step(replace(observed, report=_other_uid(report(observed, phase))))
        assert status(desired).completion_time is None
        assert desired.scales == ()

    @pytest.mark.parametrize("phase", [RunPhase.SUCCEEDED, RunPhase.FAILED])
    def test_report_for_another_plan_does_not_end_the_job(self, phase: RunPhase) -> None:
        observed = training()
        desired = step(replace(observed, report=report(observed, phase, plan_number=7)))
        assert status(desired).completion_time is None
        assert desired.scales == ()
