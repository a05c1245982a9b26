"""A small dataset with random augmentation, and unequal weights for a sampler of it."""

import torch
from torch.utils.data import Dataset

SAMPLES = 40
WEIGHTS = [8.0] * 4 + [1.0] * 36
"""The weight of each sample. The first four are drawn most."""


class Augmented(Dataset[tuple[torch.Tensor, int]]):
    """Samples with noise from torch's generator, and their number as the label."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return index + torch.rand(3), index
