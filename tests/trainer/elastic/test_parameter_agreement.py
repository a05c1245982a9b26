"""Tests of the comparison of parameters between ranks by hashes."""

import subprocess
import sys

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


GROWTH = """
import torch

from dltrain.elastic.parameter_agreement import fingerprint
from dltrain.host import heap
from dltrain.host.pod_memory import PROC
from dltrain.host.cgroup import numbers

torch.set_num_threads(1)
heap.retain_freed_memory()
fingerprint([torch.ones(1000)])
parameters = [torch.ones(3_000_000) for _ in range(8)]
before = numbers(PROC / "self" / "status")["RssAnon:"]
fingerprint(parameters)
print(1024 * (numbers(PROC / "self" / "status")["RssAnon:"] - before))
"""


def test_comparison_needs_no_memory_of_the_size_of_the_parameters() -> None:
    """Regression: small results between the large temporary tensors divided the heap, which grew by twice the parameters.

    Ranks compare at the end and before each checkpoint, so plans were too small for that.
    """
    done = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout) <= 8 * 2**20, "of 92 MiB of parameters"
