"""Random mixes of jobs on a small pool: no device stays free for long that a waiting job could use."""

import random
from datetime import timedelta
from typing import Any

import pytest

from support.builders import NOW, T4
from support.controller.fake_operator import Operator
from support.controller.shared_devices import A100, LONG, together
from support.controller.simulated_pool import SimulatedPool
from support.servers.fake_api import FakeCluster
from support.virtual_time import now_s

MOST_S = 200.0
"""Time in seconds for which a device may stay free: the assignment looks every minute, and pods start and stop."""
LIMIT_S = 3000.0


def jobs_of(rng: random.Random) -> list[tuple[float, str, dict[str, Any]]]:
    """Return (time of arrival in seconds, namespace, spec) of each job."""
    found = []
    for i in range(rng.randint(5, 8)):
        at_s, scheduling = rng.uniform(0, 900), {}
        if rng.random() < 0.4:
            due = NOW + timedelta(seconds=at_s + rng.choice([600, 1800, 3600, 7200, 20_000, 200_000]))
            scheduling["finishBy"] = due.strftime("%Y-%m-%dT%H:%M:%SZ")
        if rng.random() < 0.2:
            scheduling["priorityClassName"] = "high"
        spec = {**LONG, "epochs": rng.choice([20, 60, 200, 600, 3000]), "seed": i, "scheduling": scheduling}
        spec["nodes"] = {"min": 1, "max": rng.choice([1, 2, 4])}
        found.append((at_s, rng.choice(["team-a", "team-b"]), spec))
    return sorted(found, key=lambda job: job[0])


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("preempts", [False, True])
def test_no_device_stays_free_while_a_job_waits_that_could_use_it(seed: int, preempts: bool) -> None:
    rng = random.Random(seed)
    nodes = {"n1": (T4, 4), "n2": (rng.choice([A100, T4]), rng.choice([2, 4]))}
    if rng.random() < 0.4:
        del nodes["n2"]

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        cluster.priority_class("high", 100)
        pool, coming, waits_since = SimulatedPool(cluster, operator, nodes), jobs_of(rng), dict[Any, float]()
        number = len(coming)
        while pool.elapsed_s < LIMIT_S and len(pool.ended) < number:
            while coming and coming[0][0] <= pool.elapsed_s:
                _, namespace, spec = coming.pop(0)
                pool.submit(f"job-{len(pool.jobs)}", namespace, **spec)
            await pool.run()
            for key in pool.jobs.keys() - pool.ended:
                if pool.holds(key) or not any(pool.free().values()):
                    waits_since.pop(key, None)
                    continue
                since_s = waits_since.setdefault(key, now_s())
                assert now_s() - since_s < MOST_S, f"{key}: {operator.message(key, 'Planned')}; free: {pool.free()}"
        assert any(training is not None for training in pool.jobs.values())

    together({}, body, preempts=preempts)
