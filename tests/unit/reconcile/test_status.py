"""Status: transition times of conditions, the phase, events, and the smallest patch."""

import copy
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlcontract import CheckpointMark, RunPhase, StartupMarks
from dljob.api import Condition, ConditionStatus, Phase
from dljob.job.observed import Fetching, Observed, PodSeen, Stuck
from dljob.status import FALSE, TRUE, UNKNOWN, Verdict, events, merge_patch, pods_ready
from dljob.status.build import people
from dljob.status.conditions import MAX_MESSAGE, merge, phase
from dljob.status.events import MAX_MESSAGE as MAX_EVENT
from support.builders import CREATED, NOW, after, plan_of, report
from support.job_lifecycle import started, status, step

Json = dict[str, Any]


def conditions(*verdicts: Verdict, before: tuple[Condition, ...] = (), seconds: float = 0) -> tuple[Condition, ...]:
    return merge(before, verdicts, 1, NOW + timedelta(seconds=seconds))


def says(kind: str, value: ConditionStatus, reason: str = "Because", message: str = "") -> Verdict:
    return Verdict(kind, value, reason, message)


class TestConditions:
    def test_the_time_moves_only_with_the_status(self) -> None:
        first = conditions(says("Running", FALSE, "Starting"))
        other_reason = conditions(says("Running", FALSE, "Relaunching"), before=first, seconds=5)
        assert (other_reason[0].last_transition_time, other_reason[0].reason) == (NOW, "Relaunching")
        turned = conditions(says("Running", TRUE), before=other_reason, seconds=9)
        assert turned[0].last_transition_time == NOW + timedelta(seconds=9)

    def test_conditions_without_verdict_stay(self) -> None:
        first = conditions(says("Accepted", TRUE), says("Planned", TRUE))
        assert conditions(says("Planned", TRUE), before=first, seconds=5) == first

    def test_a_long_message_is_shortened_in_the_middle(self) -> None:
        [found] = conditions(says("Failed", TRUE, message="A" + "x" * 10_000 + "Z"))
        assert len(found.message) <= MAX_MESSAGE
        assert (found.message[0], found.message[-1]) == ("A", "Z")


PHASES: dict[str, tuple[list[Verdict], Phase]] = {
    "nothing known": ([], Phase.PENDING),
    "refused": ([says("Accepted", FALSE)], Phase.PENDING),
    "no plan": ([says("Planned", FALSE)], Phase.PENDING),
    "only planned": ([says("Planned", TRUE, "PlanOnly")], Phase.PLANNED),
    "planned": ([says("Planned", TRUE)], Phase.STARTING),
    "volume hopeless": ([says("Planned", TRUE), says("VolumeReady", FALSE)], Phase.PENDING),
    "volume comes": ([says("Planned", TRUE), says("VolumeReady", UNKNOWN)], Phase.STARTING),
    "starting": ([says("Planned", TRUE), says("Running", FALSE, "Starting")], Phase.STARTING),
    "not started": ([says("Planned", TRUE), says("Running", FALSE, "NotStarted")], Phase.STARTING),
    "running": ([says("Planned", TRUE), says("Running", TRUE)], Phase.RUNNING),
    "running, another plan impossible": ([says("Planned", FALSE), says("Running", TRUE)], Phase.RUNNING),
    "relaunching": ([says("Running", FALSE, "Relaunching")], Phase.RECOVERING),
    "pods lost": ([says("Running", FALSE, "PodsLost")], Phase.RECOVERING),
    "suspended": ([says("Running", FALSE, "NotStarted"), says("Suspended", TRUE)], Phase.SUSPENDED),
    "suspending": ([says("Running", TRUE), says("Suspended", FALSE, "Suspending")], Phase.RUNNING),
    "complete": ([says("Suspended", TRUE), says("Complete", TRUE)], Phase.COMPLETE),
    "failed": ([says("Running", TRUE), says("Failed", TRUE)], Phase.FAILED),
}


@pytest.mark.parametrize("case", PHASES)
def test_phase(case: str) -> None:
    verdicts, expected = PHASES[case]
    assert phase(conditions(*verdicts)) is expected


class TestEvents:
    def news(self, before: list[Verdict], now: list[Verdict]) -> list[tuple[str, str]]:
        old = conditions(*before)
        return [(event.type, event.reason) for event in events(old, conditions(*now, before=old))]

    @pytest.mark.parametrize(
        ("before", "now", "expected"),
        [
            ([], [says("Accepted", TRUE, "Accepted")], []),
            ([], [says("Accepted", FALSE, "InvalidSpec")], [("Warning", "InvalidSpec")]),
            ([], [says("Running", FALSE, "Starting")], []),
            ([says("Running", FALSE, "Starting")], [says("Running", TRUE, "Running")], [("Normal", "Running")]),
            ([says("Running", TRUE, "Running")], [says("Running", TRUE, "Running", "step 9")], []),
            ([says("Running", TRUE)], [says("Running", FALSE, "Relaunching")], [("Warning", "Relaunching")]),
            ([], [says("Failed", TRUE, "ProgramFailed")], [("Warning", "ProgramFailed")]),
            ([], [says("Complete", TRUE, "Complete")], [("Normal", "Complete")]),
            ([says("Planned", TRUE, "Planned", "plan 1")], [says("Planned", TRUE, "Planned", "plan 1")], []),
            (
                [says("Planned", TRUE, "Planned", "plan 1")],
                [says("Planned", TRUE, "Planned", "plan 2")],
                [("Normal", "Planned")],
            ),
            ([], [says("DeviceMismatch", FALSE)], []),
            ([says("DeviceMismatch", TRUE)], [says("DeviceMismatch", FALSE)], [("Normal", "Because")]),
        ],
    )
    def test_events_by_change(self, before: list[Verdict], now: list[Verdict], expected: list[tuple[str, str]]) -> None:
        assert self.news(before, now) == expected

    def test_equal_events_have_equal_names(self) -> None:
        [one], [again], [other] = (
            events((), conditions(says("Failed", TRUE, message=text))) for text in ("a", "a", "b")
        )
        assert one.name("digits", "u") == again.name("digits", "u") != other.name("digits", "u")
        assert one.name("digits", "u") != one.name("digits", "another job of that name")

    def test_no_longer_than_the_server_takes(self) -> None:
        [event] = events((), conditions(says("Failed", TRUE, message="x" * 5000)))
        assert len(event.message) <= MAX_EVENT


TREES = st.recursive(
    st.booleans() | st.integers(0, 3) | st.text("ab", max_size=2) | st.lists(st.integers(0, 3), max_size=2),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
)
DOCUMENTS = st.dictionaries(st.sampled_from("abcd"), TREES, max_size=4)


def patched(target: Any, patch: Any) -> Any:
    """Apply a merge patch with the pseudo-code of RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    result = copy.deepcopy(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = patched(result.get(key), value)
    return result


class TestPatch:
    @given(DOCUMENTS, DOCUMENTS)
    def test_the_patch_leads_from_old_to_new(self, old: Json, new: Json) -> None:
        assert patched(old, merge_patch(old, new)) == new

    @given(DOCUMENTS)
    def test_an_unchanged_status_is_not_written(self, document: Json) -> None:
        assert merge_patch(document, copy.deepcopy(document)) == {}

    def test_only_what_changed_is_written(self) -> None:
        old = {"a": {"b": 1, "c": 2, "d": 3}, "e": 4}
        assert merge_patch(old, {"a": {"b": 1, "c": 5}, "e": 4}) == {"a": {"c": 5, "d": None}}


IMAGE = Stuck("ImagePullBackOff", "not found", "registry.example/x:1")
PODS: dict[str, tuple[Json, str, tuple[str, ...]]] = {
    "starting": ({}, "Starting", ("0 of 1",)),
    "ready": ({"ready": True}, "AllReady", ("1 of 1",)),
    "leaving": ({"ready": True, "deleting": True}, "Starting", ("0 of 1",)),
    "no image": (
        {"stuck": IMAGE},
        "ImagePullFailed",
        ("spec.trainer.image", "'registry.example/x:1'", "spec.trainer.imagePullSecrets"),
    ),
    "crashing": (
        {"stuck": Stuck("CrashLoopBackOff", "no module"), "restarts": 4},
        "AgentCrashing",
        ("4 times", "no module", "kubectl logs digits-cpu-0 --previous"),
    ),
    "container refused": (
        {"stuck": Stuck("CreateContainerConfigError", "secret not found")},
        "ContainerNotStarted",
        ("secret not found", "spec.podTemplateOverrides"),
    ),
    "data on its way": ({"fetching": Fetching()}, "FetchingDataset", ("1 pods", "kubectl logs digits-cpu-0 -c dataset")),
    "data cannot be had yet": (
        {"fetching": Fetching(74, "spec.dataset.uri: http://a/b: cannot connect")},
        "DatasetNotFetched",
        ("spec.dataset.uri", "cannot connect (exit code 74)", "kubectl logs digits-cpu-0 -c dataset"),
    ),
    "no secret for the data": (
        {"stuck": Stuck("CreateContainerConfigError", 'secret "s3" not found')},
        "ContainerNotStarted",
        ('secret "s3" not found', "spec.dataset.secretName"),
    ),
    "only creating": ({"stuck": Stuck("ContainerCreating", "")}, "Starting", ()),
    "no node": ({"unschedulable": "0/3 nodes: Insufficient cpu"}, "Unschedulable", ("Insufficient cpu", "spec.devices")),
    "no volume yet": ({"unschedulable": "unbound immediate PersistentVolumeClaims"}, "Starting", ()),
}  # fmt: skip


@pytest.mark.parametrize("case", PODS)
def test_pods(case: str) -> None:
    fields, reason, words = PODS[case]
    observed = replace(started(), pods=(PodSeen("digits-cpu-0", "u", "cpu", **fields),))
    found = pods_ready(observed, 1)
    assert (found.reason, found.status is TRUE) == (reason, reason == "AllReady")
    assert all(word in found.message for word in words), found.message


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0, "0s"), (0.4, "0s"), (40, "40s"), (60, "1m"), (61, "1m1s"), (7500, "2h5m"), (7200, "2h"), (90061, "1d1h")],
)
def test_times_for_people(seconds: float, expected: str) -> None:
    assert people(seconds) == expected


class TestReported:
    def reported(self, **news: Any) -> Observed:
        observed = started()
        return replace(observed, report=report(observed, RunPhase.RUNNING, **news))

    def test_measured_beside_predicted(self) -> None:
        observed = self.reported(step_s=0.01, samples_per_s=9600.04)
        found = status(step(observed)).measured
        assert found is not None
        predicted_s = plan_of(observed).status.predicted.step_seconds
        assert found.samples_per_second == 9600
        assert found.step_error == pytest.approx((predicted_s - 0.01) / 0.01, abs=1e-4)

    def test_startup_by_parts(self) -> None:
        began = NOW.timestamp()
        marks = StartupMarks(
            agents_up_unix_s=began + 3, rendezvous_unix_s=began + 4, imported_unix_s=began + 6, first_step_unix_s=began + 7
        )  # fmt: skip
        found = status(step(self.reported(startup=marks))).startup
        assert found is not None
        parts = [
            found.admission_seconds, found.pods_seconds, found.rendezvous_seconds, found.import_seconds,
            found.first_step_seconds,
        ]  # fmt: skip
        assert parts == [2, 3, 1, 2, 1]
        assert found.total_seconds == 9

    def test_a_clock_that_is_behind_makes_no_negative_times(self) -> None:
        early = CREATED.timestamp() - 50
        found = status(
            step(self.reported(startup=StartupMarks(agents_up_unix_s=early, first_step_unix_s=early)))
        ).startup
        assert found is not None
        assert (found.pods_seconds, found.total_seconds) == (0, 0)

    def test_the_first_start_is_kept(self) -> None:
        marks = StartupMarks(rendezvous_unix_s=NOW.timestamp() + 3, first_step_unix_s=NOW.timestamp() + 5)
        observed = self.reported(startup=marks)
        told = after(observed, step(observed))
        later = replace(told, report=report(told, startup=StartupMarks(first_step_unix_s=NOW.timestamp() + 500)))
        assert status(step(later)).startup == status(step(observed)).startup

    def test_the_latest_time_that_a_report_may_claim(self) -> None:
        latest_s = 2.5e11
        found = status(step(self.reported(unix_s=latest_s, last_checkpoint=CheckpointMark(step=1, unix_s=latest_s))))
        assert found.last_checkpoint is not None
        assert found.last_checkpoint.time == datetime.fromtimestamp(latest_s, UTC)

    @pytest.mark.parametrize("step_s", [1e8, 1e9])
    def test_a_huge_step_time_does_not_break_the_status(self, step_s: float) -> None:
        assert status(step(self.reported(step_s=step_s))).progress is not None

    def test_progress_is_at_most_all_steps(self) -> None:
        found = status(step(self.reported(step=80, steps=75))).progress
        assert found is not None
        assert (found.step, found.percent) == (75, 100)

    def test_progress_is_never_behind_the_checkpoint(self) -> None:
        mark = CheckpointMark(step=57, unix_s=NOW.timestamp())
        saved = self.reported(step=53, steps=75, last_checkpoint=mark)
        found = status(step(saved)).progress
        assert found is not None
        assert (found.step, found.percent) == (57, 76)
        resumed = replace(after(saved, step(saved)), report=report(saved, RunPhase.RUNNING, step=53, steps=75))
        found = status(step(resumed)).progress
        assert found is not None
        assert found.step == 57, "also when the next launch has not saved yet"

    def test_restarts_by_cause(self) -> None:
        found = status(step(self.reported(restarts={"RankDied": 2, "NodeLost": 1})))
        assert (found.restarts, found.restarts_by_cause) == (3, {"NodeLost": 1, "RankDied": 2})
