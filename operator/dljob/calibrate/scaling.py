"""Bayesian fit of the multi-device constants to few or many measured steps: prior, robust fit, posterior, intervals.

The model of a measured step time is log(measured) = log(formula(constants)) + effects + noise. Constants have normal
priors. Effects cover what the formulas do not model:

- a factor on communication that all runs on the same number of nodes have in common (same session, same switch);
- a factor on communication that varies smoothly over placements;
- a factor on computing for each batch, because the one-device curve has measurement errors, too;
- a small factor on the whole step that varies smoothly over runs.

All effects are Gaussian processes (Rasmussen, Williams 2006), so they fade with the distance from measurements. The
noise has heavy tails.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil, log
from statistics import NormalDist

import numpy as np

from dljob.calibrate.compute import ABSURD
from dljob.calibrate.prior import Prior, effects_of, noise_variance, of_constants, prior_covariance, prior_variance
from dljob.perf.fit.scaling import Constants, Floats, Runs, Steps, steps

MIN_MEASUREMENTS = 5
"""Number of measurements up to which none is treated as an outlier, because so few cannot show which one is wrong."""
MAX_MEASUREMENTS = 256
"""Maximum number of measurements in a fit, because its cost grows with their cube. Longer lists are thinned evenly."""
HESITANT = 20
"""Weight of the normal distribution in the width of an interval of predicted step times, as a number of measurements.

The width is the weighted mean of two widths. One follows from the scatter of the measurements, with the weight n, which
is their number beyond ``MIN_MEASUREMENTS``. The other follows from the normal distribution.
"""
FASTEST = 5.0
"""Largest plausible ratio of the computing time of one device to the measured step time of several with this batch."""
WIDEST = 3.0
"""Maximum factor by which the scatter of measurements widens an interval of predicted step times."""
_ROUNDS = 20
_SHORTEST_MOVE = 1e-3


@dataclass(frozen=True)
class Predicted:
    """Predicted step seconds of each run: the median, and the lower and the upper end of the prediction interval."""

    median_s: Floats
    low_s: Floats
    high_s: Floats


@dataclass(frozen=True)
class Posterior:
    """Probability distribution of step times after the measurements of the runs ``given`` (posterior).

    ``constants``: the most likely constants of the formulas. ``reference_s``: typical step seconds on one device, the
    unit of the times in ``constants``.
    """

    prior: Prior
    constants: Constants
    reference_s: float
    given: Runs
    residual: Floats
    """log(measured step time) - log(step time by the formulas and ``constants``) for each run in ``given``."""
    left_out: Floats
    """Absolute leave-one-out residual of log(step time) of each measurement, divided by its standard deviation."""
    _inverse: Floats = field(repr=False)
    """Inverse of the measurements' covariance, which is due to constants, effects and noise."""
    _weights: Floats = field(repr=False)
    """(Inverse of the covariance due to effects and noise) @ ``residual``."""
    least_spread: float = 0.0
    """Least standard deviation of log(measured / predicted) that a plan may assume, because equal runs differ."""

    @cached_property
    def _there(self) -> Steps:
        return steps(self.constants, self.given, self.reference_s)

    def predict(self, runs: Runs, level: float = 0.9) -> Predicted:
        """Return the median step seconds of ``runs``, and for each run an interval of step seconds.

        ``level``: probability that a new measurement of the run is in its interval.
        """
        here = steps(self.constants, runs, self.reference_s)
        log_s, variance = here.log_s, prior_variance(self.prior, here)
        if len(self.given):
            there = self._there
            effects = effects_of(self.prior, runs, here, self.given, there)
            cross = effects + of_constants(self.prior, here, there)
            log_s = log_s + effects @ self._weights
            variance = np.maximum(variance - np.einsum("ij,ij->i", cross @ self._inverse, cross), 0.0)
        deviations = NormalDist().inv_cdf(0.5 + level / 2) * self.widening(level)
        half = deviations * np.sqrt(variance + noise_variance(self.prior, here))
        return Predicted(np.exp(log_s), np.exp(log_s - half), np.exp(log_s + half))

    def with_prior(self, prior: Prior) -> "Posterior":
        """Return the distribution of step times after the same measurements, with another prior."""
        step_s = np.exp(self.residual + self._there.log_s)
        return replace(fit(self.reference_s, self.given, step_s, prior), least_spread=self.least_spread)

    def covariance(self, runs: Runs) -> tuple[Floats, Floats]:
        """Return the uncertainty of the log(step time) of ``runs``, as a pair of arrays.

        The first is the covariance without the noise of a new measurement, of shape (runs, runs). The second is the
        variance of this noise for each run.
        """
        here = steps(self.constants, runs, self.reference_s)
        covariance = prior_covariance(self.prior, runs, here, runs, here)
        if len(self.given):
            there = self._there
            cross = prior_covariance(self.prior, runs, here, self.given, there)
            covariance = covariance - cross @ self._inverse @ cross.T
        return covariance, noise_variance(self.prior, here)

    def widening(self, level: float) -> float:
        """Return the factor by which predicted intervals are wider than those of the normal distribution.

        ``level``: probability with which an interval contains a measurement.

        The factor is a quantile of the leave-one-out residuals (conformal prediction; Vovk, Gammerman, Shafer 2005)
        divided by the normal quantile, at most ``WIDEST``. It is averaged with 1, which has the weight of ``HESITANT``
        measurements.
        """
        counted = max(0, len(self.left_out) - MIN_MEASUREMENTS)
        if counted == 0:
            return 1.0
        ordered = np.sort(self.left_out)
        found = ordered[min(len(ordered), ceil((len(ordered) + 1) * level)) - 1]
        ratio = min(float(found) / NormalDist().inv_cdf(0.5 + level / 2), WIDEST)
        return 1.0 + counted / (counted + HESITANT) * (ratio - 1.0)


def fit(reference_s: float, given: Runs, step_s: Floats, prior: Prior = Prior()) -> Posterior:  # noqa: B008 - frozen
    """Fit the constants to measurements: the runs ``given`` took ``step_s`` seconds per step.

    Return the probability distribution of step times (posterior). Without runs, it is the prior. ``reference_s``: a
    typical step time of the workload on one device, in seconds. It is the unit of the times in the constants, and must
    be the same in every fit. Measurements are ignored if they are not finite and positive, or differ from the prior's
    prediction by more than a factor ``ABSURD``.

    Damped Gauss-Newton steps find the maximum a posteriori. Iteratively reweighted variances fit Student's t
    distribution of the noise (Lange, Little, Taylor 1989). The posterior is normal around the maximum (Laplace).
    """
    given, log_s = _plausible(given, step_s, steps(prior.mean, given, reference_s))
    mean, spread = prior.mean.vector(), prior.deviation.vector() ** 2
    vector, trust = mean.copy(), np.ones(len(given))
    here = steps(prior.mean, given, reference_s)
    for _ in range(_ROUNDS if len(given) else 0):
        noise = noise_variance(prior, here) / trust
        effects = effects_of(prior, given, here, given, here) + np.diag(noise)
        inverse: Floats = np.asarray(np.linalg.inv(effects), dtype=np.float64)
        gain = (spread * here.jacobian).T @ np.linalg.inv(of_constants(prior, here, here) + effects)
        move = mean - vector + gain @ (log_s - here.log_s + here.jacobian @ (vector - mean))
        move *= _damped(vector, move, given, log_s, reference_s, prior, inverse)
        vector = vector + move
        here = steps(Constants(*vector), given, reference_s)
        if len(given) > MIN_MEASUREMENTS:
            error = noise * (inverse @ (log_s - here.log_s))
            trust = (prior.tail + 1) / (prior.tail + error**2 / noise_variance(prior, here))
        if np.abs(move).max() < _SHORTEST_MOVE:
            break
    effects = effects_of(prior, given, here, given, here) + np.diag(noise_variance(prior, here) / trust)
    whole: Floats = np.asarray(np.linalg.inv(effects + of_constants(prior, here, here)), dtype=np.float64)
    residual = log_s - here.log_s
    # Divide leave-one-out residuals by their standard deviations. Here an outlier's noise variance is that of all other
    # measurements, because otherwise outliers would not widen intervals.
    precision = np.diag(whole)
    usual = 1 / precision - noise_variance(prior, here) * (1 / trust - 1)
    left_out = np.abs(whole @ (residual + here.jacobian @ (vector - mean)) / precision)
    left_out /= np.sqrt(np.maximum(usual, noise_variance(prior, here)))
    weights = np.asarray(np.linalg.solve(effects, residual), dtype=np.float64)
    return Posterior(prior, Constants(*vector.tolist()), reference_s, given, residual, left_out, whole, weights)


def _damped(
    vector: Floats, move: Floats, given: Runs, log_s: Floats, reference_s: float, prior: Prior, inverse: Floats
) -> float:
    """Return the factor f by which a Gauss-Newton step must be shortened so that the fit does not become worse.

    It is the largest of 1, 1/2, 1/4, ..., 1/128 with which ``vector`` + f ``move`` fits no worse than ``vector``; 1/128
    if there is none. ``vector``: the current constants. ``move``: their change in the full step.

    The misfit is r' ``inverse`` r plus the squared deviations of the constants from ``prior``, divided by its standard
    deviations, with r = ``log_s`` - predicted. ``log_s``: log(measured step seconds) of each run in ``given``.
    ``inverse``: matrix of shape (runs, runs). ``reference_s``: typical step seconds on one device, the unit of the
    times in ``vector``.
    """

    def misfit(tried: Floats) -> float:
        residual = log_s - steps(Constants(*tried), given, reference_s).log_s
        off = (tried - prior.mean.vector()) / prior.deviation.vector()
        return float(residual @ inverse @ residual + off @ off)

    length, now = 1.0, misfit(vector)
    while length > 0.01 and not misfit(vector + length * move) <= now:
        length /= 2
    return length


def _plausible(given: Runs, step_s: Floats, expected: Steps) -> tuple[Runs, Floats]:
    """Return (runs with plausible times, log(step seconds) of these runs).

    A time is plausible if it is finite, positive and within a factor ``ABSURD`` of the time in ``expected``, and if the
    devices did not compute more than ``FASTEST`` times as fast as one device alone. If more
    than ``MAX_MEASUREMENTS`` runs have plausible times, return this number of them, at equal distances in their order.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        log_s = np.log(np.asarray(step_s, dtype=float))
    possible = np.isfinite(log_s)
    possible[possible] = np.abs(log_s[possible] - expected.log_s[possible]) <= log(ABSURD)
    possible[possible] = log_s[possible] >= np.log(given.one_s[possible] / FASTEST)
    which = np.flatnonzero(possible)
    if len(which) > MAX_MEASUREMENTS:
        which = which[np.linspace(0, len(which) - 1, MAX_MEASUREMENTS).astype(np.int64)]
    return given.take(which), log_s[which]
