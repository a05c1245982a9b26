"""Agree with the other ranks on the shards of each node, for a dataset with distribution Sharded."""

import time
from math import inf
from typing import TYPE_CHECKING, Any

from dltrain.batch.sharding import nodes_of
from dltrain.data.feeding.loader import Loader
from dltrain.elastic.team import Team
from dltrain.protocol.errors import MisuseError
from dltrain.train.progress import UPDATE_INTERVAL_S, Progress

if TYPE_CHECKING:  # It imports aiohttp, which takes time, and which other datasets do not need.
    from dltrain.data.sharded.dataset import ShardedDataset

FETCH_SILENCE_S = 120.0
"""Maximum seconds without received data while a rank fetches. Retries after faults of the network end earlier."""


def divide(team: Team, progress: Progress, dataset: "ShardedDataset", step: int = 0) -> None:
    """Assign shards to the nodes of all ranks, and set the number of classes or tokens. All ranks call it together.

    For tokens, a rank fetches its shards here, because the number of tokens follows from them. Otherwise, it fetches
    them from its first step on. ``step``: number of completed steps. Raise PeerLostError if the run cannot continue
    after a loss of ranks.
    """
    from dltrain.data.sharded.dataset import decode, encode

    told_at = -inf

    def alive() -> None:
        nonlocal told_at
        if time.monotonic() - told_at >= UPDATE_INTERVAL_S:
            progress.busy("fetching shards of the dataset", FETCH_SILENCE_S)
            told_at = time.monotonic()

    plan, group = team.plan, team.process_group
    dataset.file.alive = alive
    mine = encode(dataset, plan.global_batch)
    told, nodes = team.together(step, lambda: group.collect(mine)), nodes_of(plan)
    held = decode(told, [nodes[rank] for rank in team.elastic.alive], dataset.file.shown)
    dataset.divide(plan, team.rank, held, lambda: team.shares)
    targets = team.together(step, lambda: group.gather([dataset.largest_target()]))
    largest = max(int(value) for (value,) in targets)
    dataset.agree_on_classes(largest + 1)


def check_held_out(loader: Loader) -> None:
    """Raise MisuseError if the loader has the training samples of a sharded dataset, of which each node has only a
    part.
    """
    if _is_sharded(loader.source.dataset):
        raise MisuseError(
            "t.held_out: found the training samples of a sharded dataset; expected held-out samples. Pass "
            "t.loader(data.test(numpy.arange(data.test_samples)))"
        )


def ensure_divided(team: Team, progress: Progress, loader: Loader, step: int) -> None:
    """If the plan's dataset is sharded and ``divide`` was not called yet, call it, because training scripts do not.

    All ranks call it together. ``step``: number of completed steps. Raise MisuseError if the loader has another
    dataset.
    """
    if not team.plan.dataset.sharded:
        return
    dataset = loader.source.dataset
    if not _is_sharded(dataset):
        raise MisuseError(
            f"t.steps: found a loader of {type(dataset).__name__} with spec.dataset.distribution Sharded; expected "
            "t.loader(dltrain.data.load(t.dataset_path)). Use it, or use distribution Full"
        )
    if dataset.sampler is None:
        divide(team, progress, dataset, step)


def _is_sharded(dataset: Any) -> bool:
    return getattr(dataset, "in_shards", False) is True
