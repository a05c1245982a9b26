"""Tests of claims, StorageClasses and PersistentVolumes in the cache: what is cached, and whom a change concerns."""

from typing import Any

import pytest

from dljob.cluster.node_selector import NodeSelector
from dljob.kube import Cache
from dljob.kube.kinds import CLAIM, DLJOB, NODE, STORAGE_CLASS, VOLUME, Kind
from dljob.kube.objects import storage
from support.manifests.watched import Json, body, dljob

ZONE = "topology.kubernetes.io/zone"
KEY = ("ns", "digits")


def zone(name: str) -> Json:
    return {"nodeSelectorTerms": [{"matchExpressions": [{"key": ZONE, "operator": "In", "values": [name]}]}]}


def volume(name: str, required: Json | None, version: int = 1, *, namespace: str = "ns", **more: Any) -> Json:
    """Return a PersistentVolume. ``namespace``: of its claim."""
    meta = {"name": name, "uid": f"uid-{name}", "resourceVersion": str(version)}
    affinity = {"nodeAffinity": {"required": required}} if required is not None else {}
    return {"metadata": meta, "spec": {"claimRef": {"namespace": namespace, "name": "data"}, **affinity}, **more}


def claim(name: str, volume_name: str | None, version: int = 1, phase: str = "Bound") -> Json:
    found = body(name, f"uid-{name}", version, job=None, owner=None, status={"phase": phase})
    return found | {"spec": {"accessModes": ["ReadWriteMany"], **({"volumeName": volume_name} if volume_name else {})}}


AFFINITIES: dict[str, tuple[Json, NodeSelector | None]] = {
    "none": ({}, None),
    "no spec": ({"spec": None}, None),
    "an empty one": ({"spec": {"nodeAffinity": {}}}, None),
    "a zone": ({"spec": {"nodeAffinity": {"required": zone("a")}}}, NodeSelector.parse(zone("a"))),
    "no terms, which no node matches": ({"spec": {"nodeAffinity": {"required": {}}}}, NodeSelector(())),
}


@pytest.mark.parametrize(("given", "expected"), AFFINITIES.values(), ids=AFFINITIES.keys())
def test_volume_is_reduced_to_its_node_affinity(given: Json, expected: NodeSelector | None) -> None:
    assert storage.volume({"metadata": {"name": "pv"}, **given}) == expected


def test_equal_affinities_share_memory() -> None:
    first, second = (storage.volume(volume(name, zone("shared"))) for name in ("one", "two"))
    assert first is second


def test_claim_names_its_volume() -> None:
    assert [storage.claim(claim("data", name)).volume for name in ("pv", None)] == ["pv", ""]


@pytest.mark.parametrize(("allowed", "limited"), [(None, False), ([], False), (True, True)])
def test_class_has_its_topologies(allowed: Any, limited: bool) -> None:
    given = [{"matchLabelExpressions": [{"key": ZONE, "values": ["a"]}]}] if allowed else allowed
    found = storage.storage_class({"metadata": {"name": "s"}, "allowedTopologies": given})
    assert (found.topologies == NodeSelector.parse(zone("a"))) is limited


@pytest.fixture
def cache() -> Cache:
    found = Cache()
    found.put(DLJOB, dljob())
    return found


def volumes(cache: Cache) -> list[str]:
    observed = cache.observe(KEY)
    assert observed is not None
    return sorted(observed.volumes)


class TestCache:
    def test_job_sees_the_volumes_of_the_claims_in_its_namespace(self, cache: Cache) -> None:
        for name in ("mine", "other"):
            cache.put(VOLUME, volume(name, zone("a")))
        cache.put(CLAIM, claim("data", "mine"))
        observed = cache.observe(KEY)
        assert observed is not None and observed.volumes == {"mine": NodeSelector.parse(zone("a"))}
        assert observed.claims["data"].volume == "mine"

    def test_volumes_without_affinity_are_not_cached(self, cache: Cache) -> None:
        """A cluster may have ten thousand volumes."""
        assert not cache.put(VOLUME, volume("nfs", None))
        assert cache.found(VOLUME, "", "nfs") is None

    def test_only_changes_of_the_affinity_count(self, cache: Cache) -> None:
        assert cache.put(VOLUME, volume("pv", zone("a"), 1))
        assert not cache.put(VOLUME, volume("pv", zone("a"), 2, status={"phase": "Bound"}))
        assert cache.put(VOLUME, volume("pv", zone("b"), 3))
        assert not cache.put(VOLUME, volume("pv", zone("a"), 2)), "an older version"
        cache.put(CLAIM, claim("data", "pv"))
        assert volumes(cache) == ["pv"]
        assert cache.put(VOLUME, volume("pv", None, 4))
        assert volumes(cache) == []

    def test_deleted_volumes_are_dropped(self, cache: Cache) -> None:
        cache.put(CLAIM, claim("data", "pv"))
        for name in ("pv", "gone"):
            cache.put(VOLUME, volume(name, zone("a")))
        assert cache.drop(VOLUME, "", "gone") and not cache.drop(VOLUME, "", "nfs")
        cache.prune(VOLUME, ["uid-nfs"], 9)
        assert cache.found(VOLUME, "", "pv") is None and volumes(cache) == []


CONFLICT = {"type": "Planned", "status": "False", "reason": "VolumeNodeConflict"}
BUSY = {"type": "Planned", "status": "False", "reason": "DeviceBusy"}
BINDING = {"type": "VolumeReady", "status": "Unknown", "reason": "Binding"}
WAITING: dict[str, tuple[Json, Kind, bool]] = {
    "a claim: too few nodes for its volume": (CONFLICT, CLAIM, True),
    "a claim: it waits for its volume": (BINDING, CLAIM, True),
    "a claim: the nodes are busy": (BUSY, CLAIM, False),
    "a class: too few nodes for it": (CONFLICT, STORAGE_CLASS, True),
    "a volume: too few nodes for it": (CONFLICT, VOLUME, True),
    "a volume: a claim waits for its volume": (BINDING, VOLUME, False),
    "a volume: the nodes are busy": (BUSY, VOLUME, False),
    "a node": (CONFLICT, NODE, False),
}


@pytest.mark.parametrize(("condition", "kind", "waits"), WAITING.values(), ids=WAITING.keys())
def test_jobs_that_a_change_concerns(condition: Json, kind: Kind, waits: bool) -> None:
    cache = Cache()
    cache.put(DLJOB, dljob(status={"conditions": [condition]}))
    if kind is VOLUME:
        cache.put(VOLUME, volume("pv", zone("a")))
    assert cache.waiting_for_volumes({kind}) == ([KEY] if waits else [])
    assert cache.waiting_for_volumes({kind}) == ([KEY] if waits and kind is not VOLUME else [])


VOLUMES: dict[str, tuple[list[Json], bool]] = {
    "of a claim in another namespace": ([volume("pv", zone("a"), namespace="other")], False),
    "without a claim": ([{**volume("pv", None), "spec": {"nodeAffinity": {"required": zone("a")}}}], False),
    "with the affinity that it had": ([volume("pv", zone("a"), n) for n in (1, 2)], False),
    "with another affinity": ([volume("pv", zone("a")), volume("pv", zone("b"), 2)], True),
    "without an affinity": ([volume("nfs", None)], False),
    "whose affinity is gone": ([volume("pv", zone("a")), volume("pv", None, 2)], True),
}


@pytest.mark.parametrize(("bodies", "waits"), VOLUMES.values(), ids=VOLUMES.keys())
def test_irrelevant_volumes_queue_no_job(bodies: list[Json], waits: bool) -> None:
    cache = Cache()
    cache.put(DLJOB, dljob(status={"conditions": [CONFLICT]}))
    for each in bodies:
        cache.waiting_for_volumes({VOLUME})
        cache.put(VOLUME, each)
    assert bool(cache.waiting_for_volumes({VOLUME})) is waits


def test_ended_jobs_wait_for_nothing() -> None:
    cache = Cache()
    cache.put(DLJOB, dljob(status={"conditions": [CONFLICT], "phase": "Failed"}))
    assert cache.waiting_for_volumes({CLAIM, STORAGE_CLASS}) == []
