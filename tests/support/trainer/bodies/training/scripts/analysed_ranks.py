"""Analyse predictions of two ranks, first over MPI, then over torch.distributed. Argument: a file for its store.

The ranks have two samples and one sample, in batches of one. On rank 0 alone, the analyses are printed.
"""

import os
import sys
from collections.abc import Iterator

import torch
from mpi4py import MPI
from torch import distributed

import dltrain

rank = MPI.COMM_WORLD.Get_rank()
os.environ["RANK"] = str(rank)


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for number in (0, 1) if rank == 0 else (2,):
        yield torch.eye(3)[[number]], torch.tensor([number])


over_mpi = dltrain.evaluate(batches(), labels="abc")
distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
over_gloo = dltrain.evaluate(batches(), labels="abc")
distributed.destroy_process_group()
assert over_mpi is not None and over_mpi == over_gloo and over_mpi.samples == 3, (over_mpi, over_gloo)
