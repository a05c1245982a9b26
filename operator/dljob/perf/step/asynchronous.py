"""A step without lockstep: workers that take turns at one parameter server.

A worker computes for Z, then the server takes its gradient, applies it and sends the parameters: D = 2 alpha + 2 V beta
+ V gamma, for one worker at a time. A step of the training is a round, an update by every worker: n over the updates a
second of that closed queue (``sync``); within a bound, what is left of waiting for the slowest is added.
"""

from dataclasses import replace

from dljob.perf.step.communication import Link
from dljob.perf.step.step import Step
from dljob.perf.step.synchronization import asynchronous_updates_per_s, stale_factor


def round_of(timing: Step, workers: int, nbytes: float, link: Link, bound: int | None) -> Step:
    """The step with its communication and waiting replaced; ``bound``: steps workers may be apart, None for any."""
    think_s = timing.compute_s + timing.data_s
    service_s = 2 * link.latency_s + 2 * nbytes / link.bandwidth_Bps + nbytes / link.reduce_Bps
    round_s = workers / asynchronous_updates_per_s(workers, think_s, service_s)
    waiting_s = 0.0 if bound is None else timing.compute_s * (stale_factor(workers, bound) - 1)
    return replace(timing, communication_s=max(round_s - think_s, service_s), waiting_s=waiting_s)
