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
from dljob.kube import ApiError
from dljob.kube.kinds import NODE, POD, PROFILE, Kind


class _Server:
    """An API server that refuses to list objects of some kinds."""

    def __init__(self, refused: tuple[Kind, ...], code: int = 403) -> None:
        self._refused, self._code = refused, code

    async def find(self, kind: Kind, namespace: str | None, **selectors: str) -> list[Any]:
        if kind in self._refused:
            raise ApiError(self._code, "Forbidden", f"{kind.plural} is forbidden: User jane cannot list it")
        return []


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
