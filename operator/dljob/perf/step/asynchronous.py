"""Step time of asynchronous and stale-synchronous training with one parameter server.

A worker computes for Z seconds. Then the server receives the worker's gradient, applies it and sends the parameters, in
D = 2 alpha + 2 V beta + V gamma seconds. It serves one worker at a time. A step means a round with one update by each
of n workers. It takes n divided by the updates per second of this closed queue (``synchronization``). A staleness bound
adds the remaining wait for the slowest worker.
"""

from dataclasses import replace

from dljob.perf.step.communication import Link
from dljob.perf.step.step import Step
from dljob.perf.step.synchronization import asynchronous_updates_per_s, stale_factor


def round_of(timing: Step, workers: int, nbytes: float, link: Link, bound: int | None) -> Step:
    """Return ``timing`` with the communication and waiting times of asynchronous training.

    ``bound``: the staleness bound in steps; None if staleness is unbounded.
    """
    think_s = timing.compute_s + timing.data_s
    service_s = 2 * link.latency_s + 2 * nbytes / link.bandwidth_Bps + nbytes / link.reduce_Bps
    round_s = workers / asynchronous_updates_per_s(workers, think_s, service_s)
    waiting_s = 0.0 if bound is None else timing.compute_s * (stale_factor(workers, bound) - 1)
    return replace(timing, communication_s=max(round_s - think_s, service_s), waiting_s=waiting_s)
