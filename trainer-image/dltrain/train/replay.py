"""A recorded run once more: the shares that it had at each step, and how it summed gradients.

Shares follow measured times and lost ranks, so no two runs of a job need have the same. What they were is in its
``report.json``; a run with ``$DLTRAIN_REPLAY`` naming that file measures nothing of this and takes it from there. With
the same number of ranks all along it then makes the same additions in the same order.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dlcontract import Plan
from dltrain.protocol.errors import BadInputError
from dltrain.protocol.rank_messages import Summing
from dltrain.record.run_report.document import Document

REPLAY_ENV = "DLTRAIN_REPLAY"


@dataclass(frozen=True)
class Replay:
    """``splits``: (step, shares from that step on, by rank), in rising order. ``sums``: as measured at its start."""

    splits: tuple[tuple[int, tuple[int, ...]], ...]
    sums: tuple[Summing, ...] = ()

    def shares(self, step: int) -> tuple[int, ...] | None:
        """At ``step``, from 0; None where none were recorded yet, so that they are the plan's."""
        return next((shares for since, shares in reversed(self.splits) if since <= step), None)


def timeline(document: Document) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """The splits of the training as it stands: what was done again after a relaunch counts as it was done last.

    Ranks are those of the largest world, in its order; one that was lost has share 0. Raises ValueError when the report
    does not hold all of them.
    """
    if len(document.splits) < document.totals.splits:
        found = f"{len(document.splits)} of {document.totals.splits} splits: of so many a report keeps every other one"
        raise ValueError(f"found {found}, expected all")
    if not document.splits:
        return ()
    places: Sequence[str] = list(max(document.splits, key=lambda split: len(split.shares)).shares)
    standing: list[tuple[int, tuple[int, ...]]] = []
    for split in document.splits:
        if strange := set(split.shares) - set(places):
            raise ValueError(f"found ranks {sorted(strange)} beside {places}, expected the same pods all along")
        while standing and standing[-1][0] >= split.step:
            standing.pop()
        standing.append((split.step, tuple(split.shares.get(place, 0) for place in places)))
    return tuple(standing)


def asked(plan: Plan) -> Replay | None:
    """What the environment asks to be replayed, None if nothing. Raises BadInputError when it is not of such a run."""
    if not (path := os.environ.get(REPLAY_ENV)):
        return None
    field, remedy = f"${REPLAY_ENV}", "give it the report.json of a run of this job, or unset it"
    try:
        document = Document.parse(Path(path).read_bytes())
        splits = timeline(document)
    except (OSError, ValueError) as error:
        raise BadInputError(field, f"{path}: {str(error).splitlines()[0]}", "a run's report", remedy) from None
    ranks = len(splits[0][1]) if splits else 0
    recorded = {"global batch": document.global_batch, "seed": document.seed, "ranks": ranks}
    here = {"global batch": plan.global_batch, "seed": plan.seed, "ranks": len(plan.ranks)}
    if recorded != here:
        words = (", ".join(f"{name} {value}" for name, value in of.items()) for of in (recorded, here))
        raise BadInputError(field, f"{path} of a run with {next(words)}", next(words), remedy)
    return Replay(splits, document.sums)
