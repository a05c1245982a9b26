"""What a script passes to ``t.steps``: a dataset, and how its batches are made."""

from collections.abc import Iterator
from typing import Any

import torch

from dlcontract import Plan
from dltrain.batch.sampling import Sampler
from dltrain.data.feeding.device_copy import DeviceCopier
from dltrain.data.feeding.source import Collate, Request, Source
from dltrain.device.randomness import undisturbed
from dltrain.host import cgroup
from dltrain.protocol.errors import MisuseError

MAX_BATCHES_AHEAD = 128
"""Twice as many messages, those of before a drop and those of after it, fit into a socket: nobody waits to send one."""


class Loader:
    """Batches of ``dataset``: one of ``dltrain.data``, a tuple of tensors, or a torch map-style dataset."""

    def __init__(
        self,
        dataset: Any,
        device: torch.device,
        *,
        workers: int | None = None,
        prefetch: int | None = None,
        collate_fn: Collate | None = None,
        most_workers: int = 0,
        ranks_here: int = 1,
        plan: Plan | None = None,
    ) -> None:
        """See ``Trainer.loader``. ``most_workers``: where their number is left open. ``ranks_here``: share the memory.
        ``plan``: of the training, for its number of steps.

        Raises MisuseError when the dataset is none of these, or empty, or the other arguments are not for it.
        """
        self.source = Source(dataset, collate_fn)
        self.device, self.mover = device, DeviceCopier(device)
        for name, value in (("workers", workers), ("prefetch", prefetch)):
            if value is not None and value < 0:
                raise MisuseError(f"{name}: found {value}, expected 0 or more")
        if workers and not self.source.foreign:
            raise MisuseError(f"workers: found {workers} for samples that are in memory, expected none: leave it out")
        if workers and prefetch is not None and prefetch < workers:
            raise MisuseError(f"prefetch: found {prefetch} batches for {workers} workers, expected one each at least")
        if workers == 0 and prefetch and self.source.foreign:
            raise MisuseError(
                f"prefetch: found {prefetch} without workers, expected workers to make what is fetched ahead: a thread "
                "would draw from the generators that the training step draws from"
            )
        if prefetch is not None and prefetch > MAX_BATCHES_AHEAD:
            raise MisuseError(
                f"prefetch: found {prefetch}, expected at most {MAX_BATCHES_AHEAD}: more would only take memory"
            )
        self.workers, self.prefetch, self.most_workers = workers, prefetch, most_workers
        self._ranks_here = ranks_here
        self._plan = plan

    def __len__(self) -> int:
        """Steps of an epoch over this dataset, each of all ranks together."""
        assert self._plan is not None, "t.loader tells the plan"
        return Sampler.planned(self._plan, self.samples).steps_per_epoch

    @property
    def total_steps(self) -> int:
        """Steps of a training on this dataset, as a schedule of the learning rate wants to know beforehand."""
        assert self._plan is not None, "t.loader tells the plan"
        return Sampler.planned(self._plan, self.samples).steps(self._plan)

    def __iter__(self) -> Iterator[Any]:
        """Raises MisuseError: who iterates has to say what for."""
        raise MisuseError(
            "loader: found a loop over it, expected one over t.steps(loader), which trains on it for all epochs, or "
            "over t.held_out(loader), which gives every sample to one rank once"
        )

    @property
    def room_nbytes(self) -> int | None:
        """What workers that nobody asked for may take for the dataset: half of what is free. None: not known."""
        free = cgroup.free_nbytes()
        return None if free is None else free // (2 * self._ranks_here)

    @property
    def samples(self) -> int:
        """Of the dataset."""
        return self.source.samples

    def fetch(self, request: Request) -> Any:
        """The samples as one batch, on the device, made here and now. Raises SampleError."""
        if not self.source.foreign:
            return self.mover.now(self.source.make(request))
        with undisturbed():
            return self.mover.now(self.source.make(request))


def check_loader(where: str, loader: Any) -> None:
    """Raises MisuseError for what ``t.loader`` did not make."""
    if not isinstance(loader, Loader):
        found = type(loader).__name__
        raise MisuseError(f"{where}: loader: found {found}, expected what t.loader(dataset) returns")
