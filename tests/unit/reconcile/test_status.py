"""Tests of the status: transition times of conditions, the phase, events, and minimal patches."""

import copy
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlcontract import CheckpointMark, Report, RunPhase, StartupMarks
from dljob.api import Condition, ConditionStatus, Phase
from dljob.job.observed import Fetching, Observed, PodSeen, Stuck
from dljob.status import FALSE, TRUE, UNKNOWN, Verdict, events, merge_patch, pods_ready
from dljob.status.build import build, human_duration
from dljob.status.conditions import MAX_MESSAGE, merge, phase
from dljob.status.events import MAX_MESSAGE as MAX_EVENT
from support.builders import CREATED, NOW, after, plan_of, report
from support.job_lifecycle import started, status, step

Json = dict[str, Any]


def conditions(*verdicts: Verdict, before: tuple[Condition, ...] = (), seconds: float = 0) -> tuple[Condition, ...]:
    return merge(before, verdicts, 1, NOW + timedelta(seconds=seconds))


def make_verdict(kind: str, value: ConditionStatus, reason: str = "Because", message: str = "") -> Verdict:
    return Verdict(kind, value, reason, message)


class TestConditions:
    def test_transition_time_changes_only_with_the_status(self) -> None:
        first = conditions(make_verdict("Running", FALSE, "Starting"))
        other_reason = conditions(make_verdict("Running", FALSE, "Restarting"), before=first, seconds=5)
        assert (other_reason[0].last_transition_time, other_reason[0].reason) == (NOW, "Restarting")
        changed = conditions(make_verdict("Running", TRUE), before=other_reason, seconds=9)
        assert changed[0].last_transition_time == NOW + timedelta(seconds=9)

    def test_conditions_without_verdict_are_unchanged(self) -> None:
        first = conditions(make_verdict("Accepted", TRUE), make_verdict("Planned", TRUE))
        assert conditions(make_verdict("Planned", TRUE), before=first, seconds=5) == first

    def test_time_in_the_future_becomes_now(self) -> None:
        """Fixed bug: after a clock that was a day ahead, waiting times lasted for a day."""
        first = conditions(make_verdict("Admitted", FALSE), make_verdict("Planned", TRUE), seconds=86_400)
        corrected = conditions(make_verdict("Planned", TRUE), before=first, seconds=5)
        assert [each.last_transition_time for each in corrected] == [NOW + timedelta(seconds=5)] * 2

    def test_long_message_is_shortened_in_the_middle(self) -> None:
        [found] = conditions(make_verdict("Failed", TRUE, message="A" + "x" * 10_000 + "Z"))
        assert len(found.message) <= MAX_MESSAGE
        assert (found.message[0], found.message[-1]) == ("A", "Z")


PHASES: dict[str, tuple[list[Verdict], Phase]] = {
    "nothing known": ([], Phase.PENDING),
    "rejected": ([make_verdict("Accepted", FALSE)], Phase.PENDING),
    "no plan": ([make_verdict("Planned", FALSE)], Phase.PENDING),
    "only planned": ([make_verdict("Planned", TRUE, "PlanOnly")], Phase.PLANNED),
    "planned": ([make_verdict("Planned", TRUE)], Phase.STARTING),
    "volume cannot be bound": ([make_verdict("Planned", TRUE), make_verdict("VolumeReady", FALSE)], Phase.PENDING),
    "volume pending": ([make_verdict("Planned", TRUE), make_verdict("VolumeReady", UNKNOWN)], Phase.STARTING),
    "starting": ([make_verdict("Planned", TRUE), make_verdict("Running", FALSE, "Starting")], Phase.STARTING),
    "not started": ([make_verdict("Planned", TRUE), make_verdict("Running", FALSE, "NotStarted")], Phase.STARTING),
    "running": ([make_verdict("Planned", TRUE), make_verdict("Running", TRUE)], Phase.RUNNING),
    "running, new plan infeasible": ([make_verdict("Planned", FALSE), make_verdict("Running", TRUE)], Phase.RUNNING),
    "restarting": ([make_verdict("Running", FALSE, "Restarting")], Phase.RECOVERING),
    "pods lost": ([make_verdict("Running", FALSE, "PodsLost")], Phase.RECOVERING),
    "suspended": ([make_verdict("Running", FALSE, "NotStarted"), make_verdict("Suspended", TRUE)], Phase.SUSPENDED),
    "suspending": ([make_verdict("Running", TRUE), make_verdict("Suspended", FALSE, "Suspending")], Phase.RUNNING),
    "complete": ([make_verdict("Suspended", TRUE), make_verdict("Complete", TRUE)], Phase.COMPLETE),
    "failed": ([make_verdict("Running", TRUE), make_verdict("Failed", TRUE)], Phase.FAILED),
}


@pytest.mark.parametrize("case", PHASES)
def test_phase_follows_from_conditions(case: str) -> None:
    verdicts, expected = PHASES[case]
    assert phase(conditions(*verdicts)) is expected


class TestEvents:
    def events_between(self, before: list[Verdict], now: list[Verdict]) -> list[tuple[str, str]]:
        old = conditions(*before)
        return [(event.type, event.reason) for event in events(old, conditions(*now, before=old))]

    @pytest.mark.parametrize(
        ("before", "now", "expected"),
        [
            ([], [make_verdict("Accepted", TRUE, "Accepted")], []),
            ([], [make_verdict("Accepted", FALSE, "InvalidSpec")], [("Warning", "InvalidSpec")]),
            ([], [make_verdict("Running", FALSE, "Starting")], []),
            (
                [make_verdict("Running", FALSE, "Starting")],
                [make_verdict("Running", TRUE, "Running")],
                [("Normal", "Running")],
            ),
            ([make_verdict("Running", TRUE, "Running")], [make_verdict("Running", TRUE, "Running", "step 9")], []),
            (
                [make_verdict("Running", TRUE)],
                [make_verdict("Running", FALSE, "Restarting")],
                [("Warning", "Restarting")],
            ),
            ([], [make_verdict("Failed", TRUE, "ProgramFailed")], [("Warning", "ProgramFailed")]),
            ([], [make_verdict("Complete", TRUE, "Complete")], [("Normal", "Complete")]),
            (
                [make_verdict("Planned", TRUE, "Planned", "plan 1")],
                [make_verdict("Planned", TRUE, "Planned", "plan 1")],
                [],
            ),
            (
                [make_verdict("Planned", TRUE, "Planned", "plan 1")],
                [make_verdict("Planned", TRUE, "Planned", "plan 2")],
                [("Normal", "Planned")],
            ),
            ([], [make_verdict("DeviceMismatch", FALSE)], []),
            ([make_verdict("DeviceMismatch", TRUE)], [make_verdict("DeviceMismatch", FALSE)], [("Normal", "Because")]),
        ],
    )
    def test_events_are_created_for_changes(
        self, before: list[Verdict], now: list[Verdict], expected: list[tuple[str, str]]
    ) -> None:
        assert self.events_between(before, now) == expected

    def test_equal_events_have_equal_names(self) -> None:
        [one], [again], [other] = (
            events((), conditions(make_verdict("Failed", TRUE, message=text))) for text in ("a", "a", "b")
        )
        assert one.name("digits", "u") == again.name("digits", "u") != other.name("digits", "u")
        assert one.name("digits", "u") != one.name("digits", "another job of that name")

    def test_event_message_is_limited_to_the_servers_maximum(self) -> None:
        [event] = events((), conditions(make_verdict("Failed", TRUE, message="x" * 5000)))
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
    def test_patch_transforms_old_to_new(self, old: Json, new: Json) -> None:
        assert patched(old, merge_patch(old, new)) == new

    @given(DOCUMENTS)
    def test_unchanged_status_is_not_written(self, document: Json) -> None:
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
    "script on its way": (
        {"fetching": Fetching(container="source")}, "FetchingSource", ("the files of trainer.source", "-c source"),
    ),
    "script cannot be had yet": (
        {"fetching": Fetching(74, "spec.trainer.source.git.url: cannot connect", "source")},
        "SourceNotFetched",
        ("spec.trainer.source: pod", "cannot connect (exit code 74)", "kubectl logs digits-cpu-0 -c source"),
    ),
    "no secret for the data": (
        {"stuck": Stuck("CreateContainerConfigError", 'secret "s3" not found')},
        "ContainerNotStarted",
        ('secret "s3" not found', "spec.dataset.secretName"),
    ),
    "only creating": ({"stuck": Stuck("ContainerCreating", "")}, "Starting", ()),
    "no node with the scratch space": (
        {"unschedulable": "0/3 nodes: 3 Insufficient ephemeral-storage"},
        "Unschedulable",
        ("lower spec.trainer.scratch.size", "spec.devices"),
    ),
    "no node": ({"unschedulable": "0/3 nodes: Insufficient cpu"}, "Unschedulable", ("Insufficient cpu", "spec.devices")),
    "no volume yet": ({"unschedulable": "unbound immediate PersistentVolumeClaims"}, "Starting", ()),
}  # fmt: skip


@pytest.mark.parametrize("case", PODS)
def test_reason_of_pods_that_are_not_ready(case: str) -> None:
    fields, reason, words = PODS[case]
    observed = replace(started(), pods=(PodSeen("digits-cpu-0", "u", "cpu", **fields),))
    found = pods_ready(observed, 1, NOW)
    assert (found.reason, found.status is TRUE) == (reason, reason == "AllReady")
    assert all(word in found.message for word in words), found.message


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0, "0s"), (0.4, "0s"), (40, "40s"), (60, "1m"), (61, "1m1s"), (7500, "2h5m"), (7200, "2h"), (90061, "1d1h")],
)
def test_durations_are_formatted(seconds: float, expected: str) -> None:
    assert human_duration(seconds) == expected


class TestReported:
    def reported(self, **changes: Any) -> Observed:
        observed = started()
        return replace(observed, report=report(observed, RunPhase.RUNNING, **changes))

    def test_status_shows_measured_and_predicted_times(self) -> None:
        observed = self.reported(step_s=0.01, samples_per_s=9600.04)
        found = status(step(observed)).measured
        assert found is not None
        predicted_s = plan_of(observed).status.predicted.step_seconds
        assert found.samples_per_second == 9600
        assert found.step_error == pytest.approx((predicted_s - 0.01) / 0.01, abs=1e-4)

    def test_step_time_of_another_plan_is_not_shown(self) -> None:
        """Fixed bug: after a move, the status compared the step time on the former devices with the new prediction."""
        observed, stored = self.reported(step_s=0.01), plan_of(started())
        before = status(step(observed))
        assert before.measured is not None and before.plan is not None
        number = stored.plan.number + 1
        shown = stored.status.model_copy(update={"number": number})
        moved = stored.model_copy(update={"plan": stored.plan.model_copy(update={"number": number}), "status": shown})
        assert observed.report is not None
        found = build(observed, before, (), moved, Report.model_validate_json(observed.report), NOW)
        assert (found.measured, found.remaining, found.eta) == (None, None, None)

    def test_startup_time_is_divided_into_parts(self) -> None:
        began = NOW.timestamp()
        marks = StartupMarks(
            agents_up_unix_s=began + 3, rendezvous_unix_s=began + 4, imported_unix_s=began + 6, first_step_unix_s=began + 7
        )  # fmt: skip
        found = status(step(self.reported(startup=marks))).startup
        assert found is not None
        seconds = [
            found.admission_seconds, found.pods_seconds, found.rendezvous_seconds, found.import_seconds,
            found.first_step_seconds,
        ]  # fmt: skip
        assert seconds == [2, 3, 1, 2, 1]
        assert found.total_seconds == 9

    def test_longest_fetch_of_the_data_is_a_part_of_the_startup(self) -> None:
        marks = StartupMarks(agents_up_unix_s=NOW.timestamp() + 90, first_step_unix_s=NOW.timestamp() + 95)
        observed = self.reported(startup=marks)
        assert (found := status(step(observed)).startup) is not None and found.fetch_seconds is None
        pods = [replace(pod, fetched_s=seconds) for pod, seconds in zip(observed.pods, (60.0, 75.0, None), strict=True)]
        found = status(step(replace(observed, pods=tuple(pods)))).startup
        assert found is not None and (found.fetch_seconds, found.pods_seconds) == (75.0, 90.0)

    def test_wait_for_admission_after_the_first_plan_is_no_part_of_a_restart(self) -> None:
        """Fixed bug: a restart of a job that had waited in a queue of Kueue seemed to take as long as the wait."""
        observed = self.reported(
            startup=StartupMarks(agents_up_unix_s=NOW.timestamp() + 7203, first_step_unix_s=NOW.timestamp() + 7207)
        )
        observed = replace(observed, job=replace(observed.job, status={**observed.job.status, "waitedSeconds": 7200.0}))
        found = status(step(observed, 7210))
        assert found.startup is not None and found.forecast is not None
        assert (found.startup.admission_seconds, found.startup.pods_seconds) == (7202, 3)
        assert found.startup.total_seconds == 7209 and found.forecast.restart_seconds == 7

    def test_clock_that_is_behind_gives_no_negative_times(self) -> None:
        early = CREATED.timestamp() - 50
        found = status(
            step(self.reported(startup=StartupMarks(agents_up_unix_s=early, first_step_unix_s=early)))
        ).startup
        assert found is not None
        assert (found.pods_seconds, found.total_seconds) == (0, 0)

    def test_startup_of_the_first_launch_is_kept(self) -> None:
        marks = StartupMarks(rendezvous_unix_s=NOW.timestamp() + 3, first_step_unix_s=NOW.timestamp() + 5)
        observed = self.reported(startup=marks)
        updated = after(observed, step(observed))
        later = replace(updated, report=report(updated, startup=StartupMarks(first_step_unix_s=NOW.timestamp() + 500)))
        assert status(step(later)).startup == status(step(observed)).startup

    def test_latest_valid_time_of_a_report(self) -> None:
        latest_s = 2.5e11
        found = status(step(self.reported(unix_s=latest_s, last_checkpoint=CheckpointMark(step=1, unix_s=latest_s))))
        assert found.last_checkpoint is not None
        assert found.last_checkpoint.time == datetime.fromtimestamp(latest_s, UTC)

    @pytest.mark.parametrize("step_s", [1e8, 1e9])
    def test_huge_step_time_does_not_break_the_status(self, step_s: float) -> None:
        assert status(step(self.reported(step_s=step_s))).progress is not None

    def test_progress_is_at_most_all_steps(self) -> None:
        found = status(step(self.reported(step=80, steps=75))).progress
        assert found is not None
        assert (found.step, found.percent) == (75, 100)

    def test_progress_of_a_script_that_does_not_know_its_steps(self) -> None:
        found = status(step(self.reported(step=80, steps=0, loss=0.5)))
        assert found.progress is not None and found.eta is None
        assert (found.progress.steps, found.progress.percent, found.progress.display) == (None, None, "step 80")

    def test_progress_is_never_behind_the_checkpoint(self) -> None:
        mark = CheckpointMark(step=57, unix_s=NOW.timestamp())
        saved = self.reported(step=53, steps=75, last_checkpoint=mark)
        found = status(step(saved)).progress
        assert found is not None
        assert (found.step, found.percent) == (57, 76)
        resumed = replace(after(saved, step(saved)), report=report(saved, RunPhase.RUNNING, step=53, steps=75))
        found = status(step(resumed)).progress
        assert found is not None
        assert found.step == 57, "this also holds before the next checkpoint"

    def test_steps_that_were_done_twice_are_shown(self) -> None:
        for reported, shown in ((7, 7), (0, None)):
            found = status(step(self.reported(steps_repeated=reported))).progress
            assert found is not None and found.steps_repeated == shown

    def test_restarts_are_counted_by_cause(self) -> None:
        found = status(step(self.reported(restarts={"RankDied": 2, "NodeLost": 1})))
        assert (found.restarts, found.restarts_by_cause) == (3, {"NodeLost": 1, "RankDied": 2})
