"""Read a user's stream in one process: in the rank itself, or in one of its data workers.

The random numbers of a sample (augmentation) follow from the seed, the epoch, the rank, the worker and the number of
the sample in this worker's stream, as those of a map-style dataset follow from the sample. When a stream begins, all
ranks and workers have the same random numbers, so that a dataset that shuffles its files and then takes every n-th
gets the same order of files everywhere.
"""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import _utils

from dltrain.data.streams.state import decode, encode
from dltrain.device import randomness
from dltrain.protocol.errors import BadInputError, MisuseError, SampleError

_END = object()


class Place(NamedTuple):
    """A place in the stream of one worker: ``read`` samples after its begin.

    ``states``: the states of the dataset and of its iterator there, as JSON; None if they have none. A stream without
    states is read again from its begin.
    """

    read: int = 0
    states: tuple[Any, Any] = (None, None)

    @property
    def stateful(self) -> bool:
        return any(state is not None for state in self.states)


class Start(NamedTuple):
    """The request to go to ``place`` in the stream of an epoch. The answer is the place.

    ``worker``: the number of this data worker of ``workers``. ``workers`` is 0 if the rank reads the stream itself.
    """

    epoch: int
    worker: int
    workers: int
    rank: int
    place: Place

    def __str__(self) -> str:
        return f"of epoch {self.epoch}"


class Take(NamedTuple):
    """The request for the next ``wanted`` samples. The answer is a ``Chunk``."""

    wanted: int

    def __str__(self) -> str:
        return f"of {self.wanted} samples"


class Chunk(NamedTuple):
    """Successive samples of one worker's stream: fewer than requested if the stream has ended.

    ``place``: the place after them.
    """

    samples: list[Any]
    place: Place


class StreamReader:
    """Reads a dataset that is an iterable, in answer to requests (``make``).

    Each epoch begins with ``iter(dataset)``, after ``set_epoch(epoch)`` if the dataset has this method. A dataset with
    ``state_dict`` and ``load_state_dict`` gets the state that it had before the first epoch. The dataset, or the
    iterator, may have these two methods. Otherwise samples are read and left out to reach a place in the stream.
    """

    def __init__(self, dataset: Any, seed: int, worker_init_fn: Callable[[int], Any] | None = None) -> None:
        """``seed``: the plan's seed. ``worker_init_fn``: called with its number by each data worker."""
        self._dataset, self._seed, self._worker_init_fn = dataset, seed, worker_init_fn
        self._iterator: Iterator[Any] | None = None
        self._start, self._read = Start(0, 0, 0, 0, Place()), 0
        self._initial: tuple[Any] | None = None
        """The dataset's state before the first epoch, once it is known."""

    def make(self, request: Start | Take) -> Place | Chunk:
        """Answer a request. Raise SampleError with the number of the sample that failed.

        New tensors are in main memory, as in ``Source.make``. Random generators of the process change.
        """
        if torch.get_default_device() != randomness.CPU:
            with randomness.CPU:
                return self.make(request)
        try:
            return self._begin(request) if isinstance(request, Start) else self._take(request.wanted)
        except (BadInputError, MisuseError, MemoryError):
            raise
        except Exception as error:
            what = f"sample {self._read} of the stream" if isinstance(request, Take) else "begin of the stream"
            raise SampleError(f"{what}: {type(error).__name__}: {error}") from error

    def _begin(self, start: Start) -> Place:
        dataset, place = self._dataset, start.place
        self._iterator = None  # closes a generator of the last epoch before the state of the dataset changes
        self._start = start
        if self._initial is None:
            self._announce_worker(start)
            self._initial = (encode(dataset.state_dict()) if _stateful(dataset) else None,)
        elif _stateful(dataset) and place.states[0] is None:
            dataset.load_state_dict(decode(self._initial[0]))
        if callable(set_epoch := getattr(dataset, "set_epoch", None)):
            set_epoch(start.epoch)
        if place.states[0] is not None:
            dataset.load_state_dict(decode(place.states[0]))
        self._read = place.read if place.stateful else 0
        self._seed_sample()
        self._iterator = iterator = iter(dataset)
        own = place.states[0] if iterator is dataset else place.states[1]
        if own is not None:  # ``iter`` may have set the dataset, as its own iterator, to its begin
            iterator.load_state_dict(decode(own))
        self._next(place.read - self._read)
        return place

    def _take(self, count: int) -> Chunk:
        samples = self._next(count)
        iterator: Any = self._iterator
        dataset = self._dataset
        states = (
            encode(dataset.state_dict()) if _stateful(dataset) else None,
            encode(iterator.state_dict()) if iterator is not dataset and _stateful(iterator) else None,
        )
        return Chunk(samples, Place(self._read, states))

    def _next(self, count: int) -> list[Any]:
        """Return up to ``count`` samples."""
        assert self._iterator is not None, "a stream begins with Start"
        samples: list[Any] = []
        while len(samples) < count:
            self._seed_sample()
            if (sample := next(self._iterator, _END)) is _END:
                break
            samples.append(sample)
            self._read += 1
        return samples

    def _seed_sample(self) -> None:
        """Seed the random generators for the next sample, or for the begin of the stream."""
        start = self._start
        where = f"{start.rank} {start.worker} {self._read}" if self._read else "begin"
        randomness.seed(seed_of(f"{self._seed} {start.epoch} {where} stream"), everywhere=True)

    def _announce_worker(self, start: Start) -> None:
        """Let ``torch.utils.data.get_worker_info`` describe this data worker, and call the script's function in it."""
        if not start.workers:
            return
        seed = seed_of(f"{self._seed} {start.rank} {start.worker} worker")
        info = _utils.worker.WorkerInfo(id=start.worker, num_workers=start.workers, seed=seed, dataset=self._dataset)
        _utils.worker._worker_info = info
        if self._worker_init_fn is not None:
            self._worker_init_fn(start.worker)


def seed_of(text: str) -> int:
    """Return a seed that follows from ``text``."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def _stateful(given: Any) -> bool:
    return all(callable(getattr(given, method, None)) for method in ("state_dict", "load_state_dict"))
