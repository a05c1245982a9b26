"""Prior distribution of the multi-device constants, and the covariance of the step times of runs.

The multi-device constants describe communication, and the slowdown of devices that share a node (``Constants``). All
variances and covariances are those of log(seconds).
"""

from dataclasses import dataclass, replace

import numpy as np

from dljob.perf.fit.scaling import Constants, Floats, Runs, Steps

MEAN = Constants(
    log_inter=-0.15,
    busiest_power=0.03,
    mean_power=0.25,
    log_latency=-6.5,
    log_gamma=-0.1,
    spread=0.05,
    sharing=0.0,
    crowding=0.03,
    log_intra=-2.8,
    intra_power=0.6,
    log_growth=-3.0,
)
DEVIATION = Constants(
    log_inter=1.5,
    busiest_power=0.2,
    mean_power=0.12,
    log_latency=3.0,
    log_gamma=1.8,
    spread=0.06,
    sharing=0.2,
    crowding=0.12,
    log_intra=1.2,
    intra_power=0.5,
    log_growth=1.5,
)


@dataclass(frozen=True)
class Prior:
    """Distribution of the constants of communication, and of the slowdown of devices that share a node.

    It holds before any step on several devices is measured. ``mean``, ``deviation``: mean and standard deviation of
    each constant. All other standard deviations are those of log(seconds).

    The values were chosen so that they suit three workloads on one cluster. The mean of ``log_gamma`` was chosen so
    that it suits four clusters. Its deviation was chosen by cross-validation over 18 workloads on these four, and
    so was the deviation of ``log_growth``. The mean of ``log_growth`` and ``smooth`` were chosen on all of them (design
    note 0006).
    """

    mean: Constants = MEAN
    deviation: Constants = DEVIATION
    session: float = 0.32
    """Standard deviation of a factor on communication that all runs on the same number of nodes have in common."""
    network: float = 0.08
    """Standard deviation of a factor on the communication time that varies smoothly over placements."""
    network_reach: float = 0.75
    """Length scale of the ``network`` factor in log(nodes), log(devices) and log(devices on the busiest node)."""
    batch: float = 0.035
    """Standard deviation of a factor on the computing time that all runs with the same batch have in common."""
    smooth: float = 0.09
    """Standard deviation of a factor on the whole step time that varies smoothly over runs."""
    smooth_reach: float = 0.45
    """Length scale of the ``smooth`` factor in four logarithms.

    These are the logarithms of nodes, of devices on the busiest node, of the square root of all devices, and of the
    one-device time.
    """
    noise: float = 0.035
    """Standard deviation of repeated measurements of a step that only computes."""
    network_noise: float = 0.035
    """Standard deviation that communication adds to repeated measurements of a step that only communicates."""
    tail: float = 4.0
    """Degrees of freedom of the noise, which has Student's t distribution."""


PROBING = Prior(mean=replace(MEAN, log_growth=-30.0), deviation=replace(DEVIATION, log_gamma=0.9), smooth=0.08)
"""Prior with which the next run to measure is chosen. Communication does not grow with the batch.

Measurements that are chosen with the wide deviation of ``log_gamma`` in ``DEVIATION`` improve predictions of other runs
less: the choice uses derivatives, and favours runs that tell most about the overlap (design note 0006).
"""


def noise_variance(prior: Prior, here: Steps) -> Floats:
    return np.asarray(prior.noise**2 + (prior.network_noise * here.share) ** 2)


def of_constants(prior: Prior, a: Steps, b: Steps) -> Floats:
    return np.asarray((a.jacobian * prior.deviation.vector() ** 2) @ b.jacobian.T)


def prior_variance(prior: Prior, here: Steps) -> Floats:
    constants = ((here.jacobian * prior.deviation.vector()) ** 2).sum(axis=1)
    network, computing = prior.session**2 + prior.network**2, prior.batch**2
    return np.asarray(constants + here.share**2 * network + (1 - here.share) ** 2 * computing + prior.smooth**2)


def prior_covariance(prior: Prior, a: Runs, at_a: Steps, b: Runs, at_b: Steps) -> Floats:
    return of_constants(prior, at_a, at_b) + effects_of(prior, a, at_a, b, at_b)


def effects_of(prior: Prior, a: Runs, at_a: Steps, b: Runs, at_b: Steps) -> Floats:
    """Return the covariance of the errors of the formulas for log(step time), runs ``a`` (rows) by ``b`` (columns).

    The errors come from effects that the formulas for the step time do not model: the ``session``, ``network``,
    ``batch`` and ``smooth`` factors in ``prior``. ``at_a``, ``at_b``: step times that the formulas give for the runs
    ``a`` and ``b``.
    """
    session = (a.nodes[:, None] == b.nodes) * prior.session**2
    network = prior.network**2 * _near(
        [np.log(f) for f in (a.nodes, a.busiest, a.devices)],
        [np.log(f) for f in (b.nodes, b.busiest, b.devices)],
        prior.network_reach,
    )
    smooth = prior.smooth**2 * _near(
        [np.log(a.nodes), np.log(a.busiest), np.log(a.devices) / 2, np.log(a.one_s)],
        [np.log(b.nodes), np.log(b.busiest), np.log(b.devices) / 2, np.log(b.one_s)],
        prior.smooth_reach,
    )
    computing = (a.batch[:, None] == b.batch) * prior.batch**2
    talking = at_a.share[:, None] * at_b.share
    return np.asarray(talking * (session + network) + (1 - at_a.share)[:, None] * (1 - at_b.share) * computing + smooth)


def _near(a: list[Floats], b: list[Floats], reach: float) -> Floats:
    """Return exp(-distance^2 / (2 reach^2)) for each pair of a point in ``a`` (rows) and one in ``b`` (columns).

    ``a``, ``b``: one array for each coordinate, with one element for each point. ``reach``: length scale.
    """
    square = sum(((x[:, None] - y) ** 2 for x, y in zip(a, b, strict=True)), np.zeros((len(a[0]), len(b[0]))))
    return np.asarray(np.exp(-square / (2 * reach**2)))
