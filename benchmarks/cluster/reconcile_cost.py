"""Measure the processor time that the operator itself needs for a reconcile, without a cluster.

    hack/env python -m benchmarks.cluster.reconcile_cost
    hack/env python -m benchmarks.cluster.reconcile_cost --against FOLDER

The operator's controller, cache and rendering run on an API server in memory, in virtual time. Processor time within
this API server and within the planner, which is a process of its own, does not count. HTTP and TLS are not measured.
The phases are

- start: from the creation of a job until its status says that its pods run,
- report: a report of the trainer with another step,
- unchanged: a reconcile after which nothing has to change, as after a restart of the operator.

``--against``: a folder with another version of the repository, such as a worktree of an earlier commit. Both versions
run in turn, ``--repeats`` times each, in processes of their own, and the output has medians and their ratio.
``--profile FILE``: write the statistics of cProfile.
"""

import argparse
import cProfile
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import dlcontract
from dljob.kube import JobKey
from dljob.kube.kinds import CONFIG_MAP, POD
from support.builders import T4
from support.controller.fake_operator import Operator
from support.servers.fake_api import FakeCluster
from support.virtual_time import run

ROOT = Path(__file__).resolve().parents[2]
PODS = 4
PHASES = ("start", "report", "unchanged")
SPEC: dict[str, Any] = {
    "model": {"name": "digits-cnn"}, "dataset": {"name": "digits"}, "globalBatchSize": 64, "epochs": 5,
    "nodes": {"min": PODS, "max": PODS}, "checkpoint": {"enabled": False},
}  # fmt: skip
READY = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}


class Meter:
    """Processor time in seconds that does not belong to the operator."""

    def __init__(self) -> None:
        self.others_s, self._depth = 0.0, 0

    async def leave_out(self, call: Awaitable[Any]) -> Any:
        """Await a call that does not wait for anything, and do not count its processor time."""
        began, self._depth = time.process_time(), self._depth + 1
        try:
            return await call
        finally:
            self._depth -= 1
            if self._depth == 0:
                self.others_s += time.process_time() - began

    def operator_s(self) -> float:
        return time.process_time() - self.others_s


def metered(cluster: FakeCluster, operator: Operator, meter: Meter) -> None:
    """Leave out the processor time of the API server and of the planner."""

    def wrapped(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        return lambda *args, **options: meter.leave_out(method(*args, **options))

    for name in ("get", "metadata_of", "find", "create", "apply", "merge", "delete"):
        setattr(cluster.api, name, wrapped(getattr(cluster.api, name)))
    operator.planning._planner = wrapped(operator.planning._planner)  # type: ignore[assignment]


class Bench:
    def __init__(self, jobs: int, reports: int, spec: dict[str, Any] = SPEC) -> None:
        self._cluster, self._reports, self._meter, self._spec = FakeCluster(), reports, Meter(), spec
        for i in range(jobs * PODS):
            self._cluster.node(f"n{i}", T4, 1)
        self._operator = Operator(self._cluster)
        metered(self._cluster, self._operator, self._meter)
        self._names = [f"job-{i}" for i in range(jobs)]
        self.figures: dict[str, float] = {}

    @property
    def objects(self) -> dict[tuple[str, str, str], dict[str, Any]]:
        """The objects on the API server, by plural name of their kind, namespace and name."""
        return self._cluster.api.objects

    async def run(self) -> None:
        """Run all phases. Store reconciles per second of processor time in ``figures``, by phase."""
        async with self._operator:
            await self._measured("start", self._start())
            await self._measured("report", self._report())
            await self._measured("unchanged", self._unchanged())

    async def _measured(self, phase: str, work: Awaitable[None]) -> None:
        before_s, before = self._meter.operator_s(), self._reconciles()
        await work
        used_s, done = self._meter.operator_s() - before_s, self._reconciles() - before
        self.figures[phase] = done / used_s
        self.figures[f"{phase}: ms per job"] = 1000 * used_s / len(self._names)

    def _reconciles(self) -> float:
        return sum(
            sample.value
            for metric in self._operator.metrics.reconciles.collect()
            for sample in metric.samples
            if sample.name.endswith("_total")
        )

    async def _start(self) -> None:
        cluster, free = self._cluster, iter(range(len(self._names) * PODS))
        keys = [cluster.submit(name, **self._spec) for name in self._names]
        await self._settle()
        for key in keys:
            pods = await self._meter.leave_out(cluster.create_pods(key))
            await self._settle()
            for pod in pods:
                node = {"spec": {"nodeName": f"n{next(free)}"}, "status": READY}
                await cluster.api.merge(POD, key[0], pod["metadata"]["name"], node)
            await self._settle()
        for key in keys:
            await self._write_report(key, 0)
        await self._settle()
        phases = {job.name: job.status.get("phase") for job in self._operator.cache.jobs()}
        assert set(phases.values()) == {"Running"}, phases

    async def _report(self) -> None:
        for step in range(1, self._reports + 1):
            for name in self._names:
                await self._write_report(("team-a", name), step)
            await self._settle()

    async def _unchanged(self) -> None:
        for _ in range(self._reports):
            for name in self._names:
                self._operator.queue.add(("team-a", name))
            await self._settle()

    async def _settle(self) -> None:
        await self._operator.watch(1.5)

    async def _write_report(self, key: JobKey, step: int) -> None:
        body = await self._cluster.api.get(CONFIG_MAP, key[0], f"{key[1]}-plan")
        plan = dlcontract.Plan.parse(body["data"][dlcontract.PLAN_KEY])
        ranks = tuple(
            dlcontract.RankMeasure(rank=i, device=rank.device, share=rank.share, compute_s=0.1)
            for i, rank in enumerate(plan.ranks)
        )
        report = dlcontract.Report(
            uid=plan.uid, plan_number=plan.number, plan_digest=plan.digest(), term=plan.term,
            phase=dlcontract.RunPhase.RUNNING, unix_s=self._operator.now.timestamp(), step=step, steps=10_000,
            step_s=0.5, loss=0.5, world_size=len(plan.ranks), ranks=ranks,
        )  # fmt: skip
        data = {"data": {dlcontract.REPORT_KEY: report.to_json()}}
        await self._cluster.api.merge(CONFIG_MAP, key[0], f"{key[1]}-report", data)


def measured(options: argparse.Namespace, root: Path) -> dict[str, float]:
    """Return the figures of the version of the repository at ``root``, from a run in a process of its own."""
    folders = [root, root / "operator", root / "operator/contract"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    command = [sys.executable, __file__, "--once", f"--jobs={options.jobs}", f"--reports={options.reports}"]
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    found: dict[str, float] = json.loads(output)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=30)
    parser.add_argument("--reports", type=int, default=5, help="reports, and reconciles without a change, of each job")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--against", type=Path, metavar="FOLDER")
    parser.add_argument("--profile", default="", metavar="FILE")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once or options.profile:
        bench, profile = Bench(options.jobs, options.reports), cProfile.Profile()
        if options.profile:
            profile.enable()
        run(bench.run())
        if options.profile:
            profile.disable()
            profile.dump_stats(options.profile)
        print(json.dumps(bench.figures))
        return
    versions = [ROOT] if options.against is None else [options.against.resolve(), ROOT]
    runs: list[list[dict[str, float]]] = [[] for _ in versions]
    for _ in range(options.repeats):
        for found, root in zip(runs, versions, strict=True):
            found.append(measured(options, root))
    print(f"{options.jobs} jobs of {PODS} pods; medians of {options.repeats} runs")
    for name in runs[0][0]:
        values = [statistics.median(each[name] for each in found) for found in runs]
        unit = "ms" if "ms per job" in name else "reconciles per CPU second"
        text = " → ".join(f"{value:.1f}" for value in values)
        print(f"{name.split(':')[0]:10} {text} {unit}" + (f" (× {values[1] / values[0]:.2f})" if values[1:] else ""))


if __name__ == "__main__":
    main()
