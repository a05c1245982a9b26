"""Training on streams: the positions of all ranks in their streams, which checkpoints contain."""

import json
from typing import Any, NoReturn

from dlcontract import Role
from dltrain.data.streams.loader import StreamLoader
from dltrain.data.streams.sequence import Position
from dltrain.elastic.team import Team
from dltrain.protocol.errors import BadInputError, MisuseError
from dltrain.protocol.volume_layout import checkpoint_place
from dltrain.train.progress import Progress
from dltrain.train.steps.stream_order import StreamOrder

SKIP_S = 3600.0
"""Maximum seconds in which a resumed run reads the samples of an epoch again that it has used before."""


class Streams:
    """The positions of all ranks in their streams, in ``Saved``'s form. Without streams, the state is None."""

    def __init__(self, team: Team, progress: Progress) -> None:
        self._team, self._progress = team, progress
        self._order: StreamOrder | None = None
        self._stored: list[Position] | None = None
        """The positions in the checkpoint from which the training resumed, until it continues from them."""

    def state(self) -> list[Any] | None:
        """Return the position of each rank after the last completed step. All ranks must call it together.

        Raise PeerLostError if a rank is lost.
        """
        if self._order is None:
            return None
        mine = json.dumps(self._order.position.to_json()).encode()
        return [json.loads(each) for each in self._team.process_group.collect(mine)]

    def load(self, state: list[Any] | None, /) -> None:
        self._stored = None if state is None else [Position.parse(each) for each in state]

    def open(self, loader: StreamLoader, step: int) -> StreamOrder:
        """Return the order of this rank's stream from its position on. All ranks must call it together.

        ``step``: number of completed steps. Raise MisuseError if the plan does not support streams, BadInputError if
        the position in the checkpoint is not one of this stream, and the errors of ``StreamOrder``.
        """
        plan = self._team.plan
        if plan.splits_model or plan.dataset.sharded:
            what = f"parallelism.strategy {plan.parallelism}" if plan.splits_model else "dataset.distribution Sharded"
            raise MisuseError(
                f"t.steps: found {loader.kind}, a stream, with {what}; expected a dataset with len and [], because "
                "ranks do not read streams of their own. Use such a dataset, or another value of this field"
            )
        position = self._position(loader, step)
        self._team.keep_ranks_and_shares()
        if any(place.read and not place.stateful for place in position.places):
            self._progress.busy("reading the stream up to its position in the checkpoint", SKIP_S)
        self._progress.bound_ranks = self._team.size if plan.checkpoint.enabled else None
        self._order = StreamOrder(self._team, loader, position, step)
        return self._order

    def leave(self) -> None:
        """Train on a dataset with random access from now on.

        Raise BadInputError if the training resumed from a checkpoint that contains positions in streams.
        """
        self._order = self._progress.bound_ranks = None
        if self._stored is not None:
            self._refuse("dataset", "a dataset with len and []", "a stream", "pass the stream to t.loader again")

    def _position(self, loader: StreamLoader, step: int) -> Position:
        if self._order is not None:  # another call of ``t.steps`` in the same process
            position = self._order.position
            return Position(position.epoch + position.inside)
        stored, self._stored = self._stored, None
        if stored is None:
            if step:
                remedy = "pass the former dataset to t.loader"
                self._refuse("dataset", f"{loader.kind}, a stream", "a dataset with len and []", remedy)
            return Position(0)
        if not any(each.inside for each in stored):
            return Position(stored[0].epoch)
        team = self._team
        if len(stored) != team.size:
            remedy = (
                "run with this number of ranks until the end of an epoch, because the streams of other ranks begin and "
                "end at other samples"
            )
            self._refuse("number of ranks", str(team.size), f"{len(stored)} in the middle of an epoch", remedy)
        readers = [rank.rank for rank in team.plan.ranks if rank.role is Role.WORKER]
        if readers != (before := [rank for rank, each in enumerate(stored) if each.inside]):
            found, expected = (", ".join(map(str, ranks)) for ranks in (readers, before))
            remedy = "set spec.collective back, because a parameter server cannot read on for another rank"
            self._refuse("ranks that read the stream", found, f"{expected} in the middle of an epoch", remedy)
        mine = stored[team.rank]
        if mine.inside and len(mine.places) != max(1, loader.workers):
            remedy = "pass this number to t.loader, because each worker reads its own part of a stream"
            self._refuse("workers", str(loader.workers), f"{len(mine.places)} in the middle of an epoch", remedy)
        return mine

    def _refuse(self, field: str, found: str, expected: str, remedy: str) -> NoReturn:
        place = checkpoint_place(self._team.plan)
        remedy += ", or use another checkpoint volume to train from the beginning"
        raise BadInputError(field, found, f"{expected}, as in the checkpoint in {place}", remedy)
