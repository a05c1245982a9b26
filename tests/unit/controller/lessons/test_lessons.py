"""Tests of the writes to profiles: the structure of a running script is written twice, not with each report."""

import asyncio
from dataclasses import replace
from typing import Any

from dlcontract import RunPhase, Structure
from dljob.calibrate.memory import MemoryPoint
from dljob.controller.lessons import Lessons
from dljob.job.observed import Observed
from dljob.kube import ApiError
from dljob.reconcile import RunMemory
from support.builders import NOW, Json, report
from support.job_lifecycle import done, started, step

SPEC: Json = {
    "trainer": {"command": ["torchrun", "train.py"], "framework": "Torchrun", "image": "registry.example/mine:1"},
    "nodes": {"min": 2},
    "resources": {"memory": "1Gi"},
}


class Profiles:
    """Records the structures that are written to profiles."""

    def __init__(self) -> None:
        self.parameters: list[int] = []

    async def update_profiles(self, found: Any, namespace: str | None, now: object) -> None:
        assert namespace == "team-a", "what a script says about itself is its owner's"
        self.parameters.append(found.structure.parameters)


def seen_structure(parameters: int, step_s: float | None = 0.02) -> Structure:
    return Structure(parameters=parameters, samples=32, flops=1e6, step_s=step_s, world_size=2)


def test_structure_of_a_running_script_is_written_without_and_with_its_time_and_at_its_end() -> None:
    """Each change of a profile makes the operator plan all waiting jobs again."""
    profiles = Profiles()
    kube: Any = profiles
    lessons = Lessons(kube, lambda: NOW, shared=True)

    async def learn(observed: Observed) -> None:
        assert await lessons.learn(observed.job, step(observed).measurements) is None

    async def run() -> None:
        for steps in range(5):
            for name, parameters in (("small", 10), ("large", 20)):  # Only their environments differ.
                observed = started(SPEC, name=name)
                structure = seen_structure(parameters + steps, None if steps < 2 else 0.02)
                await learn(replace(observed, report=report(observed, step=steps, structure=structure)))
        assert profiles.parameters == [10, 20, 12, 22]
        await learn(done(RunPhase.SUCCEEDED, SPEC, structure=seen_structure(30)))

    asyncio.run(run())
    assert profiles.parameters == [10, 20, 12, 22, 30]


class Memories:
    """Records the peaks that are written to profiles, in MiB. The first write fails."""

    def __init__(self) -> None:
        self.peaks: list[float] = []
        self.errors: list[ApiError] = [ApiError(500, "InternalError", "try again")]

    async def update_memory(self, found: RunMemory, now: object) -> None:
        if self.errors:
            raise self.errors.pop()
        assert found.namespace == "team-a" and found.point.peak_nbytes is not None
        self.peaks.append(found.point.peak_nbytes / 2**20)


def test_memory_of_a_running_script_is_written_when_it_grows_and_at_its_end() -> None:
    memories = Memories()
    kube: Any = memories
    lessons = Lessons(kube, lambda: NOW, shared=True)

    job = started(SPEC).job

    async def learn(mib: int, enough: int | None = None) -> ApiError | None:
        point = MemoryPoint(1, None, "Data", mib * 2**20, enough)
        return await lessons.learn_memory(job, RunMemory("program-1", "cpu", "team-a", point))

    async def run() -> None:
        assert await learn(200) is not None and await learn(200) is None, "the write is repeated"
        for mib in (201, 202, 400, 401, 900):
            assert await learn(mib) is None
        assert await lessons.learn_memory(job, None) is None
        await learn(901, 2**30)

    asyncio.run(run())
    assert memories.peaks == [200, 400, 900, 901]
