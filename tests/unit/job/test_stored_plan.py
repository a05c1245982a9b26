"""Tests of the stored plan: data that the operator did not write is rejected with a ValueError, which plans again."""

import json
from typing import Any

import pytest

from dlcontract import PLAN_KEY
from dljob.job.plan.stored import OPERATOR_KEY, StoredPlan
from support.builders import DIGITS, MIXED, rendered, seen


def stored() -> dict[str, str]:
    manifests = rendered(seen(DIGITS, MIXED))
    data: dict[str, str] = next(m["data"] for m in manifests if PLAN_KEY in m.get("data", {}))
    return data


@pytest.mark.parametrize(
    "changes",
    [{"status": ["x"]}, {"status": "x"}, {"status": None}, {"cpu_m": {}}, {"cpu_m": {"other": 100}}, {"cpu_m": None}],
    ids=lambda changes: json.dumps(changes),
)
def test_data_of_another_writer_is_rejected(changes: dict[str, Any]) -> None:
    data = stored()
    with pytest.raises(ValueError, match=r"."):
        StoredPlan.parse({**data, OPERATOR_KEY: json.dumps(json.loads(data[OPERATOR_KEY]) | changes)})


def test_groups_are_those_of_the_status() -> None:
    accepted = StoredPlan.parse(stored())
    shown = [(group.name, group.device, group.nodes) for group in accepted.status.groups]
    assert [(group.name, group.device, group.nodes) for group in accepted.groups] == shown
    assert accepted.nodes == sum(group.nodes for group in accepted.groups)
