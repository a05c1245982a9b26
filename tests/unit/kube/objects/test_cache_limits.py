"""Tests of what the cache counts: the resources of all pods, and the memory that stored plans take."""

from typing import Any

import pytest

from dljob.job.plan.stored import StoredPlan
from dljob.kube import Cache
from dljob.kube.kinds import CONFIG_MAP, DLJOB, NODE, POD
from support.manifests.watched import DLJOB_OWNER, Json, body, dljob


@pytest.fixture
def cache() -> Cache:
    found = Cache()
    found.put(DLJOB, dljob())
    return found


class TestCapacity:
    """The ledger has the pods of all jobs and of everybody else."""

    @staticmethod
    def taking(name: str, uid: str, version: int, cpu: str, **more: Any) -> Json:
        spec = {"nodeName": "n1", "containers": [{"resources": {"requests": {"cpu": cpu}}}]}
        return body(name, uid, version, **{"job": None, "owner": None, **more}) | {"spec": spec}

    @pytest.fixture
    def filled(self, cache: Cache) -> Cache:
        ready = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-02T00:00:00Z"}
        status = {"conditions": [ready], "allocatable": {"cpu": "4", "memory": "8Gi"}}
        cache.put(NODE, {"metadata": {"name": "n1", "uid": "n"}, "status": status})
        return cache

    @staticmethod
    def free(cache: Cache) -> float:
        [node] = cache.ledger.view().nodes
        return node.free_cpu

    def test_pods_of_jobs_and_of_others_count(self, filled: Cache) -> None:
        assert filled.put(POD, self.taking("other", "p1", 1, "1"))
        assert filled.put(POD, self.taking("digits-cpu-0", "p2", 2, "2", job="digits", owner="set"))
        assert self.free(filled) == 1.0
        assert not filled.put(POD, self.taking("other", "p1", 3, "1")), "nothing that matters has changed"
        assert filled.put(POD, self.taking("other", "p1", 4, "500m"))
        assert self.free(filled) == 1.5

    def test_deleted_pod_does_not_count(self, filled: Cache) -> None:
        filled.put(POD, self.taking("other", "p1", 1, "1"))
        filled.put(POD, self.taking("more", "p2", 2, "1"))
        filled.drop(POD, "ns", "other", "p1")
        assert filled.prune(POD, [], before=9) == []
        assert self.free(filled) == 4.0

    def test_successor_of_a_pod_replaces_it(self, filled: Cache) -> None:
        filled.put(POD, self.taking("web-0", "p1", 1, "3"))
        filled.put(POD, self.taking("web-0", "p2", 2, "1"))
        assert self.free(filled) == 3.0

    def test_ended_pod_does_not_count(self, filled: Cache) -> None:
        filled.put(POD, self.taking("other", "p1", 1, "3"))
        assert filled.put(POD, self.taking("other", "p1", 2, "3") | {"status": {"phase": "Succeeded"}})
        assert self.free(filled) == 4.0

    def test_deleted_node_is_not_in_the_view(self, filled: Cache) -> None:
        filled.drop(NODE, "", "n1")
        assert filled.ledger.view().nodes == ()


def test_specs_of_one_namespace_take_a_limited_amount_of_memory(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Computed: 300 DLJobs of 64 KiB, each of 20,000 empty maps, would take 420 MB of the operator."""
    monkeypatch.setattr("dljob.kube.objects.stored_texts.MAX_NAMESPACE_NBYTES", 500_000)

    def spec_of(namespace: str, name: str) -> tuple[int, str]:
        found = cache.job((namespace, name))
        assert found is not None
        return len(found.spec), found.spec_problem or ""

    def put(namespace: str, name: str, values: int, version: int = 1) -> None:
        found = body(name, f"uid-{namespace}-{name}", version, job=None, owner=None)
        found["metadata"]["namespace"] = namespace
        cache.put(DLJOB, found | {"spec": {"podTemplateOverrides": [{}] * values}})

    for i in range(4):
        put("greedy", f"job-{i}", 2500)
        put("modest", f"job-{i}", 400)
    assert [spec_of("greedy", f"job-{i}")[0] for i in range(4)] == [1, 1, 0, 0]
    assert "in this namespace" in spec_of("greedy", "job-3")[1]
    assert [spec_of("modest", f"job-{i}") for i in range(4)] == [(1, "")] * 4
    cache.drop(DLJOB, "greedy", "job-0")
    put("greedy", "job-1", 2500, version=2)
    put("greedy", "job-3", 2500, version=2)
    assert [spec_of("greedy", f"job-{i}")[0] for i in (1, 2, 3)] == [1, 0, 1]


def test_plans_of_one_namespace_take_a_limited_amount_of_memory(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed bug: 500 jobs with edited plans of 1 MiB took all memory of the operator."""
    monkeypatch.setattr("dljob.kube.objects.stored_texts.MAX_NAMESPACE_NBYTES", 10_000)

    def plan(namespace: str, job: str, nbytes: int, version: int = 1) -> Json:
        owner = {**DLJOB_OWNER, "name": job, "uid": f"uid-{job}"}
        meta = {
            "name": f"{job}-plan", "namespace": namespace, "uid": f"plan-{namespace}-{job}",
            "resourceVersion": str(version), "labels": {"dljob.dev/job": job}, "ownerReferences": [owner],
        }  # fmt: skip
        return {"metadata": meta, "data": {"plan.json": "x" * nbytes}}

    def texts(namespace: str) -> list[int]:
        found = [cache.found(CONFIG_MAP, namespace, f"job-{i}-plan") for i in range(4)]
        return [len(entry.seen.plan.get("plan.json", "")) for entry in found if entry is not None]

    for i in range(4):
        cache.put(CONFIG_MAP, plan("greedy", f"job-{i}", 4000))
        cache.put(CONFIG_MAP, plan("modest", f"job-{i}", 400))
    assert texts("greedy") == [4000, 4000, 0, 0] and texts("modest") == [400] * 4
    beyond = cache.found(CONFIG_MAP, "greedy", "job-3-plan")
    assert beyond is not None
    with pytest.raises(ValueError, match="plans and reports of the jobs in this namespace"):
        StoredPlan.parse(beyond.seen.plan)
    cache.drop(CONFIG_MAP, "greedy", "job-0-plan")
    cache.put(CONFIG_MAP, plan("greedy", "job-1", 1000, version=2))
    cache.put(CONFIG_MAP, plan("greedy", "job-3", 4000, version=2))
    assert texts("greedy") == [1000, 0, 4000]
