"""Step time of asynchronous and stale-synchronous training with one parameter server.

A worker computes for Z seconds, without an update of its parameters. Then the server receives the worker's gradient of
V bytes, applies the gradient and sends the parameters. This takes D = 2 latency + 2 V / bandwidth + U. U is the
server's time for the gradient's norm, which shows whether all values are finite, and for the optimizer's step. The
server serves one worker at a time. Here, a step is a round with one update by each of the n workers. A round takes n
divided by the updates per second of this closed queue (``synchronization``). A staleness bound adds the time for which
workers still wait for the slowest worker.
"""

from dataclasses import replace

from dljob.perf.step.communication import Link
from dljob.perf.step.step import Step
from dljob.perf.step.synchronization import asynchronous_updates_per_s, stale_factor


def round_of(
    timing: Step,
    workers: int,
    nbytes: float,
    link: Link,
    bound: int | None,
    *,
    own_update_s: float = 0.0,
    server_update_s: float = 0.0,
) -> Step:
    """Return the predicted time of a round of asynchronous training, in which each worker makes one update.

    ``timing``: the predicted synchronous step. The result has the same computing and input time, but the communication
    and waiting times of the round. ``workers``: number of workers, which share one parameter server. ``nbytes``: size
    of the gradients. ``link``: network between a worker and the server. ``bound``: the staleness bound (maximum
    distance between two workers) in steps; None without a bound. ``own_update_s``: seconds of the synchronous step's
    computing in which a rank updates its parameters, which workers do not do. ``server_update_s``: seconds in which the
    server updates the parameters. It is predicted like an update in a synchronous step: the server reads the gradient
    once for its norm, where a synchronous update sets it to zero, so both move the same number of bytes.
    """
    timing = replace(timing, compute_s=max(0.0, timing.compute_s - own_update_s))
    think_s = timing.compute_s + timing.data_s
    service_s = 2 * link.latency_s + 2 * nbytes / link.bandwidth_Bps + server_update_s
    round_s = workers / asynchronous_updates_per_s(workers, think_s, service_s)
    waiting_s = 0.0 if bound is None else timing.compute_s * (stale_factor(workers, bound) - 1)
    return replace(timing, communication_s=max(round_s - think_s, service_s), waiting_s=waiting_s)
