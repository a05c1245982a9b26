"""Tests of the fake nodes on which the jobs of tests/api run."""

from pathlib import Path
from typing import Any

import pytest

from dljob.kube.kinds import POD
from support.cluster.fake_nodes import HollowNodes
from support.cluster.kubectl import wait_for
from support.servers.threaded_api import ThreadedApiServer, threaded_api

WITHIN_S = 30.0


def pod(name: str, node: str) -> dict[str, Any]:
    spec = {"nodeName": node, "containers": [{"name": "trainer", "image": "example.invalid/trainer:1"}]}
    return {"metadata": {"name": name, "namespace": "team-a"}, "spec": spec, "status": {"phase": "Pending"}}


def phase(api: ThreadedApiServer, name: str) -> str:
    return str(api.server.objects[POD.plural, "team-a", name]["status"]["phase"])


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    with threaded_api(tmp_path) as found:
        monkeypatch.setenv("KUBECONFIG", str(found.kubeconfig))
        yield found


def test_pods_of_the_nodes_run_and_end(api: ThreadedApiServer) -> None:
    with HollowNodes("hollow", 2, device="hollow") as nodes:
        lists = api.server.lists[POD.plural]
        for name, node in {"first": "hollow-0", "second": "hollow-1", "other": "elsewhere"}.items():
            api.put(POD, pod(name, node))
        wait_for("both pods", lambda: phase(api, "first") == phase(api, "second") == "Running", WITHIN_S)
        api.put(POD, pod("unpulled", "hollow-0"))
        nodes.unpullable.add("unpulled")
        ending = pod("first", "hollow-0")
        ending["metadata"] |= {"deletionTimestamp": "2026-01-01T00:00:00Z"}
        api.put(POD, ending)
        wait_for("the first to end", lambda: (POD.plural, "team-a", "first") not in api.server.objects, WITHIN_S)
        nodes.unpullable.clear()
        wait_for("the last to run", lambda: phase(api, "unpulled") == "Running", WITHIN_S)
        assert api.server.lists[POD.plural] == lists, "a watch shows them"
        assert phase(api, "other") == "Pending"


def test_status_that_a_test_has_written_stays_while_the_watch_is_late(api: ThreadedApiServer) -> None:
    with HollowNodes("hollow", 1, device="hollow") as nodes:
        api.server.silent.add(POD.plural)
        api.put(POD, pod("evicted", "hollow-0"))
        seen = api.server.objects[POD.plural, "team-a", "evicted"]
        nodes._bodies.put(POD, seen)
        wait_for("the pod to run", lambda: phase(api, "evicted") == "Running", WITHIN_S)
        failed = {**seen, "status": {"phase": "Failed"}}
        api.put(POD, failed)
        api.put(POD, pod("next", "hollow-0"))
        nodes._bodies.put(POD, api.server.objects[POD.plural, "team-a", "next"])
        wait_for("a later pod to run", lambda: phase(api, "next") == "Running", WITHIN_S)
        assert phase(api, "evicted") == "Failed"
