"""Torch's generators at a step. Users: ``loop``, ``asynchronous``, ``rangetest``."""

import torch


def seed(number: int, device: torch.device) -> None:
    """Seed the generators of the CPU and, on a GPU, of the GPUs.

    Not ``torch.manual_seed``: where no GPU is in use it puts three calls off for later, each with its stack as text,
    which took a third of a small step.
    """
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(number)
