"""Users and trainers of a stream of jobs on simulated nodes: jobs arrive, train, move and end in real time.

A job trains as fast as its plan predicts, times a factor of its own that the operator does not know. A start takes
``START_S`` seconds. A stop that the operator orders loses no step, as with real pods, which write a checkpoint first.
"""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from benchmarks.cluster.simulated_jobs import Json, Key, follow, plan_of, write_report
from benchmarks.scheduling.workload import START_S, Job

import dlcontract
from dljob.kube import Api
from dljob.kube.kinds import CLAIM, DLJOB, Kind

TICK_S = 1.0
REPORT_S = 5.0
VOLUME = Kind("v1", "PersistentVolume", "persistentvolumes", namespaced=False)
CLAIM_NAME = "checkpoints"


@dataclass(frozen=True)
class Foreseen:
    """The first forecast of a waiting job's start: seconds from then on."""

    made_s: float
    low_s: float
    start_s: float
    high_s: float


@dataclass
class Course:
    """What has happened to a job. Times are monotonic, in seconds."""

    job: Job
    created_s: float
    status: Json = field(default_factory=dict)
    foreseen: Foreseen | None = None
    started_s: float | None = None
    """When all pods of its first plan ran."""
    ended_s: float | None = None
    """When its status was Complete or Failed."""
    plan: dlcontract.Plan | None = None
    """The plan that it trains with; None: its pods do not all run."""
    begins_s: float = 0.0
    """When it makes its next step after a start."""
    done: float = 0.0
    """Steps."""
    stopped_s: float | None = None
    """When it was stopped to move; None: it trains, or has not started."""
    moves_s: list[float] = field(default_factory=list)
    """For each move, the seconds from the stop until all pods of the new plan ran."""
    partly_s: float | None = None
    """Since when only a part of its pods runs."""
    longest_partly_s: float = 0.0

    @property
    def phase(self) -> str:
        return str(self.status.get("phase"))

    @property
    def all_ready(self) -> bool:
        ready, _, wanted = str(self.status.get("ready", "0/0")).partition("/")
        return ready == wanted != "0"

    def note(self, status: Json, now_s: float, unix_s: float) -> None:
        """Take over a status. ``unix_s``: the same moment as Unix time."""
        self.status = status
        ready, _, wanted = str(status.get("ready", "0/0")).partition("/")
        partly = 0 < int(ready) < int(wanted)
        self.partly_s = (self.partly_s or now_s) if partly else None
        if self.partly_s is not None:
            self.longest_partly_s = max(self.longest_partly_s, now_s - self.partly_s)
        queue = status.get("queue") or {}
        if self.foreseen is None and self.started_s is None and "forecastStart" in queue:
            low, start, high = (
                max(0.0, datetime.fromisoformat(queue.get(name, queue["forecastStart"])).timestamp() - unix_s)
                for name in ("earliestStart", "forecastStart", "latestStart")
            )
            self.foreseen = Foreseen(now_s, low, start, high)
        if self.plan is not None and not self.all_ready:
            self.plan, self.stopped_s = None, now_s
        if self.ended_s is None and self.phase in ("Complete", "Failed"):
            self.ended_s = now_s

    def begin(self, plan: dlcontract.Plan, now_s: float) -> None:
        """Start training with a plan, because all its pods run."""
        if self.stopped_s is not None:
            self.moves_s.append(now_s - self.stopped_s)
        self.started_s = self.started_s or now_s
        self.plan, self.stopped_s, self.begins_s = plan, None, now_s + START_S

    def advance(self, from_s: float, to_s: float) -> None:
        """Make the steps of a time in which it trains."""
        if self.plan is not None and to_s > self.begins_s:
            self.done += (to_s - max(from_s, self.begins_s)) / self.step_s

    @property
    def step_s(self) -> float:
        assert self.plan is not None
        return self.plan.expected.step_s * self.job.noise


class Stream:
    """The jobs of a stream on one control plane. ``run`` returns when all have ended, or at the deadline."""

    def __init__(self, api: Api, jobs: Iterable[Job]) -> None:
        self._api, self._jobs = api, tuple(jobs)
        self.courses: dict[Key, Course] = {}

    async def prepare(self) -> None:
        """Create a claim for checkpoints in each namespace of the stream."""
        size, modes = {"storage": "1Gi"}, {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
        for namespace in sorted({job.namespace for job in self._jobs}):
            spec = {**modes, "capacity": size, "hostPath": {"path": "/simulated"}}
            await self._api.create(VOLUME, _object(VOLUME, {"name": namespace}, spec))
            spec = {**modes, "volumeName": namespace, "resources": {"requests": size}}
            await self._api.create(CLAIM, _object(CLAIM, {"name": CLAIM_NAME, "namespace": namespace}, spec))

    async def run(self, deadline_s: float) -> None:
        """Create the jobs when they arrive, and train them. ``deadline_s``: seconds from now."""
        watching = asyncio.create_task(follow(self._api, DLJOB, "", self._note))
        began_s, trainers = time.monotonic(), []
        try:
            async with asyncio.timeout(deadline_s):
                for job in self._jobs:
                    await asyncio.sleep(max(0.0, began_s + job.arrival_s - time.monotonic()))
                    key = (job.namespace, job.name)
                    self.courses[key] = Course(job, time.monotonic())
                    await self._api.create(DLJOB, manifest(job))
                    trainers.append(asyncio.create_task(self._train(key)))
                await asyncio.gather(*trainers)
        except TimeoutError:
            pass  # The figures say how many jobs have ended.
        finally:
            for task in (watching, *trainers):
                task.cancel()
            await asyncio.gather(watching, *trainers, return_exceptions=True)

    def _note(self, body: Json) -> None:
        course = self.courses.get((body["metadata"]["namespace"], body["metadata"]["name"]))
        if course is not None and (status := body.get("status")):
            course.note(status, time.monotonic(), time.time())

    async def _train(self, key: Key) -> None:
        course, before_s, reported_s = self.courses[key], time.monotonic(), 0.0
        steps = course.job.request.total_steps
        while course.ended_s is None:
            await asyncio.sleep(TICK_S)
            now_s = time.monotonic()
            if course.plan is None and course.all_ready:
                course.begin(await plan_of(self._api, key), now_s)
            course.advance(before_s, now_s)
            before_s = now_s
            if course.plan is not None and (course.done >= steps or now_s - reported_s >= REPORT_S):
                reported_s = now_s
                await self._report(key, course, steps)

    async def _report(self, key: Key, course: Course, steps: int) -> None:
        assert course.plan is not None
        plan, step = course.plan, min(int(course.done), steps)
        if (now := await plan_of(self._api, key)).digest() != plan.digest():
            course.plan, course.stopped_s = None, time.monotonic()  # The stop was shorter than the time between events.
            course.begin(now, time.monotonic())
            return
        mark = dlcontract.CheckpointMark(step=step, unix_s=time.time())
        fields: dict[str, Any] = {"step": step, "steps": steps, "last_checkpoint": mark if step else None}
        if step:
            fields["step_s"] = course.step_s
        phase = dlcontract.RunPhase.RUNNING
        if step >= steps:
            phase = dlcontract.RunPhase.SUCCEEDED
            fields["outcome"] = dlcontract.Outcome(steps=steps, seconds=1.0, loss=0.1)
        await write_report(self._api, key, plan, phase, **fields)


def manifest(job: Job) -> Json:
    """Return the DLJob of a job of the stream: the operator may use all devices of the pool for it."""
    request = job.request
    if request.dataset:
        what: Json = {"model": {"name": request.model}, "dataset": {"name": request.dataset}}
    else:
        hints = {
            "parameters": request.parameters, "flopsPerSample": request.flops_per_sample,
            "activationBytesPerSample": request.activation_nbytes_per_sample,
        }  # fmt: skip
        data = {"uri": "file:///made/by/the/script", "samples": 10**6, "sampleBytes": request.sample_nbytes}
        what = {"model": {"hints": hints}, "dataset": data, "trainer": {"command": ["python", "train.py"]}}
    spec = {
        **what, "steps": request.total_steps, "globalBatchSize": request.global_batch, "nodes": {"min": 1, "max": 6},
        "parallelism": {"strategy": "Data"}, "checkpoint": {"volume": {"claimName": CLAIM_NAME}},
    }  # fmt: skip
    return _object(DLJOB, {"name": job.name, "namespace": job.namespace}, spec)


def _object(kind: Kind, metadata: Json, spec: Json) -> Json:
    return {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata, "spec": spec}
