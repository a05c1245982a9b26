"""Tests of the compact form of decoded JSON in the cache."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dljob.kube.objects.compact import MAX_SHARED, MAX_UNPACKED, CompactStatus, CompactTexts, compact

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(JSON)
def test_compact_value_is_equal(value: Any) -> None:
    assert compact(value) == value


@given(st.dictionaries(st.text(max_size=MAX_SHARED), st.lists(st.text(max_size=MAX_SHARED))))
def test_equal_short_strings_are_the_same_object(value: dict[str, Any]) -> None:
    first, second = (compact(json.loads(json.dumps(value))) for _ in range(2))
    for name, other in zip(first, second, strict=True):
        assert name is other
        assert all(a is b for a, b in zip(first[name], second[other], strict=True))


FIELDS_AND_OTHER = ("phase", "plan", "result", "other")
FIELDS = st.sampled_from(["phase", "conditions", "plan", "result", "suggestion"])


@given(st.dictionaries(FIELDS | st.text(), JSON), st.dictionaries(FIELDS, JSON))
def test_compact_status_is_equal_to_the_status(status: dict[str, Any], other: dict[str, Any]) -> None:
    found = CompactStatus(status)
    assert found == status and dict(found) == status and len(found) == len(status)
    assert {name: found.get(name) for name in FIELDS_AND_OTHER} == {name: status.get(name) for name in FIELDS_AND_OTHER}
    assert all((name in found) == (name in status) for name in FIELDS_AND_OTHER)
    assert (found == CompactStatus(other)) == (status == other) == (found == other)


def test_statuses_with_fields_in_another_order_are_equal() -> None:
    first, second = {"plan": {"number": 1, "nodes": 2}, "phase": "Running"}, {"plan": {"nodes": 2, "number": 1}}
    assert CompactStatus(first) == CompactStatus({"phase": "Running", **second})


@given(st.dictionaries(st.text(), st.text()), st.dictionaries(st.text(), st.text()))
def test_compact_texts_are_equal_to_the_texts(texts: dict[str, str], other: dict[str, str]) -> None:
    found = CompactTexts(texts)
    assert found == texts and dict(found) == texts and dict(found.items()) == texts and list(found) == list(texts)
    assert all(found[name] == text and name in found for name, text in texts.items())
    assert (found == CompactTexts(other)) == (texts == other) == (found == other)


def test_packed_parts_are_read_again_when_they_change() -> None:
    statuses = [CompactStatus({"phase": "Running", "plan": {"number": number}}) for number in range(MAX_UNPACKED + 2)]
    for _ in range(2):
        assert [status["plan"]["number"] for status in statuses] == list(range(MAX_UNPACKED + 2))


def test_deep_value_is_no_error() -> None:
    """Whoever may write the status of a job can nest it as deeply as the JSON decoder allows."""
    value: Any = {}
    for _ in range(900):
        value = {"a": [value]}
    assert compact(value) == compact(value) and list(compact(value)) == ["a"]
    assert CompactStatus({"plan": value})["plan"] == value
