"""Sizes of the datasets in the trainer image, so that the planner can convert epochs to steps without reading the data.

A trainer test compares these sizes with the real data.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Dataset:
    train_samples: int
    test_samples: int
    shape: tuple[int, ...]
    """Shape of one sample."""
    classes: int
    """Number of classes, or the vocabulary size of a language model."""
    sample_nbytes: int
    """Bytes of one sample in the trainer's memory."""
    making_s: float = 0.0
    """Seconds that one core needs to generate a sample; 0 if samples are not generated while the job trains."""
    tokens: bool = False
    """True if a sample is a sequence of tokens."""


# Of scikit-learn's bundled datasets, a fifth is held out for tests. benchmarks/perfmodel/compute_constants.py measured
# the generation times of synthetic datasets.
DATASETS = {
    "digits": Dataset(1437, 360, (1, 8, 8), 10, 64 * 4),
    "digits-32": Dataset(1437, 360, (1, 32, 32), 10, 32 * 32 * 4),  # digits, each pixel enlarged to 4 x 4
    "breast-cancer": Dataset(455, 114, (30,), 2, 30 * 4),
    "wine": Dataset(142, 36, (13,), 3, 13 * 4),
    "iris": Dataset(120, 30, (4,), 3, 4 * 4),
    "synthetic-images": Dataset(10_000, 1_000, (3, 32, 32), 10, 3 * 32 * 32 * 4, 50e-6),
    "synthetic-tokens": Dataset(10_000, 1_000, (128,), 256, 129 * 8, 25e-6, tokens=True),
    "python-source": Dataset(10_000, 1_000, (128,), 256, 129 * 8, tokens=True),
}
