"""Step time of asynchronous and stale-synchronous training with one parameter server.

A worker computes for Z. Then the server receives its gradient, applies it and sends the parameters, for one worker at a
time: D = 2 alpha + 2 V beta + V gamma. A step is a round with one update by each of n workers: n divided by the updates
per second of this closed queue (``synchronization``). With a staleness bound, the remaining wait for the slowest worker
is added.
"""

from dataclasses import replace

from dljob.perf.step.communication import Link
from dljob.perf.step.step import Step
from dljob.perf.step.synchronization import asynchronous_updates_per_s, stale_factor


def round_of(timing: Step, workers: int, nbytes: float, link: Link, bound: int | None) -> Step:
    """Return the step with communication and waiting of asynchronous training; ``bound``: staleness, None for any."""
    think_s = timing.compute_s + timing.data_s
    service_s = 2 * link.latency_s + 2 * nbytes / link.bandwidth_Bps + nbytes / link.reduce_Bps
    round_s = workers / asynchronous_updates_per_s(workers, think_s, service_s)
    waiting_s = 0.0 if bound is None else timing.compute_s * (stale_factor(workers, bound) - 1)
    return replace(timing, communication_s=max(round_s - think_s, service_s), waiting_s=waiting_s)
