"""Tests of ``dljob plan`` for users who may not see the whole cluster."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from dljob.cli import main, remote
from dljob.client import preview
from dljob.client.preview import ClusterState
from dljob.cluster import ClusterView
from dljob.job.plan.recommendation import Job, parse_job
from dljob.kube import ApiError
from dljob.kube.kinds import CLAIM, NODE, POD, PROFILE, STORAGE_CLASS, VOLUME, Kind
from support.specs.small_specs import JOB, MINIMAL


class _Server:
    """An API server that refuses to list objects of some kinds."""

    def __init__(self, refused: tuple[Kind, ...], code: int = 403, *objects: tuple[Kind, dict[str, Any]]) -> None:
        self._refused, self._code, self._objects = refused, code, objects
        self.read: list[str] = []

    async def find(self, kind: Kind, namespace: str | None, **selectors: str) -> list[Any]:
        self.read.append(kind.plural)
        if kind in self._refused:
            raise ApiError(self._code, "Forbidden", f"{kind.plural} is forbidden: User jane cannot list it")
        return [body for each, body in self._objects if each is kind]

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Any:
        self.read.append(f"{kind.plural}/{name}")
        if kind in self._refused:
            raise ApiError(self._code, "Forbidden", f"{kind.plural} is forbidden: User jane cannot get it")
        for each, body in self._objects:
            if each is kind and body["metadata"]["name"] == name:
                return body
        raise ApiError(404, "NotFound", name)


@pytest.mark.parametrize("kind", [NODE, POD], ids=lambda kind: str(kind.plural))
def test_missing_permission_is_explained(kind: Kind) -> None:
    """Fixed bug: the message was that of the API server, and named no remedy."""
    with pytest.raises(ApiError, match="PlanOnly") as raised:
        asyncio.run(preview.observe(_Server((kind,))))
    assert raised.value.code == 403
    assert raised.value.message.startswith(f"current cluster: {kind.plural} is forbidden")


def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(ApiError) as raised:
        asyncio.run(preview.observe(_Server((NODE,), code=500)))
    assert raised.value.message == "nodes is forbidden: User jane cannot list it"


def test_missing_permission_for_profiles_is_a_warning() -> None:
    """Fixed bug: plans used data sheets, and nothing said so."""
    state = asyncio.run(preview.observe(_Server((PROFILE,))))
    assert state.profiles == ()
    assert state.warning is not None and state.warning.startswith("current cluster: dlprofiles is forbidden")
    assert "data sheets" in state.warning and "dljob-plan" in state.warning


@pytest.mark.parametrize(("refused", "code"), [((), 403), ((PROFILE,), 404)], ids=["readable", "no such resource"])
def test_no_warning_without_a_missing_permission(refused: tuple[Kind, ...], code: int) -> None:
    assert asyncio.run(preview.observe(_Server(refused, code))).warning is None


def test_plan_prints_the_warning_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = ClusterState(ClusterView(()), {}, warning="current cluster: found nothing")
    monkeypatch.setattr(remote, "reach", lambda _: (empty, []))
    main(["plan", str(Path(__file__).parents[4] / "examples/mixed-devices.yaml"), "--json"])
    written = capsys.readouterr()
    assert written.err == "dljob: current cluster: found nothing\n"
    json.loads(written.out)


ZONE = "topology.kubernetes.io/zone"
IN_A = {"nodeSelectorTerms": [{"matchExpressions": [{"key": ZONE, "operator": "In", "values": ["a"]}]}]}
BOUND = {"spec": {"volumeName": "pv", "storageClassName": "zonal"}, "status": {"phase": "Bound"}}
OBJECTS: tuple[tuple[Kind, dict[str, Any]], ...] = (
    (CLAIM, {"metadata": {"name": "data", "namespace": "team-a"}, **BOUND}),
    (VOLUME, {"metadata": {"name": "pv"}, "spec": {"nodeAffinity": {"required": IN_A}}}),
    (VOLUME, {"metadata": {"name": "of-others"}, "spec": {"nodeAffinity": {"required": IN_A}}}),
    (
        STORAGE_CLASS,
        {
            "metadata": {"name": "zonal", "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}},
            "allowedTopologies": [{"matchLabelExpressions": [{"key": ZONE, "values": ["a", "b"]}]}],
        },
    ),
)


def with_data(**changes: Any) -> Job:
    data = {"uri": "pvc://data/train.npz", "samples": 1000, "sampleBytes": 256}
    spec = {**MINIMAL, "dataset": data, "checkpoint": {"enabled": False}, **changes}
    return parse_job({**JOB, "spec": spec})


def observed(server: _Server, job: Job) -> ClusterState:
    state = ClusterState(ClusterView(()), {}, warning="no profiles")
    return asyncio.run(preview.with_volumes(server, state, [(job, "team-a")]))


def test_plan_reads_only_the_volumes_of_the_job() -> None:
    server = _Server((), 403, *OBJECTS)
    state = observed(server, with_data())
    assert server.read == ["persistentvolumeclaims/data", "persistentvolumes/pv"]
    [limit] = state.volumes["team-a", "a"]
    assert (limit.field, limit.source, str(limit.nodes)) == ("spec.dataset.uri", "volume 'pv'", f"{ZONE} in (a)")
    assert state.warning == "no profiles"


def test_plan_reads_the_class_of_a_claim_without_a_volume() -> None:
    [limit] = observed(_Server((), 403, *OBJECTS[1:]), with_data(checkpoint={})).volumes["team-a", "a"]
    assert (limit.field, limit.source) == ("spec.checkpoint.volume", "StorageClass 'zonal'")


@pytest.mark.parametrize("kind", [CLAIM, VOLUME], ids=lambda kind: str(kind.plural))
def test_missing_permission_for_volumes_is_a_warning(kind: Kind) -> None:
    state = observed(_Server((kind,), 403, *OBJECTS), with_data())
    assert state.volumes == {}
    assert state.warning is not None and state.warning.startswith("no profiles; current cluster: persistentvolume")
    assert "dljob-plan" in state.warning and "get persistentvolumeclaims" in state.warning


def test_missing_permission_for_classes_is_none() -> None:
    """Most clusters have no classes with topologies, and most jobs make a claim."""
    state = observed(_Server((STORAGE_CLASS,), 403, *OBJECTS), with_data(checkpoint={}))
    assert len(state.volumes["team-a", "a"]) == 1 and state.warning == "no profiles"


def test_other_errors_of_volumes_stay_as_they_are() -> None:
    with pytest.raises(ApiError):
        observed(_Server((VOLUME,), 500, *OBJECTS), with_data())
