"""What other controllers complain of: warnings about an object, from the events, where its status is silent.

Events are not watched (there are far too many): those of an object that stays in trouble are looked up now and
then. Users: ``controller``.
"""

from datetime import datetime, timedelta
from time import monotonic

from dljob.kube.kinds import EVENT
from dljob.kube.rest import Api

RECHECK_S = 5.0
"""How long trouble must last before it is looked into, and how often that is done."""
STALE = timedelta(minutes=20)
"""A StatefulSet that cannot make a pod tries again, and complains again, within this time."""


class Complaints:
    def __init__(self, api: Api) -> None:
        self._api = api
        self._known: dict[tuple[str, str, str], tuple[float, str | None]] = {}
        """(namespace, kind, name) → when it was looked at, and what was found."""

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
        recent = [e for e in events if datetime.fromisoformat(_time(e) or "1970-01-01T00:00:00Z") > now - STALE]
        recent.sort(key=_time)
        problem = str(recent[-1].get("message", "")) if recent else None
        self._known[key] = (clock, problem)
        return problem


def _time(event: dict[str, object]) -> str:
    """When it was told last; events of the newer API have another field for it."""
    return str(event.get("lastTimestamp") or event.get("eventTime") or "")
