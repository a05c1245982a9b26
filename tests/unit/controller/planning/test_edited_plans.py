"""Tests that a plan which somebody has edited concerns its own job only.

Whoever may edit ConfigMaps in a namespace can write anything into ``<job>-plan``. The operator plans the jobs of all
namespaces in one loop, which must not end.
"""

import json

import pytest

from dljob.job.plan.stored import OPERATOR_KEY
from dljob.kube.kinds import CONFIG_MAP
from support.controller.fake_operator import SPEC, Json, Operator, on_two_nodes
from support.servers.fake_api import FakeCluster

SMALL: Json = {**SPEC, "nodes": {"min": 1, "max": 1}}

EDITS: dict[str, Json] = {
    "CPUs that fit no float": {},
    "memory that fits no float": {"memory_nbytes": 10**400},
    "charges": {"charges": {"": {"is_pod": True, "amounts": [["pods", 10**400]]}}},
    "nodes to come": {"new_nodes": 10**400, "start_timeout_s": 1e308},
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_edited_plan_does_not_stop_planning(edit: Json) -> None:
    """Fixed bug: with this amount of memory, the operator stopped for all namespaces, again after each restart."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        cluster.quota("team-a", pods="10")
        cluster.submit("edited", **SMALL)
        await operator.watch(1.0)
        plan = await cluster.api.get(CONFIG_MAP, "team-a", "edited-plan")
        mine = json.loads(plan["data"][OPERATOR_KEY])
        huge = edit or {"cpu_m": dict.fromkeys(mine["cpu_m"], 10**400)}
        data = {OPERATOR_KEY: json.dumps(mine | huge)}
        await cluster.api.merge(CONFIG_MAP, "team-a", "edited-plan", {"data": data})
        keys = [cluster.submit("other", name, second=1, **SMALL) for name in ("team-a", "team-b")]
        await operator.watch(5.0)
        assert "Planned" in {operator.planned(key) for key in keys}

    on_two_nodes(body)
