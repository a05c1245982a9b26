"""Tests of the number of examples of property tests, which tests/conftest.py changes."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

OWN = 120
EXPECTED = {"sixth": OWN // 6, "explore": 10 * OWN}


@pytest.mark.parametrize("case", range(3))
@settings(max_examples=OWN)
@given(st.integers())
def test_parametrized_test(case: int, number: int) -> None:
    """Fixed bug: the number changed once per case, because the cases share one function."""
    used = test_parametrized_test._hypothesis_internal_use_settings.max_examples  # type: ignore[attr-defined]
    assert used == EXPECTED.get(os.environ.get("DLJOB_HYPOTHESIS", ""), OWN)
