"""Tests of ``t.gather`` without other ranks."""

from typing import cast

import torch

from dltrain.comm.process_group import ProcessGroup
from dltrain.train.steps.gathering import Participants, gathered


class OneRank:
    """A process group of one rank."""

    rank = 0

    def collect(self, data: bytes) -> list[bytes]:
        return [data]

    def add(self, values: object) -> object:
        return values


def test_gradients_of_complex_rows_have_an_imaginary_part() -> None:
    """Fixed bug: ranks summed the real parts alone."""
    group = cast(ProcessGroup, OneRank())
    alone = Participants(lambda operation: operation(group), lambda: 0.5, True, lambda: None)
    rows = torch.tensor([[1 + 2j], [3 - 1j]], requires_grad=True)
    factor = torch.tensor([2 - 3j])
    (expected,) = torch.autograd.grad((rows * factor).real.sum(), rows)
    (found,) = torch.autograd.grad((gathered(rows, alone) * factor).real.sum(), rows)
    assert found.dtype == rows.dtype and torch.equal(found.resolve_conj(), expected.resolve_conj())
    assert bool(found.imag.all())
