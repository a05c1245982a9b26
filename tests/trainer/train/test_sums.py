"""Tests of the arguments of ``t.sum``."""

from typing import Any

import numpy as np
import pytest
import torch

from dltrain.protocol.errors import MisuseError
from dltrain.train.usage_checks import numbers


def test_sum_takes_tensors_of_any_type() -> None:
    weight = torch.ones((), requires_grad=True)
    values = [torch.tensor(3), torch.tensor(0.5, dtype=torch.bfloat16), 2 * weight, np.float32(4), True]
    assert numbers(values) == [3, 0.5, 2, 4, 1]
    assert numbers(torch.tensor([1, 2], dtype=torch.bfloat16)) == [1, 2]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (torch.tensor(1), "found a single Tensor; expected a list"),
        ([1, "many"], "found str as item 1; expected a number"),
        ([torch.zeros(2)], r"found a tensor of shape \(2,\) as item 0; expected a number"),
        (torch.zeros(2, 2), "found list as item 0; expected a number"),
    ],
)
def test_values_that_are_no_numbers_are_named(values: Any, message: str) -> None:
    with pytest.raises(MisuseError, match=f"t.sum: {message}"):
        numbers(values)
