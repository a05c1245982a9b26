"""Stored plans and profiles as planning needs them, parsed once per change."""

from collections.abc import Mapping

from dljob.job.plan.stored import StoredPlan
from dljob.job.profiles import learned_by_model
from dljob.job.reservation import PlannedPods
from dljob.kube import Cache, JobKey
from dljob.planner import Learned

Profiles = Mapping[tuple[str, str], Learned]


class PlansByJob:
    """The pods of the jobs' stored plans, for reservations and forecasts. Each plan is parsed once per change."""

    def __init__(self) -> None:
        self._known: dict[JobKey, tuple[Mapping[str, str], PlannedPods | None]] = {}
        """The data of each job's plan, and the pods that were parsed from it; None if it does not parse."""

    def of(self, key: JobKey, data: Mapping[str, str] | None) -> PlannedPods | None:
        """Return the pods of a job's stored plan; None without one, or if it does not parse.

        ``data``: data of the plan's ConfigMap; None: the job has no stored plan.
        """
        if data is None:
            self.forget(key)
            return None
        known = self._known.get(key)
        if known is None or known[0] is not data:
            try:
                found = PlannedPods.of(StoredPlan.parse(data))
            except Exception:  # noqa: BLE001 - the job's owner can edit it, and its reconcile reports the problem
                found = None
            known = self._known[key] = (data, found)
        return known[1]

    def known(self, key: JobKey) -> PlannedPods | None:
        """Return what the last call of ``of`` for this job returned, without parsing again; None if there was none."""
        return self._known[key][1] if key in self._known else None

    def forget(self, key: JobKey) -> None:
        self._known.pop(key, None)

    def clear(self) -> None:
        self._known.clear()


class ProfilesByNamespace:
    """The profiles (measurements of earlier runs) that plans of jobs in each namespace may use.

    They are parsed once per change.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._known: dict[str, tuple[int, Profiles]] = {}

    def of(self, namespace: str) -> Profiles:
        version, known = self._cache.profiles_version, self._known.get(namespace)
        if known is None or known[0] != version:
            self._known = {name: each for name, each in self._known.items() if each[0] == version}
            known = self._known[namespace] = (version, learned_by_model(self._cache.profiles(), namespace))
        return known[1]
