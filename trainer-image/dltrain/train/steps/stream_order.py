"""The order of the samples of a training on streams, of which each rank reads its own.

An epoch ends when the first rank has no complete batch left, so that all ranks make the same steps. Ranks learn this
one step in advance: each reads two batches ahead, and tells the others at the end of the gradient buffer if there is
only one left. Only the begin of an epoch needs a message of its own.
"""

import json
import time
from collections.abc import Callable
from math import inf
from types import TracebackType
from typing import Any, Self
from zlib import crc32

import numpy as np

from dltrain.batch.sampling import Part
from dltrain.data.streams.loader import StreamLoader
from dltrain.data.streams.sequence import Position, Readers, Sequence
from dltrain.data.streams.state import encode
from dltrain.elastic.team import Team
from dltrain.protocol.errors import MisuseError
from dltrain.train import usage_checks

_AHEAD = 2
"""Number of complete batches that a rank reads ahead of the batch of the present step."""


class StreamOrder:
    """The order of this rank's stream. See ``Order`` for its methods, which the trainer calls."""

    def __init__(self, team: Team, loader: StreamLoader, position: Position, step: int) -> None:
        """Begin to read at ``position``. All ranks must call it together. ``step``: number of completed steps.

        Raise MisuseError if a rank has no complete batch, and SampleError if the user's dataset fails.
        """
        self.ending = False
        self._team, self._loader, self._position = team, loader, position
        self._readers: Readers | None = None
        self._sequence: Sequence | None = None
        self._last: bool | None = None
        """True if the present step is the last one of its epoch; None until its epoch has begun."""
        self._samples: list[Any] | None = None
        plan = team.plan
        self.planned_steps = plan.steps or 0
        if step >= (plan.steps or inf):
            return
        if position.epoch < (plan.epochs or inf):
            self._begin_epoch(step)
        if self.position.epoch >= (plan.epochs or inf):
            self.planned_steps = step

    @property
    def position(self) -> Position:
        """Return the position in this rank's stream after the last completed step."""
        return self._position if self._sequence is None else self._sequence.position

    @property
    def _share(self) -> int:
        return self._team.shares[self._team.rank]

    def part(self, step: int) -> Part:
        if self._last is None:
            self._begin_epoch(step)
        self._samples, mine, whole = None, self._share, sum(self._team.shares)
        return Part(self.position.epoch, np.arange(mine), mine / whole, whole, bool(self._last))

    def feed(self, part_of: Callable[[int], Part], steps: int) -> "StreamFeed":
        return StreamFeed(self, self._loader, self._team.rank, steps)

    def is_last(self, part: Part) -> bool:
        return not self.planned_steps and part.last and part.epoch + 1 >= (self._team.plan.epochs or inf)

    def conclude(self, *, ending: bool) -> None:
        if self._last:
            self._end_epoch()
        else:
            self._last = ending

    def samples(self) -> tuple[list[Any], float]:
        """Return this rank's samples of the present step, and the seconds spent on reading since the last call."""
        assert self._readers is not None and self._sequence is not None, "``part`` has begun the epoch"
        before = self._readers.spent_s
        if self._samples is None:
            mine = self._share
            if self._sequence.available(mine) < mine:
                raise MisuseError(
                    f"t.reshard: found a local batch size of {mine} in an epoch of a stream that ends earlier; "
                    "expected local batch sizes that stay the same during an epoch. Change them at the end of an epoch"
                )
            self._samples = self._sequence.take(mine)
            self.ending = self._sequence.available(_AHEAD * mine) < _AHEAD * mine
        return self._samples, self._readers.spent_s - before

    def close(self) -> None:
        if self._readers is not None:
            self._readers.close()

    def _begin_epoch(self, step: int) -> None:
        """Read the first batches of an epoch, and agree with the other ranks if it has more than one batch.

        If a resumed run is so near the end of an epoch that a rank has no complete batch with its present local batch
        size, begin the next epoch.
        """
        team = self._team
        while self._last is None and self.position.epoch < (team.plan.epochs or inf):
            rows = self._agree(step)
            batches = [row[0] for row in rows]
            if least := min(batches):
                self._last = least == 1
                usage_checks.warn_of_equal_streams([int(row[2]) for row in rows], team.rank)
            elif any(row[1] for row in rows):
                self._end_epoch()
            else:
                rank = batches.index(least)
                raise MisuseError(
                    f"dataset: found no complete batch in the stream of rank {rank} in epoch {self.position.epoch}; "
                    f"expected at least {team.shares[rank]} samples, its local batch size. Give each rank more of the "
                    "samples, or lower spec.globalBatchSize"
                )

    def _agree(self, step: int) -> list[list[float]]:
        """Go to the present position, and return three numbers of each rank.

        These are the number of complete batches from the position on, at most ``_AHEAD``, 1 if it is inside of an
        epoch, and a checksum of the first samples of the training. All ranks must call it together.
        """
        team, resumed = self._team, self.position.inside
        row = [inf, 0.0, 0.0]  # of a parameter server, which reads no samples
        if self._share:
            batches = self._batches_ahead()
            begins = batches and not resumed and not self.position.epoch
            row = [float(batches), float(resumed), float(self._checksum() if begins else 0)]
        return team.together(step, lambda: team.process_group.gather(row))

    def _batches_ahead(self) -> int:
        """Go to the present position, and return the number of complete batches from there on, at most ``_AHEAD``."""
        mine = self._share
        if self._readers is None:
            self._readers = self._loader.readers()
        self._sequence = self._loader.sequence(self._readers, self._team.rank, self._position, mine)
        return self._sequence.available(_AHEAD * mine) // mine

    def _end_epoch(self) -> None:
        self._position, self._sequence, self._last = Position(self.position.epoch + 1), None, None
        if self._readers is not None:
            self._readers.drop()

    def _checksum(self) -> int:
        """Return a checksum of equally many first samples on each rank; 0 if they are other objects than data."""
        assert self._sequence is not None
        count = min(share for share in self._team.shares if share)
        try:
            return crc32(json.dumps(encode(self._sequence.first(count))).encode())
        except MisuseError:
            return 0


class StreamFeed:
    """Makes the batches of all steps from this rank's stream. See ``Feed``, which has the same methods."""

    def __init__(self, order: StreamOrder, loader: StreamLoader, rank: int, steps: int) -> None:
        self.spent_s, self.steps = 0.0, steps
        self._order, self._loader, self._rank = order, loader, rank

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._order.close()

    def take(self, step: int, part: Part) -> Any:
        """Return the batch of ``step`` on the device, or None if ``part`` is empty.

        ``step``: number of the batch, or of the micro-batch. ``part``: which of the step's samples it has. Raise
        SampleError if the user's dataset fails, and MemoryError or WorkerLostError if a worker fails.
        """
        if not len(part.indices):
            return None
        samples, read_s = self._order.samples()
        began = time.perf_counter()
        batch = self._loader.batch([samples[index] for index in part.indices], f"{self._rank} {step}")
        self.spent_s = read_s + time.perf_counter() - began
        return batch
