"""Gradient accumulation: choose the number of micro-batches of a step, the fewest that fit into memory.

A rank divides its local batch into micro-batches, and only one of them needs memory.

With k micro-batches, a rank whose forward and backward passes and update take C(b) seconds with b samples needs

    k (C(b / k) - u) + u

seconds for a step, where u is the time of the update. It never takes less time than C(b) if C is concave, so the
planner uses as few micro-batches as the memory allows. The search does not choose their number: for a rank that can
hold at most L samples, it uses the smallest time over all k, at multiples of L,

    C(b) up to L samples, and u + (b / L) (C(L) - u) beyond.

``micro_batches_of`` then chooses the number for a candidate, and the exact evaluation uses the first formula.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil

from dljob.perf.fit.curve import Curve
from dljob.perf.resources.memory import MAX_SAMPLES
from dljob.perf.step.compute import at_least
from dljob.perf.workload.workload import Workload
from dljob.planner.candidates.options import Option

MAX_MICRO_BATCHES = 4096
"""Maximum number of micro-batches. The API has the same bound for ``spec.parallelism.microBatches``."""
_LARGEST_UPDATE = 0.9
"""Maximum time of an update, as a fraction of the computing time of a step without samples, which includes it."""


def update_part_s(option: Option) -> float:
    """Return the seconds for updating all parameters within the computing time of a step on the option's device."""
    return min(option.update_once_s * option.slowdown, _LARGEST_UPDATE * option.computing.seconds(0))


def repeated(curve: Curve, micro_batches: int, update_s: float) -> Curve:
    """Return the computing time of a step with ``micro_batches`` equal micro-batches, over the local batch.

    ``curve``: the computing time of a step with one micro-batch, of which ``update_s`` seconds are the update. A rank
    with fewer samples than micro-batches computes one sample in each of them.
    """
    k = micro_batches
    times = tuple(k * (t - update_s) + update_s for t in curve.times_s)
    found = Curve(tuple(k * b for b in curve.batches), times, curve.slope_s)
    return at_least(found, found.seconds(k))


def beyond(curve: Curve, largest: int, update_s: float) -> Curve:
    """Return the least computing time over the local batch if a micro-batch has at most ``largest`` samples.

    ``curve``: the computing time of a step with one micro-batch, of which ``update_s`` seconds are the update.
    """
    held = [(b, t) for b, t in zip(curve.batches, curve.times_s, strict=True) if b < largest]
    last_s = curve.seconds(largest)
    knots = [*held, (float(largest), last_s)]
    return Curve(tuple(b for b, _ in knots), tuple(t for _, t in knots), (last_s - update_s) / largest)


def accumulating(option: Option, micro_batches: int) -> Option:
    """Return the option for a plan with exactly ``micro_batches`` micro-batches per step."""
    if micro_batches == 1:
        return option
    computing = repeated(option.computing, micro_batches, update_part_s(option))
    return replace(
        option,
        curve=option.fetching.over(computing),
        computing=computing,
        largest_batch=min(MAX_SAMPLES, micro_batches * option.largest_batch),
        micro_batches=micro_batches,
    )


def unlimited(option: Option, batch: int) -> Option:
    """Return the option for candidates whose number of micro-batches is chosen later, so that large batches fit.

    The largest local batch is then that of ``MAX_MICRO_BATCHES`` micro-batches. ``batch``: the global batch size. An
    option whose ranks can hold the whole batch at once is returned unchanged, and so is one that cannot hold a sample.
    """
    if option.largest_batch >= batch or option.largest_batch < 1:
        return option
    computing = beyond(option.computing, option.largest_batch, update_part_s(option))
    most = min(MAX_SAMPLES, MAX_MICRO_BATCHES * option.largest_batch)
    return replace(
        option, curve=option.fetching.over(computing), computing=computing, largest_batch=most, single=option
    )


def accumulated(option: Option, micro_batches: int | None, batch: int) -> Option:
    """Return the option with gradient accumulation. ``micro_batches``: their number; None: the planner chooses it."""
    return unlimited(option, batch) if micro_batches is None else accumulating(option, micro_batches)


def holding(option: Option, held: Workload, batch: int) -> Option:
    """Return the option with the largest local batch of ranks that store ``held``: shards of the optimizer's state.

    Until the number of ranks is known, an option assumes that only its ``min_ranks`` share the state. ``batch``: the
    global batch size.
    """
    if option.strategy != "Optimizer":
        return option
    if option.single is not None:
        return unlimited(replace(option.single, largest_batch=option.single.largest_of(held)), batch)
    return replace(option, largest_batch=min(MAX_SAMPLES, option.micro_batches * option.largest_of(held)))


def micro_batches_of(
    options: Sequence[Option], shares: Callable[[Sequence[Option]], list[list[int]] | None]
) -> tuple[list[Option], int]:
    """Choose the number of micro-batches of a candidate. Return (its options with this number, the number).

    The number is the smallest with which every rank's micro-batch fits into memory, and it is the same for all ranks.
    ``shares``: function that splits the batch among the ranks of the options and returns a list of local batch sizes
    for each option; None: the batch does not fit.
    """
    single = [option.single or option for option in options]
    if all(option.single is None for option in options):
        return list(options), options[0].micro_batches
    found = shares(options)
    if found is None:
        return single, 1
    pairs = zip(found, single, strict=True)
    # A group with only a parameter server has no samples, and perhaps no memory for any.
    k = max(ceil(max(sizes, default=0) / max(1, option.largest_batch)) for sizes, option in pairs)
    return [accumulating(option, k) for option in single], max(1, k)


def room(option: Option, largest: int, batch: int) -> int:
    """Return the largest local batch of a rank with gradient accumulation, at most ``batch``, the global batch size.

    ``largest``: number of samples that the rank can hold in memory at once. ``option``: it has the number of
    micro-batches, or leaves it open.
    """
    if option.single is not None:
        return batch if largest >= 1 else 0
    return min(batch, option.micro_batches * largest)
