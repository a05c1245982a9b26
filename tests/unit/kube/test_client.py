"""Tests of the operator's writes where other owners have objects of the same names."""

import asyncio
from typing import Any

import pytest

from dlcontract import Report, RunPhase
from dlcontract.report import RankMeasure
from dljob.job.identity import profile_name
from dljob.job.profiles import MANAGED_LABEL, MANAGER
from dljob.kube import Cache, Kube
from dljob.kube.answers import ApiError
from dljob.kube.kinds import DLJOB, POD, PROFILE, SERVICE, STATEFUL_SET, Kind
from dljob.reconcile import RunMeasurements
from support.builders import NOW, T4, job
from support.servers.fake_api import FakeApi

Json = dict[str, Any]
MODEL, KEY = "digits-cnn.digits", ("team-a", "digits")
NAME = profile_name(MODEL, T4)
REPORT = Report(
    uid="u", plan_number=1, plan_digest="d", term=1, phase=RunPhase.SUCCEEDED, unix_s=NOW.timestamp(), step=100,
    steps=100, step_s=0.01, world_size=1, ranks=(RankMeasure(rank=0, device=T4, share=30, compute_s=0.1),),
)  # fmt: skip


def learned(api: FakeApi, *, cached: bool) -> Json:
    """Update the profile of a run. Return it. ``cached``: the watch has shown what exists already."""
    cache = Cache(now=lambda: NOW)
    found: Any = api
    if cached:
        cache.put(PROFILE, api.objects["dlprofiles", "", NAME])
    measurements = RunMeasurements(MODEL, REPORT, (T4,))
    asyncio.run(Kube(found, cache, 600.0).update_profiles(measurements, None, NOW))
    return api.objects["dlprofiles", "", NAME]


def test_new_profile_is_the_operators() -> None:
    made = learned(FakeApi(), cached=False)
    assert made["metadata"]["labels"] == {MANAGED_LABEL: MANAGER}
    assert made["spec"] == {"model": MODEL, "device": T4} and made["status"]["observedJobs"] == 1


@pytest.mark.parametrize("cached", [True, False], ids=["cached", "not cached yet"])
def test_profile_of_an_administrator_does_not_become_the_operators(cached: bool) -> None:
    """Fixed bug: a profile that the watch had not shown yet got the label, and could then expire."""
    api = FakeApi()
    api._store(
        PROFILE,
        {
            "metadata": {"name": NAME, "labels": {"team": "infra"}},
            "spec": {"model": MODEL, "device": T4},
            "status": {"observedJobs": 7},
        },
    )
    found = learned(api, cached=cached)
    assert found["metadata"]["labels"] == {"team": "infra"}
    assert found["status"]["observedJobs"] == 8, "its measurements count"


class Silent(FakeApi):
    """An API server that does not show StatefulSets."""

    async def get(self, *args: Any) -> Json:
        raise ApiError(403, "Forbidden", "no")


@pytest.mark.parametrize(
    ("api", "exists", "counts"), [(FakeApi(), True, False), (FakeApi(), False, True), (Silent(), True, True)]
)
def test_pods_of_a_set_without_the_label_are_not_the_jobs(api: FakeApi, exists: bool, counts: bool) -> None:
    cache = Cache(now=lambda: NOW)
    if exists:
        api._store(STATEFUL_SET, {"metadata": {"name": "digits-cpu", "namespace": "team-a", "uid": "s1"}, "spec": {}})
    owner = {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "digits-cpu", "uid": "s1", "controller": True}
    meta = {
        "name": "digits-cpu-0", "namespace": "team-a", "uid": "p1", "ownerReferences": [owner],
        "labels": {"dljob.dev/job": "digits", "dljob.dev/group": "cpu"},
    }  # fmt: skip
    cache.put(POD, {"metadata": meta, "spec": {}})
    job = {"name": "digits", "namespace": "team-a", "uid": "j", "creationTimestamp": "2026-01-01T00:00:00Z"}
    cache.put(DLJOB, {"metadata": job, "spec": {}})
    client: Any = api
    asyncio.run(Kube(client, cache, 600.0).identify_sets(KEY))
    observed = cache.observe(KEY)
    assert observed is not None and bool(observed.pods) is counts


def test_two_runs_that_end_together_both_count() -> None:
    """Fixed bug: both updates began with the profile as it was before, so that the second one removed the first."""

    class SlowApi(FakeApi):
        async def merge(self, kind: Kind, *where: Any, **more: Any) -> Json:
            await asyncio.sleep(0)  # The other job is reconciled meanwhile.
            return await super().merge(kind, *where, **more)

    async def run() -> int:
        api = SlowApi()
        found: Any = api
        kube = Kube(found, Cache(now=lambda: NOW), 600.0)
        measurements = RunMeasurements(MODEL, REPORT, (T4,))
        await asyncio.gather(*(kube.update_profiles(measurements, None, NOW) for _ in range(3)))
        count: int = api.objects["dlprofiles", "", NAME]["status"]["observedJobs"]
        return count

    assert asyncio.run(run()) == 3


def test_operator_that_leads_again_restores_what_another_leader_has_changed() -> None:
    """Fixed bug: for ten minutes, it took objects that no watch shows for those that it had applied when it led before."""

    async def body() -> None:
        api: Any = FakeApi()
        first, second = (Kube(api, Cache(now=lambda: NOW), 600.0) for _ in range(2))
        services = [
            {
                "apiVersion": "v1", "kind": "Service", "spec": {"clusterIP": address},
                "metadata": {
                    "name": "digits", "namespace": "team-a",
                    "ownerReferences": [{"kind": "DLJob", "name": "digits", "uid": job().uid, "controller": True}],
                },
            }
            for address in ("None", "10.0.0.1")
        ]  # fmt: skip
        assert await first.apply(job(), services[:1]) == 1 and await first.apply(job(), services[:1]) == 0
        assert await second.apply(job(), services[1:]) == 1
        first.forget_all()
        assert await first.apply(job(), services[:1]) == 1
        assert (await api.get(SERVICE, "team-a", "digits"))["spec"] == {"clusterIP": "None"}

    asyncio.run(body())
