"""Tests of the turns of running jobs: a job leaves its turn to one that comes before it, but not for ever."""

from dataclasses import dataclass, field, replace
from typing import Any

from dljob.cluster import ClusterView
from dljob.controller.planning.growing import LOOK_AGAIN_S, YIELD_S, Turns
from dljob.kube import JobKey
from dljob.reconcile import ParsedJob, parse_observed
from dljob.scheduling import Growth, QueuedJob
from support.builders import CPUS, CREATED, DIGITS, NOW, Json, after, report, seen, settled
from support.job_lifecycle import step

ELASTIC: Json = {**{k: v for k, v in DIGITS.items() if k != "epochs"}, "steps": 100_000, "nodes": {"min": 1, "max": 3}}
TWO = ClusterView(CPUS.nodes[:2])


def trains(namespace: str) -> ParsedJob:
    """Return a job that trains on two nodes, with room for a third one in its spec."""
    first = seen(ELASTIC, TWO)
    first = replace(first, job=replace(first.job, namespace=namespace))
    observed = settled(after(first, step(first)))
    observed = replace(observed, report=report(observed, step=500, steps=100_000, step_s=1.0))
    return parse_observed(after(observed, step(observed, 10.0)))


@dataclass
class World:
    """The jobs of two namespaces, their shares of the cluster, and time in seconds."""

    shares: dict[str, float]
    at_s: float = 1000.0
    view: ClusterView | None = TWO
    growth: Growth = field(default_factory=Growth)
    queued: list[JobKey] = field(default_factory=list)

    def __post_init__(self) -> None:
        source: Any = self
        self.turns = Turns(list, source, source, self.queued.append, lambda: self.at_s, lambda: NOW)
        self.jobs = {namespace: trains(namespace) for namespace in self.shares}
        self.growth.look(TWO)
        for each in self.jobs.values():
            self.looked(each)
            self.turns.note(each.observed.job.key, each)
        self.at_s += LOOK_AGAIN_S
        self.growth.look(CPUS)

    def share(self, namespace: str) -> float:
        return self.shares[namespace]

    def job(self, parsed: ParsedJob) -> QueuedJob:
        job = parsed.observed.job
        return QueuedJob(job.key, job.uid, 0, self.share(job.namespace), CREATED)

    def looked(self, parsed: ParsedJob) -> None:
        """Let a job have its turn."""
        self.turns.current = parsed.observed.job.key
        self.turns.planned(self.turns.current, self.growth.count(lambda _: True), self.at_s)
        self.turns.end(self.turns.current)


def test_job_leaves_its_turn_for_a_bounded_time() -> None:
    world = World({"large": 0.5, "small": 0.25})
    assert not world.turns.yields(world.jobs["small"]) and world.queued == []
    for _ in range(3):
        assert world.turns.yields(world.jobs["large"])
        world.at_s += YIELD_S / 4
    assert set(world.queued) == {("small", "digits")}
    world.at_s += YIELD_S / 4
    assert not world.turns.yields(world.jobs["large"])


def test_job_gets_its_turn_when_the_other_has_had_it() -> None:
    world = World({"large": 0.5, "small": 0.25})
    assert world.turns.yields(world.jobs["large"])
    world.looked(world.jobs["small"])
    assert not world.turns.yields(world.jobs["large"])
    world.looked(world.jobs["large"])
    world.at_s += LOOK_AGAIN_S
    world.growth.look(TWO)
    world.growth.look(CPUS)
    assert world.turns.yields(world.jobs["large"]), "it is another growth of the capacity, with its own bound"


def test_equal_shares_decide_nothing() -> None:
    world = World({"one": 0.5, "other": 0.5})
    assert not world.turns.yields(world.jobs["one"]) and not world.turns.yields(world.jobs["other"])


def test_job_that_is_gone_has_no_turn_to_wait_for() -> None:
    world = World({"large": 0.5, "small": 0.25})
    world.turns.forget(("small", "digits"))
    assert not world.turns.yields(world.jobs["large"])
