"""Run a stream of jobs on a mixed pool of simulated GPUs, with the operator and a real control plane, in real time.

    hack/env python -m benchmarks.cluster.shared_pool [--jobs 60] [--minutes 18] [--assignment InOrder Together]

The stream and the pool are those of ``benchmarks.scheduling``, but its eight hours become ``--minutes``, with as many
device-hours per device. Each assignment (chart value ``queue.assignment``) has a control plane and an operator of its
own, and all run at the same time. KWOK simulates nodes and pods, and this program trains (``streamed_jobs``).

It shows whether the operator does on an API server what the simulator says: the jobs' times beside those of the same
stream in the simulator, how long moves take, and how good the forecasts in ``status.queue`` are. Rests and the times
between decisions are not scaled, so that jobs move less often than in eight hours. ``--check``: exit with 1 if a job
was lost or the operator logged an error.
"""

import argparse
import asyncio
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import numpy as np
from benchmarks.cluster.simulated_jobs import crds, node, set_up
from benchmarks.cluster.streamed_jobs import Course, Stream
from benchmarks.lib.control_plane import ControlPlane, control_plane
from benchmarks.lib.goals import Figure, table
from benchmarks.scheduling.foresight import LEAST_WAIT_S
from benchmarks.scheduling.policies import POLICIES
from benchmarks.scheduling.simulator import simulate
from benchmarks.scheduling.workload import HOURS, NETWORK_BPS, NOISE, POOL, Job, stream

from devcluster.progress import Progress
from dljob.controller.connection import connect
from dljob.kube import Api
from support.cluster.operator_process import OperatorProcess

STREAM_JOBS = 160
"""Number of jobs of a whole stream, whose device-hours fill the pool for eight hours."""
DEVICES = sum(nodes * per_node for _, nodes, per_node in POOL)
SIMULATED = {"InOrder": "dljob, in order", "Together": "dljob"}
LONGEST = 0.4
"""Longest predicted time of a job on its best devices, as a fraction of the time in which all jobs arrive."""
SAY_S = 60.0


@dataclass
class Pool:
    """A control plane with the pool's nodes, and an operator with one kind of assignment."""

    assignment: str
    operator: OperatorProcess
    stream: Stream

    async def run(self, deadline_s: float) -> None:
        await asyncio.to_thread(self.operator.start)
        await self.stream.run(deadline_s)

    @property
    def courses(self) -> list[Course]:
        return list(self.stream.courses.values())


def scaled(seed: int, jobs: int, minutes: float) -> tuple[Job, ...]:
    """Return a stream of ``jobs`` jobs that arrive within ``minutes``, and use as much of the pool as a whole one.

    Jobs that would take longer than ``LONGEST`` of this time are cut.
    """
    part = minutes / 60 / HOURS
    found = stream(seed, jobs, part * STREAM_JOBS / jobs)
    return tuple(replace(_cut(job, LONGEST * 60 * minutes), arrival_s=job.arrival_s * part) for job in found)


def _cut(job: Job, most_s: float) -> Job:
    """Return the job with at most as many steps as its best devices make in ``most_s`` seconds."""
    steps = int(most_s / min(use.seconds for use in job.uses) * job.request.total_steps)
    return replace(job, request=replace(job.request, total_steps=max(1, min(steps, job.request.total_steps))))


def figures(pool: Pool, jobs: Sequence[Job]) -> list[Figure]:
    """Return what an assignment did with the stream."""
    name, ended, now_s = pool.assignment, [c for c in pool.courses if c.phase == "Complete"], time.monotonic()
    took = np.array([(each.ended_s or now_s) - each.created_s for each in pool.courses])
    policy = POLICIES[SIMULATED[name]](NOISE)
    policy.joint.stream = tuple(jobs)
    ideal = {each.job.name: each.ended_s - each.job.arrival_s for each in simulate(jobs, policy, DEVICES).states}
    complete_s = [(each.ended_s or now_s) - each.created_s for each in ended]
    of_ideal = float(sum(complete_s) / sum(ideal[each.job.name] for each in ended)) if ended else 0.0
    waits = [
        (each.foreseen, each.started_s - each.foreseen.made_s)
        for each in pool.courses
        if each.foreseen is not None and each.started_s is not None
    ]
    long = [(foreseen, wait_s) for foreseen, wait_s in waits if wait_s >= LEAST_WAIT_S]
    errors = [abs(foreseen.start_s - wait_s) / wait_s for foreseen, wait_s in long]
    covered = [foreseen.low_s <= wait_s <= foreseen.high_s for foreseen, wait_s in long]
    moves = [move_s for each in pool.courses for move_s in each.moves_s]
    failed = sum(int(each.status.get("failures", 0)) for each in pool.courses)
    logged = len(re.findall(r"^\S+ \S+ [EC] |^Traceback", pool.operator.log, re.MULTILINE))
    return [
        Figure(f"{name}: jobs that are Complete", len(ended), high=len(jobs), low=len(jobs)),
        Figure(f"{name}: failures of jobs", failed, high=0),
        Figure(f"{name}: errors in the operator's log", logged, high=0),
        Figure(f"{name}: longest time with a part of a job's pods", max(e.longest_partly_s for e in pool.courses), "s"),
        Figure(f"{name}: average time of a job until its end, or now", float(took.mean()) / 60, "min"),
        Figure(f"{name}: average time of Complete jobs / the simulator's", of_ideal),
        Figure(f"{name}: p95 of the time of a job", float(np.percentile(took, 95)) / 60, "min"),
        Figure(f"{name}: moves per job", len(moves) / len(jobs)),
        Figure(f"{name}: stop to all pods of the new plan, median", float(np.median(moves or [0.0])), "s"),
        Figure(f"{name}: stop to all pods of the new plan, max", max(moves, default=0.0), "s"),
        Figure(f"{name}: jobs that waited for at least a minute", len(long)),
        Figure(f"{name}: median error of the forecast wait", float(np.median(errors or [0.0]))),
        Figure(f"{name}: starts within the forecast interval", float(np.mean(covered or [True]))),
    ]


async def follow_progress(pools: Sequence[Pool], progress: Progress, planes: Sequence[ControlPlane]) -> None:
    """Say every minute how many jobs have ended, until cancelled. Raise SystemExit if a process has ended."""
    while True:
        await asyncio.sleep(SAY_S)
        for pool, plane in zip(pools, planes, strict=True):
            plane.check()
            if not pool.operator.running:
                raise SystemExit(f"{pool.assignment}: found that the operator has ended; expected it to run")
            phases = [each.phase for each in pool.courses]
            counts = ", ".join(f"{phases.count(phase)} {phase}" for phase in sorted(set(phases)))
            progress.say(f"{pool.assignment}: {counts}")


async def measure(
    options: argparse.Namespace, planes: Sequence[ControlPlane], jobs: Sequence[Job], progress: Progress
) -> list[Figure]:
    machines = [
        node(f"{device}-{i}".lower(), device, per_node, f"{NETWORK_BPS:.0f}")
        for device, nodes, per_node in POOL
        for i in range(nodes)
    ]
    namespaces = ["dljob-system", *sorted({job.namespace for job in jobs})]
    folder = Path(tempfile.mkdtemp(prefix="dljob-pool-"))
    pools = []
    async with AsyncExitStack() as stack:
        for assignment, plane in zip(options.assignment, planes, strict=True):
            os.environ["KUBECONFIG"] = str(plane.kubeconfig)
            connection = connect()
            api = Api(await stack.enter_async_context(connection.session()), connection.server)
            await set_up(api, crds(), machines, [], namespaces)
            operator = OperatorProcess(
                str(plane.kubeconfig), "dljob-system", folder / f"{assignment}.log", assignment.lower(),
                DLJOB_WATCH_NAMESPACES="", DLJOB_QUEUE_ASSIGNMENT=assignment,
            )  # fmt: skip
            pools.append(Pool(assignment, operator, Stream(api, jobs)))
            await pools[-1].stream.prepare()
        progress.say(f"logs of the operators: {folder}")
        saying = asyncio.create_task(follow_progress(pools, progress, planes))
        running = [asyncio.create_task(pool.run(60 * options.limit)) for pool in pools]
        try:
            while any(not task.done() for task in running):
                await asyncio.wait([saying, *running], return_when=asyncio.FIRST_COMPLETED)
                for task in filter(asyncio.Task.done, (saying, *running)):
                    task.result()
                running = [task for task in running if not task.done()]
        finally:
            for task in (saying, *running):
                task.cancel()
            await asyncio.gather(saying, *running, return_exceptions=True)
            for pool in pools:
                pool.operator.kill()
    return [figure for pool in pools for figure in figures(pool, jobs)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assignment", nargs="+", choices=sorted(SIMULATED), default=sorted(SIMULATED))
    parser.add_argument("--jobs", type=int, default=60)
    parser.add_argument("--minutes", type=float, default=18.0, help="time in which the jobs arrive")
    parser.add_argument("--limit", type=float, default=60.0, help="minutes after which the run ends")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a goal is missed")
    options = parser.parse_args()
    jobs, progress, began_s = scaled(options.seed, options.jobs, options.minutes), Progress(), time.monotonic()
    with ExitStack() as stack:
        planes = [stack.enter_context(control_plane(progress)) for _ in options.assignment]
        found = asyncio.run(measure(options, planes, jobs, progress))
    took_min = (time.monotonic() - began_s) / 60
    print(f"{options.jobs} jobs within {options.minutes:g} minutes on {DEVICES} devices, seed {options.seed}; ", end="")
    print(f"{took_min:.0f} minutes, {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}\n")
    print(table(found))
    return int(options.check and any(each.missed for each in found))


if __name__ == "__main__":
    sys.exit(main())
