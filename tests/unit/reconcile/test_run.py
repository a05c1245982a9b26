"""Tests of the desired state of running jobs for reports, pods and times."""

from dataclasses import replace
from typing import Any

import pytest

from dlcontract import Failure, Mismatch, Outcome, RunPhase, Until
from dljob.api import Phase
from dljob.job.observed import Fetching, Observed, Rejected
from dljob.reconcile import needs_view
from support.builders import DIGITS, NOW, Json, after, changed, plan_of, report, seen, settled
from support.job_lifecycle import DOWN, OUTCOME, condition_of, done, started, status, step, training, verdict

FETCHED: Json = {**DIGITS, "dataset": {"uri": "http://a/b.npz", "samples": 1437}}


def fetching(code: int, **more: Any) -> Observed:
    """Return a job whose second pod has a failed init container, without agents or a report."""
    first = seen(FETCHED)
    found = settled(after(first, step(first)), ready=False)
    pods = list(found.pods)
    pods[1] = replace(pods[1], fetching=Fetching(code, "spec.dataset.uri: nothing at http://a/b.npz"), **more)
    return replace(found, pods=tuple(pods))


class TestData:
    def test_permanent_fetch_error_fails_the_job(self) -> None:
        desired = step(fetching(64))
        assert verdict(desired, "Failed") == ("True", "BadInput")
        assert condition_of(desired, "Failed").message == (
            "pod digits-cpu-1 could not fetch the dataset: spec.dataset.uri: nothing at http://a/b.npz (exit code 64)"
        )
        assert desired.scales == DOWN
        assert [event.reason for event in desired.events if event.type == "Warning"] == ["BadInput"]

    def test_script_that_cannot_be_fetched_fails_the_job(self) -> None:
        found = fetching(64)
        pods = [replace(pod, fetching=pod.fetching and replace(pod.fetching, container="source")) for pod in found.pods]
        desired = step(replace(found, pods=tuple(pods)))
        assert verdict(desired, "Failed") == ("True", "BadInput")
        assert "could not fetch the files of trainer.source: " in condition_of(desired, "Failed").message

    def test_temporary_fetch_error_does_not_fail_the_job(self) -> None:
        desired = step(fetching(74))
        assert verdict(desired, "PodsReady") == ("False", "DatasetNotFetched")
        assert status(desired).phase is Phase.STARTING
        assert desired.scales == ()
        assert "DatasetNotFetched" in [event.reason for event in desired.events if event.type == "Warning"]

    def test_terminating_pod_is_ignored(self) -> None:
        assert status(step(fetching(64, deleting=True))).phase is Phase.STARTING

    @pytest.mark.parametrize(
        ("min_nodes", "expected"), [(2, Phase.RUNNING), (3, Phase.FAILED)], ids=["elastic", "fixed"]
    )
    def test_fetch_error_of_a_replaced_pod(self, min_nodes: int, expected: Phase) -> None:
        found = training({**FETCHED, "nodes": {"min": min_nodes, "max": 3}})
        first, *others = found.pods
        replaced = replace(first, ready=False, fetching=Fetching(64, "nothing there"))
        assert status(step(replace(found, pods=(replaced, *others)))).phase is expected

    def test_corrected_uri_is_fetched(self) -> None:
        corrected = changed(fetching(64), dataset={"uri": "http://a/c.npz", "samples": 1437})
        assert status(step(corrected)).phase is not Phase.FAILED


@pytest.mark.parametrize(("nodes", "machine_nodes", "expected"), [(1, 1, None), (2, 1, 5e8), (2, 2, None), (3, 2, 5e8)])
def test_only_runs_on_several_machines_measure_the_network(
    nodes: int, machine_nodes: int, expected: float | None
) -> None:
    """Fixed bug: the shared memory of one machine with all nodes of a run was stored as the network."""
    spec = {**DIGITS, "nodes": {"min": nodes, "max": nodes}}
    observed = done(spec=spec, step_s=0.5, link_latency_s=1e-4, link_bandwidth_Bps=5e8)
    desired = step(replace(observed, machine_nodes=machine_nodes))
    assert desired.measurements is not None
    assert desired.measurements.report.link_bandwidth_Bps == expected


@pytest.mark.parametrize(
    ("cpu", "resources", "expected"),
    [(8.0, {}, 2.0), (1.5, {}, 1.5), (0.2, {}, 0.2), (None, {}, 2.0), (8.0, {"cpuLimit": "500m"}, 0.5)],
)
def test_cores_that_a_rank_keeps_busy_are_at_most_its_part_of_the_node(
    cpu: float | None, resources: Json, expected: float
) -> None:
    env = [{"name": "OMP_NUM_THREADS", "value": "2"}]
    measured = {"rank": 0, "device": "cpu", "share": 32, "compute_s": 0.1}
    observed = done(spec={**DIGITS, "trainer": {"env": env}, "resources": resources}, ranks=[measured])
    usable = {} if cpu is None else {"digits-cpu-node-0": cpu, "digits-cpu-node-1": 64.0, "of-another-job": 0.1}
    desired = step(replace(observed, usable_cpus=usable))
    assert desired.measurements is not None
    assert desired.measurements.used_cores == {"cpu": pytest.approx(expected)}


class TestUntil:
    SPEC: Json = {**DIGITS, "until": {"metric": "accuracy", "atLeast": 0.9, "patience": 3}}

    def test_plan_has_the_target(self) -> None:
        plan = plan_of(training(self.SPEC)).plan
        assert plan.until == Until(metric="accuracy", at_least=0.9, patience=3)
        assert "until" not in plan_of(training(DIGITS)).plan.to_json(), "an agent of an earlier release rejects it"

    @pytest.mark.parametrize("reason", ["TargetReached", "NoImprovement", "OfANewerRelease"])
    def test_reason_of_a_complete_job_says_why_it_ended(self, reason: str) -> None:
        found = training(self.SPEC)
        stopped = {"reason": reason, "message": "accuracy: found 0.95 after step 40; spec.until.atLeast is 0.9"}
        outcome = {"steps": 40, "seconds": 9.5, "accuracy": 0.95, "stopped": stopped}
        done = step(replace(found, report=report(found, RunPhase.SUCCEEDED, step=40, outcome=outcome)))
        assert status(done).phase is Phase.COMPLETE
        complete = condition_of(done, "Complete")
        assert complete.reason == (reason if reason != "OfANewerRelease" else "Complete")
        assert ("spec.until.atLeast is 0.9; trained 40 steps" in complete.message) is (reason != "OfANewerRelease")

    def test_status_shows_the_predicted_time_to_the_target(self) -> None:
        found = training(self.SPEC)
        ahead = {"step": 30, "earliest_step": 20, "latest_step": 50}
        target = {"value": 0.7, "best": 0.75, "forecast": ahead}
        seen_ = replace(found, report=report(found, RunPhase.RUNNING, step=10, steps=75, step_s=0.5, target=target))
        shown = status(step(seen_)).target
        assert shown is not None and (shown.metric, shown.value, shown.best) == ("accuracy", 0.7, 0.75)
        remaining = (shown.remaining_seconds, shown.remaining_seconds_earliest, shown.remaining_seconds_latest)
        each_s = plan_of(found).status.predicted.per_step_s(0.5, 75)
        assert each_s > 0.5, "it also evaluates"
        assert remaining == pytest.approx((20 * each_s, 10 * each_s, 40 * each_s), rel=1e-3)
        target["forecast"] = {**ahead, "latest_step": 76}
        late = replace(found, report=report(found, RunPhase.RUNNING, step=10, steps=75, step_s=0.5, target=target))
        shown = status(step(late)).target
        assert shown is not None and shown.remaining_seconds is None, "the last step comes first"

    def test_changed_target_gives_a_new_plan(self) -> None:
        found = training(self.SPEC)
        new = step(changed(found, until={"metric": "accuracy", "atLeast": 0.95}))
        assert new.scales, "the pods write a checkpoint and stop"


class TestRunning:
    def test_status_shows_progress_and_measurements(self) -> None:
        found = training(step_s=0.5, loss=0.25)
        running = status(step(found))
        assert running.phase is Phase.RUNNING
        assert running.progress is not None
        assert (running.progress.step, running.progress.steps, running.progress.percent) == (10, 75, 13)
        assert running.measured is not None
        assert running.measured.step_seconds == 0.5
        assert running.remaining == "35s (<1m2s)", "65 steps, with their part of the evaluations"

    @pytest.mark.parametrize(
        ("phase", "expected", "reason"),
        [
            (RunPhase.WAITING, Phase.STARTING, "Starting"),
            (RunPhase.LAUNCHING, Phase.STARTING, "Starting"),
            (RunPhase.RUNNING, Phase.RUNNING, "Running"),
            (RunPhase.RESTARTING, Phase.RECOVERING, "Restarting"),
            (RunPhase.STOPPED, Phase.STARTING, "Starting"),
        ],
    )
    def test_phase_follows_the_report(self, phase: RunPhase, expected: Phase, reason: str) -> None:
        observed = started()
        desired = step(replace(observed, report=report(observed, phase)))
        assert status(desired).phase is expected
        assert condition_of(desired, "Running").reason == reason

    @pytest.mark.parametrize(
        ("phase", "expected"),
        [
            (RunPhase.WAITING, "waiting for the agents of all pods; not connected: digits-cpu-1"),
            (RunPhase.RESTARTING, "the ranks are restarting; not connected: digits-cpu-1"),
        ],
    )
    def test_message_says_what_the_launch_waits_for(self, phase: RunPhase, expected: str) -> None:
        observed = started()
        desired = step(replace(observed, report=report(observed, phase, waits_for="not connected: digits-cpu-1")))
        assert condition_of(desired, "Running").message == expected

    def test_job_without_ready_pods_is_recovering(self) -> None:
        assert status(step(settled(training(), ready=False))).phase is Phase.RECOVERING

    @pytest.mark.parametrize("phase", [RunPhase.WAITING, RunPhase.RESTARTING])
    def test_pods_that_are_not_ready_yet_are_not_lost(self, phase: RunPhase) -> None:
        """Ranks run up to a second before a probe succeeds, and a script that fails at once may never be ready."""
        observed = settled(started(), ready=False)
        observed = replace(observed, report=report(observed, phase, failure=FAILURE))
        first = step(observed)
        launched = after(observed, first)
        second = step(replace(launched, report=report(launched)))
        assert verdict(second, "Running") == verdict(first, "Running")
        assert "PodsLost" not in [event.reason for event in second.events]

    def test_rejected_object_is_shown_in_the_status(self) -> None:
        desired = step(replace(seen(), rejected=Rejected("StatefulSet", "digits-cpu", "exceeded quota: pods")))
        assert verdict(desired, "PodsReady") == ("False", "ObjectRejected")
        assert "exceeded quota: pods" in condition_of(desired, "PodsReady").message

    def test_device_mismatch_lasts_until_it_is_fixed(self) -> None:
        mismatch = Mismatch(rank=1, planned="cpu", found="cpu-slow")
        wrong = training(mismatches=[mismatch])
        assert verdict(step(wrong), "DeviceMismatch") == ("True", "DeviceMismatch")
        mended = replace(wrong, report=report(wrong))
        assert verdict(step(mended), "DeviceMismatch") == ("False", "DevicesAsPlanned")

    def test_running_names_the_ranks_that_are_left(self) -> None:
        before = training()
        assert (
            "of 3 ranks"
            not in condition_of(step(replace(before, report=report(before, world_size=3))), "Running").message
        )
        fewer = step(replace(before, report=report(before, world_size=2)))
        assert condition_of(fewer, "Running").message.endswith(" on 2 of 3 ranks")

    def test_refused_number_of_ranks_has_a_condition_until_the_next_plan(self) -> None:
        before = training()
        refused = replace(before, report=report(before, refused_sizes=[{"ranks": 2, "message": "ValueError: 2"}]))
        desired = step(refused)
        assert verdict(desired, "WorldSizeRefused") == ("True", "WorldSizeRefused")
        assert "failed on 2 of 3 ranks: ValueError: 2" in condition_of(desired, "WorldSizeRefused").message
        mended = after(refused, desired)
        assert verdict(step(replace(mended, report=report(mended))), "WorldSizeRefused") == ("False", "NotRefused")


FAILURE = Failure(reason="ProgramFailed", message="the program ended", rank=1, exit_code=1)


class TestEnds:
    def test_success_is_reported_and_pods_stop(self) -> None:
        desired = step(done(outcome=OUTCOME, step=75))
        assert desired.scales == DOWN
        found = status(desired)
        assert (found.phase, found.completion_time) == (Phase.COMPLETE, NOW)
        assert found.result is not None
        assert (found.result.accuracy, found.result.checkpoint) == (0.9733, "step-75")
        assert found.result.report == "report.html" and "report.html" in condition_of(desired, "Complete").message
        assert (found.eta, found.remaining) == (None, None)
        assert "accuracy 97.33 %" in condition_of(desired, "Complete").message
        assert desired.measurements is not None and desired.measurements.model == "digits-cnn"
        assert ("Normal", "Complete") in [(event.type, event.reason) for event in desired.events]

    @pytest.mark.parametrize("framework", ["DLTrain", "Torchrun"])
    def test_script_that_reports_no_step_is_not_said_to_have_trained_none(self, framework: str) -> None:
        """Fixed bug: an unmodified torchrun script, which reports nothing, was "trained 0 steps in 36000.0 s"."""
        trained = {**DIGITS, "model": {"hints": {"parameters": 10, "flopsPerSample": 60}}}
        spec = trained if framework == "DLTrain" else {"nodes": {"min": 2}, "checkpoint": {"enabled": False}}
        spec = {**spec, "trainer": {"framework": framework, "command": ["python", "x.py"]}}
        found = condition_of(step(done(spec=spec, outcome=Outcome(steps=0, seconds=3.0), step=0)), "Complete").message
        assert found.startswith("the script reported no step, and ended with exit code 0 after 3.0 s")
        assert ("calls dltrain.init" in found) is (framework == "DLTrain")

    def test_measurements_of_a_run_in_16_bits_are_stored_apart(self) -> None:
        desired = step(done(spec={**DIGITS, "precision": "BF16"}, outcome=OUTCOME, step=75))
        assert desired.measurements is not None and desired.measurements.model == "digits-cnn.bf16"

    def test_finished_job_stays_finished(self) -> None:
        observed = done(outcome=OUTCOME)
        ended = after(observed, step(observed))
        for again in (ended, changed(ended, epochs=9), changed(ended, suspend=True), replace(ended, report=None)):
            assert not needs_view(again)
            desired = step(again, 60)
            assert (desired.scales, desired.objects, desired.measurements) == ((), (), None)
            reported = ["JobEnded"] if again.job.spec["epochs"] == 9 else []
            assert [event.reason for event in desired.events] == reported
            assert (status(desired).phase, status(desired).completion_time) == (Phase.COMPLETE, NOW)
            assert status(desired).result == status(step(observed)).result

    def test_failure_names_the_rank_and_its_log(self) -> None:
        failure = Failure(
            reason="ProgramFailed", message="the program ended", rank=2, host="digits-cpu-2", exit_code=1,
            log_tail="KeyError: 'x'\n",
        )  # fmt: skip
        desired = step(done(RunPhase.FAILED, failure=failure))
        assert desired.scales == DOWN
        assert (status(desired).phase, status(desired).completion_time) == (Phase.FAILED, NOW)
        assert verdict(desired, "Failed") == ("True", "ProgramFailed")
        message = condition_of(desired, "Failed").message
        assert message == "rank 2 on digits-cpu-2: the program ended (exit code 1); log: KeyError: 'x'"
        assert ("Warning", "ProgramFailed") in [(event.type, event.reason) for event in desired.events]
        assert desired.measurements is None

    @pytest.mark.parametrize(
        ("command", "reason", "text", "log", "expected"),
        [
            (
                ["python", "a.py"], "RankFailed", "rank 0 in pod digits-cpu-0 ended with exit code 1", "bye",
                "spec.trainer.command: rank 0 in pod digits-cpu-0 ended with exit code 1; "
                "the training script failed 4 times, spec.runPolicy.backoffLimit is 3; log: bye",
            ),
            (
                None, "BadInput", "spec.dataset.uri: found no file /a", "dltrain: BadInput: spec.dataset.uri: found no file /a",
                "rank 0 on digits-cpu-0: spec.dataset.uri: found no file /a (exit code 1); "
                "the training script failed 4 times, spec.runPolicy.backoffLimit is 3",
            ),
            (
                None, "TrainingError", "KeyError: 'x'", "Traceback:\n  a.py\nKeyError: 'x'",
                "rank 0 on digits-cpu-0: KeyError: 'x' (exit code 1); "
                "the training script failed 4 times, spec.runPolicy.backoffLimit is 3; log: Traceback:\n  a.py\nKeyError: 'x'",
            ),
        ],
        ids=["a program of the user's", "the log says no more", "a traceback"],
    )  # fmt: skip
    def test_failure_message_repeats_nothing(
        self, command: list[str] | None, reason: str, text: str, log: str, expected: str
    ) -> None:
        spec = {**DIGITS, "trainer": {"command": command}} if command else DIGITS
        failure = Failure(reason=reason, message=text, rank=0, host="digits-cpu-0", exit_code=1, log_tail=log)
        desired = step(done(RunPhase.FAILED, spec, failure=failure, failures=4))
        assert condition_of(desired, "Failed").message == expected

    @pytest.mark.parametrize(("failures", "failed"), [(0, False), (2, False), (3, True)])
    def test_job_fails_at_the_backoff_limit(self, failures: int, failed: bool) -> None:
        spec = {**DIGITS, "runPolicy": {"backoffLimit": 2}}
        desired = step(done(RunPhase.RESTARTING, spec, failures=failures))
        assert (status(desired).phase is Phase.FAILED) is failed
        assert desired.scales == (DOWN if failed else ())
        if failed:
            assert verdict(desired, "Failed") == ("True", "BackoffLimitExceeded")

    @pytest.mark.parametrize(("seconds", "failed"), [(0, False), (99, False), (100, True), (500, True)])
    def test_job_fails_after_its_active_deadline(self, seconds: float, failed: bool) -> None:
        observed = training({**DIGITS, "runPolicy": {"activeDeadlineSeconds": 100}})
        desired = step(observed, seconds)
        assert (status(desired).phase is Phase.FAILED) is failed
        if failed:
            assert verdict(desired, "Failed") == ("True", "DeadlineExceeded")
            assert desired.scales == DOWN
        else:
            assert desired.requeue_after_s == 100 - seconds

    def test_suspended_time_does_not_count_as_active(self) -> None:
        observed = changed(training({**DIGITS, "runPolicy": {"activeDeadlineSeconds": 100}}), suspend=True)
        empty = settled(after(observed, step(observed, 50)))
        suspended = after(empty, step(empty, 60))
        assert status(step(suspended, 1000)).phase is Phase.SUSPENDED
        resumed = changed(suspended, suspend=False)
        running = settled(after(resumed, step(resumed, 1000)))
        assert status(step(running, 1099)).phase is not Phase.FAILED
        assert status(step(running, 1100)).phase is Phase.FAILED

    def test_start_time_in_the_future_does_not_delay_the_deadline(self) -> None:
        """A clock was ahead and has been corrected. Earlier, the limit counted from when the clock was there again."""
        observed = training({**DIGITS, "runPolicy": {"activeDeadlineSeconds": 100}})
        early = {**observed.job.status, "startTime": "2999-01-01T00:00:00Z"}
        observed = replace(observed, job=replace(observed.job, status=early))
        running = after(observed, step(observed))
        assert status(step(running, 99)).phase is Phase.RUNNING
        assert status(step(running, 101)).phase is Phase.FAILED

    @pytest.mark.parametrize("field", ["activeDeadlineSeconds", "ttlSecondsAfterFinished"])
    def test_time_that_never_comes_is_no_error(self, field: str) -> None:
        """Fixed bug: the sum of a date and 10^12 seconds overflowed."""
        spec = {**DIGITS, "runPolicy": {field: 10**12}}
        assert verdict(step(training(spec), 10), "Running") == ("True", "Running")
        assert not step(done(spec=spec), 10).delete_job

    def test_job_is_deleted_after_its_time_to_live(self) -> None:
        observed = done(spec={**DIGITS, "runPolicy": {"ttlSecondsAfterFinished": 60}}, outcome=OUTCOME)
        desired = step(observed)
        assert (desired.delete_job, desired.requeue_after_s) == (False, 60)
        ended = after(observed, desired)
        assert (step(ended, 59).delete_job, step(ended, 59).requeue_after_s) == (False, 1)
        assert step(ended, 60).delete_job

    def test_completion_time_in_the_future_does_not_delay_the_deletion(self) -> None:
        """A clock was ahead and has been corrected. Earlier, the job lived until the clock was there again."""
        observed = done(spec={**DIGITS, "runPolicy": {"ttlSecondsAfterFinished": 60}}, outcome=OUTCOME)
        ended = after(observed, step(observed, 86400))
        desired = step(ended)
        assert (desired.delete_job, desired.requeue_after_s) == (False, 60)
        assert status(desired).completion_time == NOW
        assert step(after(ended, desired), 60).delete_job

    def test_time_to_live_of_zero_reports_the_end_first(self) -> None:
        observed = done(spec={**DIGITS, "runPolicy": {"ttlSecondsAfterFinished": 0}}, outcome=OUTCOME)
        desired = step(observed)
        assert (desired.delete_job, desired.requeue_after_s, status(desired).phase) == (False, 0, Phase.COMPLETE)
        assert step(after(observed, desired)).delete_job

    def test_job_without_time_to_live_is_not_deleted(self) -> None:
        observed = done(outcome=OUTCOME)
        ended = after(observed, step(observed))
        assert (step(ended, 1e8).delete_job, step(ended, 1e8).requeue_after_s) == (False, None)
