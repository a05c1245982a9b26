"""What other controllers complain of: warnings about an object, from the events, where its status is silent.

Events are not watched (there are far too many): those of an object that stays in trouble are looked up now and
then. Users: ``controller``.
"""

from dataclasses import replace
from datetime import datetime, timedelta
from time import monotonic

from dljob.kube.kinds import EVENT
from dljob.kube.rest import Api
from dljob.observed import Observed, Stuck
from dljob.render import Names
from dljob.status import NOT_YET

RECHECK_S = 5.0
"""How long trouble must last before it is looked into, and how often that is done."""
STALE = timedelta(minutes=20)
"""A StatefulSet that cannot make a pod tries again, and complains again, within this time."""
_IGNORED = {"FailedScheduling", "Unhealthy"}
"""Said otherwise: by the pod's own conditions."""


class Complaints:
    def __init__(self, api: Api) -> None:
        self._api = api
        self._known: dict[tuple[str, str, str], tuple[float, str | None]] = {}
        """(namespace, kind, name) → when it was looked at, and what was found."""

    async def added_to(self, observed: Observed, now: datetime) -> tuple[Observed, bool]:
        """What is observed of a job with what is complained of; whether anything is in trouble.

        In trouble are a claim that stays pending, a set that stays without its pods, and a container that is
        long on its way.
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
                break  # one is as good as all
        return replace(observed, claims=claims, sets=tuple(sets), pods=tuple(pods)), troubled

    async def about(self, namespace: str, kind: str, name: str, now: datetime) -> str | None:
        """The last warning about an object in trouble. The first call only starts the clock."""
        key, clock = (namespace, kind, name), monotonic()
        self._known = {k: v for k, v in self._known.items() if clock - v[0] < 10 * RECHECK_S}
        last = self._known.get(key)
        if last is None:
            self._known[key] = (clock, None)
            return None
        if clock - last[0] < RECHECK_S:
            return last[1]
        selector = f"involvedObject.kind={kind},involvedObject.name={name},type=Warning"
        events = await self._api.find(EVENT, namespace, fieldSelector=selector)
        events = [event for event in events if event.get("reason") not in _IGNORED]
        recent = [e for e in events if datetime.fromisoformat(_time(e) or "1970-01-01T00:00:00Z") > now - STALE]
        recent.sort(key=_time)
        problem = str(recent[-1].get("message", "")) if recent else None
        self._known[key] = (clock, problem)
        return problem


def _time(event: dict[str, object]) -> str:
    """When it was told last; events of the newer API have another field for it."""
    return str(event.get("lastTimestamp") or event.get("eventTime") or "")
