"""Remember which StatefulSets belong to jobs, by uid, because two StatefulSets may have had the same name.

A pod with the label of a job counts as the job's until its StatefulSet is found to have another owner. If the operator
instead ignored pods with an unknown StatefulSet, it would overlook some of the job's own pods. Pods can outlive their
StatefulSet, and an operator that restarts after the deletion has never seen the StatefulSet.
"""

MAX_SETS = 10_000
"""Maximum number of StatefulSets that are remembered. The oldest are forgotten, and looked up again if needed."""


class SetOwners:
    def __init__(self) -> None:
        self._foreign: dict[str, bool] = {}
        """Uid of a StatefulSet → True if no DLJob controls it."""

    def note(self, uid: str, *, foreign: bool) -> None:
        """Remember if a DLJob controls the StatefulSet with this uid. ``foreign``: True if none does."""
        self._foreign[uid] = foreign
        if len(self._foreign) > MAX_SETS:
            del self._foreign[next(iter(self._foreign))]

    def known(self, uid: str) -> bool:
        return uid in self._foreign

    def foreign(self, uid: str) -> bool:
        """Return True if it is known that no DLJob controls the StatefulSet with this uid; False also if unknown."""
        return self._foreign.get(uid, False)
