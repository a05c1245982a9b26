"""A change of a job whose watch event says nothing new: the answer to a write of the status brought it."""

from collections.abc import Mapping
from typing import Any

import pytest

from dljob.kube.kinds import DLJOB, Kind
from support.controller.fake_operator import SPEC, Operator, on_two_nodes
from support.servers.fake_api import FakeCluster, Json


def test_job_that_changes_while_its_status_is_written_is_reconciled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed bug: the operator did not act on the change before something else happened to the job.

    The answer to the write had brought the change into the cache, which then ignored the older watch event.
    """

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        write, writes = cluster.api.merge, list[str]()

        async def merge(
            kind: Kind, namespace: str | None, name: str, patch: Mapping[str, Any], subresource: str = ""
        ) -> Json:
            if kind is DLJOB and not writes:  # The user is a little faster.
                await write(kind, namespace, name, {"metadata": {"generation": 2}, "spec": {"suspend": False}})
            answer = await write(kind, namespace, name, patch, subresource)
            if kind is DLJOB:
                writes.append(answer["status"]["phase"])
                cluster.api.events.clear()  # Their versions are not newer than the cached one.
            return answer

        monkeypatch.setattr(cluster.api, "merge", merge)
        key = cluster.submit("digits", **SPEC, suspend=True)
        await operator.watch()
        assert writes[0] == "Suspended" and operator.planned(key) == "Planned"

    on_two_nodes(body)
