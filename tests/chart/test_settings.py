"""Chart and operator agree on the environment: what the chart sets, the operator reads, and means the same."""

import inspect
import re
from typing import Any

import pytest

from dljob.app import settings
from dljob.app.settings import Settings
from support.helm_chart import WAYS, one, render

Json = dict[str, Any]
KNOWN = set(re.findall(r"^\| (DLJOB_[A-Z_]+) \|", inspect.getdoc(settings) or "", re.MULTILINE))


def environment(values: Json) -> dict[str, str]:
    """What the operator's container sees; fields of the pod are made up."""
    [container] = one(render(values), "Deployment")["spec"]["template"]["spec"]["containers"]
    return {item["name"]: item.get("value", "made-up") for item in container["env"]}


@pytest.mark.parametrize("way", WAYS)
def test_the_operator_knows_every_variable(way: str) -> None:
    env = environment(WAYS[way])
    assert {name for name in env if name.startswith("DLJOB_")} <= KNOWN
    Settings.of(env)


def test_every_setting_can_be_set_by_the_chart() -> None:
    """All but the one for tests and patience, which operator.extraEnv reaches."""
    assert KNOWN - set(environment({})) == {"DLJOB_RESYNC_SECONDS"}


def test_values_arrive() -> None:
    peers = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    found = Settings.of(
        environment(
            {
                "trainer": {"image": {"repository": "r/t", "tag": "9", "pullPolicy": "Always"}},
                "watchNamespaces": ["a", "b"],
                "leaderElection": {"enabled": False},
                "operator": {
                    "logLevel": "debug",
                    "logFormat": "json",
                    "concurrency": 3,
                    "clusterDomain": "k8s.example",
                    "extraEnv": [{"name": "DLJOB_RESYNC_SECONDS", "value": "5"}],
                },
                "metrics": {"port": 9999, "allowedSources": peers},
            }
        )
    )
    assert (found.trainer_image, found.trainer_pull_policy) == ("r/t:9", "Always")
    assert (found.watch_namespaces, found.leader_election) == (("a", "b"), False)
    assert (found.log_level, found.log_format, found.concurrency) == ("debug", "json", 3)
    assert (found.cluster_domain, found.metrics_port, found.resync_s) == ("k8s.example", 9999, 5)
    assert list(found.metrics_sources) == peers
    assert found.identity == found.namespace == "made-up"


def test_without_a_limit_all_namespaces() -> None:
    assert Settings.of(environment({})).watch_namespaces == ()
    assert Settings.of(environment({"singleNamespaceInstall": True})).watch_namespaces == ("dljob-system",)
