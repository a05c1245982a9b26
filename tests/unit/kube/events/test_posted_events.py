"""Tests of the list of events with which a new leader finds out what the one before it has posted."""

import asyncio

import pytest

from dljob.job.observed import JobSeen
from dljob.kube import ApiError, Cache
from dljob.kube.events.posted import KEPT_S, LIST_S, PAGE, PostedEvents
from dljob.kube.kinds import EVENT
from dljob.status import Event
from support.builders import NOW, job
from support.controller.fake_operator import SPEC, Operator, on_two_nodes
from support.servers.fake_api import FakeApi, FakeCluster
from support.virtual_time import run

PLANNED, STARTED = Event("Normal", "Planned", "plan 1"), Event("Normal", "Started", "all pods run")


def jobs(count: int, namespace: str = "team-a") -> list[JobSeen]:
    return [job(name=f"job-{i}", namespace=namespace, uid=f"uid-{namespace}-{i}") for i in range(count)]


async def posted(api: FakeApi, *about: JobSeen) -> PostedEvents:
    events = PostedEvents(api, Cache(now=lambda: NOW))
    for each in about:
        await events.record(each, PLANNED, NOW)
    return events


def test_jobs_of_a_namespace_share_one_list() -> None:
    """The API server reads all events of a namespace for each list, so that a list per job is quadratic."""

    async def body() -> None:
        api, found = FakeApi(), jobs(3)
        events = await posted(api, *found)
        await events.record(found[0], STARTED, NOW)
        reasons = await asyncio.gather(*(events.reasons(each) for each in found))
        assert reasons == [{"Planned", "Started"}, {"Planned"}, {"Planned"}]
        assert api.pages == [("events", "team-a")]
        assert await events.reasons(jobs(1, "team-b")[0]) == frozenset()
        assert api.pages[1:] == [("events", "team-b")]

    run(body())


def test_all_pages_are_read() -> None:
    async def body() -> None:
        api, found = FakeApi(), jobs(PAGE + 1)
        events = await posted(api, *found)
        assert [await events.reasons(each) for each in found] == [{"Planned"}] * len(found)
        assert len(api.pages) == 2

    run(body())


def test_list_is_forgotten_after_a_while_and_by_a_new_leader() -> None:
    async def body() -> None:
        api, [one] = FakeApi(), jobs(1)
        events = await posted(api, one)
        await events.reasons(one)
        events.forget_all()
        await events.record(one, STARTED, NOW)
        assert await events.reasons(one) == {"Planned", "Started"}
        await asyncio.sleep(KEPT_S + 1)
        assert await events.reasons(one) and len(api.pages) == 3

    run(body())


@pytest.mark.parametrize("error", [ApiError(403, "Forbidden", "events"), None], ids=str)
def test_list_that_fails_is_tried_again(error: ApiError | None) -> None:
    """``None``: the API server does not answer. A caller has less patience than the list."""

    async def body() -> None:
        api, [one] = FakeApi(), jobs(1)
        events = await posted(api, one)
        api.unlisted[EVENT.kind] = error
        with pytest.raises((ApiError, TimeoutError)):
            async with asyncio.timeout(5.0):
                await events.reasons(one)
        del api.unlisted[EVENT.kind]
        await asyncio.sleep(LIST_S)
        assert await events.reasons(one) == {"Planned"}

    run(body())


def test_next_leader_lists_the_events_of_a_namespace_once() -> None:
    """Fixed bug: it listed them once per job, and the API server was busy with that for a minute."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        keys = [cluster.submit(name, **SPEC, suspend=True) for name in ("first", "second", "third")]
        await operator.watch()
        await operator.__aexit__()
        [event, *_] = [key for key in cluster.api.objects if key[0] == "events"]
        lost = cluster.api.objects.pop(event)
        async with Operator(cluster) as following:
            for key in keys:
                following.queue.add(key)
            await following.watch(15.0)
            assert cluster.api.pages == [("events", keys[0][0])]
            assert cluster.api.objects[event]["reason"] == lost["reason"]

    on_two_nodes(body)
