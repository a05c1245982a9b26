"""Tests of the environment of a job's containers: the user's variables, and those of the operator."""

from typing import Any

import pytest

from support.builders import DIGITS, rendered, seen

Json = dict[str, Any]
FETCHED = {"uri": "https://data.example/train.npz", "samples": 1000, "size": "5Gi"}


def containers(spec: Json) -> tuple[Json, list[Json]]:
    """Return the trainer container and the init containers of a job's pods."""
    [found] = [each for each in rendered(seen(spec)) if each["kind"] == "StatefulSet"]
    pod = found["spec"]["template"]["spec"]
    return pod["containers"][0], pod.get("initContainers", [])


def variables(container: Json) -> Json:
    return {item["name"]: item.get("value") for item in container["env"]}


@pytest.mark.parametrize("name", ["HOME", "TMPDIR"])
def test_users_value_of_home_and_tmpdir_wins(name: str) -> None:
    """Fixed bug: the operator set both to /tmp, and nothing said so."""
    spec = {**DIGITS, "trainer": {"env": [{"name": name, "value": "/data/me"}]}}
    found = variables(containers(spec)[0])
    assert found[name] == "/data/me"
    assert {found["HOME"], found["TMPDIR"]} == {"/data/me", "/tmp"}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, None),
        ({"HOME": "/data"}, None),
        ({"TMPDIR": "/data"}, "/tmp/dljob"),
        ({"TMPDIR": "/data", "DLTRAIN_RUN_DIR": "/tmp/mine"}, "/tmp/mine"),
    ],
)
def test_sockets_of_the_agent_stay_in_the_pod(env: dict[str, str], expected: str | None) -> None:
    """A folder of a shared volume may be the TMPDIR of several pods, and its path may be too long for a socket."""
    spec = {**DIGITS, "trainer": {"env": [{"name": name, "value": value} for name, value in env.items()]}}
    assert variables(containers(spec)[0]).get("DLTRAIN_RUN_DIR") == expected


def test_containers_that_fetch_files_use_their_own_space() -> None:
    """They lack the volumes of the ranks."""
    env = [{"name": "HOME", "value": "/data"}, {"name": "TMPDIR", "value": "/data"}, {"name": "A", "value": "b"}]
    [first] = containers({**DIGITS, "dataset": FETCHED, "trainer": {"env": env}})[1]
    assert variables(first) == {"A": "b", "HOME": "/tmp"}
