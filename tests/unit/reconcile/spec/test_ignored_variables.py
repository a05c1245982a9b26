"""Tests of the report about variables of a job that have no effect."""

from pathlib import Path
from typing import Any

import pytest

from dljob.api import DLJobSpec
from dljob.reconcile.spec.variables import accepted_verdict, reserved
from support.builders import DIGITS, rendered, seen

Json = dict[str, Any]
PAGE = Path(__file__).parents[4] / "docs" / "how-to" / "your-own-script.md"
TORCHRUN: Json = {"trainer": {"framework": "Torchrun", "command": ["python", "train.py"]}}


def with_env(base: Json, *env: Json) -> DLJobSpec:
    return DLJobSpec.model_validate({**base, "trainer": {**base.get("trainer", {}), "env": list(env)}})


def test_reserved_variables_are_named_with_value_and_remedy() -> None:
    """Fixed bug: the value was dropped, and nothing said so."""
    found = accepted_verdict(with_env(TORCHRUN, {"name": "A", "value": "b"}, {"name": "MASTER_PORT", "value": "29500"}))
    assert (found.type, found.status, found.reason) == ("Accepted", "True", "VariablesIgnored")
    assert "spec.trainer.env[1]: found MASTER_PORT=29500" in found.message and "Remove" in found.message


def test_message_quotes_no_secret_and_is_short() -> None:
    secret = {"name": "RANK", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}
    long = {"name": "WORLD_SIZE", "value": "1" * 30000}
    found = accepted_verdict(with_env(DIGITS, secret, long))
    assert "found RANK=(valueFrom)" in found.message
    assert len(found.message) < 500


def test_variables_of_overrides_are_named_too() -> None:
    """Fixed bug: the agent replaced RANK of an override, and nothing said so."""
    env = [{"name": "LOG_LEVEL", "value": "debug"}, {"name": "RANK", "value": "0"}]
    sidecar = {"name": "sidecar", "env": [{"name": "WORLD_SIZE", "value": "1"}]}
    overrides = [{"manager": "example.com/test", "spec": {"containers": [sidecar, {"name": "trainer", "env": env}]}}]
    found = accepted_verdict(DLJobSpec.model_validate({**DIGITS, "podTemplateOverrides": overrides}))
    assert found.reason == "VariablesIgnored"
    assert "spec.podTemplateOverrides[0].spec.containers[1].env[1]: found RANK=0" in found.message
    assert "WORLD_SIZE" not in found.message and "LOG_LEVEL" not in found.message


@pytest.mark.parametrize("name", ["HOME", "TMPDIR", "OMP_NUM_THREADS", "NCCL_SOCKET_IFNAME", "DLJOB_OBSERVE"])
def test_variables_that_have_an_effect_are_not_reported(name: str) -> None:
    assert accepted_verdict(with_env(DIGITS, {"name": name, "value": "x"})).reason == "Accepted"


@pytest.mark.parametrize(
    ("base", "name", "expected"),
    [
        (DIGITS, "TORCHELASTIC_RUN_ID", False),
        (TORCHRUN, "TORCHELASTIC_RUN_ID", True),
        (TORCHRUN, "DLJOB_CHECKPOINT_DIR", True),
        ({**TORCHRUN, "checkpoint": {"enabled": False}}, "DLJOB_CHECKPOINT_DIR", False),
        (TORCHRUN, "DLJOB_GLOBAL_BATCH_SIZE", False),
    ],
)
def test_names_depend_on_the_job(base: Json, name: str, expected: bool) -> None:
    assert (name in reserved(with_env(base))) is expected


def test_every_variable_of_the_operator_is_reported_or_a_default() -> None:
    """A variable that the operator sets in the pods may be neither dropped nor unknown to the report."""
    [stateful] = [each for each in rendered(seen(DIGITS)) if each["kind"] == "StatefulSet"]
    names = {item["name"] for item in stateful["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert names - reserved(with_env(DIGITS)) == {"HOME", "TMPDIR"}


@pytest.mark.parametrize("framework", ["DLTrain", "Torchrun", "MPI"])
def test_docs_name_every_variable(framework: str) -> None:
    """The operator cannot read the keys of envFrom, so users must find the names before the job runs."""
    trainer = {"framework": framework, "command": ["python", "train.py"]}
    dataset = {"uri": "https://example.com/data.npz", "samples": 1000}
    names = reserved(DLJobSpec.model_validate({**DIGITS, "collective": "Auto", "dataset": dataset, "trainer": trainer}))
    section = PAGE.read_text().partition("### Variables that dljob sets\n")[2].partition("\n#")[0]
    assert "DLJOB_DATASET" in names and not [name for name in names if f"`{name}`" not in section]
