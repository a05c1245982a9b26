"""Tests that the operator reads every variable that the chart sets, with the same meaning."""

import inspect
import re
from typing import Any

import pytest

from dljob.app import settings
from dljob.app.settings import Settings
from dljob.faults import FaultPolicy
from support.manifests.helm_chart import JOB_DEFAULTS, WAYS, one, render

Json = dict[str, Any]
KNOWN = set(re.findall(r"^\| (DLJOB_[A-Z_]+) \|", inspect.getdoc(settings) or "", re.MULTILINE))


def environment(values: Json) -> dict[str, str]:
    """Return the environment of the operator's container, with invented pod fields."""
    [container] = one(render(values), "Deployment")["spec"]["template"]["spec"]["containers"]
    return {item["name"]: item.get("value", "made-up") for item in container["env"]}


@pytest.mark.parametrize("way", WAYS)
def test_operator_reads_every_variable(way: str) -> None:
    env = environment(WAYS[way])
    assert {name for name in env if name.startswith("DLJOB_")} <= KNOWN
    Settings.of(env)


def test_chart_can_set_every_setting() -> None:
    """The only exceptions are settings for tests, which operator.extraEnv can set."""
    assert KNOWN - set(environment({})) == {"DLJOB_RESYNC_SECONDS", "DLJOB_WATCH_SILENCE_SECONDS"}


def test_values_reach_the_settings() -> None:
    peers = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    found = Settings.of(
        environment(
            {
                "trainer": {"image": {"repository": "r/t", "tag": "9", "pullPolicy": "Always"}},
                "watchNamespaces": ["a", "b"],
                "leaderElection": {"enabled": False},
                "queue": {"deadlines": False, "weights": {"team-a": 2}},
                "operator": {
                    "logLevel": "debug",
                    "logFormat": "json",
                    "concurrency": 3,
                    "countAllPods": True,
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
    assert (found.queue_policy.deadlines, dict(found.queue_policy.weights)) == (False, {"team-a": 2.0})
    default = Settings.of(environment({})).queue_policy
    assert default.deadlines and not default.weights
    assert found.count_all_pods and not Settings.of(environment({})).count_all_pods
    assert (found.cluster_domain, found.metrics_port, found.resync_s) == ("k8s.example", 9999, 5)
    assert list(found.metrics_sources) == peers
    assert found.identity == found.namespace == "made-up"


def test_defaults_of_jobs_reach_the_settings() -> None:
    found = Settings.of(environment({"jobDefaults": JOB_DEFAULTS}))
    assert found.job_defaults.manifest() == JOB_DEFAULTS
    assert found.render().job_defaults == found.job_defaults
    assert Settings.of(environment({})).job_defaults.empty


def test_architectures_of_nodes_reach_the_settings() -> None:
    assert environment({})["DLJOB_NODE_ARCHITECTURES"] == "", "the operator takes that of its machine"
    values = {"nodes": {"architectures": ["arm64", "amd64"]}}
    assert Settings.of(environment(values)).node_architectures == ("amd64", "arm64")


def test_node_faults_reach_the_settings() -> None:
    values = {"limit": 3, "windowSeconds": 1800, "leftOutSeconds": 600, "maxLeftOutSeconds": 604800}
    assert Settings.of(environment({"nodeFaults": values})).fault_policy == FaultPolicy(3, 1800, 600, 604800)
    assert Settings.of(environment({})).fault_policy == FaultPolicy()
    assert Settings.of(environment({"nodeFaults": {"enabled": False}})).fault_policy is None


def test_hardware_probes_are_on_unless_switched_off() -> None:
    assert Settings.of(environment({})).probes
    assert not Settings.of(environment({"probes": {"enabled": False}})).probes
    assert not Settings.of(environment({})).probe_gpus
    assert Settings.of(environment({})).probe_links
    named = Settings.of(environment({"probes": {"gpus": True, "links": False, "priorityClassName": "background"}}))
    assert named.probe_gpus and not named.probe_links and named.probe_priority_class == "background"


def test_operator_watches_all_namespaces_by_default() -> None:
    assert Settings.of(environment({})).watch_namespaces == ()
    assert Settings.of(environment({"singleNamespaceInstall": True})).watch_namespaces == ("dljob-system",)


@pytest.mark.parametrize(("enabled", "followed"), [("auto", True), (True, True), (False, False), ("false", False)])
def test_kueue_is_followed_unless_it_is_switched_off(enabled: str | bool, followed: bool) -> None:
    assert Settings.of(environment({"kueue": {"enabled": enabled}})).queues is followed
