"""Tests of the cache, which holds the newest version of each object and no deleted object."""

from datetime import UTC, datetime
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dljob.kube import Cache
from dljob.kube.kinds import CLAIM, CONFIG_MAP, DLJOB, NODE, POD, STATEFUL_SET, Kind
from support.manifests.watched import DLJOB_OWNER, Json, body, dljob

KEY = ("ns", "digits")


def controlled(name: str, uid: str, *, by: str, reason: str | None = None) -> Json:
    """Return a pod whose controller is the StatefulSet with the uid ``by``. ``reason``: why it has failed, if it has."""
    found = body(name, uid, owner=by)
    return found | ({"status": {"phase": "Failed", "reason": reason}} if reason else {})


def of_job(name: str, owner: Json) -> Json:
    """Return an object with a name that the job needs, which the DLJob ``owner`` controls."""
    found = body(name, name, owner=None, data={})
    return found | {"metadata": found["metadata"] | {"ownerReferences": [owner]}}


def pod(version: int, ready: bool, uid: str = "p1") -> Json:
    status = {"conditions": [{"type": "Ready", "status": str(ready)}]}
    return body("digits-cpu-0", uid, version, status=status)


@pytest.fixture
def cache() -> Cache:
    found = Cache()
    found.put(DLJOB, dljob())
    return found


def readiness(cache: Cache) -> list[bool]:
    return [seen.ready for seen in cache.pods_of(KEY)]


class TestPut:
    def test_put_reports_relevant_changes(self, cache: Cache) -> None:
        assert cache.put(POD, pod(1, False))
        assert not cache.put(POD, pod(2, False)), "the change is irrelevant"
        assert cache.put(POD, pod(3, True))

    def test_older_version_is_ignored(self, cache: Cache) -> None:
        cache.put(POD, pod(5, True))
        assert not cache.put(POD, pod(4, False))
        assert readiness(cache) == [True]

    def test_older_object_of_the_same_name_does_not_replace_its_successor(self, cache: Cache) -> None:
        cache.put(POD, pod(9, True, uid="new"))
        assert not cache.put(POD, pod(7, False, uid="old"))
        assert not cache.drop(POD, "ns", "digits-cpu-0", "old")
        assert readiness(cache) == [True]

    def test_late_response_does_not_restore_a_deleted_object(self, cache: Cache) -> None:
        cache.put(POD, pod(1, True))
        assert cache.drop(POD, "ns", "digits-cpu-0", "p1")
        assert not cache.put(POD, pod(2, True))
        assert readiness(cache) == []

    def test_object_whose_label_is_removed_is_dropped(self, cache: Cache) -> None:
        cache.put(POD, pod(1, True))
        stranger = body("digits-cpu-0", "p1", 2, job=None)
        cache.put(POD, stranger)
        assert readiness(cache) == []

    @given(st.lists(st.tuples(st.integers(1, 9), st.sampled_from(["a", "b"]), st.booleans()), max_size=12))
    def test_cache_holds_the_newest_object_that_is_not_deleted(self, history: list[tuple[int, str, bool]]) -> None:
        """The result does not depend on the order of events and responses."""
        cache, dropped, newest = Cache(), set[str](), None
        for version, uid, deleted in history:
            if deleted:
                if cache.drop(POD, "ns", "digits-cpu-0", uid):
                    dropped.add(uid)
                    newest = None
            else:
                cache.put(POD, pod(version, True, uid))
                if uid not in dropped and (newest is None or version >= newest):
                    newest = version
        assert len(cache.pods_of(KEY)) == (newest is not None)


class TestPrune:
    def test_prune_drops_objects_missing_in_a_list(self, cache: Cache) -> None:
        cache.put(POD, pod(5, True))
        assert cache.prune(POD, [], before=9) == [KEY]
        assert readiness(cache) == []

    @pytest.mark.parametrize(("present", "before"), [(["p1"], 9), ([], 4), ([], None)])
    def test_prune_keeps_listed_and_newer_objects(self, present: list[str], before: int | None, cache: Cache) -> None:
        cache.put(POD, pod(5, True))
        assert cache.prune(POD, present, before) == []
        assert readiness(cache) == [True]

    def test_prune_of_a_namespace_does_not_affect_others(self, cache: Cache) -> None:
        cache.put(POD, pod(5, True))
        assert cache.prune(POD, [], 9, namespace="elsewhere") == []

    def test_deleted_job_is_reconciled_once_more(self, cache: Cache) -> None:
        assert cache.prune(DLJOB, [], 9) == [KEY]
        assert cache.observe(KEY) is None


class TestObserve:
    def test_objects_of_other_jobs_are_not_observed(self, cache: Cache) -> None:
        other = body("other-cpu-0", "p2", job="other")
        cache.put(POD, other)
        observed = cache.observe(KEY)
        assert observed is not None and observed.pods == ()

    @pytest.mark.parametrize(
        ("kind", "name", "leftover"),
        [
            (STATEFUL_SET, "digits-cpu", "StatefulSet digits-cpu"),
            (CONFIG_MAP, "digits-plan", "ConfigMap digits-plan"),
            (CONFIG_MAP, "digits-report", "ConfigMap digits-report"),
            (CLAIM, "digits-checkpoints", "PersistentVolumeClaim digits-checkpoints"),
        ],
    )
    def test_objects_of_a_predecessor_are_leftovers(self, kind: Kind, name: str, leftover: str, cache: Cache) -> None:
        cache.put(kind, body(name, "u9", owner="another-uid", data={"plan.json": "{}", "report.json": "{}"}))
        observed = cache.observe(KEY)
        assert observed is not None and observed.leftovers == (leftover,)
        assert observed.sets == () and observed.plan is None and observed.report is None and not observed.being_deleted

    def test_objects_of_an_earlier_job_of_the_same_name_are_being_deleted(self, cache: Cache) -> None:
        """Fixed bug: after ``kubectl delete`` and ``apply`` of a job, they counted as objects of another owner."""
        for kind, name in ((STATEFUL_SET, "digits-cpu"), (CONFIG_MAP, "digits-plan"), (CLAIM, "digits-checkpoints")):
            cache.put(kind, of_job(name, {**DLJOB_OWNER, "uid": "earlier"}))
        cache.put(CONFIG_MAP, of_job("digits-report", {**DLJOB_OWNER, "uid": "another", "name": "digit"}))
        observed = cache.observe(KEY)
        assert observed is not None and observed.leftovers == ("ConfigMap digits-report",)
        assert observed.being_deleted == (
            "StatefulSet digits-cpu", "ConfigMap digits-plan", "PersistentVolumeClaim digits-checkpoints",
        )  # fmt: skip
        assert observed.sets == () and observed.plan is None

    def test_claim_without_owner_is_not_a_leftover(self, cache: Cache) -> None:
        cache.put(CLAIM, body("digits-checkpoints", "c", owner=None))
        observed = cache.observe(KEY)
        assert observed is not None and observed.leftovers == () and "digits-checkpoints" in observed.claims

    def test_only_lost_nodes_of_the_jobs_pods_are_observed(self, cache: Cache) -> None:
        for name, ready in (("n1", "True"), ("n2", "Unknown"), ("n3", "Unknown")):
            condition = {"type": "Ready", "status": ready, "lastTransitionTime": "2026-01-02T00:00:00Z"}
            cache.put(NODE, {"metadata": {"name": name, "uid": name}, "status": {"conditions": [condition]}})
        for i, node in enumerate(("n1", "n2", "gone")):
            cache.put(POD, body(f"digits-cpu-{i}", f"p{i}") | {"spec": {"nodeName": node}})
        observed = cache.observe(KEY)
        assert observed is not None and set(observed.lost_nodes) == {"n2", "gone"}
        assert cache.on_lost_nodes() == [KEY] and cache.runs(KEY)

    def test_nodes_of_the_jobs_pods_on_one_machine_are_counted(self, cache: Cache) -> None:
        for name, machine in (("n1", "host-1"), ("n2", "host-1"), ("n3", "host-1"), ("n4", "host-2"), ("n5", None)):
            labels = {"dljob.dev/machine": machine} if machine else {}
            status = {"allocatable": {"cpu": "4"}} if name != "n5" else {}
            cache.put(NODE, {"metadata": {"name": name, "uid": name, "labels": labels}, "status": status})
        observed = cache.observe(KEY)
        assert observed is not None and observed.machine_nodes == 1, "it has no pods"
        for i, node in enumerate(("n1", "n2", "n4", "n5", "gone")):
            cache.put(POD, body(f"digits-cpu-{i}", f"p{i}") | {"spec": {"nodeName": node}})
        observed = cache.observe(KEY)
        assert observed is not None and observed.machine_nodes == 2
        assert observed.usable_cpus == {"n1": 2.0, "n2": 2.0, "n4": 4.0}

    def test_conditions_of_nodes_and_pods_are_observed_without_their_times(self, cache: Cache) -> None:
        def node(status: str, at: str) -> Json:
            ready = {"type": "Ready", "status": "True", "lastHeartbeatTime": at}
            pressure = {"type": "MemoryPressure", "status": status, "lastHeartbeatTime": at}
            return {"metadata": {"name": "n1", "uid": "n1"}, "status": {"conditions": [ready, pressure]}}

        target = {"type": "DisruptionTarget", "status": "True", "lastTransitionTime": "2026-01-02T00:00:00Z"}
        conditions = [{"type": "Ready", "status": "False"}, {"type": "PodScheduled", "status": "True"}, target]
        pod = {"spec": {"nodeName": "n1"}, "status": {"conditions": conditions}}
        cache.put(POD, body("digits-cpu-0", "p0") | pod)
        assert cache.put(NODE, node("False", "2026-01-02T00:00:00Z"))
        assert not cache.put(NODE, node("False", "2026-01-03T00:00:00Z")), "a heartbeat changes nothing"
        assert cache.put(NODE, node("True", "2026-01-04T00:00:00Z"))
        observed = cache.observe(KEY)
        assert observed is not None and observed.pods[0].conditions == (("DisruptionTarget", "True"),)
        assert observed.node_conditions == {"n1": (("MemoryPressure", "True"), ("Ready", "True"))}

    @pytest.mark.parametrize(
        ("spec", "others", "failed"),
        [
            ({}, 3, True),
            ({"unschedulable": True}, 3, False),
            ({"taints": [{"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}]}, 3, False),
            ({"taints": [{"key": "cloud.google.com/impending-node-termination", "effect": "NoSchedule"}]}, 3, False),
            ({"taints": [{"key": "aws-node-termination-handler/spot-itn", "effect": "NoSchedule"}]}, 3, False),
            ({"taints": [{"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}]}, 3, False),
            ({"taints": [{"key": "node.kubernetes.io/unreachable", "effect": "NoSchedule"}]}, 3, True),
            ({}, 1, True),
            ({}, 0, False),
        ],
        ids=[
            "alone",
            "cordoned",
            "scaled down",
            "taken back by GKE",
            "taken back by AWS",
            "by Karpenter",
            "Kubernetes' own taint",
            "one of two",
            "all nodes",
        ],
    )
    def test_node_fails_by_itself_unless_somebody_took_it_away(
        self, spec: Json, others: int, failed: bool, cache: Cache
    ) -> None:
        for i in range(others + 1):
            ready = {
                "type": "Ready",
                "status": "True" if i else "Unknown",
                "lastTransitionTime": "2026-01-02T00:00:00Z",
            }
            node = {"metadata": {"name": f"n{i}", "uid": f"n{i}"}, "status": {"conditions": [ready]}}
            cache.put(NODE, node | ({} if i else {"spec": spec}))
        cache.put(POD, body("digits-cpu-0", "p0") | {"spec": {"nodeName": "n0"}})
        cache.put(POD, body("digits-cpu-1", "p1") | {"spec": {"nodeName": "gone"}})
        observed = cache.observe(KEY)
        assert observed is not None and "n0" in observed.lost_nodes
        assert set(observed.failed_nodes) == ({"n0"} if failed else set())

    def test_missing_node_is_lost_from_when_it_is_noticed(self) -> None:
        """The watch of nodes may lag behind that of pods. Fixed bug: the node counted as lost since 1970."""
        times = [datetime(2026, 1, 2, tzinfo=UTC), datetime(2026, 1, 3, tzinfo=UTC), datetime(2026, 1, 4, tzinfo=UTC)]
        cache = Cache(now=iter(times).__next__)
        cache.put(DLJOB, dljob())
        cache.put(POD, body("digits-cpu-0", "p0") | {"spec": {"nodeName": "new"}})
        for _ in range(2):
            observed = cache.observe(KEY)
            assert observed is not None and observed.lost_nodes == {"new": times[0]}
        ready = {"conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-02T00:00:00Z"}]}
        cache.put(NODE, {"metadata": {"name": "new", "uid": "n"}, "status": ready})
        observed = cache.observe(KEY)
        assert observed is not None and observed.lost_nodes == {}

    def test_deleted_node_is_lost_at_once(self, cache: Cache) -> None:
        cache.put(NODE, {"metadata": {"name": "n1", "uid": "n1"}, "status": {}})
        cache.put(POD, body("digits-cpu-0", "p0") | {"spec": {"nodeName": "n1"}})
        cache.drop(NODE, "", "n1")
        observed = cache.observe(KEY)
        assert observed is not None and observed.lost_nodes == {"n1": datetime(1970, 1, 1, tzinfo=UTC)}

    @pytest.mark.parametrize(
        "owner",
        [None, {"kind": "ReplicaSet", "name": "digits-cpu"}, {"kind": "StatefulSet", "name": "web"}],
        ids=["none", "another kind", "another set"],
    )
    def test_pods_of_other_owners_are_not_observed(self, cache: Cache, owner: Json | None) -> None:
        stranger = body("stranger", "p9", owner=None)
        stranger["metadata"]["ownerReferences"] = [{**owner, "controller": True, "uid": "x"}] if owner else []
        cache.put(POD, stranger)
        cache.put(POD, body("digits-cpu-0", "p0"))
        assert [pod.name for pod in cache.pods_of(KEY)] == ["digits-cpu-0"]

    @pytest.mark.parametrize("first", [True, False], ids=["set first", "pod first"])
    def test_pods_of_a_foreign_set_of_the_same_name_are_not_observed(self, cache: Cache, first: bool) -> None:
        """Fixed bug: only the name of the StatefulSet counted."""
        foreign = body("digits-cpu", "s9", owner=None)
        if first:
            cache.put(STATEFUL_SET, foreign)
        cache.put(POD, controlled("digits-cpu-0", "p0", by="s9", reason="Evicted"))
        if not first:
            assert cache.unidentified_sets(KEY) == {"s9": "digits-cpu"}
            cache.put(STATEFUL_SET, foreign)
        observed = cache.observe(KEY)
        assert observed is not None and observed.pods == () and cache.unidentified_sets(KEY) == {}
        assert bool(observed.evictions) is not first

    def test_pods_outlive_their_set(self, cache: Cache) -> None:
        """The operator deletes a StatefulSet in the background. Its pods count until they have stopped."""
        own = body("digits-cpu", "s1", owner=None)
        own["metadata"]["ownerReferences"] = [DLJOB_OWNER]
        cache.put(STATEFUL_SET, own)
        cache.put(POD, controlled("digits-cpu-0", "p0", by="s1"))
        cache.drop(STATEFUL_SET, "ns", "digits-cpu", "s1")
        assert [pod.name for pod in cache.pods_of(KEY)] == ["digits-cpu-0"] and cache.unidentified_sets(KEY) == {}

    @pytest.mark.parametrize(
        ("found", "counts"),
        [
            (None, True),
            (("s2", None), True),
            (("s1", None), False),
            (("s1", "Deployment"), False),
            (("s1", "DLJob"), True),
        ],
        ids=["gone", "replaced", "without owner", "another owner", "a job's"],
    )
    def test_set_that_no_watch_has_shown_is_identified(
        self, cache: Cache, found: tuple[str, str | None] | None, counts: bool
    ) -> None:
        cache.put(POD, controlled("digits-cpu-0", "p0", by="s1"))
        answer = None
        if found is not None:
            answer = body("digits-cpu", found[0], job=None, owner=None)
            answer["metadata"]["ownerReferences"] = [{**DLJOB_OWNER, "kind": found[1]}] if found[1] else []
        cache.identify_set("s1", answer)
        assert bool(cache.pods_of(KEY)) is counts and cache.unidentified_sets(KEY) == {}


class TestConfigMaps:
    """Everybody who may write ConfigMaps in a namespace can add the label of a job, and 1 MiB of data."""

    DATA: ClassVar[Json] = {"plan.json": "{}", "report.json": "{}", "more": "x" * 1000}

    def stored(self, cache: Cache, name: str, owner: Json | None, job: str = "digits") -> Any:
        found = body(name, "m1", job=job, owner=None, data=self.DATA)
        found["metadata"]["ownerReferences"] = [owner] if owner else []
        found["metadata"]["annotations"] = {"dljob.dev/applied": "x" * 1000, "dljob.dev/support": "x" * 1000}
        found["metadata"]["annotations"]["dljob.dev/signature"] = "x" * 1000
        cache.put(CONFIG_MAP, found)
        entry = cache.found(CONFIG_MAP, "ns", name)
        assert entry is not None
        return entry.seen

    def test_plan_and_report_are_stored(self, cache: Cache) -> None:
        plan, report = (self.stored(cache, name, DLJOB_OWNER) for name in ("digits-plan", "digits-report"))
        assert plan.plan == {"plan.json": "{}"} and plan.report is None and plan.applied
        assert len(plan.signature) < 1000
        assert report.plan is None and report.report_text == "{}"

    @pytest.mark.parametrize(
        ("name", "owner"),
        [
            ("digits-plan", None),
            ("digits-plan", {"kind": "Deployment"}),
            ("digits-plan", {"apiVersion": "example.com/v1"}),
            ("digits-plan", {"name": "other"}),
            ("digits-plan", {"controller": False}),
            ("digits-more", {}),
            ("other-plan", {}),
            ("digits-logs", {}),
        ],
    )
    def test_other_data_is_not_stored(self, cache: Cache, name: str, owner: Json | None) -> None:
        """Fixed bug: any ConfigMap with the label and a key plan.json was stored as a whole."""
        seen = self.stored(cache, name, None if owner is None else {**DLJOB_OWNER, **owner})
        assert (seen.plan, seen.report, seen.applied, seen.support) == (None, None, "", "")


@pytest.mark.parametrize(
    ("status", "affected"),
    [
        ({}, False),
        ({"conditions": [{"type": "Planned", "status": "False"}]}, False),
        ({"conditions": [{"type": "VolumeReady", "status": "Unknown"}]}, True),
        ({"conditions": [{"type": "VolumeReady", "status": "Unknown"}], "phase": "Failed"}, False),
    ],
)
def test_jobs_that_wait_for_volumes_are_found(status: Json, affected: bool) -> None:
    """Jobs that wait for nodes are not among them: they are queued only when capacity grows."""
    cache = Cache()
    cache.put(DLJOB, dljob(status=status))
    assert cache.waiting_for_volumes({CLAIM}) == ([KEY] if affected else []) and not cache.runs(KEY)


def test_changed_jobs_are_collected_only_for_a_reader() -> None:
    """Fixed bug: a replica that does not lead kept the name of each job that its watches ever reported."""
    cache = Cache()
    cache.put(DLJOB, dljob())
    cache.touched.begin()
    assert cache.touched.take() == set()
    cache.drop(DLJOB, *KEY)
    assert cache.touched.take() == {KEY} and cache.touched.take() == set()
    cache.put(DLJOB, dljob(uid="another"))
    cache.touched.end()
    cache.touched.begin()
    assert cache.touched.take() == set()
