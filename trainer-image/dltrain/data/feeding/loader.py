"""The loader that a script passes to ``t.steps``: a dataset and the options for loading its batches."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from typing import Any

import torch

from dlcontract import Plan
from dltrain.batch.sampling import Part, Sampler
from dltrain.data.feeding.device_copy import DeviceCopier
from dltrain.data.feeding.drawing import DrawnSampler, Draws
from dltrain.data.feeding.source import Collate, Request, Source
from dltrain.device.randomness import undisturbed
from dltrain.host import cgroup
from dltrain.protocol.errors import MisuseError

MAX_BATCHES_AHEAD = 128
"""Maximum number of prefetched batches.

The limit ensures that no sender blocks on a full socket. A socket must have room for twice as many messages as this
limit, because requests before and after a cancellation can be pending together.
"""


class AnyLoader(ABC):
    """The result of ``t.loader``. The length is the number of steps in an epoch.

    ``batch_size``: the batch size of the script's DataLoader; None if it did not choose one.
    """

    batch_size: int | None = None

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of steps in an epoch."""

    @property
    @abstractmethod
    def total_steps(self) -> int:
        """Return the number of steps of the whole training, for example for a learning-rate schedule."""

    def __iter__(self) -> Iterator[Any]:
        """Raise MisuseError, because a script must loop over ``t.steps(loader)`` or ``t.held_out(loader)`` instead."""
        raise MisuseError(
            "loader: found a loop over the loader itself; expected one over t.steps(loader), which trains for all "
            "epochs, or over t.held_out(loader), which gives every sample to one rank once"
        )


class Loader(AnyLoader):
    """A dataset and the options for loading its batches.

    The dataset is one of ``dltrain.data``, a tuple of tensors or arrays, or a map-style torch dataset.
    """

    def __init__(
        self,
        dataset: Any,
        device: torch.device,
        *,
        workers: int | None = None,
        prefetch: int | None = None,
        collate_fn: Collate | None = None,
        drop_last: bool = False,
        sampler: Iterable[int] | None = None,
        max_workers: int = 0,
        ranks_here: int = 1,
        plan: Plan | None = None,
    ) -> None:
        """Check the dataset and the options, which ``Trainer.loader`` describes.

        ``max_workers``: maximum number of workers if ``workers`` is None. ``ranks_here``: number of ranks that share
        this pod's memory. ``plan``: the plan from which the number of steps follows. Raise MisuseError if the dataset
        is unsupported or empty, or if an option does not suit the dataset.
        """
        self.source = Source(dataset, collate_fn)
        self.device, self.mover = device, DeviceCopier(device)
        for name, value in (("workers", workers), ("prefetch", prefetch)):
            if value is not None and value < 0:
                raise MisuseError(f"{name}: found {value}; expected 0 or more")
        if workers and not self.source.foreign:
            raise MisuseError(
                f"workers: found {workers} for a dataset that is in memory; expected no workers. Omit this argument"
            )
        if workers and prefetch is not None and prefetch < workers:
            raise MisuseError(
                f"prefetch: found {prefetch} batches for {workers} workers; expected at least {workers}, one per worker"
            )
        if workers == 0 and prefetch and self.source.foreign:
            raise MisuseError(
                f"prefetch: found {prefetch} with workers=0; expected workers that load the batches. A thread cannot "
                "load them, because it would share random generators with the training step"
            )
        if prefetch is not None and prefetch > MAX_BATCHES_AHEAD:
            raise MisuseError(
                f"prefetch: found {prefetch}; expected at most {MAX_BATCHES_AHEAD}. More batches only take memory"
            )
        self.workers, self.prefetch, self.max_workers = workers, prefetch, max_workers
        self._ranks_here = ranks_here
        self._plan = plan
        self._drop_last = drop_last
        self._draws: Draws | None = None
        if sampler is not None:
            if getattr(dataset, "in_shards", False):
                raise MisuseError(
                    f"sampler: found {type(sampler).__name__} for a sharded dataset; expected none, because each node "
                    "has only the samples of its shards. Omit it, or set spec.dataset.distribution: Full"
                )
            needed = plan.steps * plan.global_batch if plan is not None and plan.steps else None
            self._draws = Draws(sampler, self.source.samples, device, needed)

    def __len__(self) -> int:
        assert self._plan is not None, "t.loader passes the plan"
        return self.sampler(self._plan).steps_per_epoch

    @property
    def total_steps(self) -> int:
        assert self._plan is not None, "t.loader passes the plan"
        return self.sampler(self._plan).steps(self._plan)

    def sampler(self, plan: Plan) -> Sampler:
        """Return the sampler that splits this dataset into the batches of ``plan``."""
        sampler: Sampler | None = getattr(self.source.dataset, "sampler", None)
        if plan.dataset.sharded and sampler is not None:
            return replace(sampler, drop_last=self._drop_last)
        found = Sampler.planned(plan, self.samples, drop_last=self._drop_last)
        return found if self._draws is None else DrawnSampler(**asdict(found), draws=self._draws)

    def once(self, part: Part, seed: int) -> Part:
        """Return ``part`` with the samples that the script's sampler, if any, draws for an evaluation."""
        return part if self._draws is None else self._draws.of(part, seed)

    def identity(self, plan: Plan) -> list[float]:
        """Return the number of samples, and a checksum of the samples that the script's sampler draws for an epoch.

        Raise MisuseError if the sampler draws other samples when it is asked again.
        """
        return [self.samples, 0.0 if self._draws is None else self._draws.checksum(plan.seed)]

    @property
    def room_nbytes(self) -> int | None:
        """Return the memory limit for copies of the dataset in automatically started workers; None if unknown.

        The limit is half of the free memory, divided by the number of ranks in the pod.
        """
        free = cgroup.free_nbytes()
        return None if free is None else free // (2 * self._ranks_here)

    @property
    def samples(self) -> int:
        """Return the number of samples in an epoch."""
        return self.source.samples if self._draws is None else len(self._draws)

    def fetch(self, request: Request) -> Any:
        """Load the samples in this thread and return the batch on the device.

        Raise SampleError if the user's dataset fails.
        """
        if not self.source.foreign:
            return self.mover.now(self.source.make(request))
        with undisturbed():
            return self.mover.now(self.source.make(request))


def check_loader(where: str, loader: Any) -> None:
    """Raise MisuseError unless ``loader`` is a result of ``t.loader``. ``where``: name of the called method."""
    if not isinstance(loader, AnyLoader):
        found = type(loader).__name__
        raise MisuseError(
            f"{where}: loader: found {found}; expected the result of t.loader(dataset). Pass the dataset to t.loader "
            "first"
        )
