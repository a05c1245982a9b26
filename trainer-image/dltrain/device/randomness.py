"""Seeding and restoring of random generators.

The randomness of a step (dropout) is a function of (seed, step, rank), that of numpy and Python in a step one of (seed,
step), and that of a sample (augmentation) one of (seed, epoch, sample). So checkpoints contain no state of random
generators, and a resumed run draws the same numbers.
"""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

CPU = torch.device("cpu")
_EVERY_RANK = -1


def seed(number: int, device: torch.device = CPU, *, everywhere: bool = False) -> None:
    """Seed torch's CPU generator and, if ``device`` is a GPU, the GPU generators, with ``number``.

    ``everywhere``: also seed the global generators of numpy and Python.

    ``torch.manual_seed`` is not used, because it is slow and seeds too much. On a machine without a GPU, it stores
    three calls for later, each with a stack trace, which took a third of a small step. On a machine with a GPU, it
    would seed the GPU even for the random augmentation of a sample, which runs on the CPU.
    """
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(number)
    if everywhere:
        _seed_shared(number)


def _seed_shared(number: int) -> None:
    np.random.seed(number % 2**32)
    random.seed(number)


def seed_step(run_seed: int, step: int, rank: int, device: torch.device) -> None:
    """Seed the random generators for one step of a training script on one rank.

    ``run_seed``: the seed of the whole run, from the plan. ``device``: as for ``seed``. Ranks draw different numbers
    from torch. Those of numpy and Python are equal on all ranks, as they are outside of the steps: a script may choose
    the same branch with them, such as timm's ``Mixup``.
    """
    seed(of_step(run_seed, step, rank), device)
    _seed_shared(of_step(run_seed, step, _EVERY_RANK))


def of_step(seed: int, step: int, rank: int) -> int:
    """Return the seed of the random generators for one step of one rank, which is the same after a restart.

    ``seed``: the seed of the whole run, from the plan.
    """
    return int.from_bytes(hashlib.blake2b(f"{seed} {step} {rank}".encode(), digest_size=7).digest(), "big")


@contextmanager
def undisturbed() -> Iterator[None]:
    """Restore the random generators of torch (CPU), numpy and Python on exit from a ``with`` block.

    Code in the block therefore does not change the random numbers that the training script draws.
    """
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])
