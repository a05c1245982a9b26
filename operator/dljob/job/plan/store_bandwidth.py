"""The assumption about the bandwidth to an object store with checkpoints, for users."""

from dljob.api import DLJobSpec
from dljob.perf.step.interruptions import STORE_BANDWIDTH_Bps


def assumed_bandwidth(spec: DLJobSpec, predicted_s: float, measured_s: float | None = None) -> str | None:
    """Return a note that the plan assumes the bandwidth to the object store; None if it assumes nothing.

    ``predicted_s``: predicted seconds to write a checkpoint; 0 if they are unknown. ``measured_s``: the seconds that a
    checkpoint of this job took; None without one, or if it reported none.
    """
    if not spec.checkpoint.enabled or spec.checkpoint.uri is None or measured_s or not predicted_s:
        return None
    return (
        f"spec.checkpoint.uri: the plan assumes that a checkpoint takes {predicted_s:.1f} s, at "
        f"{STORE_BANDWIDTH_Bps / 1e6:.0f} MB/s to the object store. The job measures the time"
    )
