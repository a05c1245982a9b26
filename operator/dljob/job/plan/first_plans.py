"""Let first plans wait, for a bounded time, while their devices are measured for the first time. No I/O."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dljob.job.plan.stored import StoredPlan
from dljob.planner import Infeasible

WAIT_S = 20.0
"""Seconds after the start of the first probe of a device type for which first plans on these devices wait at most.

Each type makes plans wait only once. A warm quickstart of 23 s therefore takes at most 43 s."""
CATALOGUE = "catalogue"
"""``predicted.basis`` of a plan that rests on data sheets."""


@dataclass(frozen=True)
class AwaitsMeasurement(Infeasible):
    """A plan on ``devices`` is possible, but it is made after these have been measured."""

    devices: frozenset[str] = frozenset()


class FirstMeasurements:
    """The device types whose hardware is measured for the first time. Use it in one event loop only."""

    def __init__(self, clock: Callable[[], float], wait_s: float = WAIT_S) -> None:
        self._clock, self._wait_s = clock, wait_s
        self._ends_s: dict[str, float] = {}
        """Device type → time at which plans stop waiting for its first measurement. Entries stay for ever, so that
        plans never wait for a second one."""

    def begin(self, device: str, ago_s: float = 0.0) -> None:
        """Note that a probe of ``device`` began ``ago_s`` seconds ago. Only the first probe of a type counts."""
        self._ends_s.setdefault(device, self._clock() - ago_s + self._wait_s)

    def end(self, device: str) -> None:
        """Note that the first probe of ``device`` has ended, with or without a measurement."""
        if device in self._ends_s:
            self._ends_s[device] = min(self._ends_s[device], self._clock())

    def awaited(self, devices: Iterable[str]) -> frozenset[str]:
        """Return those of ``devices`` for which first plans wait now."""
        now_s = self._clock()
        return frozenset(device for device in devices if self._ends_s.get(device, now_s) > now_s)

    def left_s(self) -> float | None:
        """Return the seconds until plans no longer wait for one of the types; None if they wait for no type."""
        now_s = self._clock()
        return min((end_s - now_s for end_s in self._ends_s.values() if end_s > now_s), default=None)

    def postponed(self, decision: StoredPlan | Infeasible, *, first: bool) -> StoredPlan | Infeasible:
        """Return ``decision``, or that the plan waits for a measurement.

        It waits if its prediction rests on data sheets and it uses devices that are measured now. ``first``: True if
        the job has no plan yet. Other jobs never wait.
        """
        if not first or isinstance(decision, Infeasible):
            return decision
        predicted = decision.status.predicted
        devices = self.awaited(group.device for group in decision.status.groups)
        # The step time of a script that nobody has described is unknown (0), also after a measurement.
        if predicted.basis != CATALOGUE or predicted.step_seconds == 0 or not devices:
            return decision
        text = (
            f"found no measurement of {', '.join(sorted(devices))}; expected the one that runs now. Wait: the job is "
            f"planned when it ends, or after {self._wait_s:g} s from data sheets"
        )
        return AwaitsMeasurement(
            reason="MeasuringHardware", field="spec.devices", message=text, transient=True, devices=devices
        )
