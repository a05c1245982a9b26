"""Applied objects that no watch shows are looked at again: with one list for many jobs of a namespace."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import yaml

from devcluster.paths import REPOSITORY
from dljob.job.observed import JobSeen
from dljob.job.profiles import MANAGED_LABEL, MANAGER
from dljob.kube import ApiError, Cache, Kube
from dljob.kube.applying import applier, looks
from dljob.kube.applying.applied import Applied, AppliedObjects
from dljob.kube.applying.looks import Looks
from dljob.kube.kinds import ROLE, SERVICE
from support.builders import NOW, job
from support.servers.fake_api import FakeApi

Json = dict[str, Any]
RESYNC_S = 600.0
MANY, FEW = looks.MIN_LISTED, looks.MIN_LISTED - 1


class Jobs:
    """Jobs of a namespace with a Service and a Role each."""

    def __init__(self, number: int) -> None:
        self.api, self.jobs = FakeApi(), [job(name=f"job-{i}", uid=f"uid-{i}") for i in range(number)]
        api: Any = self.api
        self.kube = Kube(api, Cache(now=lambda: NOW), RESYNC_S)

    async def apply_all(self) -> None:
        for each in self.jobs:
            await self.kube.apply(each, manifests(each))

    async def look(self, *numbers: int) -> list[int]:
        """Look again at the objects of jobs at the same time. Return how many were applied again for each."""
        self.api.looked_at.clear()
        self.api.pages.clear()
        chosen = [self.jobs[number] for number in numbers]
        return await asyncio.gather(*(self.kube.look_again(each, manifests(each)) for each in chosen))


def manifests(owner: JobSeen) -> list[Json]:
    owners = [{"kind": "DLJob", "name": owner.name, "uid": owner.uid, "controller": True}]
    meta = {
        "name": owner.name,
        "namespace": owner.namespace,
        "labels": {MANAGED_LABEL: MANAGER},
        "ownerReferences": owners,
    }
    return [
        {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": meta, **content}
        for kind, content in ((SERVICE, {"spec": {"clusterIP": "None"}}), (ROLE, {"rules": []}))
    ]


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A function that sets the clock forward by a time in seconds."""
    clock_s = [1000.0]
    for module in (applier, looks):
        monkeypatch.setattr(module, "monotonic", lambda: clock_s[0])

    def forward(seconds: float) -> None:
        clock_s[0] += seconds

    return forward


def run(number: int, body: Callable[[Jobs], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        jobs = Jobs(number)
        await jobs.apply_all()
        await body(jobs)

    asyncio.run(main())


def test_one_list_of_each_kind_is_enough_for_many_jobs(later: Callable[[float], None]) -> None:
    async def body(jobs: Jobs) -> None:
        later(RESYNC_S - 1)
        assert await jobs.look(0) == [0] and not jobs.api.pages, "not due yet"
        later(1)
        assert await jobs.look(*range(MANY)) == [0] * MANY
        assert sorted(jobs.api.pages) == [("roles", "team-a"), ("services", "team-a")]
        assert not jobs.api.looked_at, "no object was asked for alone"
        later(RESYNC_S - 1)
        assert await jobs.look(*range(MANY)) == [0] * MANY and not jobs.api.pages
        later(1)
        await jobs.look(3)
        assert len(jobs.api.pages) == 2

    run(MANY, body)


def test_all_objects_of_a_job_are_in_the_lists() -> None:
    """JOB-logs has no label of a job, so that no watch shows it."""
    text = (REPOSITORY / "tests" / "golden" / "digits.yaml").read_text()
    objects = [each for each in yaml.safe_load_all(text) if each]
    assert {each["kind"] for each in objects} > {
        "ServiceAccount",
        "Role",
        "RoleBinding",
        "Service",
        "NetworkPolicy",
        "ConfigMap",
    }
    assert all(each["metadata"]["labels"][MANAGED_LABEL] == MANAGER for each in objects)
    assert f"{MANAGED_LABEL}={MANAGER}" == looks.OURS


def test_objects_of_few_jobs_are_asked_for_one_by_one(later: Callable[[float], None]) -> None:
    async def body(jobs: Jobs) -> None:
        later(RESYNC_S)
        await jobs.look(*range(FEW))
        assert len(jobs.api.looked_at) == 2 * FEW and not jobs.api.pages

    run(FEW, body)


def test_new_jobs_among_few_old_ones_need_no_list(later: Callable[[float], None]) -> None:
    async def body(jobs: Jobs) -> None:
        later(RESYNC_S / 2 + 1)
        jobs.jobs += [job(name=f"new-{i}", uid=f"new-uid-{i}") for i in range(4 * MANY)]
        await jobs.apply_all()
        later(RESYNC_S / 2)
        await jobs.look(*range(MANY))
        assert len(jobs.api.looked_at) == 2 * MANY and not jobs.api.pages

    run(MANY, body)


@pytest.mark.parametrize("change", ["changed", "deleted", "made anew"])
def test_changed_object_among_those_of_many_jobs_is_applied_again(change: str, later: Callable[[float], None]) -> None:
    async def body(jobs: Jobs) -> None:
        where = ("team-a", "job-5")
        if change == "changed":
            await jobs.api.merge(SERVICE, *where, {"spec": {"clusterIP": "10.0.0.1"}})
        else:
            await jobs.api.delete(SERVICE, *where)
        if change == "made anew":
            meta = {"metadata": {"namespace": "team-a", "name": "job-5", "labels": {MANAGED_LABEL: MANAGER}}}
            owners = {"ownerReferences": manifests(jobs.jobs[5])[0]["metadata"]["ownerReferences"]}
            jobs.api._store(SERVICE, {"metadata": {**meta["metadata"], **owners}, "spec": {"clusterIP": "10.0.0.1"}})
        later(RESYNC_S)
        assert await jobs.look(*range(MANY)) == [0, 0, 0, 0, 0, 1, 0, 0]
        assert (await jobs.api.get(SERVICE, *where))["spec"]["clusterIP"] == "None"
        assert jobs.api.looked_at == ["job-5"], "only the changed object is asked for"

    run(MANY, body)


def test_missing_permission_to_list_costs_one_request_for_each_kind(later: Callable[[float], None]) -> None:
    """Roles of an older release have only ``get``. The operator then asks for each object, as it did before."""

    async def body(jobs: Jobs) -> None:
        jobs.api.unlisted = {kind: ApiError(403, "Forbidden", "cannot list") for kind in ("Service", "Role")}
        await jobs.api.delete(SERVICE, "team-a", "job-2")
        later(RESYNC_S)
        assert sum(await jobs.look(*range(MANY))) == 1
        assert len(jobs.api.pages) == 2 and len(jobs.api.looked_at) == 2 * MANY
        later(RESYNC_S)
        await jobs.look(*range(MANY))
        assert not jobs.api.pages and len(jobs.api.looked_at) == 2 * MANY

    run(MANY, body)


def test_list_that_fails_is_an_error_of_the_look(later: Callable[[float], None]) -> None:
    async def body(jobs: Jobs) -> None:
        jobs.api.unlisted = {"Role": ApiError(500, "InternalError", "no etcd")}
        later(RESYNC_S)
        with pytest.raises(ApiError, match="no etcd"):
            await jobs.look(0)

    run(MANY, body)


def test_list_does_not_help_if_resource_versions_are_not_known(later: Callable[[float], None]) -> None:
    """As after a restart of the operator: it compares the owners of fields, which needs the manifest."""
    fake, applied = FakeApi(), AppliedObjects()
    api: Any = fake
    restored = [job(name=f"job-{i}", uid=f"uid-{i}") for i in range(MANY)]
    for each in restored:
        applied.update(each, {f"{kind.kind} {each.name}": Applied("d", 0.0, None, None) for kind in (SERVICE, ROLE)})
    later(RESYNC_S)
    changed = asyncio.run(Looks(api, applied, RESYNC_S).changed(restored[0], manifests(restored[0])))
    assert len(changed) == 2 and fake.looked_at == ["job-0", "job-0"] and not fake.pages
