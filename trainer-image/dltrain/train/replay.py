"""Replay a recorded run: use its local batch sizes (shares) at each step and its all-reduce algorithms.

Shares depend on measured times and lost ranks, so they differ between two runs of the same job. The file
``report.json`` of a run records its shares. If the environment variable ``DLTRAIN_REPLAY`` names such a file, a run
uses the recorded values instead of measuring. If the number of ranks is the same, the run then makes the same additions
in the same order as the recorded run.
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
    """Choices that another run recorded in its report. This run repeats them, so that it makes the same additions.

    ``splits``: (step, local batch sizes of all ranks from this step on), in ascending order of steps. ``sums``: the
    all-reduce algorithms that were the fastest in measurements at the start of the recorded run.
    """

    splits: tuple[tuple[int, tuple[int, ...]], ...]
    sums: tuple[Summing, ...] = ()

    def shares(self, step: int) -> tuple[int, ...] | None:
        """Return the recorded local batch sizes of all ranks at ``step``, the number of completed steps before it.

        Return None for a step before the first record; the plan's local batch sizes apply to such a step.
        """
        return next((shares for since, shares in reversed(self.splits) if since <= step), None)


def timeline(document: Document) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Return the local batch sizes of a recorded run as (step, local batch sizes of all ranks from this step on).

    ``document``: the report of the run. If a restart repeated steps, the last repetition counts, because it led to the
    final model. Ranks are in the order of the largest process group, and lost ranks have 0. Raise ValueError if the
    report does not contain all changes of local batch sizes.
    """
    if len(document.splits) < document.totals.splits:
        found = f"{len(document.splits)} of {document.totals.splits} changes of local batch sizes"
        raise ValueError(
            f"splits: found {found} in the report of the run; expected all of them. Reports of runs with very many "
            "changes omit some, so this run cannot be replayed"
        )
    if not document.splits:
        return ()
    places: Sequence[str] = list(max(document.splits, key=lambda split: len(split.shares)).shares)
    standing: list[tuple[int, tuple[int, ...]]] = []
    for split in document.splits:
        if strange := set(split.shares) - set(places):
            raise ValueError(
                f"splits: found ranks {sorted(strange)}, which are not among the first ranks {places}; expected the "
                "same ranks (written as pod/local rank) in the whole run"
            )
        while standing and standing[-1][0] >= split.step:
            standing.pop()
        standing.append((split.step, tuple(split.shares.get(place, 0) for place in places)))
    return tuple(standing)


def asked(plan: Plan) -> Replay | None:
    """Return the choices of the recorded run that this run must replay, or None if it replays no run.

    The environment variable ``DLTRAIN_REPLAY`` names the report of the recorded run. Raise BadInputError if the report
    cannot be read, or if its run had another batch size, seed or number of ranks than ``plan``.
    """
    if not (path := os.environ.get(REPLAY_ENV)):
        return None
    field, remedy = f"${REPLAY_ENV}", "set it to the report.json of a run of this job, or unset it"
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
