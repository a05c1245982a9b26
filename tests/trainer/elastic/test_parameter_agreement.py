"""Tests of the comparison of parameters between ranks by hashes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dltrain.elastic.parameter_agreement import dissenters, fingerprint


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@given(data=st.data(), sizes=st.lists(st.integers(1, 200_000), min_size=1, max_size=3))
def test_any_flipped_bit_changes_the_hash(dtype: torch.dtype, data: st.DataObject, sizes: list[int]) -> None:
    parameters = [torch.linspace(-1, 1, size).to(dtype) for size in sizes]
    before = fingerprint(parameters)
    assert before == fingerprint([parameter.clone() for parameter in parameters])
    parameter = data.draw(st.sampled_from(parameters))
    raw = parameter.view(torch.uint8).numpy()
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert fingerprint(parameters) != before


def test_hash_depends_on_the_order_of_parameters() -> None:
    a, b = torch.zeros(3), torch.ones(3)
    assert len({fingerprint([a, b]), fingerprint([b, a]), fingerprint([a]), fingerprint([])}) == 4


@pytest.mark.parametrize(
    ("values", "kinds", "wrong"),
    [
        ([1, 1, 1], ["cpu"] * 3, []),
        ([1, 2, 1], ["cpu"] * 3, [1]),
        ([1, 2, 2], ["cpu"] * 3, [0]),
        ([1, 2], ["cpu"] * 2, [1]),
        ([1, 1, 2, 2], ["a100", "a100", "t4", "t4"], []),
        ([1, 1, 2, 3], ["a100", "a100", "t4", "t4"], [3]),
    ],
)
def test_minority_of_ranks_with_the_same_device_is_wrong(values: list[int], kinds: list[str], wrong: list[int]) -> None:
    assert dissenters(values, kinds) == wrong
