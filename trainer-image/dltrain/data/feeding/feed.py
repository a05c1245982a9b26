"""Load the batches of a training in order, and prefetch the batches of future steps.

The samples of future steps are known in advance, unless local batch sizes change or a step is abandoned. A prefetched
batch is used only if it contains exactly the samples that the step needs. Otherwise all prefetched batches are dropped.
Results with and without prefetching are therefore equal to the last bit, and the loading method may change while the
training runs.
"""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from math import ceil
from queue import SimpleQueue
from statistics import median
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

from dltrain.batch.sampling import Part
from dltrain.data.feeding.loader import Loader
from dltrain.data.feeding.source import Request
from dltrain.data.feeding.worker_pool import Workers
from dltrain.protocol.errors import SampleError, WorkerLostError

MIN_FETCH_FRACTION, MIN_FETCH_S = 0.05, 1e-3
"""Prefetching starts if loading takes at least this fraction of a step's time and at least this time in seconds.

Prefetching has a cost: a thread shares the interpreter with the rank, and a process takes memory.
"""
MEASURED = 5
"""Number of steps whose loading time is measured before prefetching may start.

The two steps before them are not measured, because they open files and allocate memory.
"""
SPARE = 1.25
"""Ratio of the throughput that all workers together should have to the throughput at which the training uses batches.

The ratio is above 1, because some samples take longer to load than others.
"""
_THREAD_AHEAD = 2


class Lane(Protocol):
    """A method of prefetching: a thread or worker processes that load batches before the steps need them.

    ``ask`` requests a batch and returns a ticket for it. ``get`` waits for the batch of a ticket, and returns the batch
    and the seconds spent on loading it. Callers must get batches in the order in which they asked, but may skip some.
    ``drop`` cancels all requests.
    """

    def ask(self, request: Request) -> int: ...

    def get(self, ticket: int) -> tuple[Any, float]: ...

    def drop(self) -> None: ...

    def close(self) -> None: ...


class Thread:
    """A lane (method of prefetching) that runs ``make`` in a thread of this process, for one request after another.

    ``make``: maps a request to (result, seconds spent).
    """

    def __init__(self, make: Callable[[Any], tuple[Any, float]]) -> None:
        self._make = make
        self._asked: SimpleQueue[tuple[int, Any] | None] = SimpleQueue()
        self._made: SimpleQueue[tuple[int, Any, BaseException | None]] = SimpleQueue()
        self._next = self._wanted_from = 0
        self._thread = threading.Thread(target=self._work, daemon=True, name="fetch")
        self._thread.start()

    def ask(self, request: Any) -> int:
        ticket, self._next = self._next, self._next + 1
        self._asked.put((ticket, request))
        return ticket

    def get(self, ticket: int) -> tuple[Any, float]:
        while True:
            number, made, error = self._made.get()
            if number == ticket and error is not None:
                raise error
            if number == ticket:
                found: tuple[Any, float] = made
                return found

    def drop(self) -> None:
        self._wanted_from = self._next

    def close(self) -> None:
        self.drop()
        self._asked.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (asked := self._asked.get()) is not None:
            ticket, request = asked
            made, error = None, None
            if ticket >= self._wanted_from:
                try:
                    made = self._make(request)
                except BaseException as raised:  # noqa: BLE001 - raised where the batch is wanted
                    error = raised
            self._made.put((ticket, made, error))


class DeviceLane:
    """A lane (method of prefetching) in which worker processes load batches and a thread copies them to the rank's GPU.

    ``move``: starts the copy of a batch to the GPU and returns a handle for it.
    """

    def __init__(self, workers: Workers, move: Callable[[Any], Any]) -> None:
        self._workers = workers

        def carry(ticket: int) -> tuple[Any, float]:
            batch, spent_s = workers.get(ticket)
            return move(batch), spent_s

        self._thread = Thread(carry)

    def ask(self, request: Request) -> int:
        return self._thread.ask(self._workers.ask(request))

    def get(self, ticket: int) -> tuple[Any, float]:
        return self._thread.get(ticket)

    def drop(self) -> None:
        self._thread.drop()
        self._workers.drop()

    def close(self) -> None:
        self._workers.wake()
        self._thread.close()
        self._workers.close()


class _Asked(NamedTuple):
    step: int
    request: Request
    ticket: int


class Feed:
    """The batches of all steps, in order.

    ``spent_s``: seconds that this process or a worker spent on loading the last batch. With prefetching, a step waits
    for less than ``spent_s``. ``steps``: number of batches; none after these is prefetched.
    """

    def __init__(self, loader: Loader, part_of: Callable[[int], Part], seed: int, steps: int) -> None:
        """Choose how to load batches: in this thread, in another thread, or in worker processes.

        If the user has not chosen, the feed begins in this thread and decides after a few measured steps. ``part_of``:
        function that returns this rank's samples in a future step, if local batch sizes do not change. ``seed``: the
        plan's seed. ``steps``: the number of steps in the training.
        """
        self.spent_s, self.steps = 0.0, steps
        self._loader, self._part_of, self._seed = loader, part_of, seed
        self._lane: Lane | None = None
        self._starting: Workers | None = None
        self._room = 0
        self._asked: deque[_Asked] = deque()
        self._fetched_s, self._between_s = list[float](), list[float]()
        self._left: float | None = None
        self._decided = loader.prefetch == 0 or loader.workers == 0
        if self._decided:
            return
        if loader.workers:
            self._take_workers(Workers(loader.source, loader.workers))
        elif not loader.source.foreign and loader.device.type == "cuda":
            self._take_thread()
        elif loader.source.foreign and not loader.max_workers:
            self._decided = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for lane in (self._lane, self._starting):
            if lane is not None:
                lane.close()

    def take(self, step: int, part: Part) -> Any:
        """Return this rank's batch of ``step`` on the device, or None if ``part`` is empty.

        ``part``: the samples of the batch. If a prefetched batch contains exactly these samples, use it. Otherwise drop
        all prefetched batches. Raise SampleError if the user's dataset fails, and MemoryError or WorkerLostError if a
        worker fails.
        """
        if (request := Request.of(part, self._seed)) is None:
            return None
        if self._starting is not None:
            self._take_over(self._starting)
        if self._lane is None:
            return self._fetch(request)
        if not (self._asked and self._asked[0].step == step and self._asked[0].request.same(request)):
            self._lane.drop()
            self._asked.clear()
            self._asked.append(_Asked(step, request, self._lane.ask(request)))
            self._ask(self._lane, step + 1)
        first = self._asked.popleft()
        try:
            batch, self.spent_s = self._lane.get(first.ticket)
        except (SampleError, MemoryError, WorkerLostError) as error:
            if self._loader.workers or not self._loader.source.foreign:
                raise
            return self._go_back(request, error)
        self._ask(self._lane, step + 1)
        return self._loader.mover.arrived(batch)

    def _ask(self, lane: Lane, step: int) -> None:
        """Request the batches of ``step`` and the following steps from ``lane``, up to the limit for prefetching.

        Batches that were requested before are not requested again.
        """
        ahead = self._asked[-1].step + 1 if self._asked else step
        while len(self._asked) < self._room and ahead < self.steps:
            if (request := Request.of(self._part_of(ahead), self._seed)) is None:
                return
            self._asked.append(_Asked(ahead, request, lane.ask(request)))
            ahead += 1

    def _fetch(self, request: Request) -> Any:
        """Load a batch in this thread, measure the time, and decide after some steps whether to start prefetching."""
        began = time.perf_counter()
        if self._left is not None:
            self._between_s.append(began - self._left)
        batch = self._loader.fetch(request)
        self._left = time.perf_counter()
        self.spent_s = self._left - began
        self._fetched_s.append(self.spent_s)
        if len(self._fetched_s) == 2 + MEASURED and not self._decided:
            self._decide(median(self._fetched_s[2:]), median(self._between_s[2:]))
        if len(self._fetched_s) >= 2 + MEASURED:
            self._fetched_s, self._between_s = self._fetched_s[:2], self._between_s[:1]
        return batch

    def _decide(self, fetched_s: float, between_s: float) -> None:
        """Start prefetching if loading takes long enough compared with a step. Otherwise, a later call decides again.

        ``fetched_s``: seconds to load a batch. ``between_s``: seconds from the end of a load to the next one, in which
        the step computes.
        """
        loader = self._loader
        if fetched_s < max(MIN_FETCH_S, MIN_FETCH_FRACTION * (fetched_s + between_s)):
            return
        self._decided = True
        if not loader.source.foreign:
            self._take_thread()
            return
        count = min(loader.max_workers, max(1, ceil(SPARE * fetched_s / max(between_s, 1e-9))))
        try:
            self._starting = Workers(loader.source, count, loader.room_nbytes, in_main_memory=True)
        except (ValueError, MemoryError, OSError) as error:
            self._stay(str(error))

    def _take_over(self, workers: Workers) -> None:
        """Use the starting ``workers`` from now on if all of them have started; otherwise do nothing yet.

        If they fail to start, continue without workers.
        """
        try:
            if workers.ready():
                self._take_workers(workers)
        except (MemoryError, WorkerLostError) as error:
            workers.close()
            self._starting = None
            self._stay(str(error))

    def _go_back(self, request: Request, error: Exception) -> Any:
        """Continue without workers after one of them failed. Load and return the batch of ``request`` in this thread.

        This is possible because the user did not request workers. Loading in the rank may succeed if it fails in a
        worker, because only the rank has run the training script. ``error``: the failure, which is printed.
        """
        assert self._lane is not None
        self._lane.close()
        self._lane = None
        self._asked.clear()
        batch = self._fetch(request)  # raises if the workers were not the cause
        self._stay(str(error))
        return batch

    def _stay(self, why: str) -> None:
        print(  # noqa: T201
            f"dltrain: loading is slow, but the rank cannot use data workers: {why}. The rank loads each batch itself "
            "between steps, which may make steps slower. Pass workers=0 to t.loader to avoid this message",
            file=sys.stderr,
            flush=True,
        )

    def _take_thread(self) -> None:
        loader = self._loader

        def make(request: Request) -> tuple[Any, float]:
            began = time.perf_counter()
            batch = loader.mover.ahead(loader.source.make(request))
            return batch, time.perf_counter() - began

        self._lane, self._room = Thread(make), loader.prefetch or _THREAD_AHEAD

    def _take_workers(self, workers: Workers) -> None:
        on_gpu = self._loader.device.type == "cuda"
        self._lane = DeviceLane(workers, self._loader.mover.ahead) if on_gpu else workers
        self._starting, self._decided = None, True
        self._room = self._loader.prefetch or 2 * workers.count
