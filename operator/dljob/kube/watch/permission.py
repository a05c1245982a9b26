"""Log once that the operator may not list or watch a kind, and once that it may again.

An administrator can remove a permission while the operator runs, or bind an older role. The operator then tries again
every few seconds, because nothing tells it that the permission is back.
"""

import logging

from dljob.kube.answers import ApiError
from dljob.kube.kinds import (
    DLJOB,
    LIMIT_RANGE,
    PRIORITY_CLASS,
    PROVISIONING_REQUEST,
    QUOTA,
    STORAGE_CLASS,
    VOLUME,
    Kind,
)

log = logging.getLogger("dljob.kube.watch")

EFFECTS = {
    DLJOB: "the jobs there are not managed, and an operator that watches no other namespace cannot start. "
    "If the namespace no longer exists, remove it from the chart value watchNamespaces",
    STORAGE_CLASS: "a checkpoint volume whose class is missing is reported only when its claim has failed, plans may "
    "use nodes outside the topologies of a class, and new claims are ReadWriteMany only where the spec or the plan "
    "says so",
    VOLUME: "plans may use nodes that cannot mount the volumes of a job, so that its pods stay pending",
    PRIORITY_CLASS: "jobs wait in the queue by the priorities that were last read, or 0",
    QUOTA: "plans may exceed ResourceQuotas, so that the API server rejects pods",
    LIMIT_RANGE: "plans may break LimitRanges, so that the API server rejects pods",
    PROVISIONING_REQUEST: "jobs ask no autoscaler for nodes, because they would not see its answer",
}
"""Kind → what users notice while the operator may not read it."""
REQUIRED = (
    "an operator that starts stays unready, unless it may not list the DLJobs there either, and one that runs decides "
    "by the objects that it last read"
)
"""What users notice while the operator may not read a kind that it cannot do without."""
POLLED = "changes are noticed up to 15 s late, because the operator lists the objects again and again"
"""What users notice while the operator may list a kind, but not watch it."""


class Permission:
    """Whether the operator may list and watch the objects of one kind, as the API server last answered."""

    def __init__(self, kind: Kind, namespace: str | None) -> None:
        """``namespace``: the namespace of the objects; None: all."""
        self._kind = kind
        where = f" in {namespace}" if namespace else ""
        self._objects = f"{kind.plural}{where}"
        self._refused: set[str] = set()
        """Verbs that the API server refuses."""

    def refused(self, verb: str, error: ApiError) -> None:
        """Record that the API server refused a request. Log a warning if it did not refuse the verb before."""
        if verb in self._refused:
            return
        self._refused.add(verb)
        effect = POLLED if verb == "watch" else EFFECTS.get(self._kind, REQUIRED)
        log.warning(
            "permission to %s %s: found none (%s); expected it in the operator's role. Until then, %s. Grant the verbs "
            "list and watch for %s, as in docs/reference/permissions.md. The operator keeps trying, and logs when it "
            "succeeds",
            verb, self._objects, error, effect, self._kind.plural,
        )  # fmt: skip

    def granted(self, verb: str) -> None:
        """Record that the API server answered a request. Log a line if it refused the verb before."""
        if verb in self._refused:
            self._refused.remove(verb)
            log.info("permission to %s %s: granted again", verb, self._objects)
