"""Choose the termination grace period of a plan's pods, so that their last checkpoint fits into it.

Also say which time of a checkpoint is assumed.
"""

from math import ceil

from dljob.api import DLJobSpec, LastCheckpoint, RunPolicy
from dljob.perf.step.interruptions import STORE_BANDWIDTH_Bps
from dljob.planner import Decision

MARGIN = 2.0
"""Factor between the time of a checkpoint and the time reserved for it, because several jobs may stop at the same time
and share the bandwidth of the storage."""
REST_S = 15.0
"""Seconds reserved for the remainder: ending the current step, the last report and output, and killing processes."""
MAX_RAISED_S = 600.0
"""Longest grace period in seconds that the operator chooses by itself. Cluster Autoscaler waits no longer by default
(``--max-graceful-termination-sec``)."""
KUBERNETES_DEFAULT_S = 30.0
"""Grace period in seconds of a pod whose manifest sets none."""
ROUNDED_S = 30.0
"""The operator raises the grace period to a multiple of this number of seconds."""


def given_s(spec: DLJobSpec) -> float:
    """Return the termination grace period in seconds that the spec asks for.

    If pod template overrides set the grace period, the last of them determines it. Otherwise, it is
    ``spec.runPolicy.terminationGracePeriodSeconds`` or the default of this field.
    """
    return [float(spec.run_policy.termination_grace_period_seconds), *_overrides(spec)][-1]


def grace_s(spec: DLJobSpec, checkpoint_s: float, step_s: float, former_s: float | None = None) -> float:
    """Return the termination grace period for the pods of a plan in seconds.

    It is the grace period that the user sets, or the default. If the user sets none, and the default is too short for a
    step and a checkpoint, return a longer grace period, at most ``MAX_RAISED_S``. Jobs without checkpoints need none.

    All times are in seconds. ``checkpoint_s``: time to write a checkpoint. ``step_s``: time of a step. ``former_s``:
    grace period of the former plan for the same spec; None without such a plan. If ``former_s`` is still long enough,
    it is returned in place of a new value, so that the pods need not change.
    """
    given = given_s(spec)
    if not spec.checkpoint.enabled or _overrides(spec) or given != _default_s():
        return given
    least_s = min(MAX_RAISED_S, MARGIN * checkpoint_s + step_s + REST_S)
    if former_s is not None and max(given, least_s) <= former_s <= MAX_RAISED_S:
        return former_s
    return max(given, ROUNDED_S * ceil(least_s / ROUNDED_S))


def measured_write_s(saved: LastCheckpoint | None, predicted_s: float) -> float | None:
    """Return the seconds that writing the last checkpoint ``saved`` took; None: they are unknown.

    An upload of a script's folder that took less than the predicted time of a checkpoint (``predicted_s``) does not
    count, because it may have sent only the few files that had changed.
    """
    if saved is None or saved.write_seconds is None:
        return None
    return saved.write_seconds if saved.name is None or saved.write_seconds > predicted_s else None


def too_short(spec: DLJobSpec, chosen_s: float, checkpoint_s: float, step_s: float) -> str | None:
    """Return a warning if a step and a checkpoint take longer than the plan's grace period; otherwise None.

    All times are in seconds. ``chosen_s``: grace period of the plan. ``checkpoint_s``: time to write a checkpoint.
    Without checkpoints, return None.
    """
    needed_s = checkpoint_s + step_s
    if not spec.checkpoint.enabled or needed_s <= chosen_s:
        return None
    return (
        f"spec.runPolicy.terminationGracePeriodSeconds: found {chosen_s:g} s; expected at least {needed_s:.0f} s for a "
        "checkpoint. A job that stops repeats the steps since its last checkpoint. Raise the field, or use a faster "
        "volume"
    )


def too_short_grace(spec: DLJobSpec, decision: Decision) -> str | None:
    """Return the warning of ``too_short`` about a planner's decision for a new job; None if the grace period suffices.

    The times of a step and of a checkpoint are the predicted ones.
    """
    step_s, checkpoint_s = decision.chosen.prediction.step_p90_s, decision.checkpoint_s
    return too_short(spec, grace_s(spec, checkpoint_s, step_s), checkpoint_s, step_s)


def _overrides(spec: DLJobSpec) -> list[float]:
    """Return the grace periods in seconds that pod template overrides set. 0 counts as one second.

    A null removes the field from the pod, so that Kubernetes sets its own default.
    """
    name = "terminationGracePeriodSeconds"
    found = [override.spec[name] for override in spec.pod_template_overrides if name in override.spec]
    found = [KUBERNETES_DEFAULT_S if seconds is None else seconds for seconds in found]
    return [max(1.0, float(seconds)) for seconds in found if isinstance(seconds, int | float) and seconds >= 0]


def _default_s() -> float:
    return float(RunPolicy.model_fields["termination_grace_period_seconds"].default)


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
