"""Random generators: seeded for a step or a sample, and left as they were.

Randomness of a step (dropout) is a function of (seed, step, rank), that of a sample (augmentation) one of (seed, epoch,
sample): there is nothing to save, and a resumed run draws the same.
"""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

CPU = torch.device("cpu")


def seed(number: int, device: torch.device = CPU, *, everywhere: bool = False) -> None:
    """Seed torch's generator of the CPU and, on a GPU, those of the GPUs; ``everywhere``: numpy's and Python's, too.

    Not ``torch.manual_seed``: where no GPU is in use it puts three calls off for later, each with its stack as text,
    which took a third of a small step; and where one is, a sample has no use for it.
    """
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(number)
    if everywhere:
        np.random.seed(number % 2**32)
        random.seed(number)


def of_step(seed: int, step: int, rank: int) -> int:
    """What to seed one step of one rank with. ``seed``: the plan's."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {step} {rank}".encode(), digest_size=7).digest(), "big")


@contextmanager
def undisturbed() -> Iterator[None]:
    """Leave this process's generators as they are, for the script around the loop."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])
