"""Tests that specs and plans which are parsed only once stay as they are while jobs are reconciled with them."""

import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from dljob.job.plan.stored import StoredPlan, _parsed_once
from dljob.reconcile import parse_observed, parsed, reconcile
from dljob.reconcile.parsed import _validated, _validated_once
from support.builders import CONFIG, DIGITS, NOW, after, report, seen, settled

Json = dict[str, Any]
_TERM = {"matchExpressions": [{"key": "pool", "operator": "In", "values": ["a"]}]}
_AFFINITY = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [_TERM]}}}
RICH: Json = {
    **DIGITS,
    "scheduling": {"disruption": "Avoid"},
    "podTemplateOverrides": [
        {
            "manager": "me",
            "metadata": {"labels": {"team": "a"}, "annotations": {"b": "c"}},
            "spec": {
                "affinity": _AFFINITY,
                "tolerations": [{"key": "x", "operator": "Exists"}],
                "volumes": [{"name": "more", "emptyDir": {}}],
            },
        },
    ],
}


def test_reconciles_change_neither_spec_nor_plan() -> None:
    first = seen(RICH)
    observed = settled(after(first, reconcile(first, CONFIG, NOW)))
    assert observed.plan is not None
    texts = observed.plan["plan.json"], observed.plan["operator.json"]
    spec = json.dumps(observed.job.spec)
    for step in range(3):
        observed = replace(observed, report=report(observed, step=10 + step))
        observed = after(observed, reconcile(observed, CONFIG, NOW + timedelta(seconds=step)))
        observed = settled(replace(observed, sets=(), pods=()))  # All objects are rendered again.
        assert _validated_once(spec) == _validated(spec)
        assert _validated_once(spec).manifest() == _validated(spec).manifest()
        assert _parsed_once(*texts).model_dump() == StoredPlan._parsed(*texts).model_dump()
        assert _parsed_once(*texts).data() == observed.plan


def test_record_of_failures_is_not_parsed_once_for_all() -> None:
    first = seen(DIGITS)
    plan = after(first, reconcile(first, CONFIG, NOW)).plan
    assert plan is not None
    assert StoredPlan.parse(plan).failures is None
    recorded = StoredPlan.parse({**plan, "failures.json": '{"evictions": 3}'})
    assert recorded.failures is not None and recorded.failures.evictions == 3
    assert StoredPlan.parse(plan).failures is None and StoredPlan.parse(plan).data() == plan


@pytest.mark.parametrize("length", [1, 30_000])
def test_long_specs_are_parsed_each_time(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of thousands of jobs would need too much memory."""
    once = list[str]()
    monkeypatch.setattr(parsed, "_validated_once", lambda text: once.append(text) or _validated(text))
    found = parse_observed(seen({**DIGITS, "trainer": {"env": [{"name": "A", "value": "x" * length}]}}))
    assert found.spec is not None and len(once) == (length == 1)
