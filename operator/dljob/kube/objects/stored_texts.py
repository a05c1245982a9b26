"""The memory that plans, reports and suggestions take in the cache, and its limit for each namespace.

Whoever may edit ConfigMaps can store a plan of 1 MiB for each of his jobs, and the operator has all plans in memory.
With the limit, the namespace that exceeds it has the consequences, and not the operator.
"""

from dataclasses import replace

from dljob.job.plan.stored import PROBLEM_KEY
from dljob.kube.objects.trim import MapSeen

MAX_NAMESPACE_NBYTES = 64 * 2**20
"""Maximum bytes of the plans and reports of all jobs in one namespace.

A job of 4 ranks has about 6 KiB, and one of 1,000 ranks about 400 KiB.
"""
_PROBLEM = (
    f"found more than {MAX_NAMESPACE_NBYTES // 2**20} MiB of plans and reports of the jobs in this namespace; expected "
    "at most that. Delete jobs that have ended"
)


class StoredTexts:
    """The bytes of the plans and reports in the cache, by namespace."""

    def __init__(self) -> None:
        self._nbytes: dict[tuple[str, str], int] = {}
        """Bytes of each ConfigMap, by namespace and name."""
        self._sums: dict[str, int] = {}

    def bounded(self, key: tuple[str, str], seen: MapSeen) -> MapSeen:
        """Return the ConfigMap ``seen`` in the form that the cache stores, and count its bytes.

        If the texts of its namespace exceed the limit, a message replaces its plan or report. ``key``: namespace and
        name of the ConfigMap, of which earlier versions no longer count.
        """
        self.forget(key)
        nbytes = (
            len(seen.report or "")
            + len(seen.suggestion or "")
            + sum(len(name) + len(text) for name, text in (seen.plan or {}).items())
        )
        if self._sums.get(key[0], 0) + nbytes > MAX_NAMESPACE_NBYTES:
            plan = None if seen.plan is None else {PROBLEM_KEY: _PROBLEM}
            report_problem = seen.report_problem if seen.report is None else f"report: {_PROBLEM}"
            unread = seen.suggestion_problem if seen.suggestion is None else f"suggestion: {_PROBLEM}"
            seen = replace(seen, suggestion=None, suggestion_problem=unread)
            return replace(seen, plan=plan, report=None, report_problem=report_problem)
        if nbytes:
            self._nbytes[key] = nbytes
            self._sums[key[0]] = self._sums.get(key[0], 0) + nbytes
        return seen

    def forget(self, key: tuple[str, str]) -> None:
        """Forget a ConfigMap that is no longer in the cache. Do nothing if its bytes were not counted."""
        if nbytes := self._nbytes.pop(key, 0):
            self._sums[key[0]] -= nbytes
            if not self._sums[key[0]]:
                del self._sums[key[0]]
