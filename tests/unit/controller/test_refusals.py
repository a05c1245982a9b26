"""Tests that what the API server refuses has only the effects that it must have."""

import logging
from datetime import timedelta
from typing import Any, cast

import pytest

from dlcontract import PLAN_KEY, REPORT_KEY, Plan, Report, RunPhase
from dljob.job.observed import JOB_LABEL, Observed
from dljob.kube import ApiError, JobKey, pki
from dljob.kube.kinds import CONFIG_MAP, DLJOB, PROFILE, STATEFUL_SET, Kind
from dljob.reconcile import Desired, WorkloadChange
from dljob.status import previous
from dljob.status.pace import ProgressPace
from support.builders import NOW, T4
from support.controller.fake_operator import SPEC, Operator, on_two_nodes
from support.controller.shared_devices import train
from support.servers.fake_api import FakeApi, FakeCluster
from support.virtual_time import now_s, run

Json = dict[str, Any]
ONE_NODE: Json = {**SPEC, "nodes": {"min": 1, "max": 1}}
NOT_LISTED = [ApiError(403, "Forbidden", "cannot list events"), ApiError(429, "TooManyRequests", "later"), None]


def replicas(cluster: FakeCluster, job: JobKey) -> list[int]:
    """Return the replicas of the job's StatefulSets."""
    return [
        body["spec"]["replicas"]
        for (plural, namespace, name), body in cluster.api.objects.items()
        if plural == "statefulsets" and namespace == job[0] and name.startswith(f"{job[1]}-")
    ]


def reasons(cluster: FakeCluster, job: JobKey) -> set[str]:
    """Return the reasons of the job's events."""
    events = (body for (plural, _, _), body in cluster.api.objects.items() if plural == "events")
    return {str(event["reason"]) for event in events if event["involvedObject"]["name"] == job[1]}


@pytest.mark.parametrize("error", [ApiError(500, "InternalError", "no etcd"), None], ids=str)
def test_events_that_cannot_be_posted_delay_nothing_and_are_posted_later(error: ApiError | None) -> None:
    """Fixed bug: with a broken store of events only, each event delayed its job's status by a minute."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        cluster.api.uncreated["Event"] = error
        jobs = [cluster.submit(f"job-{i}", f"team-{i}", **ONE_NODE) for i in range(2)]
        await operator.watch(20.0)
        assert {operator.planned(job) for job in jobs} == {"Planned"}
        for job in jobs:
            await cluster.edit(job, suspend=True)
        await operator.watch(20.0)
        assert {operator.condition(job, "Suspended") for job in jobs} == {("True", "Suspended")}
        del cluster.api.uncreated["Event"]
        await operator.watch(30.0)
        assert all({"Planned", "Suspended"} <= reasons(cluster, job) for job in jobs)

    on_two_nodes(body)


def test_secret_that_a_quota_refused_with_a_conflict_is_created_later() -> None:
    """Fixed bug: such an answer counted as one that it exists, and the pods waited for it for ten minutes."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        cluster.api.uncreated["Secret"] = ApiError(409, "Conflict", "Operation cannot be fulfilled on resourcequotas")
        first = cluster.submit("first", **ONE_NODE)
        await operator.watch(3.0)
        assert not replicas(cluster, first)
        del cluster.api.uncreated["Secret"]
        await operator.watch(30.0)
        assert replicas(cluster, first) == [1]
        assert [key for key in cluster.api.objects if key[0] == "secrets"]

    on_two_nodes(body)


def test_use_of_devices_is_counted_once_if_progress_is_written_rarely() -> None:
    """Fixed bug: each report counted again what had been used since the last write."""

    async def scenario() -> None:
        cluster = FakeCluster()
        cluster.node("n1", T4, 1)
        pace = ProgressPace(0.03, now_s, burst=1)
        async with Operator(cluster, pace=pace) as operator:
            job = cluster.submit("first", **ONE_NODE)
            await operator.watch(2.0)
            await train(cluster, operator, job, "n1")
            for step in range(510, 600, 10):
                operator.now += timedelta(seconds=10)
                body = await cluster.api.get(CONFIG_MAP, job[0], f"{job[1]}-report")
                report = Report.parse(body["data"][REPORT_KEY]).model_copy(update={"step": step})
                await cluster.api.merge(
                    CONFIG_MAP, job[0], f"{job[1]}-report", {"data": {REPORT_KEY: report.to_json()}}
                )
                await operator.watch(10.0)
            stored = (await cluster.api.get(DLJOB, *job))["status"]["usage"]["deviceSeconds"]
            assert stored > 0
            assert operator.metrics.device_seconds.labels("team-a")._value.get() == pytest.approx(stored)

    run(scenario())


@pytest.mark.parametrize("error", NOT_LISTED, ids=str)
def test_next_leader_works_although_events_cannot_be_listed(error: ApiError | None) -> None:
    """Fixed bug: for ten minutes, it neither planned, fenced nor wrote the status of a job with a new condition."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        first = cluster.submit("first", **ONE_NODE)
        await operator.watch()
        assert replicas(cluster, first) == [1]
        await operator.__aexit__()
        for key in [key for key in cluster.api.objects if key[0] == "events"]:
            del cluster.api.objects[key]  # The first leader ended before it posted them.
        cluster.api.unlisted["Event"] = error
        async with Operator(cluster) as following:
            await cluster.edit(first, suspend=True)
            second = cluster.submit("second", "team-b", **ONE_NODE)
            await following.watch(15.0)
            assert replicas(cluster, first) == [0] and following.condition(first, "Suspended") == ("True", "Suspended")
            assert following.planned(second) == "Planned" and replicas(cluster, second) == [1]
            assert "Planned" not in reasons(cluster, first)
            del cluster.api.unlisted["Event"]
            following.queue.add(first)
            await following.watch(60.0)
            assert reasons(cluster, first) >= {"Suspended"} and reasons(cluster, second)

    on_two_nodes(body)


@pytest.mark.parametrize("error", NOT_LISTED, ids=str)
def test_job_with_missing_pods_is_managed_although_events_cannot_be_listed(
    monkeypatch: pytest.MonkeyPatch, error: ApiError | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Fixed bug: without permission to list events, such a job could not even be suspended."""
    monkeypatch.setattr("dljob.kube.events.warning_events.monotonic", now_s)

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        key = cluster.submit("first", **SPEC)
        await operator.watch(1.0)
        cluster.api.unlisted["Event"] = error
        for _ in range(20):
            await operator.watch(2.0)
            operator.queue.add(key)
        assert operator.condition(key, "PodsReady") == ("False", "Starting")
        await cluster.edit(key, suspend=True)
        await operator.watch(15.0)
        assert replicas(cluster, key) == [0] and operator.condition(key, "Suspended") == ("True", "Suspended")

    with caplog.at_level(logging.WARNING):
        on_two_nodes(body)
    lines = [record for record in caplog.records if "were not listed" in record.getMessage()]
    assert len(lines) == 1, "a lasting problem is logged once"
    assert lines[0].__dict__["job"] == "team-a/first" and lines[0].__dict__["plan"] == 1


async def _succeed(cluster: FakeCluster, job: JobKey) -> None:
    """Write the report of a run that has ended, with one measured rank."""
    stored = await cluster.api.get(CONFIG_MAP, job[0], f"{job[1]}-plan")
    plan = Plan.parse(stored["data"][PLAN_KEY])
    outcome = {"steps": 75, "seconds": 10.0}
    report = Report.model_validate(
        {
            "uid": plan.uid, "plan_number": plan.number, "plan_digest": plan.digest(), "term": plan.term,
            "phase": RunPhase.SUCCEEDED, "unix_s": NOW.timestamp(), "step": 75, "steps": 75, "step_s": 0.5,
            "world_size": 1, "ranks": [{"rank": 0, "device": T4, "share": 64, "compute_s": 0.4}], "outcome": outcome,
        }
    )  # fmt: skip
    await cluster.api.merge(CONFIG_MAP, job[0], f"{job[1]}-report", {"data": {REPORT_KEY: report.to_json()}})


def test_failed_write_of_a_status_does_not_teach_a_profile_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reconcile is repeated, with the same report. A run that counts twice would outweigh the others."""
    taught: list[Json] = []
    merge = FakeApi.merge

    async def counted(self: FakeApi, kind: Kind, *args: Any, **more: Any) -> Json:
        found = await merge(self, kind, *args, **more)
        if kind is PROFILE:
            taught.append(found["status"])
        return found

    monkeypatch.setattr(FakeApi, "merge", counted)

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        key = cluster.submit("first", **ONE_NODE)
        await operator.watch(1.0)
        await cluster.bind(await cluster.create_pods(key), "n1")
        await operator.watch(1.0)
        cluster.api.status_errors = [ApiError(500, "InternalError", "no")] * 3
        await _succeed(cluster, key)
        await operator.watch(30.0)
        assert not cluster.api.status_errors and operator.condition(key, "Complete") == ("True", "Complete")

    on_two_nodes(body)
    assert len(taught) == 1


@pytest.mark.parametrize(
    "error",
    [ApiError(500, "InternalError", "later"), ApiError(403, "Forbidden", "no"), ValueError("bad number")],
    ids=str,
)
def test_job_ends_although_its_profile_cannot_be_written(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Fixed bug: the status stayed Running for as long as the API server did not take the measurements."""
    taught: list[Json] = []
    fails = [True]
    merge = FakeApi.merge

    async def failing(self: FakeApi, kind: Kind, *args: Any, **more: Any) -> Json:
        if kind is PROFILE and fails:
            raise error
        found = await merge(self, kind, *args, **more)
        if kind is PROFILE:
            taught.append(found["status"])
        return found

    monkeypatch.setattr(FakeApi, "merge", failing)

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        key = cluster.submit("first", **ONE_NODE)
        await operator.watch(1.0)
        await cluster.bind(await cluster.create_pods(key), "n1")
        await operator.watch(1.0)
        await _succeed(cluster, key)
        await operator.watch(30.0)
        assert operator.condition(key, "Complete") == ("True", "Complete") and not taught
        fails.clear()
        await operator.watch(300.0)

    on_two_nodes(body)
    assert len(taught) == (1 if "later" in str(error) else 0)


def test_status_goes_on_while_the_webhook_of_kueue_is_down() -> None:
    class Down:
        async def added_to(self, observed: Observed) -> Observed:
            return observed

        async def change(self, *_: Any) -> None:
            raise ApiError(500, "InternalError", "failed calling webhook")

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        key = cluster.submit("first", **ONE_NODE)
        await operator.watch()
        observed = operator.cache.observe(key)
        assert observed is not None
        operator.controller._queues = cast("Any", Down())
        status = previous(observed.job).model_copy(update={"restarts": 7})
        with pytest.raises(ApiError, match="webhook"):
            await operator.controller._do(observed, Desired(status=status, workload=WorkloadChange("first")), None)
        job = await cluster.api.get(DLJOB, *key)
        assert job["status"]["restarts"] == 7

    on_two_nodes(body)


class TestSecret:
    """The Secret with a job's TLS keys, in a namespace whose quota of Secrets is full."""

    @staticmethod
    async def restarted(cluster: FakeCluster, key: JobKey, *, readable: bool = True) -> None:
        """Change the plan of a job under the next operator, while Secrets are refused."""
        cluster.api.refused.add("Secret")
        if not readable:
            cluster.api.unreadable.add("Secret")
        async with Operator(cluster) as following:
            await following.watch()
            # Somebody has changed the StatefulSet, so it must be applied again.
            [name] = [name for plural, _, name in cluster.api.objects if plural == "statefulsets"]
            patch = {"metadata": {"annotations": {"dljob.dev/applied": None}}, "spec": {"replicas": 1}}
            await cluster.api.merge(STATEFUL_SET, key[0], name, patch)
            await following.watch(20.0)
            assert replicas(cluster, key) == [2]
            condition = following.condition(key, "PodsReady")
            assert condition is not None and condition[1] != "ObjectRejected"

    @pytest.mark.parametrize("readable", [True, False])
    def test_secret_that_exists_is_enough(self, readable: bool) -> None:
        """Fixed bug: admission refused the Secret before the API server saw that it exists, and the job stood still.

        With overrides: all, the operator may not read Secrets.
        """

        async def body(cluster: FakeCluster, operator: Operator) -> None:
            key = cluster.submit("first", **SPEC)
            await operator.watch()
            assert any(plural == "secrets" for plural, _, _ in cluster.api.objects)
            await operator.__aexit__()
            await self.restarted(cluster, key, readable=readable)

        on_two_nodes(body)

    def test_no_keys_are_made_for_a_secret_that_exists(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made: list[str] = []
        issue = pki.issue
        monkeypatch.setattr(pki, "issue", lambda *args: made.append(args[0]) or issue(*args))

        async def body(cluster: FakeCluster, operator: Operator) -> None:
            key = cluster.submit("first", **SPEC)
            await operator.watch()
            await operator.__aexit__()
            await self.restarted(cluster, key)

        on_two_nodes(body)
        assert made == ["first"]

    @pytest.mark.parametrize("readable", [True, False])
    def test_secret_that_cannot_be_made_is_one_clear_condition(self, readable: bool) -> None:
        async def body(cluster: FakeCluster, operator: Operator) -> None:
            cluster.api.refused.add("Secret")
            if not readable:
                cluster.api.unreadable.add("Secret")
            key = cluster.submit("first", **SPEC)
            await operator.watch(10.0)
            assert operator.condition(key, "PodsReady") == ("False", "ObjectRejected")
            message = operator.message(key, "PodsReady")
            assert "Secret" in message and "exceeded quota" in message and replicas(cluster, key) == []
            job = operator.cache.job(key)
            assert job is not None
            named = [c for c in job.status["conditions"] if "exceeded quota" in c["message"]]
            assert [c["type"] for c in named if c["status"] == "False"] == ["PodsReady"]
            cluster.api.refused.clear()
            cluster.api.unreadable.clear()
            await operator.watch(150.0)
            assert replicas(cluster, key) == [2]

        on_two_nodes(body)


def test_a_job_without_its_names_reserves_no_devices() -> None:
    """Regression: it was planned once a minute, and others waited for the devices of this plan."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        meta: Json = {"namespace": "team-a", "name": "waits-plan", "labels": {JOB_LABEL: "waits"}}
        await cluster.api.create(CONFIG_MAP, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {}})
        waits = cluster.submit("waits", **SPEC)
        await operator.watch()
        assert operator.condition(waits, "PodsReady") == ("False", "NamesTaken")
        other = cluster.submit("other", **SPEC)
        await operator.watch()
        assert operator.condition(other, "Planned") == ("True", "Planned"), operator.message(other, "Planned")
        await cluster.api.delete(CONFIG_MAP, "team-a", "waits-plan")
        await operator.watch()
        assert operator.condition(waits, "Planned") == ("False", "DeviceBusy")

    on_two_nodes(body)
