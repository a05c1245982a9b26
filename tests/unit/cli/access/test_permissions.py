"""Tests of ``dljob plan`` for users who may not see the whole cluster."""

import asyncio
from typing import Any

import pytest

from dljob.client import preview
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


def test_profiles_are_optional() -> None:
    assert asyncio.run(preview.observe(_Server((PROFILE,)))).profiles == ()
