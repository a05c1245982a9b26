"""Add what all attempts of a job have used, from its status, to the run report.

The pods of a job write its report. They know neither prices, nor the source of the energy, nor what devices used before
and between attempts. The operator counts all of this in ``status.usage``.
"""

import json
from collections.abc import Mapping
from html import escape
from typing import Any

from pydantic import ValidationError

from dljob.api import EnergySource, Usage
from dljob.planner.types.texts import dollars, duration, grams, joules

_SOURCES = {
    EnergySource.MEASURED: "by counters; hosts of GPUs and overhead by the model",
    EnergySource.MODELLED: "by the model, as no counter is readable",
    EnergySource.MIXED: "by counters and by the model",
}


def usage_of(job: Mapping[str, Any]) -> Usage | None:
    """Return ``status.usage`` of a DLJob; None if it has none, or one that this release cannot read."""
    found = (job.get("status") or {}).get("usage")
    try:
        return None if found is None else Usage.model_validate(found, extra="ignore")
    except ValidationError:
        return None


def data_with_usage(report: Mapping[str, Any], usage: Usage | None) -> dict[str, Any]:
    """Return the data of a run report with the entry ``usage``; unchanged if ``usage`` is None."""
    if usage is None:
        return dict(report)
    entry = {
        "until_unix_s": usage.time.timestamp(),
        "device_seconds": usage.device_seconds,
        "energy_J": usage.energy_joules,
        "energy_source": usage.energy_source.value,
        "cost_usd": usage.cost,
        "carbon_g": usage.carbon_grams,
    }
    return {**report, "usage": entry}


def text_with_usage(text: str, kind: str, usage: Usage | None) -> str:
    """Return a stored run report with the usage of its job; unchanged if ``usage`` is None or ``text`` has no place.

    ``kind``: ``html`` for the page, or ``json`` for its data. The figures of a page are in its first list.
    """
    if usage is None:
        return text
    if kind == "html":
        before, end, after = text.partition("</dl>")
        return f"{before}{_figures(usage)}{end}{after}" if end else text
    try:
        report = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return json.dumps(data_with_usage(report, usage)) if isinstance(report, dict) else text


def _figures(usage: Usage) -> str:
    carbon_g = usage.carbon_grams
    shown = {
        "cost of all attempts": dollars(usage.cost),
        "energy of all attempts": f"{joules(usage.energy_joules)} {_SOURCES[usage.energy_source]}",
        "CO2 equivalent": None if carbon_g is None else grams(carbon_g),
        "devices, times their time": duration(usage.device_seconds),
    }
    return "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in shown.items() if text is not None
    )
