"""The samples of a rank's stream in order, and the place in it from which a resumed run continues.

A rank with several data workers takes equally many samples, a chunk, from each worker in turn, as torch's DataLoader
does. A worker whose stream has ended is left out from then on. Chunks are independent of batches, so that no sample is
lost or read twice if local batch sizes change.
"""

import time
from collections import deque
from itertools import chain, islice
from typing import Any, NamedTuple

from dltrain.data.feeding.worker_pool import Workers
from dltrain.data.streams.reader import Chunk, Place, Start, StreamReader, Take
from dltrain.device.randomness import undisturbed


class Readers:
    """The data workers that read a rank's stream, or the rank itself if it has none.

    ``workers``: number of data workers. ``count``: number of streams, at least one. ``spent_s``: seconds spent on
    reading so far, here or in a worker.
    """

    def __init__(self, reader: StreamReader, workers: int) -> None:
        """Start the workers. Raise the errors of ``Workers``."""
        self.workers, self.count, self.spent_s = workers, max(1, workers), 0.0
        self._reader = reader
        self._workers = Workers(reader, workers) if workers else None
        self._asked: list[deque[Any]] = [deque() for _ in range(self.count)]

    def ask(self, number: int, request: Start | Take) -> None:
        """Request something from worker ``number``. ``get`` returns the answers of each worker in order."""
        self._asked[number].append(request if self._workers is None else self._workers.ask(request, number))

    def pending(self, number: int) -> int:
        """Return the number of requests to a worker whose answers ``get`` has not returned."""
        return len(self._asked[number])

    def get(self, number: int) -> Any:
        """Return the answer to the first pending request to worker ``number``.

        Raise SampleError if the user's dataset fails, and MemoryError or WorkerLostError if a worker fails.
        """
        asked = self._asked[number].popleft()
        if self._workers is not None:
            answer, spent_s = self._workers.get(asked)
        else:
            began = time.perf_counter()
            with undisturbed():
                answer = self._reader.make(asked)
            spent_s = time.perf_counter() - began
        self.spent_s += spent_s
        return answer

    def drop(self) -> None:
        """Cancel all pending requests."""
        for asked in self._asked:
            asked.clear()
        if self._workers is not None:
            self._workers.drop()

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()


class Position(NamedTuple):
    """A position in a rank's stream. ``places`` is empty at the begin of an epoch, and has one per worker otherwise.

    ``chunk``: number of samples that are taken from each worker in turn. ``worker``: the worker of the next chunk.
    ``offset``: number of samples of this chunk that were used already. ``ended``: numbers of the workers whose streams
    have ended.
    """

    epoch: int
    chunk: int = 0
    worker: int = 0
    offset: int = 0
    ended: tuple[int, ...] = ()
    places: tuple[Place, ...] = ()

    @property
    def inside(self) -> bool:
        """Return True if the position is inside of an epoch, so that it depends on the numbers of ranks and workers."""
        return bool(self.places)

    def to_json(self) -> list[Any]:
        return [*self[:4], list(self.ended), [[place.read, list(place.states)] for place in self.places]]

    @classmethod
    def parse(cls, found: list[Any]) -> "Position":
        epoch, chunk, worker, offset, ended, places = found
        parsed = tuple(Place(read, (states[0], states[1])) for read, states in places)
        return cls(epoch, chunk, worker, offset, tuple(ended), parsed)


class _Held(NamedTuple):
    worker: int
    chunk: Chunk
    ends: bool
    """True if the worker's stream ends with this chunk."""


class Sequence:
    """The samples of one epoch of a rank's stream, from a position on.

    ``position``: that after the last taken sample.
    """

    def __init__(self, readers: Readers, rank: int, position: Position, chunk: int, ahead: int) -> None:
        """Go to ``position``. ``rank``: this rank's number, for random numbers of samples.

        ``chunk``: see ``Position``, for the begin of an epoch. ``ahead``: number of chunks that each worker reads in
        advance.
        """
        self._readers, self._ahead = readers, ahead
        self._held: deque[_Held] = deque()
        self._samples = 0
        """Number of samples in ``_held`` that were not taken."""
        if not position.inside:
            position = position._replace(chunk=chunk, places=(Place(),) * readers.count)
        self.position = position
        self._next, self._open = position.worker, [number not in position.ended for number in range(readers.count)]
        going = [number for number, is_open in enumerate(self._open) if is_open]
        for number in going:
            readers.ask(number, Start(position.epoch, number, readers.workers, rank, position.places[number]))
            self._ask(number)
        for number in going:
            readers.get(number)
        if position.offset:  # the resumed run has used the first samples of a chunk
            self._read()
            self._samples -= position.offset

    def available(self, wanted: int) -> int:
        """Return ``wanted``, or the number of samples that are left if there are fewer. Read as many in advance."""
        while self._samples < wanted and any(self._open):
            self._read()
        return min(wanted, self._samples)

    def first(self, count: int) -> list[Any]:
        """Return the next samples without taking them, of which ``available`` has returned the number ``count``."""
        samples = chain.from_iterable(held.chunk.samples for held in self._held)
        return list(islice(samples, self.position.offset, self.position.offset + count))

    def take(self, count: int) -> list[Any]:
        """Return the next ``count`` samples, of which ``available`` has returned the number."""
        found: list[Any] = []
        while len(found) < count:
            held, position = self._held[0], self.position
            begin = position.offset
            part = held.chunk.samples[begin : begin + count - len(found)]
            found += part
            self._samples -= len(part)
            self.position = position._replace(worker=held.worker, offset=begin + len(part))
            self._drop_used()
        return found

    def _drop_used(self) -> None:
        """Move the position behind chunks that were taken completely."""
        while self._held and self.position.offset >= len(self._held[0].chunk.samples):
            held, position = self._held.popleft(), self.position
            places = list(position.places)
            places[held.worker] = held.chunk.place
            ended = (*position.ended, held.worker) if held.ends else position.ended
            following = self._held[0].worker if self._held else self._next
            self.position = position._replace(worker=following, offset=0, ended=ended, places=tuple(places))

    def _read(self) -> None:
        """Get the next chunk of the next worker whose stream has not ended."""
        number = self._next
        while not self._open[number]:
            number = (number + 1) % len(self._open)
        self._ask(number)
        chunk: Chunk = self._readers.get(number)
        self._open[number] = len(chunk.samples) == self.position.chunk
        self._ask(number)
        self._next = (number + 1) % len(self._open)
        self._held.append(_Held(number, chunk, not self._open[number]))
        self._samples += len(chunk.samples)
        self._drop_used()

    def _ask(self, number: int) -> None:
        """Request chunks from a worker ahead, unless its stream has ended."""
        while self._open[number] and self._readers.pending(number) < max(1, self._ahead):
            self._readers.ask(number, Take(self.position.chunk))
