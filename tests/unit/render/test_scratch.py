"""Tests of the scratch space of pods: its size, its requests, and the variables that lead to it."""

from typing import Any

import pytest

from dljob.api import DLJobSpec
from dljob.cluster import quantity
from dljob.job.defaults import parse_defaults
from dljob.render.volumes import scratch
from support.builders import DIGITS, rendered, seen

BERT: dict[str, Any] = {
    "model": {"hints": {"like": "BERT-base"}},
    "dataset": {"uri": "pvc://corpus/train.npz", "samples": 1000},
    "trainer": {"command": ["python", "tune.py"], "scratch": {"size": "Auto"}},
}
FETCHED = {"uri": "https://data.example/train.npz", "samples": 1000, "size": "5Gi"}


def template(spec: dict[str, Any]) -> dict[str, Any]:
    [found] = [each for each in rendered(seen(spec)) if each["kind"] == "StatefulSet"]
    pod: dict[str, Any] = found["spec"]["template"]["spec"]
    return pod


def size_limit(pod: dict[str, Any]) -> str:
    [tmp] = [volume for volume in pod["volumes"] if volume["name"] == "tmp"]
    return str(tmp["emptyDir"]["sizeLimit"])


def test_without_scratch_pods_are_as_in_earlier_releases() -> None:
    pod = template(DIGITS)
    [container] = pod["containers"]
    assert size_limit(pod) == "2Gi"
    assert "ephemeral-storage" not in str(container["resources"])
    assert not {"HF_HOME", "TORCH_HOME", "XDG_CACHE_HOME"} & {item["name"] for item in container["env"]}


def test_scratch_is_requested_and_limited_and_holds_the_caches() -> None:
    pod = template({**DIGITS, "trainer": {"scratch": {"size": "20Gi"}}})
    [container] = pod["containers"]
    variables = {item["name"]: item.get("value") for item in container["env"]}
    assert size_limit(pod) == "20Gi"
    assert container["resources"]["requests"]["ephemeral-storage"] == str(20 * 2**30)
    assert container["resources"]["limits"]["ephemeral-storage"] == str(21 * 2**30)
    assert variables["HF_HOME"] == "/tmp/.cache/huggingface"
    assert variables["TORCH_HOME"] == "/tmp/.cache/torch"
    assert variables["XDG_CACHE_HOME"] == "/tmp/.cache"
    assert variables["HOME"] == variables["TMPDIR"] == "/tmp"


def test_users_value_of_a_cache_variable_wins() -> None:
    env = [{"name": "HF_HOME", "value": "/shared"}]
    pod = template({**DIGITS, "trainer": {"scratch": {"size": "20Gi"}, "env": env}})
    assert [item for item in pod["containers"][0]["env"] if item["name"] == "HF_HOME"] == env


def test_fetched_data_counts_against_the_limit_of_the_pod() -> None:
    hints = {"parameters": 10**6, "flopsPerSample": 1e9}
    pod = template({**DIGITS, **BERT, "model": {"hints": hints}, "dataset": FETCHED})
    limits = pod["containers"][0]["resources"]["limits"]
    assert int(limits["ephemeral-storage"]) == quantity(size_limit(pod)) + 5 * 2**30 + scratch.RESERVE_NBYTES


@pytest.mark.parametrize(
    ("model", "dataset", "expected"),
    [
        # BERT-base has 110 million parameters: two copies have 0.82 GiB.
        ({"hints": {"like": "BERT-base"}}, {}, "3Gi"),
        ({"hints": {"parameters": 7 * 10**9, "flopsPerSample": 1e12}}, {}, "55Gi"),
        ({"hints": {"parameters": 10**6, "flopsPerSample": 1e9}}, {"sampleBytes": 10**7}, "12Gi"),
        ({"hints": {"parameters": 10**15, "flopsPerSample": 1e9}}, {"sampleBytes": 10**17}, f"{2**30}Gi"),
    ],
)
def test_auto_follows_from_model_and_dataset(model: dict[str, Any], dataset: dict[str, Any], expected: str) -> None:
    data = {"uri": "pvc://corpus/train.npz", "samples": 1000, **dataset}
    spec = DLJobSpec.model_validate({**DIGITS, **BERT, "model": model, "dataset": data})
    assert scratch.size(spec) == expected


def test_built_in_model_needs_little() -> None:
    spec = DLJobSpec.model_validate({**DIGITS, "trainer": {"scratch": {"size": "Auto"}}})
    assert scratch.size(spec) == "3Gi"


def test_auto_without_a_model_is_the_default() -> None:
    trainer = {"framework": "Torchrun", "command": ["python", "run.py"], "scratch": {"size": "Auto"}}
    assert size_limit(template({"trainer": trainer, "nodes": {"min": 2, "max": 2}})) == "2Gi"


@pytest.mark.parametrize("size", ["2G iB", "0", "auto", 0, 0.5, True])
def test_invalid_default_is_rejected(size: object) -> None:
    with pytest.raises(ValueError, match=r"trainer\.scratch"):
        parse_defaults({"trainer": {"scratch": {"size": size}}})
