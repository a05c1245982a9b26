"""Text forms of names and quantities, for messages and for Kubernetes."""

import re
from collections.abc import Iterable
from datetime import datetime
from math import ceil

SHOWN_PART = 0.05
"""Smallest part of a training that its evaluations, or anything else beside its steps, must take to be shown."""
LONGEST_GROUP = 16
"""Maximum length of a group's name. The name is part of pod names, which are DNS labels of at most 63 characters."""


def group_names(devices: Iterable[str]) -> list[str]:
    """Return a short, unique DNS label, such as a100-sxm4-40gb, for the group of nodes with each type of device."""
    names: list[str] = []
    for device in devices:
        text = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
        text = re.sub(r"^(nvidia|amd|tesla|geforce|instinct|-)+", "", text)[:LONGEST_GROUP].strip("-")
        base = text if text and text[0].isalpha() else f"d{text}"[:LONGEST_GROUP].strip("-")
        name, n = base, 2
        while name in names:
            suffix = f"-{n}"
            name, n = base[: LONGEST_GROUP - len(suffix)].strip("-") + suffix, n + 1
        names.append(name)
    return names


def plain(value: float, digits: int = 3) -> str:
    """Return a number with so many significant digits, and without an exponent if it is large: 20560."""
    text = f"{value:.{digits}g}"
    return f"{float(text):.0f}" if "e+" in text else text


def gibibytes(nbytes: float) -> str:
    """Return an amount of memory as a text: in GiB, in MiB below 1 GiB, or in bytes if it is no MiB at all."""
    if 0 < nbytes < 2**19:
        return f"{nbytes:.0f} byte{'s' if round(nbytes) != 1 else ''}"
    return f"{plain(nbytes / 2**30)} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.0f} MiB"


def samples(count: int) -> str:
    return f"{count} sample{'s' if count != 1 else ''}"


def computed(precision: str, *, recomputes: bool) -> str:
    """Return how ranks compute, as the end of a plan's summary, such as ', BF16, activation checkpointing'."""
    half = f", {precision}" if precision != "FP32" else ""
    return f"{half}{', activation checkpointing' if recomputes else ''}"


def dollars(usd: float) -> str:
    """Return an amount of US dollars as a text, with cents."""
    return f"${usd:.2f}" if usd >= 0.01 else "<$0.01"


def grams(carbon_g: float) -> str:
    """Return a mass as a text: in g, in kg from 1 kg, or in t from 1 t."""
    for unit, factor in (("t", 1e6), ("kg", 1e3)):
        if carbon_g >= factor:
            return f"{plain(carbon_g / factor)} {unit}"
    return f"{carbon_g:.3g} g"


def joules(energy_J: float) -> str:
    """Return the energy as a text: in J, in kJ if it is at least 10 kJ, or in kWh if it is at least 0.1 kWh."""
    if energy_J >= 3.6e5:
        return f"{plain(energy_J / 3.6e6)} kWh"
    return f"{energy_J:.0f} J" if energy_J < 1e4 else f"{energy_J / 1e3:.0f} kJ"


def rate(bandwidth_Bps: float) -> str:
    """Return a bandwidth (given in bytes per second) as a text in bits per second, such as '10 Gbit/s'."""
    bits = 8 * bandwidth_Bps
    return f"{plain(bits / 1e9)} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"


def duration(seconds: float) -> str:
    """Return a duration as a text with two or three significant figures: 1h05m, 3m20s, 12.3s, 4.5ms, 86us."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f}us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g}ms"
    if seconds < 60:
        return f"{seconds:.3g}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours < 48 else f"{hours / 24:.1f}d"


def step_times(steps_s: tuple[float, float], totals_s: tuple[float, float]) -> str:
    """Return a text with two step times; with the times of the whole training if only these are in the other order.

    In short trainings, the first batch, evaluations and checkpoints can take longer than what faster steps save.
    """
    differ = (steps_s[0] < steps_s[1]) != (totals_s[0] < totals_s[1])
    one, other = map(duration, totals_s if differ else steps_s)
    return f"{one} instead of {other} for the whole training" if differ else f"{one} per step instead of {other}"


def of_which(total_s: float, fetch_s: float, evaluations_s: float, checkpoints_s: float) -> str:
    """Return a text with the parts of a training that take more than ``SHOWN_PART`` of it; '' if there are none.

    ``total_s``: seconds of the training. The other arguments are parts of it. Example: ', of which fetching the data
    takes 1m40s and evaluations take 12.3s'.
    """
    parts = {
        "fetching the data takes": fetch_s,
        "evaluations take": evaluations_s,
        "checkpoints take": checkpoints_s,
    }
    shown = [f"{what} {duration(seconds)}" for what, seconds in parts.items() if seconds > SHOWN_PART * total_s]
    return f", of which {' and '.join(filter(None, (', '.join(shown[:-1]), shown[-1])))}" if shown else ""


def time_text(time: datetime) -> str:
    """Return a time in UTC to the second, as Kubernetes writes times: 2026-03-01T12:00:00Z."""
    return time.replace(microsecond=0).isoformat().replace("+00:00", "Z")


def duration_at_least(seconds: float) -> str:
    """Return a duration, rounded up to whole seconds, in the form of fields of the spec: 1h5m9s, 46m, 72h1s."""
    minutes, rest = divmod(max(1, ceil(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return "".join(f"{count}{unit}" for count, unit in ((hours, "h"), (minutes, "m"), (rest, "s")) if count)
