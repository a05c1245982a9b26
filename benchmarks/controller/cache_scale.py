"""Measure how the operator's memory and its loops over all jobs grow with the number of jobs, without a cluster.

    hack/env python -m benchmarks.controller.cache_scale
    hack/env python -m benchmarks.controller.cache_scale --jobs 500 5000

The objects of running jobs of 4 pods, as the API server would send them, go through the JSON decoder into the
operator's cache, for each number of jobs in a process of its own. Then the operator begins to lead: it derives all
reservations, and reconciles 200 jobs that need nothing. The jobs differ in names, uids and the seed of their spec.
There is one node for 10 jobs. HTTP, TLS and kopf are not measured (``operator_scale`` has them).
"""

import argparse
import asyncio
import gc
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from benchmarks.cluster.reconcile_cost import PODS, SPEC, Bench

from dljob.controller.job_counts import count_jobs
from dljob.controller.metrics import PHASES
from dljob.job.waiting import devices_waited_for
from dljob.kube import Cache
from dljob.kube.kinds import CONFIG_MAP, DLJOB, NODE, POD, STATEFUL_SET, Kind
from support.builders import T4
from support.controller.fake_operator import Operator
from support.servers.fake_api import FakeCluster
from support.virtual_time import run

ROOT = Path(__file__).resolve().parents[2]
JOBS_PER_NODE = 10
KINDS = {kind.plural: kind for kind in (POD, STATEFUL_SET, CONFIG_MAP, DLJOB)}
Json = dict[str, Any]


class Copies:
    """Objects of jobs that differ from those of one running job in names, uids, nodes and seed."""

    def __init__(self, objects: dict[tuple[str, str, str], Json]) -> None:
        own = [(KINDS[key[0]], body) for key, body in objects.items() if key[0] in KINDS]
        self._texts = [(kind, json.dumps(body)) for kind, body in own]
        uids = "|".join(sorted({body["metadata"]["uid"] for _, body in own}))
        self._varying = re.compile(rf"({uids})|job-0|\"nodeName\": \"n\d+\"|\"seed\": 0")

    def of(self, number: int, nodes: int) -> list[tuple[Kind, Json]]:
        def another(found: re.Match[str]) -> str:
            if found[1]:
                return f"{number:08x}{found[1][8:]}"
            if found[0].startswith('"nodeName'):
                return f'"nodeName": "n{number % nodes}"'
            return f'"seed": {number}' if found[0].startswith('"seed') else f"job-{number}"

        return [(kind, json.loads(self._varying.sub(another, text))) for kind, text in self._texts]


def template() -> Copies:
    """Return the objects of a job whose pods run and that has reported."""
    bench = Bench(1, 2, {**SPEC, "seed": 0})
    run(bench.run())
    return Copies(bench.objects)


def resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def timed_s(work: Callable[[], object]) -> float:
    """Return the processor seconds of the shortest of three calls."""
    times_s = []
    for _ in range(3):
        began_s = time.process_time()
        work()
        times_s.append(time.process_time() - began_s)
    return min(times_s)


def filled(cache: Cache, copies: Copies, jobs: int) -> float:
    """Put the objects of all jobs into the cache. Return the processor seconds, without those that make the objects."""
    used_s, nodes = 0.0, max(1, jobs // JOBS_PER_NODE)
    for number in range(jobs):
        bodies = copies.of(number, nodes)
        began_s = time.process_time()
        for kind, body in bodies:
            cache.put(kind, body)
        used_s += time.process_time() - began_s
    return used_s


async def led(operator: Operator) -> tuple[float, float]:
    """Begin to lead. Return the processor seconds until the reservations are derived, and those of the next minute."""
    began_s = time.process_time()
    planning = asyncio.create_task(operator.planning.run())
    await asyncio.sleep(0.5)  # In virtual time, which does not pass while there is something to do.
    derived_s, began_s = time.process_time() - began_s, time.process_time()
    await asyncio.sleep(60.0)
    idle_s = time.process_time() - began_s
    planning.cancel()
    with suppress(asyncio.CancelledError):
        await planning
    return derived_s, idle_s


def measured(jobs: int) -> dict[str, float]:
    """Return the figures for this number of jobs."""
    copies, cluster = template(), FakeCluster()
    for number in range(max(1, jobs // JOBS_PER_NODE)):
        cluster.node(f"n{number}", T4, JOBS_PER_NODE * PODS)
    nodes = [body for (plural, _, _), body in cluster.api.objects.items() if plural == NODE.plural]
    operator = Operator(cluster)
    for body in nodes:
        operator.cache.put(NODE, body)
    gc.collect()
    before = resident_nbytes()
    put_s = filled(operator.cache, copies, jobs)
    gc.collect()
    cached = resident_nbytes() - before
    derive_s, idle_s = run(led(operator))
    gc.collect()
    cache = operator.cache
    return {
        "cache, KiB per job": cached / 1024 / jobs,
        "after the reservations, KiB per job": (resident_nbytes() - before) / 1024 / jobs,
        "all objects into the cache, ms per job": 1e3 * put_s / jobs,
        "deriving all reservations, ms per job": 1e3 * derive_s / jobs,
        "planning for a minute without a change, ms": 1e3 * idle_s,
        "counting jobs for the metrics, ms": 1e3 * timed_s(lambda: count_jobs(cache.jobs(), PHASES)),
        "who waits for devices, ms": 1e3 * timed_s(lambda: [devices_waited_for(job) for job in cache.jobs()]),
        "whose pods are on lost nodes, ms": 1e3 * timed_s(cache.on_lost_nodes),
        "full collection of garbage, ms": 1e3 * timed_s(gc.collect),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, nargs="+", default=[500, 5_000, 50_000])
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        print(json.dumps(measured(options.jobs[0])))
        return
    columns = []
    for jobs in options.jobs:
        command = [sys.executable, "-m", "benchmarks.controller.cache_scale", "--once", "--jobs", str(jobs)]
        output = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
        columns.append(json.loads(output))
    print(f"{'jobs of 4 pods':42}" + "".join(f"{jobs:>10}" for jobs in options.jobs))
    for name in columns[0]:
        print(f"{name:42}" + "".join(f"{column[name]:10.4g}" for column in columns))


if __name__ == "__main__":
    main()
