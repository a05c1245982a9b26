"""The stored plans of jobs in the cache: which of them are the operator's, and what somebody else has made of them.

If somebody edits a plan while the operator runs, the operator still knows the plan that it stored, and goes on with it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from dljob.job.observed import JobSeen, Observed
from dljob.job.plan import authentic
from dljob.job.plan.authentic import NO_PLAN, PlanKey, Record
from dljob.job.plan.stored import PROBLEM_KEY
from dljob.kube.objects.trim import MapSeen

Data = Mapping[str, str]


@dataclass(frozen=True)
class _PlanSeen:
    """The fields of ``Observed`` about the plan of a job."""

    plan: Data | None = None
    plan_edit: authentic.Edit | None = None
    plan_record: str | None = None


@dataclass(frozen=True)
class _Known:
    """The last result of ``StoredPlans._seen`` for a job, and what it was made from.

    ``keys``: number of keys that were known. ``own``: the plan that the operator stored or used last. ``serial``: the
    number in its signature; 0 without one.
    """

    uid: str
    found: MapSeen
    record: Record | None
    keys: int
    result: _PlanSeen
    own: Data | None
    serial: int


class StoredPlans:
    """Checks the stored plans of all jobs. Without a key, every plan counts as the operator's."""

    def __init__(self) -> None:
        self._keys: dict[str, PlanKey] = {}
        """Keys by id, the present one last. Earlier ones still count while this operator runs."""
        self._known: dict[tuple[str, str], _Known] = {}

    def use(self, key: PlanKey) -> None:
        """Sign with this key from now on."""
        if not self._keys:
            self._known.clear()  # Nothing was checked without a key.
        self._keys.pop(key.id, None)
        self._keys[key.id] = key

    def forget(self, job: tuple[str, str]) -> None:
        """Forget a job that no longer exists."""
        self._known.pop(job, None)

    def added_to(self, observed: Observed, found: MapSeen | None) -> Observed:
        """Return the job with the plan that the operator may use.

        If the stored plan is not the operator's, this is the plan that this operator stored or used last, if any.
        ``found``: the ConfigMap of the plan; None: it does not exist.
        """
        seen = self._seen(observed.job, found)
        return replace(observed, plan=seen.plan, plan_edit=seen.plan_edit, plan_record=seen.plan_record)

    def _seen(self, job: JobSeen, found: MapSeen | None) -> _PlanSeen:
        record = authentic.record_of(job)
        # A status with conditions and without a record is that of an earlier release, so that the first status has one.
        first = str(NO_PLAN) if record is None and self._keys else None
        if found is None or found.plan is None:
            self.forget(job.key)
            return _PlanSeen(plan_record=first)
        if PROBLEM_KEY in found.plan:
            return _PlanSeen(found.plan, plan_record=first)
        known = self._known.get(job.key)
        if known is not None and known.uid != job.uid:
            known = None
        if known is None or (known.record, known.keys) != (record, len(self._keys)) or known.found is not found:
            known = self._known[job.key] = self._checked(job, found, found.plan, record, known)
        return known.result

    def _checked(
        self, job: JobSeen, found: MapSeen, plan: Data, record: Record | None, before: _Known | None
    ) -> _Known:
        edit = authentic.edit(job, plan, found.signature, self._keys) if self._keys else None
        if edit is not None:
            own, serial = (before.own, before.serial) if before is not None else (None, 0)
            # Another leader may have stored plans since. An earlier plan must not come back by an edit of theirs.
            if record is not None and serial <= record.serial:
                own = own if own is not None and authentic.digest(job, own) == record.digest else None
            first = str(NO_PLAN) if record is None else None
            return _Known(job.uid, found, record, len(self._keys), _PlanSeen(own, edit, first), own, serial)
        serial = authentic.serial_of(job, plan, found.signature, self._keys) or 0
        after = Record(max(serial, record.serial if record is not None else 0), authentic.digest(job, plan))
        recorded = str(after) if self._keys or record is not None else None
        return _Known(job.uid, found, record, len(self._keys), _PlanSeen(plan, None, recorded), plan, serial)

    def lacks_key_of(self, job: tuple[str, str]) -> bool:
        """Return True if the stored plan of a job names a key that is not known, such as that of another replica."""
        known = self._known.get(job)
        key_id = None if known is None else authentic.key_id_of(known.found.signature)
        return bool(self._keys) and key_id is not None and key_id not in self._keys

    def signature(self, job: JobSeen, data: Data) -> str | None:
        """Return the signature with which the operator stores this plan; None without a key."""
        if not self._keys:
            return None
        record, known = authentic.record_of(job), self._known.get(job.key)
        serials = (record.serial if record is not None else 0, known.serial if known is not None else 0)
        return authentic.sign(job, data, max(serials) + 1, self._present)

    def stands(self, job: JobSeen, found: MapSeen, data: Data) -> bool:
        """Return True if the ConfigMap ``found`` has this plan, signed with the present key."""
        if found.plan != data or not self._keys:
            return found.plan == data
        present = self._present
        return authentic.serial_of(job, data, found.signature, {present.id: present}) is not None

    @property
    def signs(self) -> bool:
        """Return True if there is a key, so that plans are signed and checked."""
        return bool(self._keys)

    @property
    def _present(self) -> PlanKey:
        return next(reversed(self._keys.values()))
