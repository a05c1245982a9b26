"""Measure what planning in a separate process costs, compared with a thread of the operator.

    python -m benchmarks.planner.process [--sizes 100 1000 10000] [--repeats 5] [--json]

The same question is planned on clusters with nodes of eight device types, each with 40 labels. Between two questions,
one node in ten changes. Both ways run in turn, and the output has medians:

- ``plan_ms``: time until the answer.
- ``blocked_ms``: longest time for which the event loop of the operator does not run meanwhile. A running job waits that
  long for its reconcile.
- ``first_ms``: time until the first answer, including the start of the process.
- ``process_MB``: resident memory of the process at the end.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from benchmarks.planner.duration import GPUS

from dljob.cluster import ClusterView, Node
from dljob.controller.planning.process import PlannerProcess
from dljob.reconcile import parse_observed
from dljob.reconcile.planning.make_plan import decide, question
from support.builders import CONFIG, DIGITS, seen

TYPES = (*GPUS, "cpu")
LABELS = {f"example.com/label-{i}": f"value-{i}" for i in range(40)}
QUESTION = question(
    parse_observed(seen({**DIGITS, "nodes": {"min": 1, "max": 64}, "parallelism": {"strategy": "Auto"}}))
)


def cluster(size: int, changed: int) -> ClusterView:
    """Return a cluster. Nodes whose number is ``changed`` modulo ten are new objects with other free resources."""
    return ClusterView(tuple(_node(i, changed) for i in range(size)))


_KNOWN: dict[int, Node] = {}


def _node(i: int, changed: int) -> Node:
    if i not in _KNOWN:
        device = TYPES[i % len(TYPES)]
        labels = {**LABELS, "kubernetes.io/hostname": f"node-{i:05}"}
        _KNOWN[i] = Node(f"node-{i:05}", device, 8, 8, 64.0, 64.0, 2**38, 1.25e10, device != "cpu", labels)
    if i % 10 == changed % 10:
        _KNOWN[i] = replace(_KNOWN[i], free_devices=1 + (i + changed) % 8, free_cpu=float(8 + changed % 32))
    return _KNOWN[i]


async def blocked_during(work: Callable[[], Awaitable[Any]]) -> tuple[float, float]:
    """Return the duration of the work, and the longest time for which the event loop did not run, in ms."""
    longest, done = 0.0, asyncio.Event()

    async def tick() -> None:
        nonlocal longest
        last = time.perf_counter()
        while not done.is_set():
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            longest, last = max(longest, now - last - 0.001), now

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0.01)
    began = time.perf_counter()
    await work()
    took = time.perf_counter() - began
    await asyncio.sleep(0.01)
    done.set()
    await ticking
    return 1000 * took, 1000 * longest


async def measure(size: int, repeats: int) -> dict[str, float]:
    planner, found = PlannerProcess(CONFIG), dict[str, list[float]]()
    profiles: dict[Any, Any] = {}

    async def in_process(view: ClusterView) -> None:
        await planner.plan(QUESTION, view, profiles)

    async def in_thread(view: ClusterView) -> None:
        asked = replace(QUESTION, observed=replace(QUESTION.observed, view=view, learned=profiles))
        await asyncio.to_thread(decide, asked, CONFIG)

    first_ms, _ = await blocked_during(lambda: in_process(cluster(size, 0)))
    for i in range(repeats):
        view = cluster(size, i)
        for name, way in (("process", in_process), ("thread", in_thread)):
            plan_ms, blocked_ms = await blocked_during(lambda way=way, view=view: way(view))  # type: ignore[misc]
            found.setdefault(f"{name}_plan_ms", []).append(plan_ms)
            found.setdefault(f"{name}_blocked_ms", []).append(blocked_ms)
    assert planner._process is not None
    status = Path(f"/proc/{planner._process.pid}/status").read_text()
    memory_mb = int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))) / 1024
    await planner.close()
    return {
        "nodes": size, "first_ms": round(first_ms), "process_MB": round(memory_mb),
        **{name: round(statistics.median(values), 1) for name, values in found.items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [asyncio.run(measure(size, options.repeats)) for size in options.sizes]
    if options.json:
        print(json.dumps(rows))
        return
    print("".join(f"{name:>20}" for name in rows[0]))
    for row in rows:
        print("".join(f"{value:>20}" for value in row.values()))


if __name__ == "__main__":
    main()
