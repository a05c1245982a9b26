"""Samples that a script's sampler draws, such as torch's WeightedRandomSampler, as a pure function of (seed, epoch).

All ranks draw all samples of an epoch, and divide each batch as without a sampler. Before the sampler draws, torch,
numpy and ``random`` are seeded by (seed, epoch). So a resumed run draws the same samples, and the result does not
depend on the number of ranks.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from operator import index
from typing import Any
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, DistributedSampler

from dltrain.batch.sampling import Part, Sampler
from dltrain.device import randomness
from dltrain.protocol.errors import MisuseError

_EPOCHS = 2
"""Number of epochs whose draws are stored. Batches that are prefetched may belong to the next epoch."""
MAX_DRAWS = 2**30
"""Maximum number of samples that a rank draws for an epoch. They take 8 bytes each."""


class Draws:
    """The indices that a sampler draws in each epoch. The length is their number."""

    def __init__(self, sampler: Any, samples: int, device: torch.device, needed: int | None = None) -> None:
        """Check the sampler. ``samples``: number of samples in the dataset. ``device``: the rank's device.

        ``needed``: maximum number of samples of an epoch that the training needs; None: all. A script that ends after a
        number of steps may have a sampler of 10^10 samples.
        """
        kind = type(sampler).__name__
        if isinstance(sampler, DistributedSampler):
            raise MisuseError(
                f"sampler: found {kind}; expected a sampler for the whole dataset, because dltrain divides each batch "
                "among the ranks. Omit it: samples are in random order by default"
            )
        if isinstance(sampler, BatchSampler):
            raise MisuseError(
                f"sampler: found {kind}, which makes batches; expected a sampler of single samples, because the job "
                "sets the batch size. Pass its attribute sampler"
            )
        if not (hasattr(sampler, "__iter__") and hasattr(sampler, "__len__")):
            raise MisuseError(
                f"sampler: found {kind}; expected a torch sampler, an object with iter() and len(). Implement __len__: "
                "the number of steps in an epoch follows from it"
            )
        self._sampler, self._samples, self._device, self._kind = sampler, samples, device, kind
        self._count = len(sampler)
        if not self._count:
            raise MisuseError(f"sampler: found no samples from {kind}; expected at least one in each epoch")
        self._needed = self._count if needed is None else min(self._count, needed)
        self._repeats = False
        """True once the sampler has been seen to draw the same samples twice."""
        self._drawn: dict[tuple[int, int], NDArray[np.int64]] = {}

    def __len__(self) -> int:
        return self._count

    def of(self, part: Part, seed: int) -> Part:
        """Return ``part`` with the drawn samples in place of the numbers of the draws. ``seed``: the plan's seed.

        Raise the error of ``checksum``.
        """
        if not self._repeats:
            self.checksum(seed)
        drawn = self._drawn.get((seed, part.epoch))
        past = int(part.indices.max(initial=0)) >= self._needed  # in an evaluation
        if drawn is None or (past and len(drawn) < self._count):
            drawn = self._draw(seed, part.epoch, self._count if past else self._needed)
            self._drawn = dict([*self._drawn.items(), ((seed, part.epoch), drawn)][-_EPOCHS:])
        return replace(part, indices=drawn[part.indices], draws=part.indices)

    def checksum(self, seed: int) -> int:
        """Return a checksum of the first epoch's samples that the training needs.

        Raise MisuseError if the sampler does not draw them again for the same epoch.
        """
        first, again = self._draw(seed, 0, self._needed), self._draw(seed, 0, self._needed)
        if not np.array_equal(first, again):
            raise MisuseError(
                f"sampler: found {self._kind}, which draws other samples when it is asked for the same epoch again; "
                "expected the same samples, because a job that resumes must not lose or repeat any. Draw random "
                "numbers in __iter__ from torch, numpy.random or random, whose generators dltrain seeds for each "
                "epoch, or let them depend on the argument of a method set_epoch(epoch)"
            )
        self._repeats = True
        return crc32(first.tobytes())

    def _draw(self, seed: int, epoch: int, count: int) -> NDArray[np.int64]:
        """Let the sampler draw the first ``count`` samples of an epoch.

        The script's random generators stay as they are. Raise MisuseError if ``count`` or a sample is unusable.
        """
        if count > MAX_DRAWS:
            raise MisuseError(
                f"sampler: found {self._count} samples in an epoch of {self._kind}; expected at most {MAX_DRAWS}, "
                "because each rank draws the samples of an epoch in advance. Set spec.steps (without a manifest: "
                "dltrain.init(steps=…)), or give the sampler a smaller number of samples"
            )
        sampler = self._sampler
        number = int.from_bytes(hashlib.blake2b(f"{seed} {epoch} sampler".encode(), digest_size=7).digest(), "big")
        with randomness.undisturbed(), randomness.CPU:
            randomness.seed(number, self._device, everywhere=True)
            if isinstance(generator := getattr(sampler, "generator", None), torch.Generator):
                generator.manual_seed(number)
            if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                set_epoch(epoch)
            try:
                indices = (index(each) for each in sampler)
                drawn = np.fromiter(indices if count == self._count else islice(indices, count), np.int64)
            except TypeError as error:
                raise MisuseError(
                    f"sampler: found an error of {self._kind}: {error}; expected the index of a single sample from "
                    "each step of its iterator. The job sets the batch size, so that a sampler makes no batches"
                ) from error
        if len(drawn) != count:
            raise MisuseError(
                f"sampler: found {len(drawn)} samples from {self._kind} in epoch {epoch}; expected {count}, its "
                "length before. The number of steps follows from it, so that all epochs have the same length"
            )
        if len(odd := drawn[(drawn < 0) | (drawn >= self._samples)]):
            raise MisuseError(
                f"sampler: found the index {odd[0]} from {self._kind}; expected one from 0 to {self._samples - 1}, "
                "because the dataset has no other samples. Give the sampler the number of samples of this dataset"
            )
        return drawn


@dataclass(frozen=True)
class DrawnSampler(Sampler):
    """Split the samples that a script's sampler draws in each epoch into batches."""

    draws: Draws = field(kw_only=True)

    def batch_of(self, epoch: int, index: int) -> NDArray[np.int64]:
        return np.arange(index * self.batch, min((index + 1) * self.batch, self.samples))

    def part(self, step: int, shares: Sequence[int], rank: int) -> Part:
        return self.draws.of(super().part(step, shares, rank), self.seed)
