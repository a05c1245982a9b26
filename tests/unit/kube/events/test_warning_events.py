"""Tests that warning events are queried only for lasting problems, and not in every reconcile."""

import asyncio
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from dljob.job.observed import SOURCE_CONTAINER, ClaimSeen, Fetching, Observed, PodSeen, SetSeen, Stuck
from dljob.kube import Api
from dljob.kube.events import warning_events
from dljob.kube.events.warning_events import RECHECK_S, WarningEvents
from dljob.status.pods import pods_ready
from support.builders import seen

Json = dict[str, Any]
NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
SET = SetSeen("digits-cpu", "cpu", replicas=2, spec_digest="x")
NOT_YET = PodSeen("digits-cpu-0", "u", "cpu", node="n1", stuck=Stuck("ContainerCreating", ""))


class RecordingApi(Api):
    """An API server with these events that counts queries."""

    def __init__(self, *events: Json) -> None:
        self.events, self.selectors = list(events), list[str]()

    async def find(self, *_: object, **params: str) -> list[Json]:
        self.selectors.append(params["fieldSelector"])
        wanted = dict(part.split("=") for part in params["fieldSelector"].split(","))
        uid = wanted.get("involvedObject.uid")
        return [each for each in self.events if uid in (None, each.get("involvedObject", {}).get("uid", uid))]


def warning(message: str, reason: str = "FailedCreate", at: str = "2026-01-01T11:59:00Z", uid: str = "") -> Json:
    """Return a warning about the object with this uid. Without a uid, it is about whatever is asked for."""
    about = {"involvedObject": {"uid": uid}} if uid else {}
    return {"message": message, "reason": reason, "lastTimestamp": at, **about}


def observe_at(
    monkeypatch: pytest.MonkeyPatch, api: RecordingApi, observed: Observed, *times_s: float
) -> list[Observed]:
    """Return the observation with its warning at each of these times."""

    async def main() -> list[Observed]:
        events, found = WarningEvents(api), []
        for time_s in times_s:
            monkeypatch.setattr(warning_events, "monotonic", lambda now=time_s: now)
            found.append((await events.added_to(observed, NOW))[0])
        return found

    return asyncio.run(main())


def test_statefulset_without_pods_shows_its_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    api = RecordingApi(warning("exceeded quota"))
    found = observe_at(monkeypatch, api, seen(sets=(SET,)), 0, 1, RECHECK_S, RECHECK_S + 1, 2 * RECHECK_S)
    assert [item.sets[0].problem for item in found] == [None, None, *["exceeded quota"] * 3]
    assert len(api.selectors) == 2 and "involvedObject.name=digits-cpu" in api.selectors[0]


def test_claim_that_pods_wait_for_shows_its_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    claim = ClaimSeen("digits-checkpoints", "Pending", ("ReadWriteMany",))
    api = RecordingApi(warning("no such backend", "ProvisioningFailed"))
    waiting = seen(claims={claim.name: claim}, pods=(NOT_YET,))
    assert observe_at(monkeypatch, api, waiting, 0, RECHECK_S)[-1].claims[claim.name].problem == "no such backend"
    api = RecordingApi(warning("no such backend"))
    observe_at(monkeypatch, api, seen(claims={claim.name: claim}), 0, RECHECK_S)
    assert not api.selectors, "without pods, the claim may wait for its first consumer"


def test_slowly_starting_container_shows_its_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    api = RecordingApi(warning("secret not found", "FailedMount"))
    found = observe_at(monkeypatch, api, seen(pods=(NOT_YET,)), 0, 6, 12, 18, 24)
    stuck = [item.pods[0].stuck for item in found]
    assert [item and item.reason for item in stuck] == [*["ContainerCreating"] * 4, "CannotStart"]
    assert stuck[-1] is not None and stuck[-1].message == "secret not found"


def test_warning_about_an_earlier_object_of_this_name_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed bug: a pod that only pulled its image counted as one that cannot start, and its job as one without pods."""
    api = RecordingApi(
        warning("secret not found", "FailedMount", uid="gone"), warning("exceeded quota", uid="another set")
    )
    waiting = seen(sets=(replace(SET, uid="set"),), pods=(NOT_YET,))
    found = observe_at(monkeypatch, api, waiting, 0, 6, 12, 18, 24)[-1]
    assert found == waiting and len(api.selectors) > 1
    again = RecordingApi(warning("exceeded quota", uid="set"))
    assert observe_at(monkeypatch, again, waiting, 0, 6)[-1].sets[0].problem == "exceeded quota"


def test_failed_fetch_keeps_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: "Back-off restarting failed container source" took the place of the missing ConfigMap."""
    api = RecordingApi(warning("Back-off restarting failed container source", "BackOff"))
    fetch = Fetching(74, "found no ConfigMap 'mine'", SOURCE_CONTAINER)
    pod = replace(NOT_YET, stuck=Stuck("PodInitializing", ""), fetching=fetch)
    found = observe_at(monkeypatch, api, seen(pods=(pod,)), 0, 6, 12, 18, 24, 30)
    assert found[-1].pods == (pod,)
    verdict = pods_ready(found[-1], 1, NOW)
    assert verdict.reason == "SourceNotFetched" and "found no ConfigMap 'mine'" in verdict.message


@pytest.mark.parametrize(
    "event",
    [
        warning("0/3 nodes", "FailedScheduling"),
        warning("probe failed", "Unhealthy"),
        warning("of yesterday", at="2025-12-31T12:00:00Z"),
        {"message": "of no time", "reason": "FailedCreate"},
    ],
)
def test_known_or_old_warnings_are_ignored(event: Json, monkeypatch: pytest.MonkeyPatch) -> None:
    found = observe_at(monkeypatch, RecordingApi(event), seen(sets=(SET,)), 0, RECHECK_S)
    assert found[-1].sets[0].problem is None


def test_recurring_problem_is_queried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    api = RecordingApi(warning("exceeded quota"))
    found = observe_at(monkeypatch, api, seen(sets=(SET,)), 0, RECHECK_S, 1000, 1000 + RECHECK_S)
    assert [item.sets[0].problem is None for item in found] == [True, False, True, False]


def test_running_job_causes_no_event_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    api = RecordingApi(warning("exceeded quota"))
    pods = tuple(PodSeen(f"digits-cpu-{i}", f"u{i}", "cpu", ready=True) for i in range(2))
    observe_at(monkeypatch, api, seen(sets=(SET,), pods=pods), 0, RECHECK_S, 60)
    assert api.selectors == []


def test_work_for_each_job_does_not_grow_with_the_number_of_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed bug: each call looked at all objects with a problem, so that 5,000 starting jobs took half of a core."""
    looks, over = Counter[str](), warning_events._Watched.over

    def counted(watched: warning_events._Watched, clock: float) -> bool:
        looks["all"] += 1
        return over(watched, clock)

    monkeypatch.setattr(warning_events._Watched, "over", counted)

    async def main() -> None:
        events = WarningEvents(RecordingApi())
        for time_s in (100.0, 101.0, 102.0):
            monkeypatch.setattr(warning_events, "monotonic", lambda now=time_s: now)
            for i in range(50):
                await events.about(seen().job, "Pod", f"pod-{i}", NOW)

    asyncio.run(main())
    assert looks["all"] <= 3 * 50
