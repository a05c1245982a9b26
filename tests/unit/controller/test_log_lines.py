"""Tests that each log line about a job has its name and uid, and the number of its plan and attempt.

The lines come from the code that writes them, as the operator's formatters show them.
"""

import asyncio
import json
import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from dljob.app.logging import JsonFormatter, TextFormatter
from dljob.controller.planning.answers import PlanningError
from dljob.controller.planning.process import PlannerProcess
from dljob.job.log_fields import log_fields
from dljob.kube import JobKey
from dljob.kube.kinds import CONFIG_MAP, DLJOB
from dljob.kube.objects import cache as cache_module
from dljob.kube.watch import Reflector
from dljob.reconcile import parse_observed
from dljob.reconcile.planning.make_plan import question
from support.builders import CONFIG, CPUS, T4, UID, seen
from support.controller.fake_operator import SPEC, Operator, on_two_nodes
from support.servers.fake_api import FakeCluster
from support.virtual_time import run

Json = dict[str, Any]
ONE_NODE: Json = {**SPEC, "nodes": {"min": 1, "max": 1}}
VOLUME: Json = {"checkpoint": {"volume": {"claimName": "data"}}, "epochs": 1_000_000}


class Lines(logging.Handler):
    """Collects lines of the log, as both formatters write them."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.documents: list[Json] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(TextFormatter("%(message)s").format(record))
        self.documents.append(json.loads(JsonFormatter().format(record)))

    def one(self, words: str) -> Mapping[str, object]:
        """Return the fields of the lines with these words, which must all be about the same job."""
        [text, *more] = [text for text in self.texts if words in text.splitlines()[0]]
        documents = [found for found in self.documents if words in found["message"]]
        fields = re.search(r" \[job=(\S+) uid=(\S+) plan=(\d+) attempt=(\d+)\]$", text.splitlines()[0])
        assert fields is not None, text
        found = documents[0]
        assert fields.groups() == tuple(str(found[key]) for key in ("job", "uid", "plan", "attempt"))
        assert len(more) + 1 == len(documents)
        return {key: found[key] for key in ("job", "uid", "plan", "attempt")}


@pytest.fixture
def lines() -> Iterator[Lines]:
    found, logger = Lines(), logging.getLogger("dljob")
    level = logger.level
    logger.addHandler(found)
    logger.setLevel(logging.INFO)
    yield found
    logger.removeHandler(found)
    logger.setLevel(level)


def fields(cluster: FakeCluster, key: JobKey, plan: int, attempt: int = 1) -> Json:
    uid = cluster.api.objects["dljobs", *key]["metadata"]["uid"]
    return {"job": "/".join(key), "uid": uid, "plan": plan, "attempt": attempt}


def fail(*_: object, **__: object) -> None:
    raise RuntimeError("a defect")


def test_fields_of_a_job_with_an_unusual_status() -> None:
    job = seen().job
    assert log_fields(job.key, job) == {"job": "team-a/digits", "uid": UID, "plan": 0, "attempt": 1}
    assert log_fields(job.key, None)["uid"] == ""


def test_planning_that_fails(lines: Lines) -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        operator.error = TypeError("a defect")
        operator.breaks = key = cluster.submit("first", **SPEC)
        await operator.watch()
        assert lines.one("planning failed") == fields(cluster, key, 0)
        # The job restarted twice, and runs with its fourth plan.
        operator.breaks = None
        await operator.watch(60.0)
        status = {"restarts": 2, "plan": {"number": 4}}
        await cluster.api.merge(DLJOB, *key, {"status": status})
        for seen_key in cluster.watch(operator.cache):
            assert seen_key == key
        expected = fields(cluster, key, 4, 3)
        assert log_fields(key, operator.cache.job(key)) == expected

    on_two_nodes(body)


def test_reservation_that_fails(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        key = cluster.submit("first", **SPEC)
        await operator.watch()
        monkeypatch.setattr("dljob.controller.planning.reserving.stored_reservation", fail)
        await cluster.create_pods(key)
        await operator.watch()
        assert lines.one("reserves nothing") == fields(cluster, key, 1)

    on_two_nodes(body)


@pytest.mark.parametrize("fails", [True, False])
def test_assignment_of_devices(lines: Lines, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    async def main() -> None:
        cluster = FakeCluster()
        cluster.claim("data", "ReadWriteMany")
        for name in ("n1", "n2"):
            cluster.node(name, T4, 1)
        async with Operator(cluster, together=True) as operator:
            if fails:
                monkeypatch.setattr(operator.planning._assigning, "_assign", fail)
                key = cluster.submit("first", **ONE_NODE)
                await operator.watch()
                assert lines.one("together with other jobs") == fields(cluster, key, 0)
            else:
                key = cluster.submit("first", **ONE_NODE)
                await operator.watch()
                assigning = operator.planning._assigning
                found: Any = type("Running", (), {"uid": fields(cluster, key, 1)["uid"]})
                assigning._running[key] = found
                assigning._order(key, [], None)
                assert lines.one("the job moves to better devices") == fields(cluster, key, 1)

    run(main())


def test_preemption(lines: Lines) -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        cluster.claim("data", "ReadWriteMany")
        cluster.priority_class("urgent", 1000)
        low = cluster.submit("low", **SPEC | VOLUME)
        await operator.watch(1.0)
        await cluster.bind(await cluster.create_pods(low), "n1", "n2")
        await operator.watch(1.0)
        cluster.submit("high", second=1, **SPEC | VOLUME, scheduling={"priorityClassName": "urgent"})
        await operator.watch(15.0)
        assert lines.one("stops for job team-a/high") == fields(cluster, low, 1)

    on_two_nodes(body, preempts=True)


def test_process_that_makes_plans_ends(lines: Lines) -> None:
    async def main() -> None:
        about = {"job": "team-a/digits", "uid": UID, "plan": 3, "attempt": 2}
        planner = PlannerProcess(CONFIG, command=("true",), about=lambda key: about if key[1] == "digits" else {})
        with pytest.raises(PlanningError):
            await planner.plan(question(parse_observed(seen())), CPUS, {})
        assert lines.one("the process that makes plans ended") == about

    asyncio.run(main())


def test_object_of_a_job_that_cannot_be_parsed(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        cluster = FakeCluster()
        cluster.node("n1", T4, 1)
        cluster.node("n2", T4, 1)
        async with Operator(cluster) as operator:
            key = cluster.submit("first", **SPEC)
            await operator.watch()
            monkeypatch.setitem(cache_module._TRIM, CONFIG_MAP.plural, fail)
            api: Any = cluster.api
            reflector = Reflector(api, operator.cache, CONFIG_MAP, None, "", lambda *_: None, lambda _: None)
            body = await cluster.api.get(CONFIG_MAP, key[0], "first-plan")
            meta = {**body["metadata"], "resourceVersion": "10000"}
            assert reflector._put({**body, "metadata": meta}) is False
            assert lines.one("ConfigMap first-plan cannot be parsed and is ignored") == fields(cluster, key, 1)

    run(main())
