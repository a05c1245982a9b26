"""Tests of the strict schema validator, on which other tests rely."""

import pytest

from support.manifests.admission import broken_rules
from support.manifests.schema_validation import ALL, assert_valid


def config_map(**more: object) -> dict[str, object]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, **more}


def test_validator_covers_kubernetes_1_25_and_later() -> None:
    assert ALL[0].startswith("1.30.")
    assert len(ALL) >= 6 and len(set(ALL)) == len(ALL)


def test_validator_accepts_a_valid_object() -> None:
    assert_valid(config_map(data={"k": "v"}))


@pytest.mark.parametrize(
    ("manifest", "expected"),
    [
        pytest.param(config_map(dta={}), "dta", id="unknown field"),
        pytest.param(config_map(data={"k": 1}), r"data\.k", id="wrong type"),
        pytest.param({**config_map(), "kind": "ConfigMop"}, "ConfigMop", id="unknown kind"),
        pytest.param({**config_map(), "apiVersion": "v2"}, "v2", id="unknown version"),
    ],
)
def test_validator_rejects_an_invalid_object(manifest: dict[str, object], expected: str) -> None:
    with pytest.raises(AssertionError, match=expected):
        assert_valid(manifest)


def test_whole_numbers_are_compared_with_others_as_an_api_server_does() -> None:
    """Regression: celpy compares no integer with a number, and both are JSON's numbers."""
    schema = {
        "x-kubernetes-validations": [{"rule": "self.part <= self.whole", "message": "too large"}],
        "properties": {"part": {"type": "number"}, "whole": {"type": "number"}},
    }
    assert [str(each) for each in broken_rules(schema, {"part": 1, "whole": 0.5})] == [": too large"]
    assert not list(broken_rules(schema, {"part": 1, "whole": 1.5}))
