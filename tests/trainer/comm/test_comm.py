"""Tests of all-reduce algorithms on real ranks."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dltrain.comm.selection import choose
from support.trainer.ranks import BODIES, run_ranks


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.long), 3, pytest.param(4, marks=pytest.mark.long)])
def test_every_algorithm_sums_like_numpy(ranks: int) -> None:
    ended = run_ranks(ranks, BODIES / "training/collectives.py", str(ranks), timeout_s=90)
    assert "all sums right" in ended.output


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.long), 3])
def test_gradients_compressed_to_16_bits_are_unbiased_over_steps(ranks: int) -> None:
    ended = run_ranks(ranks, BODIES / "training/compression.py", str(ranks))
    assert "unbiased" in ended.output


def test_one_rank_needs_no_mpi() -> None:
    buffer = torch.arange(5.0)
    collective = choose("Ring", None, [buffer])
    collective.allreduce(0)
    np.testing.assert_array_equal(buffer.numpy(), np.arange(5.0))


def test_error_names_unknown_algorithm() -> None:
    with pytest.raises(ValueError, match="'Star'; expected one of Auto, Ring, MPI"):
        choose("Star", SimpleNamespace(Get_size=lambda: 2), [torch.zeros(1)])
