"""Calibration: update the measured constants of the performance model with the measurements of each run.

Outliers are ignored, and the weight of earlier measurements has an upper bound, so that later ones always count. The
modules are:

- ``compute``: compute times on one device;
- ``scaling``: fit of the constants of multi-device steps, with the prior distribution in ``prior``;
- ``multi_device``: update of a profile after a run on several devices;
- ``probes``: choice of the next run to measure;
- ``noise``: the gradient noise scale;
- ``memory``: main memory of the pods of a training script;
- ``repeats``: how far equal runs are apart;
- ``learned``: all measured constants of one model on one type of device, as DLProfile objects store them.
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
