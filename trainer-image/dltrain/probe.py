"""What this rank's device really is, and how fast it and its links are. Users: ``session``, ``rank``."""

import torch

from dljob.contract import Rank

MISMATCH = "cpu"
"""Name of the device of a rank that was promised a GPU and found none."""


def find_device(rank: Rank) -> tuple[torch.device, str]:
    """The torch device for a rank, and what it really is, in the plan's words where it matches.

    A rank planned on a class of CPU nodes computes on the CPU, and cannot tell more than that it is one.
    """
    if not rank.gpu:
        return torch.device("cpu"), rank.device
    if not torch.cuda.is_available():
        return torch.device("cpu"), MISMATCH
    index = rank.local_rank % torch.cuda.device_count()
    return torch.device("cuda", index), product_label(torch.cuda.get_device_name(index))


def product_label(name: str) -> str:
    """A GPU's name as node label ``nvidia.com/gpu.product`` has it: 'NVIDIA A100-SXM4-40GB' with dashes for spaces."""
    return "-".join(name.split())
