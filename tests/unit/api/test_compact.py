"""Tests of the compact form of decoded JSON in the cache."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dljob.api import compact as module
from dljob.api.compact import (
    MAX_SECTION,
    MAX_SECTION_PARTS,
    MAX_SHARED,
    MAX_UNPACKED,
    CompactJson,
    CompactStatus,
    CompactTexts,
    ForecastFigures,
    brief_conditions,
    compact,
    forecast_figures,
    shared_sections,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(JSON)
def test_compact_value_is_equal(value: Any) -> None:
    assert compact(value) == value


@given(st.dictionaries(st.text(max_size=MAX_SHARED), st.lists(st.text(max_size=MAX_SHARED))))
def test_equal_short_strings_are_the_same_object(value: dict[str, Any]) -> None:
    module._KNOWN.clear()  # Otherwise strings of other examples could fill it between the two calls.
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


CONDITIONS = st.lists(st.fixed_dictionaries({"type": st.text()}, optional={"status": st.text(), "reason": JSON}))
FORECAST = st.dictionaries(st.sampled_from(["deadlineSlackSeconds", "remainingSeconds", "remainingSecondsP10"]), JSON)
USAGE = st.fixed_dictionaries({}, optional={"rate": JSON | st.fixed_dictionaries({"devices": JSON})})


@given(
    st.fixed_dictionaries(
        {},
        optional={"phase": JSON, "conditions": JSON | CONDITIONS, "forecast": JSON | FORECAST, "usage": JSON | USAGE},
    )
)
def test_what_loops_read_is_the_same_in_a_compact_status(status: dict[str, Any]) -> None:
    found = CompactStatus(status)
    assert brief_conditions(found) == brief_conditions(status)
    assert forecast_figures(found) == forecast_figures(status)
    assert found.get("phase") == status.get("phase")


def test_conditions_in_brief_have_status_and_reason() -> None:
    status = {"conditions": [{"type": "Admitted", "status": "False", "reason": "DeviceBusy", "message": "wait"}]}
    assert brief_conditions(CompactStatus(status)) == {"Admitted": ("False", "DeviceBusy")}
    assert not brief_conditions({})


def test_figures_of_a_forecast() -> None:
    forecast = {"remainingSeconds": 10, "remainingSecondsP90": 20.5, "unsavedSeconds": 1, "restartSeconds": 2}
    status = {"forecast": forecast, "usage": {"rate": {"devices": 4.0}}}
    expected = ForecastFigures(None, 10.0, 10.0, 20.5, 1.0, 2.0, 4.0)
    assert forecast_figures(CompactStatus(status)) == forecast_figures(status) == expected
    late = {"forecast": {**forecast, "deadlineSlackSeconds": -5}}
    assert forecast_figures(CompactStatus(late)) == ForecastFigures(-5.0, 10.0, 10.0, 20.5, 1.0, 2.0, 0.0)
    assert forecast_figures(CompactStatus({"phase": "Pending"})) is None


@given(st.dictionaries(st.text(), JSON))
def test_shared_sections_are_equal_and_shared(spec: dict[str, Any]) -> None:
    first, second = (shared_sections(json.loads(json.dumps(spec))) for _ in range(2))
    assert first == second == spec and list(first) == list(spec)
    short = [
        name
        for name, item in spec.items()
        if isinstance(item, dict | list)
        and len(text := json.dumps(item)) < MAX_SECTION
        and text.count("[") + text.count("{") <= MAX_SECTION_PARTS
    ]
    assert all(first[name] is second[name] for name in short)


def test_sections_that_take_much_more_memory_than_their_text_are_not_kept() -> None:
    spec = {"dense": [[] for _ in range(100)], "usual": [{"key": str(number)} for number in range(10)]}
    first, second = (shared_sections(json.loads(json.dumps(spec))) for _ in range(2))
    assert first == second == spec
    assert first["usual"] is second["usual"] and first["dense"] is not second["dense"]


@given(JSON, JSON)
def test_compact_json_is_equal_to_the_value(value: Any, other: Any) -> None:
    found = CompactJson(value)
    assert found.value == value
    assert (found == CompactJson(other)) == (value == other)


def test_values_are_read_with_the_dictionary_of_their_compression(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each dictionary is the text of an earlier value: the new one serves the next values only."""
    monkeypatch.setattr(module, "DICTIONARY_USES", 2)

    class Own(CompactJson):
        """Values with a dictionary of their own."""

    values = [{"number": number, "text": f"value {number} " * (1 + number)} for number in range(MAX_UNPACKED + 8)]
    found = [Own(value) for value in values]
    assert [each.value for each in found] == values and len({each._dictionary for each in found}) > 8
    assert [each == Own(value) for each, value in zip(found, values, strict=True)] == [True] * len(values)


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
