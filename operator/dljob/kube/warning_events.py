"""Warning events of other controllers about an object whose status does not show the problem.

There are too many events to watch. The operator therefore queries events, only for objects with a lasting problem.
"""

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from time import monotonic

from dljob.job.observed import Observed, Stuck
from dljob.kube.kinds import EVENT
from dljob.kube.rest import Api
from dljob.render import Names
from dljob.status import NOT_YET

RECHECK_S = 5.0
"""Interval between queries about a lasting problem."""
_PATIENCE_S = {"Pod": 20.0}
"""How long a problem must last before it is reported; default ``RECHECK_S``. Mounts often fail once at the start."""
STALE = timedelta(minutes=20)
"""Older events are ignored. A StatefulSet that cannot create a pod retries and warns again within this time."""
_IGNORED = {"FailedScheduling", "Unhealthy"}
"""Reasons that the pod's own conditions already show."""


@dataclass
class _Watched:
    first_asked_at: float
    asked_at: float
    read_at: float
    message: str | None = None


class WarningEvents:
    def __init__(self, api: Api) -> None:
        self._api = api
        self._watched: dict[tuple[str, str, str], _Watched] = {}
        """Problems by namespace, kind and name of the object."""

    async def added_to(self, observed: Observed, now: datetime) -> tuple[Observed, bool]:
        """Add warnings to the observed state of a job. Also return True if the job has a possible problem.

        Possible problems: a pending claim, a StatefulSet without all its pods, a container that does not start.
        """
        job, troubled = observed.job, False
        claims, sets, pods = dict(observed.claims), list(observed.sets), list(observed.pods)
        volume = (job.spec.get("checkpoint") or {}).get("volume") or {}
        claim = claims.get(volume.get("claimName") or Names.of(job).claim)
        if claim is not None and claim.phase == "Pending" and pods:
            problem = await self.about(job.namespace, "PersistentVolumeClaim", claim.name, now)
            claims[claim.name] = replace(claim, problem=problem)
            troubled = True
        for i, item in enumerate(sets):
            if sum(pod.group == item.group for pod in pods) < item.replicas:
                problem = await self.about(job.namespace, "StatefulSet", item.name, now)
                sets[i], troubled = replace(item, problem=problem), True
        for i, pod in enumerate(pods):
            if pod.stuck is not None and pod.stuck.reason in NOT_YET:
                problem = await self.about(job.namespace, "Pod", pod.name, now)
                pods[i] = replace(pod, stuck=Stuck("CannotStart", problem)) if problem else pod
                troubled = True
                break  # One pod is enough, because the others have the same problem.
        return replace(observed, claims=claims, sets=tuple(sets), pods=tuple(pods)), troubled

    async def about(self, namespace: str, kind: str, name: str, now: datetime) -> str | None:
        """Return the last warning about an object with a lasting problem. The first call starts the clock."""
        key, clock = (namespace, kind, name), monotonic()
        self._watched = {k: v for k, v in self._watched.items() if clock - v.asked_at < 4 * RECHECK_S}
        watched = self._watched.setdefault(key, _Watched(clock, clock, clock))
        watched.asked_at = clock
        if clock - watched.first_asked_at < _PATIENCE_S.get(kind, RECHECK_S) or clock - watched.read_at < RECHECK_S:
            return watched.message
        selector = f"involvedObject.kind={kind},involvedObject.name={name},type=Warning"
        events = await self._api.find(EVENT, namespace, fieldSelector=selector)
        events = [event for event in events if event.get("reason") not in _IGNORED]
        recent = [e for e in events if datetime.fromisoformat(_time(e) or "1970-01-01T00:00:00Z") > now - STALE]
        recent.sort(key=_time)
        watched.read_at = clock
        watched.message = str(recent[-1].get("message", "")) if recent else None
        return watched.message


def _time(event: dict[str, object]) -> str:
    """Return the time of an event's last occurrence. Events of the newer API have another field for it."""
    return str(event.get("lastTimestamp") or event.get("eventTime") or "")
