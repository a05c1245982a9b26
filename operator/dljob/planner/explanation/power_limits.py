"""Predictions of the chosen plan under other power limits of its GPUs, and the limits that serve its objective best.

dljob sets no limits, because its pods may not. So they are advice for the administrator, and never change the plan.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from dlcontract.pods import with_limits, without_limits
from dljob.cluster import catalogue
from dljob.cluster.gpu_limits import POWER_LIMIT_LABEL
from dljob.perf.fit.curve import Curve
from dljob.perf.resources import energy, power
from dljob.perf.step.compute import catalogue_curve
from dljob.perf.workload.workload import Workload
from dljob.planner.candidates.evaluate import Part, evaluate
from dljob.planner.candidates.options import Option
from dljob.planner.search import objective
from dljob.planner.types import Choice, PowerLimit, Request
from dljob.planner.types.texts import duration

WIDE_FROM_W = 200.0
"""Minimum peak power in watts of devices for which a power limit is advised. Smaller devices have a narrow range of
limits (T4: 60 to 70 W, A10: 100 to 150 W)."""
MAX_SLOWDOWN = 1.1
"""Maximum factor by which an advised power limit may lengthen a training without a deadline. With 10 % more time, a job
saves two thirds of the energy that power limits can save."""
PAYS = 0.01
"""Minimum part of the energy, cost or carbon of a training that an advised power limit saves."""
SHOWN = (0.9, 0.8, 0.7, 0.6, 0.5)
"""Power limits to show, as parts of the peak power."""
BELOW = 0.9
"""Largest ratio of a job's power to the limit at which the limit has no effect. Demand varies within a step."""
TRIED = 20
"""The planner tries limits in steps of the peak power divided by this number."""

Limits = Mapping[str, float]
"""Device type → power limit in watts."""


def power_limits(
    request: Request, chosen: Choice, parts: Sequence[Part], workload: Workload
) -> tuple[str | None, tuple[PowerLimit, ...]]:
    """Return (text with the advised power limits, predictions of the chosen plan under its limits and under others).

    The advised limits minimize what the request minimizes. Without a deadline, the training takes at most
    ``MAX_SLOWDOWN`` times as long. With a deadline, it may take until then. The text is None, and there are no
    predictions, if the request minimizes time, if no other limit saves enough (``PAYS``), or if the plan has no GPUs
    with a wide range of limits. ``parts``: the groups of nodes of the chosen plan.
    """
    peaks = {label: peak_W for part in parts if (peak_W := _peak_W(part.option)) for label in [part.option.label]}
    if request.minimize == "Time" or not peaks or not objective.meets(request, chosen.prediction.total_p90_s):
        return None, ()
    now = {label: float(without_limits(label).power_limit_W or peak_W) for label, peak_W in peaks.items()}

    def under(limits: Limits) -> Choice | None:
        changed = [replace(p, option=_under(p.option, limits.get(p.option.label), workload)) for p in parts]
        found = evaluate(changed, chosen.collective, request, workload)
        return found if isinstance(found, Choice) else None

    longest_s = MAX_SLOWDOWN * chosen.prediction.total_s if request.deadline_s is None else float("inf")
    best, score = now, objective.score(request, chosen.prediction)
    saved = score * (1 - PAYS)
    for label, peak_W in peaks.items():  # one type after another, because few plans have several types of GPUs
        for part in range(round(power.LOWEST_PART * TRIED), TRIED + 1):
            limits = {**best, label: round(part / TRIED * peak_W)}
            found = under(limits)
            if found is None or found.prediction.total_s > longest_s:
                continue
            if (other := objective.score(request, found.prediction)) < min(score, saved):
                best, score = limits, other
    advised = under(best) if best != now else None
    if advised is None:
        return None, ()
    tried = [best]
    if len(peaks) == 1:
        tried += [{label: round(part * peak_W)} for part in SHOWN for label, peak_W in peaks.items()]
    shown = {_text(limits, peaks): found for limits in tried if limits != now and (found := under(limits)) is not None}
    rows = [
        PowerLimit(text, found.prediction, advised=text == _text(best, peaks))
        for text, found in sorted(shown.items(), key=lambda item: item[1].prediction.total_s)
    ]
    first = PowerLimit(f"{_text(now, peaks)} (now)", chosen.prediction, now=True)
    return _advice(request, chosen, advised, now, best), (first, *rows)


def _peak_W(option: Option) -> float | None:  # noqa: N802 - the unit is part of the name
    """Return the peak power in watts of GPUs for which limits are advised; None for other devices."""
    known = catalogue.gpu(option.label) if option.pool.is_gpu else None
    return None if known is None or known.peak_power_W < WIDE_FROM_W else known.peak_power_W


def _under(option: Option, limit_W: float | None, workload: Workload) -> Option:
    """Return the option with its GPUs under another power limit; unchanged if ``limit_W`` is None.

    The limit changes measured times and power by the same factors as predicted ones. Where the framework's overhead on
    the host bounds the step, the limit has no effect.
    """
    if limit_W is None:
        return option
    before, device = option.device, replace(option.device, power_limit_W=limit_W)
    demand_W = _demand_W(option)
    old, new = power.under_both(before, demand_W), power.under_both(device, demand_W)
    slower = new.seconds / old.seconds
    if before.computing_power_W is None:
        device = replace(device, active_power_W=new.power_W)
    else:
        device = replace(device, computing_power_W=before.computing_power_W * new.power_W / old.power_W)
    old_curve = catalogue_curve(workload, before, option.cores)
    new_curve = catalogue_curve(workload, power.at_speed(power.slowed(before), 1 / slower), option.cores)
    batches = sorted({*option.computing.batches, *old_curve.batches, *new_curve.batches})
    times = [option.computing.seconds(b) * new_curve.seconds(b) / old_curve.seconds(b) for b in batches]
    computing = Curve(tuple(batches), tuple(accumulate(times, max)), slower * option.computing.slope_s)
    return replace(
        option,
        device=device,
        computing=computing,
        curve=option.fetching.over(computing),
        update_s=slower * option.update_s,
        update_once_s=slower * option.update_once_s,
        single=None if option.single is None else _under(option.single, limit_W, workload),
    )


def _demand_W(option: Option) -> float | None:  # noqa: N802 - the unit is part of the name
    """Return the measured power of the job on GPUs without limits; None if it is unknown.

    Power well below a power limit (``BELOW``) is what the job would draw without the limit. Under a clock limit, it is
    that at this clock.
    """
    device = option.device
    measured_W, limit_W = device.computing_power_W, device.power_limit_W
    if option.learned is None or option.learned.computing_W is None or measured_W is None:
        return None
    if limit_W is not None and measured_W >= BELOW * limit_W:
        return None
    return device.idle_power_W + (measured_W - device.idle_power_W) / energy.dynamic_part(device)


def _unlimited(label: str) -> str:
    """Return a device type without its power limit. It still has its clock limit."""
    product, _, clock_MHz = without_limits(label)
    return with_limits(product, clock_limit_MHz=clock_MHz)


def _text(limits: Limits, peaks: Limits) -> str:
    return ", ".join(
        f"{limit_W:.0f} W" + (f" on {_unlimited(label)}" if len(peaks) > 1 else "") for label, limit_W in limits.items()
    )


def _advice(request: Request, chosen: Choice, advised: Choice, now: Limits, best: Limits) -> str:
    """Return the text with the advised limits and their effect.

    Example: '260 W on NVIDIA-A100-SXM4-40GB (now 400 W): 12 % less energy for 9 % more time (31m12s instead of
    28m40s). An administrator sets it with nvidia-smi --power-limit and the node label dljob.dev/power-limit'.
    """
    limits = "; ".join(
        f"{limit_W:.0f} W on {_unlimited(label)} (now {now[label]:.0f} W)"
        for label, limit_W in best.items()
        if limit_W != now[label]
    )
    p, q = advised.prediction, chosen.prediction
    saved = 1 - objective.score(request, p) / objective.score(request, q)
    longer = p.total_s / q.total_s - 1
    time = f"for {100 * longer:.0f} % more time" if longer >= 0 else f"and {-100 * longer:.0f} % less time"
    return (
        f"{limits}: {100 * saved:.0f} % less {request.minimize.lower()} {time} ({duration(p.total_s)} instead of "
        f"{duration(q.total_s)}). An administrator sets it with nvidia-smi --power-limit and the node label "
        f"{POWER_LIMIT_LABEL}"
    )
