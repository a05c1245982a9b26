"""The memory that specs, plans, reports and suggestions take in the cache, and its limit for each namespace.

Whoever may edit ConfigMaps can store a plan of 1 MiB for each of his jobs, and whoever may create DLJobs can store
specs that take 1.4 MiB each in memory. The operator has all of them in memory. With the limit, the namespace that
exceeds it has the consequences, and not the operator. An object that did not fit is read again once it fits.
"""

from dataclasses import replace

from dljob.api.compact import CompactTexts
from dljob.job.observed import JobSeen
from dljob.job.plan.stored import PROBLEM_KEY
from dljob.kube.kinds import CONFIG_MAP, DLJOB, Kind
from dljob.kube.objects.bounds import number_of_values
from dljob.kube.objects.trim import CompactReport, MapSeen

MAX_NAMESPACE_NBYTES = 64 * 2**20
"""Maximum bytes of the plans and reports of all jobs in one namespace, and of their specs in memory.

A job of 4 ranks has plans and reports of about 6 KiB, and one of 1,000 ranks of about 400 KiB.
"""
UNCOUNTED_VALUES = 500
"""Number of values of each spec that do not count. A typical spec has 60. ResourceQuotas limit the number of jobs."""
VALUE_NBYTES = 100
"""Bytes that a map, a list, a key or another value of a spec takes in memory, at most on average."""
_PROBLEM = (
    f"found more than {MAX_NAMESPACE_NBYTES // 2**20} MiB of plans and reports of the jobs in this namespace; expected "
    "at most that. Delete jobs that have ended"
)
_SPEC_PROBLEM = (
    f"spec: found more than {MAX_NAMESPACE_NBYTES // 2**20} MiB of long specs in this namespace; expected at most that."
    f" Delete jobs that have ended, or make this spec shorter: {UNCOUNTED_VALUES} values of each spec do not count"
)

Key = tuple[str, str]
"""Namespace and name of an object."""
_KINDS: dict[type, Kind] = {JobSeen: DLJOB, MapSeen: CONFIG_MAP}


class StoredTexts:
    """The bytes of the specs, plans and reports in the cache, by namespace, and the objects that did not fit."""

    def __init__(self) -> None:
        self._nbytes: dict[tuple[type, Key], int] = {}
        """Bytes of each ConfigMap and of each spec, by the type of the object, namespace and name."""
        self._sums: dict[tuple[type, str], int] = {}
        self._refused: dict[tuple[type, Key], int] = {}
        """Bytes of each object that did not fit, the oldest refusal first."""

    def bounded_map(self, key: Key, seen: MapSeen) -> MapSeen:
        """Return the ConfigMap ``seen`` in the form that the cache stores, and count its bytes.

        If the texts of its namespace exceed the limit, a message replaces its plan or report. ``key``: namespace and
        name of the ConfigMap, of which earlier versions no longer count.
        """
        nbytes = (
            len(str(seen.report or ""))
            + len(seen.suggestion or "")
            + sum(len(name) + len(text) for name, text in (seen.plan or {}).items())
        )
        if self._fits(MapSeen, key, nbytes):
            plan = None if seen.plan is None else CompactTexts(seen.plan)
            report = None if seen.report is None else CompactReport(seen.report)
            return replace(seen, plan=plan, report=report)
        problem = None if seen.plan is None else {PROBLEM_KEY: _PROBLEM}
        report_problem = seen.report_problem if seen.report is None else f"report: {_PROBLEM}"
        unread = seen.suggestion_problem if seen.suggestion is None else f"suggestion: {_PROBLEM}"
        seen = replace(seen, suggestion=None, suggestion_problem=unread)
        return replace(seen, plan=problem, report=None, report_problem=report_problem)

    def bounded_job(self, key: Key, seen: JobSeen) -> JobSeen:
        """Return the job ``seen`` in the form that the cache stores, and count the bytes of its spec.

        If the specs of its namespace exceed the limit, a message replaces its spec.
        """
        nbytes = VALUE_NBYTES * max(0, number_of_values(seen.spec) - UNCOUNTED_VALUES)
        return seen if self._fits(JobSeen, key, nbytes) else replace(seen, spec={}, spec_problem=_SPEC_PROBLEM)

    def fitting(self, most: int) -> list[tuple[Kind, Key]]:
        """Return the objects that did not fit when the cache got them and would fit now, at most ``most``.

        Their texts are no longer known, so that they must be read again. Those that were refused first come first.
        """
        found: list[tuple[Kind, Key]] = []
        free: dict[tuple[type, str], int] = {}
        for (kind, key), nbytes in self._refused.items():
            place = (kind, key[0])
            left = free.setdefault(place, MAX_NAMESPACE_NBYTES - self._sums.get(place, 0))
            if nbytes <= left and len(found) < most:
                free[place] = left - nbytes
                found.append((_KINDS[kind], key))
        return found

    def _fits(self, kind: type, key: Key, nbytes: int) -> bool:
        """Count the bytes of an object in place of those of its earlier version. Return False if they are too many."""
        self.forget(kind, key)
        place = (kind, key[0])
        if self._sums.get(place, 0) + nbytes > MAX_NAMESPACE_NBYTES:
            self._refused[kind, key] = nbytes
            return False
        if nbytes:
            self._nbytes[kind, key] = nbytes
            self._sums[place] = self._sums.get(place, 0) + nbytes
        return True

    def forget(self, kind: type, key: Key) -> None:
        """Forget an object that is no longer in the cache. Do nothing if its bytes were not counted."""
        self._refused.pop((kind, key), None)
        if nbytes := self._nbytes.pop((kind, key), 0):
            place = (kind, key[0])
            self._sums[place] -= nbytes
            if not self._sums[place]:
                del self._sums[place]
