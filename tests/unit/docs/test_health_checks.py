"""Tests of the health checks for GitOps tools on the page about the installation."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from dljob.api import crd
from support.manifests.admission import evaluated

Json = dict[str, Any]
PAGE = Path(__file__).parents[3] / "docs/how-to/install.md"
TYPES = {"Failed", "Complete", "Accepted", "Suspended", "Planned", "Admitted", "VolumeReady", "PodsReady", "Running"}


def blocks() -> list[Json]:
    section = PAGE.read_text(encoding="utf-8").partition("### Health checks\n")[2].partition("\n## ")[0]
    return [yaml.safe_load(text) for text in re.findall(r"^```yaml\n(.*?)^```", section, re.MULTILINE | re.DOTALL)]


def flux(check: str, *conditions: tuple[str, ...]) -> bool:
    """Evaluate an expression of Flux for a job with these conditions: (type, status, reason)."""
    [found] = blocks()[1]["spec"]["healthCheckExprs"]
    fields = ("type", "status", "reason")
    status = {"conditions": [dict(zip(fields, each, strict=True)) for each in conditions]} if conditions else {}
    # Flux names the parts of the object; the CEL library here knows only self.
    return bool(evaluated(re.sub(r"\bstatus\.conditions", "self.status.conditions", found[check]), {"status": status}))


@pytest.mark.parametrize(
    ("conditions", "failed", "current"),
    [
        ([], False, False),
        ([("Accepted", "True", "Accepted"), ("Planned", "False", "DeviceBusy")], False, False),
        ([("Accepted", "False", "InvalidSpec")], True, False),
        ([("Planned", "True", "Planned"), ("Running", "False", "Starting")], False, False),
        ([("Planned", "True", "Planned"), ("Running", "True", "Running")], False, True),
        ([("Planned", "True", "PlanOnly")], False, True),
        ([("Suspended", "True", "Suspended")], False, True),
        ([("Running", "False", "Finished"), ("Complete", "True", "Complete")], False, True),
        ([("Running", "False", "Finished"), ("Failed", "True", "BackoffLimitExceeded")], True, False),
    ],
)
def test_flux_decides_by_the_conditions(conditions: list[tuple[str, ...]], failed: bool, current: bool) -> None:
    assert flux("failed", *conditions) is failed
    assert flux("current", *conditions) is current


def test_names_of_the_check_for_argo_exist() -> None:
    """No interpreter of Lua is among the tools of the tests, so only names are checked here."""
    [(key, script)] = blocks()[0]["data"].items()
    group, kind = key.removeprefix("resource.customizations.health.").split("_")
    assert (group, kind) in {(each["spec"]["group"], each["spec"]["names"]["kind"]) for each in crd.definitions()}
    healths = {"Healthy", "Progressing", "Degraded", "Suspended"}
    assert set(re.findall(r'"([A-Z][a-z]\w+)"', script)) == TYPES | healths | {"True", "False", "PlanOnly"}
