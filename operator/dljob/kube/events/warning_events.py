"""Find warning events of other controllers. They explain problems that the status of an object does not show.

A cluster has too many events to watch. The operator therefore queries events, and only about objects with a problem
that lasts.
"""

import asyncio
import logging
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from time import monotonic

from dljob.job.log_fields import log_fields
from dljob.job.observed import JobSeen, Observed, Stuck
from dljob.kube.answers import ApiError
from dljob.kube.kinds import EVENT
from dljob.kube.rest import Api
from dljob.kube.transport import Body
from dljob.render import Names
from dljob.status import NOT_YET

RECHECK_S = 5.0
"""Seconds between two queries about the same object with a lasting problem."""
EVENTS_S = 5.0
"""Time limit for listing events. A reconcile goes on without them, so that pods are planned and fenced in time."""
_PATIENCE_S = {"Pod": 20.0}
"""Seconds that a problem must last before its warning is reported, by kind. Other kinds: ``RECHECK_S``.

The value for pods is longer, because mounting a volume often fails once at the start.
"""
STALE = timedelta(minutes=20)
"""Events that are older than this are ignored.

If a StatefulSet still cannot create a pod, its controller has retried and warned again within this time.
"""
_IGNORED = {"FailedScheduling", "Unhealthy"}
"""Reasons of events that repeat what the conditions of the pod already show."""

log = logging.getLogger("dljob.kube")


@dataclass
class _Watched:
    first_asked_at: float
    asked_at: float
    read_at: float
    message: str | None = None
    failed: bool = False
    """True if the last query failed. Only the first failure in a row is logged."""

    def over(self, clock: float) -> bool:
        """Return True if the problem has ended: nobody has asked about it for some time."""
        return clock - self.asked_at >= 4 * RECHECK_S


class WarningEvents:
    def __init__(self, api: Api) -> None:
        self._api = api
        self._watched: dict[tuple[str, str, str, str], _Watched] = {}
        """Objects with a possible problem: (namespace, kind, name, uid) → their state."""
        self._tidied_at = 0.0
        """When the objects were dropped last whose problems have ended, which looks at all of them."""

    async def added_to(self, observed: Observed, now: datetime) -> tuple[Observed, bool]:
        """Return the state of a job with the messages of warning events, and True if the job has a possible problem.

        Possible problems are a pending checkpoint claim, a StatefulSet without all its pods, and a container that is
        still starting. While there is one, the caller should call again, because events may still arrive. A pod that
        failed to fetch its files is no such problem: its status has the cause, and its events only say BackOff.
        """
        job, troubled = observed.job, False
        claims, sets, pods = dict(observed.claims), list(observed.sets), list(observed.pods)
        volume = (job.spec.get("checkpoint") or {}).get("volume") or {}
        claim = claims.get(volume.get("claimName") or Names.of(job).claim)
        if claim is not None and claim.phase == "Pending" and pods:
            problem = await self.about(job, "PersistentVolumeClaim", claim.name, now)
            claims[claim.name] = replace(claim, problem=problem)
            troubled = True
        for i, item in enumerate(sets):
            if sum(pod.group == item.group for pod in pods) < item.replicas:
                problem = await self.about(job, "StatefulSet", item.name, now, item.uid)
                sets[i], troubled = replace(item, problem=problem), True
        for i, pod in enumerate(pods):
            if pod.fetching is not None and pod.fetching.exit_code is not None:
                continue
            if pod.stuck is not None and pod.stuck.reason in NOT_YET:
                problem = await self.about(job, "Pod", pod.name, now, pod.uid)
                pods[i] = replace(pod, stuck=Stuck("CannotStart", problem)) if problem else pod
                troubled = True
                break  # One pod is enough: the others usually have the same problem.
        return replace(observed, claims=claims, sets=tuple(sets), pods=tuple(pods)), troubled

    async def about(self, job: JobSeen, kind: str, name: str, now: datetime, uid: str = "") -> str | None:
        """Return the message of the latest warning about an object that has a problem; None if there is none yet.

        ``job``: the job to which the object belongs. The first call for an object marks the start of its problem. Later
        calls query events only if the problem lasts and if the last query is at least ``RECHECK_S`` seconds old. If a
        query fails, return the message of the query before. ``uid``: uid of the object, because an earlier one of its
        name may have had another problem; empty: events about all objects of this name count.
        """
        key, clock = (job.namespace, kind, name, uid), monotonic()
        if clock - self._tidied_at >= RECHECK_S:
            self._watched = {k: v for k, v in self._watched.items() if not v.over(clock)}
            self._tidied_at = clock
        watched = self._watched.get(key)
        if watched is None or watched.over(clock):
            watched = self._watched[key] = _Watched(clock, clock, clock)
        watched.asked_at = clock
        if clock - watched.first_asked_at < _PATIENCE_S.get(kind, RECHECK_S) or clock - watched.read_at < RECHECK_S:
            return watched.message
        selector = f"involvedObject.kind={kind},involvedObject.name={name},type=Warning"
        selector += f",involvedObject.uid={uid}" if uid else ""
        watched.read_at = clock
        try:
            async with asyncio.timeout(EVENTS_S):
                events: list[Body] = await self._api.find(EVENT, job.namespace, fieldSelector=selector)
        except (ApiError, TimeoutError) as error:
            if not watched.failed:
                what = f"{type(error).__name__}: {error}"
                log.warning(
                    "events about %s %s were not listed (%s); the job's conditions do not show them",
                    kind, name, what, extra=log_fields(job.key, job),
                )  # fmt: skip
            watched.failed = True
            return watched.message
        watched.failed = False
        events = [event for event in events if event.get("reason") not in _IGNORED]
        recent = [e for e in events if datetime.fromisoformat(_time(e) or "1970-01-01T00:00:00Z") > now - STALE]
        recent.sort(key=_time)
        watched.message = str(recent[-1].get("message", "")) if recent else None
        return watched.message


def _time(event: dict[str, object]) -> str:
    """Return the time of an event's last occurrence as text; empty if unknown.

    Events of the API ``events.k8s.io`` have another field for this time.
    """
    return str(event.get("lastTimestamp") or event.get("eventTime") or "")
