"""DLProfile objects and the planner's constants: what a report teaches, and what the planner reads.

Pure. Users: ``kube`` and ``handlers``, which keep the objects; ``cli``, which shows them.
"""

import hashlib
import re
from collections.abc import Callable
from datetime import datetime

from dljob import hardware
from dljob.api import ComputePoint, DLProfileStatus
from dljob.calibrate import Measured, learn
from dljob.contract import Report
from dljob.perf.compute import catalogue_curve
from dljob.perf.datasets import DATASETS
from dljob.perf.models import MODELS
from dljob.perf.workload import builtin
from dljob.planner import Learned, LearnedPoint

STEADY_STEPS = 50
"""Steps behind a rank's medians in a report."""
PROBE_STEPS = 5


def profile_name(model: str, device: str) -> str:
    """The DLProfile's name: model and device readable, and a digest so that no two pairs share one."""
    digest = hashlib.sha256(f"{model}\n{device}".encode()).hexdigest()[:8]
    readable = re.sub(r"[^a-z0-9]+", "-", f"{model}-{device}".lower()).strip("-")[:48].strip("-")
    return f"{readable}-{digest}"


def learned(status: DLProfileStatus) -> Learned:
    """A profile as the planner reads it."""
    return Learned(
        points=tuple(LearnedPoint(p.batch, p.seconds, p.observations) for p in status.compute),
        link_latency_s=status.link_latency_seconds,
        link_bandwidth_Bps=status.link_bandwidth_bytes_per_second,
    )


def devices(report: Report) -> tuple[str, ...]:
    """Devices that a report teaches about; none when some rank ran on another device than planned."""
    if report.mismatches:
        return ()
    return tuple(sorted({p.device for p in report.probes} | {r.device for r in report.ranks if r.device and r.share}))


def taught(before: DLProfileStatus, model: str, device: str, report: Report, now: datetime) -> DLProfileStatus:
    """The profile of (model, device) after a run that ended with ``report``."""
    if device not in devices(report):
        return before
    after = learn(
        learned(before),
        steady=[
            Measured(r.share, r.compute_s, STEADY_STEPS) for r in report.ranks if r.device == device and r.share > 0
        ],
        probes=[Measured(p.batch, p.compute_s, PROBE_STEPS) for p in report.probes if p.device == device],
        link_latency_s=report.link_latency_s,
        link_bandwidth_Bps=report.link_bandwidth_Bps,
        expected_s=_expected(model, device),
    )
    return DLProfileStatus(
        compute=tuple(
            ComputePoint(batch=p.batch, seconds=p.compute_s, observations=p.observations) for p in after.points
        ),
        link_latency_seconds=after.link_latency_s,
        link_bandwidth_bytes_per_second=after.link_bandwidth_Bps,
        observed_jobs=before.observed_jobs + 1,
        updated=now,
    )


def _expected(model: str, device: str) -> Callable[[int], float] | None:
    """What the catalogue says of a built-in model on the device; None for a user's program or data."""
    name, _, dataset = model.partition(".")
    if name not in MODELS or (dataset and dataset not in DATASETS):
        return None
    chip = hardware.gpu(device) or hardware.cpu(device, 1.0)
    return catalogue_curve(builtin(name, dataset or None), chip).seconds
