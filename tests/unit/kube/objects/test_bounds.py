"""Tests of the bounds on objects: what is within them is unchanged, and what is not keeps its identity and status."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dljob.kube.objects.bounds import (
    MAX_OBJECT_NBYTES,
    MAX_SPEC_DEPTH,
    MAX_SPEC_NBYTES,
    PROBLEM,
    bounded_answer,
    bounded_event,
    bounded_list,
    loads,
    spec_problem,
)

Json = dict[str, Any]
META: Json = {"name": 'a"b{', "namespace": "ns", "uid": "u", "resourceVersion": "7", "labels": {"a": "}"}}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda c: st.lists(c) | st.dictionaries(st.text(), c),
    max_leaves=20,
)


def job(spec: str, status: str = "{}") -> str:
    meta = json.dumps(META)
    return f'{{"apiVersion":"dljob.dev/v1alpha1","kind":"DLJob","metadata":{meta},"spec":{spec},"status":{status}}}'


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


def listed(*jobs: str) -> bytes:
    return f'{{"kind":"DLJobList","metadata":{{"resourceVersion":"9"}},"items":[{",".join(jobs)}]}}'.encode()


BEYOND = {
    "deep": nested(100_000),
    "nested lists": "[" * 2000 + "]" * 2000,
    "long": json.dumps({"a": "x" * MAX_OBJECT_NBYTES}),
}


@given(JSON | st.floats(allow_nan=False) | st.characters())
def test_decoder_reads_what_the_one_of_python_reads(value: Any) -> None:
    for text in (json.dumps(value), json.dumps({"a": [value] * 2, "b": nested(500)})):
        found = loads(text.encode())
        assert found == json.loads(text) and repr(found) == repr(json.loads(text))


@pytest.mark.parametrize("text", ['{"a":1,"a":2}', nested(500), '"\\ud800"', "1" * 100, "[-0, 1E400, -1e-400, 1.0]"])
def test_decoder_reads_odd_texts_like_the_one_of_python(text: str) -> None:
    assert repr(loads(text.encode())) == repr(json.loads(text))


@pytest.mark.parametrize("case", BEYOND)
def test_replaced_object_keeps_its_identity_and_status(case: str) -> None:
    pad = job(nested(5000))  # A list is searched for such objects only if it cannot be decoded at once.
    text = job(BEYOND[case], '{"phase":"Running","conditions":[]}')
    event = json.loads(bounded_event(f'{{"type":"ADDED","object":{text}}}'.encode()))
    (listed_item,) = bounded_list(listed(text, pad))["items"][:1]
    assert event["type"] == "ADDED"
    for item in (event["object"], listed_item):
        assert item["metadata"] == {key: META[key] for key in ("name", "namespace", "uid", "resourceVersion")}
        assert item["status"] == {"phase": "Running", "conditions": []}
        assert item["spec"] == {} and "spec: found" in item[PROBLEM]


@pytest.mark.parametrize("case", BEYOND)
def test_answers_are_bounded(case: str) -> None:
    """Fixed bug: the answer to a write of the status stopped the operator's next start."""
    text = job(BEYOND[case])
    item = bounded_answer(text.encode())
    assert item["metadata"]["name"] == META["name"] and PROBLEM in item
    assert bounded_answer(b'{"kind":"Status","code":404}') == {"kind": "Status", "code": 404}
    assert bounded_answer(listed(job("{}")))["items"] == [json.loads(job("{}"))]
    with pytest.raises(ValueError, match="Expecting value"):
        bounded_answer(b"upstream timed out")


def test_oversized_status_is_dropped() -> None:
    (item,) = bounded_list(listed(job("{}", nested(100_000))))["items"]
    assert "status" not in item and PROBLEM in item


def test_other_items_of_a_list_are_unchanged() -> None:
    good = [json.loads(job("{}")), json.loads(job('{"epochs": [1, {"a": "],["}]}'))]
    found = bounded_list(listed(json.dumps(good[0]), job(nested(5000)), json.dumps(good[1])))
    assert [found["items"][0], found["items"][2]] == good
    assert found["metadata"] == {"resourceVersion": "9"}


def test_large_list_takes_no_more_memory_than_its_specs_may() -> None:
    """Seen before: a page with 50 DLJobs of dense JSON took 576 MiB when it was decoded. The operator has 512 MiB."""
    dense = job(json.dumps({"a": [{}] * 100_000}))
    managed = job('{"epochs":1}').replace('"uid"', f'"managedFields":[{{"f:a":{nested(20)}}}],"uid"', 1)
    pad = [job(json.dumps({"a": "x" * 500_000}))] * 10  # Only large lists are decoded item by item.
    items = bounded_list(listed(dense, managed, *pad))["items"]
    assert items[0]["spec"] == {} and "spec: found" in items[0][PROBLEM]
    assert items[1]["spec"] == {"epochs": 1} and "managedFields" not in items[1]["metadata"] and PROBLEM not in items[1]


@given(st.lists(st.dictionaries(st.text(), JSON).map(json.dumps), max_size=4))
def test_objects_within_the_bounds_are_unchanged(specs: list[str]) -> None:
    text = listed(*(job(spec) for spec in specs))
    assert bounded_list(text) == json.loads(text)
    deep = listed(*(job(spec) for spec in specs), job(nested(5000)))
    assert bounded_list(deep)["items"][:-1] == json.loads(text)["items"], "the slow path"
    for spec in specs:
        line = f'{{"type":"MODIFIED","object":{job(spec)}}}'.encode()
        assert bounded_event(line) == line


@pytest.mark.parametrize(
    ("spec", "wrong"),
    [
        ({}, False),
        (json.loads(nested(MAX_SPEC_DEPTH)), False),
        (json.loads(nested(MAX_SPEC_DEPTH + 1)), True),
        ({"a": "x" * (MAX_SPEC_NBYTES - 8)}, False),
        ({"a": "x" * (MAX_SPEC_NBYTES - 7)}, True),
        ({"a": "é" * (MAX_SPEC_NBYTES // 2)}, True),
    ],
)
def test_spec_is_bounded(spec: Json, wrong: bool) -> None:
    problem = spec_problem(spec)
    assert (problem is not None) == wrong
    assert problem is None or (str(MAX_SPEC_NBYTES) in problem and str(MAX_SPEC_DEPTH) in problem)
