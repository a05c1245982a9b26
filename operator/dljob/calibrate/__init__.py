"""Calibration of the performance model from measurements: robust, bounded, and not harmed by bad measurements.

``compute``: times on one device, as DLProfile objects store them. ``scaling``: the constants of a multi-device step,
fitted with the prior in ``prior``. ``probes``: the next measurement. ``multi_device``: the update after a run on
several devices. ``noise``: the gradient noise scale. ``learned``: everything measured of a model on a device.
"""

from dljob.calibrate.compute import MAX_POINTS, Measured, in_session, learn, without_outliers
from dljob.calibrate.learned import Learned, LearnedPoint, Place, StepPoint
from dljob.calibrate.multi_device import Scaling, learn_scaling, next_place, remembered
from dljob.calibrate.noise import NoiseOf
from dljob.calibrate.prior import Prior
from dljob.calibrate.probes import MAX_PROBES, next_probe
from dljob.calibrate.scaling import Posterior, Predicted, fit

__all__ = [
    "MAX_POINTS",
    "MAX_PROBES",
    "Learned",
    "LearnedPoint",
    "Measured",
    "NoiseOf",
    "Place",
    "Posterior",
    "Predicted",
    "Prior",
    "Scaling",
    "StepPoint",
    "fit",
    "in_session",
    "learn",
    "learn_scaling",
    "next_place",
    "next_probe",
    "remembered",
    "without_outliers",
]
