"""Measure the operator with thousands of jobs, on a real control plane whose nodes and pods KWOK simulates.

    hack/env python -m benchmarks.cluster.operator_scale --quick
    hack/env python -m benchmarks.cluster.operator_scale --jobs 5000 --pods 4 --nodes 500 --foreign-pods 10000 --rate 20

The operator is a process like in its Deployment. Only the trainer pods are simulated; this program writes their
reports. In turn, it

1. creates ``--jobs`` jobs, ``--rate`` a second, and waits until all of them run,
2. measures the processor time while nothing happens, for ``--idle`` seconds,
3. restarts the operator and waits until it has reconciled all jobs. Each write of it after that is useless,
4. creates ``--waiting`` jobs for which there is no room, then writes reports of 20 running jobs. Meanwhile pods of
   others end, so that the jobs that wait are planned again and again,
5. finishes 100 jobs.

It prints goals and measured figures. Latencies depend on the machine, because the control plane needs several times the
processor time of the operator; the processor time per job does not. ``--check``: exit with 1 if a goal is missed.
``--profile FILE``: run the operator under cProfile, and write its statistics; those after its restart to FILE.restart.
"""

import argparse
import asyncio
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from benchmarks.cluster.simulated_jobs import SimulatedJobs, crds, delete_foreign, foreign_pod, node, set_up
from benchmarks.lib.control_plane import ControlPlane, children, control_plane, cpu_s, rss_mib
from benchmarks.lib.goals import Figure, table

from devcluster.progress import Progress
from dljob.controller.connection import connect
from dljob.kube import Api
from support.cluster.operator_process import OperatorProcess

Key = tuple[str, str]
NAMESPACES = 20
SCARCE_NODES = 8
REACTIONS, FINISHED = 20, 100
SAMPLE_S = 5.0
SETTLED_S = 10.0
"""Seconds without a request of the operator after which nothing is left to do."""
READS = ("get", "list", "watch")


class Probe:
    """What the operator's processes use and report."""

    def __init__(self, operator: OperatorProcess) -> None:
        self.operator = operator
        self.peak_mib, self.planner_peak_mib, self.best_rate = 0.0, 0.0, 0.0

    async def sample(self) -> None:
        """Record the memory and the rate of reconciles every ``SAMPLE_S``, until cancelled."""
        before, at_s = await self.total("dljob_operator_reconciles_total"), time.monotonic()
        while True:
            await asyncio.sleep(SAMPLE_S)
            if not self.operator.running:
                continue
            self.peak_mib = max(self.peak_mib, rss_mib(self.operator.pid))
            self.planner_peak_mib = max([self.planner_peak_mib, *map(rss_mib, children(self.operator.pid))])
            found, now_s = await self.total("dljob_operator_reconciles_total"), time.monotonic()
            self.best_rate = max(self.best_rate, (found - before) / (now_s - at_s))
            before, at_s = found, now_s

    def cpu_s(self) -> tuple[float, float]:
        """Return the processor time of the operator and of its planner process."""
        return cpu_s(self.operator.pid), sum(map(cpu_s, children(self.operator.pid)))

    async def series(self, name: str) -> dict[str, float]:
        """Return labels → value of a metric."""
        text = await asyncio.to_thread(self.operator.metrics)
        return {labels: float(value) for labels, value in re.findall(rf"^{name}(?:{{(.*)}})? (\S+)$", text, re.M)}

    async def total(self, name: str) -> float:
        return sum((await self.series(name)).values())

    async def calls(self) -> Counter[tuple[str, str]]:
        """Return (verb, resource) → number of requests of the operator, without those that it sends all the time.

        These are the renewals of its Lease and, every 10 s, the question whether the cluster has Kueue.
        """
        found: Counter[tuple[str, str]] = Counter()
        for labels, value in (await self.series("dljob_operator_api_requests_total")).items():
            fields = dict(re.findall(r'(\w+)="([^"]*)"', labels))
            if fields["resource"] not in ("leases", "apis"):
                found[fields["verb"], fields["resource"]] += int(value)
        return found

    async def until_settled(self, deadline_s: float) -> None:
        """Wait until the operator has sent no request for ``SETTLED_S``."""
        end_s, since_s, last = time.monotonic() + deadline_s, time.monotonic(), await self.calls()
        while time.monotonic() - since_s < SETTLED_S:
            if time.monotonic() > end_s:
                raise SystemExit(f"the operator: found requests {deadline_s:g} s after the last change; expected none")
            await asyncio.sleep(1.0)
            found = await self.calls()
            if found != last:
                since_s, last = time.monotonic(), found


class Run:
    """One run: the phases of the benchmark in order, and the figures that they measure."""

    def __init__(self, options: argparse.Namespace, plane: ControlPlane, api: Api, progress: Progress) -> None:
        self._options, self._plane, self._api, self._progress = options, plane, api, progress
        self._jobs = SimulatedJobs(api, options.pods)
        self._keys: list[Key] = [(f"team-{i % NAMESPACES}", f"job-{i}") for i in range(options.jobs)]
        self.figures: list[Figure] = []
        self.calls: dict[str, Counter[tuple[str, str]]] = {}
        files = [f"{options.profile}{part}" for part in ("", ".restart")] if options.profile else ["", ""]
        pythons = [(sys.executable, *(("-m", "cProfile", "-o", file) if file else ())) for file in files]
        self._log = Path(tempfile.mkdtemp(prefix="dljob-scale-")) / "operator.log"
        self._operators = [
            OperatorProcess(
                str(plane.kubeconfig), "dljob-system", self._log, f"scale-{i}", each,
                DLJOB_WATCH_NAMESPACES="", DLJOB_LOG_LEVEL="warning",
            )
            for i, each in enumerate(pythons)
        ]  # fmt: skip
        self._probe = Probe(self._operators[0])

    async def run(self) -> None:
        options, step = self._options, self._progress.step
        with step(f"{options.nodes} nodes and {options.foreign_pods} pods of others"):
            await self._set_up()
        await asyncio.to_thread(self._operators[0].start)
        watching = [asyncio.create_task(self._jobs.run()), asyncio.create_task(self._probe.sample())]
        try:
            with step(f"{options.jobs} jobs run"):
                await self._create()
            with step("idle"):
                await self._idle()
            with step("restart"):
                await self._restart()
            with step(f"reports while {options.waiting} jobs wait"):
                await self._react()
            with step("finish"):
                await self._finish()
            if options.profile:  # A killed process would not write its statistics.
                await asyncio.to_thread(self._operators[1].stop)
        except BaseException:
            if self.figures:  # a run of an hour must not lose them
                self._progress.say(f"figures so far:\n{table(self.figures)}")
            self._progress.say(f"log of the operator: {self._log}")
            raise
        finally:
            for task in watching:
                task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(*watching)
            for operator in self._operators:
                operator.kill()

    async def _set_up(self) -> None:
        names = [f"node-{i}" for i in range(self._options.nodes)]
        scarce = [f"scarce-{i}" for i in range(SCARCE_NODES)]
        foreign = [foreign_pod(f"web-{i}", names[i % len(names)]) for i in range(self._options.foreign_pods)]
        foreign += [foreign_pod(f"full-{name}-{half}", name, "31900m") for name in scarce for half in (0, 1)]
        nodes = [node(name, device) for device, each in (("simulated", names), ("scarce", scarce)) for name in each]
        namespaces = ["dljob-system", *(f"team-{i}" for i in range(NAMESPACES))]
        await set_up(self._api, crds(), nodes, foreign, namespaces)

    async def _create(self) -> None:
        jobs, keys, probe, count = self._jobs, self._keys, self._probe, self._options.jobs
        before, cpu_before = await probe.calls(), self._all_cpu_s()
        creating = asyncio.create_task(jobs.create_at(keys, "simulated", self._options.rate))
        limit_s = 120.0 + 10 * count / self._options.rate
        await creating
        await jobs.until("StatefulSets", lambda: all(jobs.seen[key].children_s for key in keys), limit_s)
        await jobs.until("all Running", lambda: jobs.count(keys, "Running") == count, limit_s)
        await probe.until_settled(limit_s)
        after = self._all_cpu_s()
        used = {name: after[name] - cpu_before[name] for name in after}
        self.calls["create to Running"] = await probe.calls() - before
        waits_s = sorted((jobs.seen[key].children_s or 0.0) - jobs.seen[key].created_s for key in keys)
        status_s = max((each.status_s or 0.0) - each.created_s for each in jobs.seen.values())
        ours_s = used["operator"] + used["planner"]
        rate = (os.cpu_count() or 1) * count / sum(used.values())
        self.figures += [
            Figure("create to StatefulSets, median", statistics.median(waits_s), "s"),
            Figure("create to StatefulSets, p99", waits_s[max(0, -(-99 * count // 100) - 1)], "s", high=3.0),
            Figure("create to first status, max", status_s, "s"),
            Figure("operator, CPU per job until Running", 1000 * used["operator"] / count, "ms"),
            Figure("planner process, CPU per job", 1000 * used["planner"] / count, "ms"),
            Figure("jobs per second that one core of the operator could start", count / ours_s),
            Figure("jobs per second that the processors of this machine could start", rate),
            *(Figure(f"{name}, CPU per job", 1000 * used[name] / count, "ms") for name in self._plane.processes),
        ]

    async def _idle(self) -> None:
        before, began_s = sum(self._probe.cpu_s()), time.monotonic()
        reconciles = await self._probe.total("dljob_operator_reconciles_total")
        await asyncio.sleep(self._options.idle)
        used = (sum(self._probe.cpu_s()) - before) / (time.monotonic() - began_s)
        reconciles = await self._probe.total("dljob_operator_reconciles_total") - reconciles
        self.figures += [
            Figure("idle CPU", 100 * used, "% of a core", high=2.0),
            Figure("reconciles while idle", reconciles),
        ]

    async def _restart(self) -> None:
        old, new = self._operators
        await asyncio.to_thread(old.stop)
        self._probe.operator, began_s = new, time.monotonic()
        # It is ready when it has processed its first lists of objects.
        await asyncio.to_thread(partial(new.start, within_s=60 + self._options.jobs / 10))
        while True:
            done = await self._probe.total("dljob_operator_reconciles_total")
            if done >= self._options.jobs and not await self._probe.total("dljob_operator_queue_depth"):
                break
            if time.monotonic() - began_s > 600:
                raise SystemExit(f"restart: found {done:g} reconciles after 600 s; expected {self._options.jobs}")
            await asyncio.sleep(0.5)
        took_s = time.monotonic() - began_s
        cpu_used_s = sum(self._probe.cpu_s())
        await self._probe.until_settled(120)
        self.calls["restart"] = await self._probe.calls()
        useless = sum(number for (verb, _), number in self.calls["restart"].items() if verb not in READS)
        self.figures += [
            Figure("restart to all reconciled", took_s, "s", high=60.0),
            Figure("operator, CPU of the restart", cpu_used_s, "s"),
            Figure("writes after the restart", useless, high=0.0),
        ]

    async def _react(self) -> None:
        waiting = [(f"team-{i % NAMESPACES}", f"waits-{i}") for i in range(self._options.waiting)]
        jobs = self._jobs
        await jobs.create_at(waiting, "scarce", self._options.rate)
        await jobs.until("the jobs that wait", lambda: all(jobs.seen[key].status for key in waiting), 300)
        plans = await self._probe.total("dljob_operator_plans_total")
        churn, times_s = asyncio.create_task(self._churn()), []
        for i, key in enumerate(self._keys[:REACTIONS]):
            times_s.append(await jobs.reaction_s(key, 20 + i))
            await asyncio.sleep(0.1)
        churn.cancel()
        with suppress(asyncio.CancelledError):
            await churn
        plans = await self._probe.total("dljob_operator_plans_total") - plans
        self.figures += [
            Figure("report to status while jobs wait, median", statistics.median(times_s), "s"),
            Figure("report to status while jobs wait, max", max(times_s), "s", high=1.0),
            Figure("plans of jobs that wait meanwhile", plans),
        ]

    async def _churn(self) -> None:
        """End pods of others on too few scarce nodes, so that capacity grows but no job that waits can start."""
        for i in range(self._options.pods - 1):
            for half in (0, 1):
                await delete_foreign(self._api, f"full-scarce-{i}-{half}")
                await asyncio.sleep(1.0)

    async def _finish(self) -> None:
        keys = self._keys[-min(FINISHED, len(self._keys)) :]
        await self._probe.until_settled(180)
        before = await self._probe.calls()
        await self._jobs.finish(keys)
        await self._jobs.until("Complete", lambda: self._jobs.count(keys, "Complete") == len(keys), 300)
        await self._probe.until_settled(180)
        self.calls["finish"] = await self._probe.calls() - before
        per_job = {"create to Running": self._options.jobs, "finish": len(keys)}
        life = sum(sum(self.calls[name].values()) / number for name, number in per_job.items())
        self.figures += [
            Figure("requests of the operator per life of a job", life),
            Figure("reconciles per second, best 5 s", self._probe.best_rate, low=50.0),
            Figure("memory of the operator, peak", self._probe.peak_mib, "MiB", high=300.0),
            Figure("memory of the planner process, peak", self._probe.planner_peak_mib, "MiB"),
        ]

    def requests(self) -> str:
        """Return a table of the operator's requests per job, by phase, verb and resource."""
        counts = {"create to Running": self._options.jobs, "finish": min(FINISHED, self._options.jobs)}
        lines = [
            f"{number / counts[name]:8.2f}  {name}: {verb} {resource}"
            for name in counts
            for (verb, resource), number in self.calls[name].most_common()
        ]
        return "\n".join(["requests of the operator per job", *lines])

    def _all_cpu_s(self) -> dict[str, float]:
        operator, planner = self._probe.cpu_s()
        return {"operator": operator, "planner": planner, **{n: self._plane.cpu_s(n) for n in self._plane.processes}}


async def measure(options: argparse.Namespace, plane: ControlPlane, progress: Progress) -> Run:
    connection = connect()
    async with connection.session() as session:
        run = Run(options, plane, Api(session, connection.server), progress)
        await run.run()
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=5000)
    parser.add_argument("--pods", type=int, default=4, help="pods of each job")
    parser.add_argument("--nodes", type=int, default=500)
    parser.add_argument("--foreign-pods", type=int, default=10_000, help="pods of other applications")
    parser.add_argument("--rate", type=float, default=20.0, help="jobs created per second")
    parser.add_argument("--waiting", type=int, default=300, help="jobs that wait for room")
    parser.add_argument("--idle", type=float, default=60.0, help="seconds for which idle CPU is measured")
    parser.add_argument("--quick", action="store_true", help="100 jobs on 50 nodes, 10 a second, about two minutes")
    parser.add_argument("--profile", default="", metavar="FILE")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a goal is missed")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.quick:
        parser.set_defaults(jobs=100, nodes=50, foreign_pods=500, rate=10.0, waiting=30, idle=20.0)
        options = parser.parse_args()
    progress = Progress()
    with control_plane(progress) as plane:
        os.environ["KUBECONFIG"] = str(plane.kubeconfig)
        run = asyncio.run(measure(options, plane, progress))
    if options.json:
        print(json.dumps({each.name: each.measured for each in run.figures}))
    else:
        print(f"{options.jobs} jobs of {options.pods} pods, {options.rate:g} a second; {options.nodes} nodes with")
        print(f"{options.foreign_pods} pods of others; {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}\n")
        print(f"{table(run.figures)}\n\n{run.requests()}")
    if options.check and any(each.missed for each in run.figures):
        sys.exit(1)


if __name__ == "__main__":
    main()
