"""The constants of a step on many devices, from few measured steps or many: prior, robust fit, posterior, intervals.

In logarithms: measured = model(constants) + effects + noise. Constants have normal priors. Effects are what no formula
tells: a factor on communication that runs with equally many nodes share (a session, a switch) beside a smooth one over
the placement, a factor on computing per batch (the one-device curve is measured as well), and a small smooth one on
the whole; all are Gaussian processes (Rasmussen, Williams 2006), so that they fade between what was measured. Noise has
heavy tails.
"""

from dataclasses import dataclass, field
from functools import cached_property
from math import ceil, log
from statistics import NormalDist

import numpy as np

from dljob.calibrate.compute import ABSURD
from dljob.calibrate.prior import Prior, effects_of, noise_variance, of_constants, prior_covariance, prior_variance
from dljob.perf.fit.scaling import Constants, Floats, Runs, Steps, steps

MIN_MEASUREMENTS = 5
"""With so many measurements or fewer none can be told to be an outlier."""
MAX_MEASUREMENTS = 256
"""Used in a fit, whose cost grows with their cube; of more, evenly spaced ones."""
HESITANT = 20
"""Measurements (beyond ``MIN_MEASUREMENTS``) until their scatter counts as much as the prior's for the width of
intervals."""
WIDEST = 3.0
"""By so much at most measurements widen an interval."""
_ROUNDS = 20
_SHORTEST_MOVE = 1e-3


@dataclass(frozen=True)
class Predicted:
    """Seconds of a step: the median, and the ends of the interval."""

    median_s: Floats
    low_s: Floats
    high_s: Floats


@dataclass(frozen=True)
class Posterior:
    """What is believed after the measurements ``given``."""

    prior: Prior
    constants: Constants
    reference_s: float
    given: Runs
    residual: Floats
    """log(measured) - log(model(constants)) of ``given``."""
    left_out: Floats
    """Of each measurement, by how many standard deviations it lies off what the others say, in absolute value."""
    _inverse: Floats = field(repr=False)
    """Of the measurements' covariance: constants, effects and noise."""
    _weights: Floats = field(repr=False)
    """Inverse covariance of effects and noise times ``residual``."""

    @cached_property
    def _there(self) -> Steps:
        return steps(self.constants, self.given, self.reference_s)

    def predict(self, runs: Runs, level: float = 0.9) -> Predicted:
        """Medians of ``runs`` and central intervals that hold a new measurement with probability ``level``."""
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

    def covariance(self, runs: Runs) -> tuple[Floats, Floats]:
        """Of the logarithms of the steps of ``runs`` (runs, runs), and the variance of noise of measuring each."""
        here = steps(self.constants, runs, self.reference_s)
        covariance = prior_covariance(self.prior, runs, here, runs, here)
        if len(self.given):
            there = self._there
            cross = prior_covariance(self.prior, runs, here, self.given, there)
            covariance = covariance - cross @ self._inverse @ cross.T
        return covariance, noise_variance(self.prior, here)

    def widening(self, level: float) -> float:
        """By how much intervals are wider than a normal distribution's.

        The quantile of leave-one-out residuals (conformal prediction; Vovk, Gammerman, Shafer 2005) over the normal
        one, drawn to 1 as ``HESITANT`` measurements would.
        """
        told = max(0, len(self.left_out) - MIN_MEASUREMENTS)
        if told == 0:
            return 1.0
        ordered = np.sort(self.left_out)
        found = ordered[min(len(ordered), ceil((len(ordered) + 1) * level)) - 1]
        ratio = min(float(found) / NormalDist().inv_cdf(0.5 + level / 2), WIDEST)
        return 1.0 + told / (told + HESITANT) * (ratio - 1.0)


def fit(reference_s: float, given: Runs, step_s: Floats, prior: Prior = Prior()) -> Posterior:  # noqa: B008 - frozen
    """The posterior after steps of ``given`` took ``step_s`` (seconds each); of no measurements: the prior.

    ``reference_s``: a typical one-device time of the workload, the same in every fit. What cannot be a measurement
    (not finite, not positive, ``ABSURD`` times off what the prior says) counts for nothing.

    Maximum a posteriori by damped Gauss-Newton steps; the noise's Student distribution by iteratively reweighted
    variances (Lange, Little, Taylor 1989); the posterior is normal around the maximum (Laplace).
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
    # What each measurement lies off the prediction from all others, over the deviation of that; the noise of a
    # measurement that is not trusted counts as any other's there, or outliers would not widen intervals.
    precision = np.diag(whole)
    usual = 1 / precision - noise_variance(prior, here) * (1 / trust - 1)
    left_out = np.abs(whole @ (residual + here.jacobian @ (vector - mean)) / precision)
    left_out /= np.sqrt(np.maximum(usual, noise_variance(prior, here)))
    weights = np.asarray(np.linalg.solve(effects, residual), dtype=np.float64)
    return Posterior(prior, Constants(*vector.tolist()), reference_s, given, residual, left_out, whole, weights)


def _damped(
    vector: Floats, move: Floats, given: Runs, log_s: Floats, reference_s: float, prior: Prior, inverse: Floats
) -> float:
    """The largest of 1, 1/2, 1/4 ... of the move that does not make the fit worse."""

    def misfit(tried: Floats) -> float:
        residual = log_s - steps(Constants(*tried), given, reference_s).log_s
        off = (tried - prior.mean.vector()) / prior.deviation.vector()
        return float(residual @ inverse @ residual + off @ off)

    length, now = 1.0, misfit(vector)
    while length > 0.01 and not misfit(vector + length * move) <= now:
        length /= 2
    return length


def _plausible(given: Runs, step_s: Floats, expected: Steps) -> tuple[Runs, Floats]:
    """The measurements that can be any, and their logarithms."""
    with np.errstate(divide="ignore", invalid="ignore"):
        log_s = np.log(np.asarray(step_s, dtype=float))
    possible = np.isfinite(log_s)
    possible[possible] = np.abs(log_s[possible] - expected.log_s[possible]) <= log(ABSURD)
    which = np.flatnonzero(possible)
    if len(which) > MAX_MEASUREMENTS:
        which = which[np.linspace(0, len(which) - 1, MAX_MEASUREMENTS).astype(np.int64)]
    return given.take(which), log_s[which]
