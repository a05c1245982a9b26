"""Tests of the compact form of decoded JSON in the cache."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dljob.kube.objects.compact import MAX_SHARED, compact

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


def test_deep_value_is_no_error() -> None:
    """Whoever may write the status of a job can nest it as deeply as the JSON decoder allows."""
    value: Any = {}
    for _ in range(900):
        value = {"a": [value]}
    assert compact(value) == compact(value) and list(compact(value)) == ["a"]
