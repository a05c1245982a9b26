"""Tests of the operator's settings: defaults, parsing and errors."""

import inspect
import re
from dataclasses import fields

import pytest

from dljob.app import settings
from dljob.app.settings import Settings
from dljob.faults import FaultPolicy

LEAST = {"DLJOB_TRAINER_IMAGE": "r/t:1"}
ROWS = re.findall(r"^\| (DLJOB_[A-Z_]+) \| (.+?) \| ", inspect.getdoc(settings) or "", re.MULTILINE)


def settings_of(**env: str) -> Settings:
    return Settings.of({**LEAST, **env})


def test_defaults_match_the_documentation() -> None:
    documented = {name: default for name, default in ROWS if default[0] not in "(h"}
    assert len(documented) >= 10
    assert settings_of(**documented, DLJOB_POD_NAME="p") == settings_of(DLJOB_POD_NAME="p")


def test_every_setting_is_documented() -> None:
    assert len(ROWS) == len(fields(Settings))


def test_operators_without_a_pod_name_have_different_identities() -> None:
    assert settings_of().identity != settings_of().identity


def test_empty_variable_counts_as_unset() -> None:
    empty = {name: "" for name, _ in ROWS if name not in ("DLJOB_TRAINER_IMAGE", "DLJOB_POD_NAME")}
    assert settings_of(DLJOB_POD_NAME="p", **empty) == settings_of(DLJOB_POD_NAME="p")


def test_namespaces_are_parsed() -> None:
    assert settings_of(DLJOB_WATCH_NAMESPACES=" a, b,,").watch_namespaces == ("a", "b")


@pytest.mark.parametrize(("text", "expected"), [("true", True), ("1", True), ("no", False), ("false", False)])
def test_booleans_are_parsed(text: str, expected: bool) -> None:
    assert settings_of(DLJOB_LEADER_ELECTION=text).leader_election is expected


def test_manifests_use_the_settings() -> None:
    peers = '[{"podSelector": {}}]'
    config = settings_of(
        DLJOB_TRAINER_PULL_POLICY="Never", DLJOB_CLUSTER_DOMAIN="corp.example", DLJOB_METRICS_SOURCES=peers
    ).render()
    assert (config.trainer_image, config.image_pull_policy, config.cluster_domain) == ("r/t:1", "Never", "corp.example")
    assert config.metrics_peers == ({"podSelector": {}},)
    assert config.look_image == "" and settings_of(DLJOB_LOOK_IMAGE="a:1").render().look_image == "a:1"


def test_node_faults_are_counted_unless_switched_off() -> None:
    assert settings_of().fault_policy == FaultPolicy(2, 3600, 3600, 86400)
    assert settings_of(DLJOB_NODE_FAULTS="0").fault_policy is None


def test_longest_time_of_a_node_is_not_below_the_first() -> None:
    with pytest.raises(ValueError, match=r"LEFT_OUT_MAX_SECONDS: found 600; expected at least .*, 3600\."):
        settings_of(DLJOB_NODE_LEFT_OUT_MAX_SECONDS="600")


@pytest.mark.parametrize(
    ("name", "found", "expected"),
    [
        ("DLJOB_TRAINER_IMAGE", "", "the container image that pods of jobs run"),
        ("DLJOB_TRAINER_PULL_POLICY", "Sometimes", "Always, IfNotPresent, Never"),
        ("DLJOB_LEADER_ELECTION", "maybe", "true, 1, yes, false, 0, no"),
        ("DLJOB_CONCURRENCY", "0", "a number from 1 to 256"),
        ("DLJOB_CONCURRENCY", "many", "a number from 1 to 256"),
        ("DLJOB_CONCURRENCY", "nan", "a number from 1 to 256"),
        ("DLJOB_PROGRESS_WRITES_PER_SECOND", "0", "a number from 0.1 to 1000"),
        ("DLJOB_METRICS_PORT", "65536", "a number from 1 to 65535"),
        ("DLJOB_RESYNC_SECONDS", "-1", "a number from 1 to 86400"),
        ("DLJOB_METRICS_SOURCES", "everyone", "expected JSON"),
        ("DLJOB_METRICS_SOURCES", "{}", "a list of NetworkPolicy peers"),
        ("DLJOB_METRICS_SOURCES", "[{}]", "a list of NetworkPolicy peers"),
        ("DLJOB_JOB_DEFAULTS", "none", "expected JSON"),
        ("DLJOB_NODE_FAULTS", "-1", "a number from 0 to 8"),
        ("DLJOB_NODE_FAULT_WINDOW_SECONDS", "5", "a number from 60 to 86400"),
        ("DLJOB_NODE_LEFT_OUT_SECONDS", "1h", "a number from 60 to 604800"),
        ("DLJOB_NODE_LEFT_OUT_MAX_SECONDS", "0", "a number from 60 to 604800"),
        ("DLJOB_GANG_SCHEDULING", "auto", "none, kubernetes, coscheduling, volcano"),
        ("DLJOB_PREEMPTION", "Always", "Never, LowerPriority"),
        ("DLJOB_SCALE_UP_SECONDS", "15m", "a number from 10 to 86400"),
        ("DLJOB_QUEUE_ASSIGNMENT", "Fair", "InOrder, Together"),
        ("DLJOB_QUEUE_DEADLINES", "perhaps", "true, 1, yes, false, 0, no"),
        ("DLJOB_QUEUE_WEIGHTS", "a=2", "expected JSON"),
        ("DLJOB_QUEUE_WEIGHTS", "[]", "an object with"),
        ("DLJOB_LOG_LEVEL", "LOUD", "debug, info, warning, error"),
        ("DLJOB_LOG_FORMAT", "xml", "text, json"),
    ],
)
def test_error_names_variable_value_and_expectation(name: str, found: str, expected: str) -> None:
    with pytest.raises(ValueError, match="found") as error:
        settings_of(**{name: found})
    message = str(error.value)
    assert message.startswith(f"{name}: found {found!r}" if found else f"{name}: found nothing")
    assert expected in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[", "JSON, a list of node templates"),
        ("{}", "a list of nodes"),
        ('[{"name": "a", "cpu": 2}]', "a template without count"),
        ('[{"name": "a", "count": 2, "cpu": "much"}]', "nodes[0].cpu: found 'much'"),
        ('[{"name": "a", "count": 2, "region": "b"}]', "nodes[0].region: no such field"),
        (
            '[{"name": "a", "count": 1500}, {"name": "b", "count": 1500}]',
            "found 3000 nodes in all templates; expected at most 2000",
        ),
    ],
)
def test_bad_node_templates_are_named(text: str, words: str) -> None:
    with pytest.raises(ValueError, match="DLJOB_NODE_TEMPLATES: ") as error:
        settings_of(DLJOB_NODE_TEMPLATES=text)
    assert words in str(error.value)


def test_architectures_are_those_of_the_images_or_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings_of(DLJOB_NODE_ARCHITECTURES=" arm64,amd64").node_architectures == ("amd64", "arm64")
    for machine, name in (("x86_64", "amd64"), ("aarch64", "arm64"), ("sparc64", "sparc64")):
        monkeypatch.setattr(settings.platform, "machine", lambda machine=machine: machine)
        assert settings_of().node_architectures == (name,)
    for given, words in (("x86_64", "expected amd64 instead"), ("pdp11", "expected 386, amd64")):
        with pytest.raises(ValueError, match=f"DLJOB_NODE_ARCHITECTURES: found '{given}'; {words}"):
            settings_of(DLJOB_NODE_ARCHITECTURES=given)


def test_node_templates_of_other_architectures_are_left_out() -> None:
    text = '[{"name": "new", "count": 1, "labels": {"kubernetes.io/arch": "arm64"}}]'
    for given, left_out in (("amd64", True), ("amd64,arm64", False)):
        [node] = settings_of(DLJOB_NODE_TEMPLATES=text, DLJOB_NODE_ARCHITECTURES=given).node_templates
        assert (node.left_out is not None) is left_out


def test_node_templates_reach_the_planner() -> None:
    text = '[{"name": "gpu", "count": 3, "device": "NVIDIA-L4", "devices": 8, "cpu": 95, "memory": "370Gi"}]'
    config = settings_of(DLJOB_NODE_TEMPLATES=text, DLJOB_SCALE_UP_SECONDS="60").render()
    assert config.node_templates.start_timeout_s == 60
    assert [(node.device, node.devices, node.is_gpu) for node in config.node_templates.nodes] == 3 * [
        ("NVIDIA-L4", 8, True)
    ]
