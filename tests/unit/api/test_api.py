"""Tests of the rejection of invalid specs by the schema and by the operator, with field, value and expectation."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from dlcontract import COLLECTIVES
from dljob.api import DLJobSpec, duration_s
from dljob.api.spec.parallelism import Collective
from support.manifests.admission import refusals
from support.specs.cases import BAD
from support.specs.small_specs import with_field

Json = dict[str, Any]


def normal(text: str) -> str:
    """Return an error with its JSON path in dot notation."""
    return text.replace("['", ".").replace("']", "")


@pytest.mark.parametrize("case", BAD)
def test_schema_rejects_invalid_field(case: str) -> None:
    path, value, words = BAD[case]
    found = refusals(with_field(path, value))
    assert len(found) == 1, found
    assert all(word in normal(found[0]) for word in words), found


@pytest.mark.parametrize("case", BAD)
def test_operator_rejects_invalid_field(case: str) -> None:
    """The operator rejects the same fields, because some servers prune fields or do not support CEL."""
    path, value, words = BAD[case]
    with pytest.raises(ValidationError) as refusal:
        DLJobSpec.model_validate(with_field(path, value)["spec"])
    [error] = refusal.value.errors()
    text = f"{'.'.join(map(str, error['loc']))}: {error['msg']}; found {error['input']!r}"
    assert all(word in text for word in words), text


def test_server_without_cel_admits_specs_that_only_rules_reject() -> None:
    job = with_field("nodes", {"min": 4, "max": 2})
    assert refusals(job, cel=False) == []
    assert refusals(job, cel=True) != []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("resources.cpu", 2),
        ("resources.cpuLimit", 0),
        ("resources.memory", 2**63 - 1),
        ("checkpoint.volume.size", 2**33),
        ("trainer.scratch", {"size": 2**33}),
    ],
)
def test_integer_is_the_same_quantity_as_its_text(path: str, value: Any) -> None:
    written = with_field(path, value)
    text = {key: str(item) for key, item in value.items()} if isinstance(value, dict) else str(value)
    assert refusals(written) == []
    assert DLJobSpec.model_validate(written["spec"]) == DLJobSpec.model_validate(with_field(path, text)["spec"])


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("1h30m", 5400), ("500ms", 0.5), ("1.5h", 5400), ("2m500ms", 120.5), ("0s", 0)],
)
def test_duration_is_parsed(text: str, seconds: float) -> None:
    assert duration_s(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "s", "90", "-1s", "1 h", "1d", "1h30", "1e3s"])
def test_invalid_duration_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="expected a duration such as 90s"):
        duration_s(text)


@given(hours=st.integers(0, 999), minutes=st.integers(0, 59), seconds=st.integers(0, 59))
def test_duration_is_a_sum(hours: int, minutes: int, seconds: int) -> None:
    assert duration_s(f"{hours}h{minutes}m{seconds}s") == 3600 * hours + 60 * minutes + seconds


def test_spec_collective_accepts_those_of_the_contract_and_auto() -> None:
    assert {str(name) for name in Collective} == {*COLLECTIVES, "Auto"}
