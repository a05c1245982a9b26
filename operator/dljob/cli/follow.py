"""Print the changes of a job's status as lines."""

import sys
from collections.abc import Mapping
from datetime import datetime
from math import log
from typing import Any

from dljob.api import DLJobStatus, LastCheckpoint, Phase, ResultAnalysis
from dljob.planner.types.texts import duration
from dljob.status import readable_status

FOLLOWED_CONDITIONS = {
    "Accepted",
    "DataInspected",
    "Admitted",
    "Planned",
    "VolumeReady",
    "PodsReady",
    "DeviceMismatch",
    "WorldSizeRefused",
    "ProgressReported",
    "CheckpointsUploaded",
    "Resizing",
    "StorageExceeded",
    "MemoryExceeded",
    "Failed",
    "Complete",
    "Suspended",
}
"""Types of conditions of a DLJob whose changes ``dljob run`` prints."""
_SAID_BY_OTHERS = ("Starting", "Started", "NoPlan", "Suspended")
"""Reasons of the condition Admitted that are not printed, because other conditions of the job say the same."""


class Follower:
    """Prints what has changed in a job's status since it was last read from the API server."""

    def __init__(self, generation: int) -> None:
        """Begin to follow a job. ``generation``: metadata.generation of the job after the manifest was applied.

        A status that the operator wrote for an earlier generation of the job is not printed.
        """
        self._generation = generation
        self._said: dict[str, tuple[str, str, str]] = {}
        self._phase: str | None = None
        self._progress_mark = -1
        self._restarts = 0
        self._checkpoint: datetime | None = None
        self.processed = False
        """True if a status of this generation of the job was seen, which only an operator writes."""

    def look(self, body: Mapping[str, Any]) -> int | None:
        """Print what has changed since the last call. ``body``: the job as the API server returns it.

        Return the exit code of ``dljob run`` if there is nothing more to follow: 0 if the job is complete or shows a
        PlanOnly plan, 1 if it has failed. Otherwise, return None. Fields that a later release of the operator has added
        are ignored.
        """
        status = readable_status(given := body.get("status") or {})
        if status.observed_generation < self._generation:
            return None
        self.processed = True
        for condition in status.conditions:
            seen = (condition.status.value, condition.reason, condition.message)
            if seen[:2] == ("True", "Accepted") and condition.type not in self._said:
                continue  # Nearly every job is accepted at once.
            if condition.type == "Admitted" and condition.reason in _SAID_BY_OTHERS:
                continue
            if condition.reason == "NotWorthwhile":
                continue  # Nothing happens, and the message changes with each look for a better plan.
            if condition.type in FOLLOWED_CONDITIONS and self._said.get(condition.type) != seen:
                self._said[condition.type] = seen
                sign = {"True": "", "False": "not ", "Unknown": "unknown whether "}[condition.status.value]
                _say(f"{sign}{condition.type} ({condition.reason}): {condition.message}")
        phase = str(given.get("phase") or status.phase.value)  # A later release may have other phases.
        if phase != self._phase:
            self._phase = phase
            _say(f"phase {phase}")
        if status.restarts > self._restarts:
            self._restarts = status.restarts
            causes = ", ".join(f"{cause} {count}" for cause, count in status.restarts_by_cause.items())
            _say(f"ranks restarted; restarts: {status.restarts}; faults by cause: {causes or 'unknown'}")
        self._progress(status)
        self._upload(status.last_checkpoint)
        return self._end(status, body)

    def _progress(self, status: DLJobStatus) -> None:
        progress = status.progress
        if progress is None:
            return
        if progress.percent is None:  # A line appears when the steps have grown by a tenth.
            begun, mark = f"step {progress.step}", int(log(max(1, progress.step), 1.1))
        else:
            begun, mark = f"{progress.percent:3d} %  step {progress.step}/{progress.steps}", progress.percent
        if mark <= self._progress_mark:
            return
        self._progress_mark = mark
        parts = [begun]
        if progress.loss is not None:
            parts.append(f"loss {progress.loss:.4g}")
        if progress.accuracy is not None:
            parts.append(f"accuracy {100 * progress.accuracy:.1f} %")
        if status.measured is not None:
            text = f"step {duration(status.measured.step_seconds)}"
            if status.plan is not None:
                text += f" (predicted {duration(status.plan.predicted.step_seconds)})"
            parts.append(text)
        if status.remaining:
            parts.append(f"{status.remaining} left")
        _say("  ".join(parts))

    def _upload(self, saved: LastCheckpoint | None) -> None:
        """Print the last upload of a script's checkpoint folder, if it is new."""
        if saved is None or saved.name is None or saved.time == self._checkpoint:
            return
        self._checkpoint = saved.time
        parts = [f"checkpoint {saved.name or 'without files'} is in the object store"]
        if saved.step is not None:
            parts.append(f"step {saved.step}")
        if saved.bytes is not None:
            parts.append(f"{saved.bytes / 1e6:.1f} MB in all")
        if saved.write_seconds is not None:
            parts.append(f"uploaded in {duration(saved.write_seconds)}")
        _say(", ".join(parts))

    def _end(self, status: DLJobStatus, body: Mapping[str, Any]) -> int | None:
        if status.phase is Phase.COMPLETE:
            if (result := status.result) is not None:
                accuracy = f", accuracy {100 * result.accuracy:.1f} %" if result.accuracy is not None else ""
                if result.steps > 0:  # Otherwise, the condition says that the script reported no step.
                    _say(f"{result.steps} steps in {duration(result.seconds)}{accuracy}")
                if (found := result.analysis) is not None:
                    _say(_described(found))
                if result.comparison is not None:
                    _say(result.comparison)
                for finding in result.findings or ():
                    _say(f"{finding.name}: {finding.message}")
            return 0
        if status.phase is Phase.FAILED:
            return 1
        mode = ((body.get("spec") or {}).get("planning") or {}).get("mode")
        if mode == "PlanOnly" and status.phase is Phase.PLANNED and status.plan is not None:
            for candidate in status.plan.candidates:
                mark = "*" if candidate.chosen else " "
                step_s = candidate.predicted.step_seconds
                _say(f"{mark} {candidate.summary}: {f'{duration(step_s)} a step' if step_s else 'no predicted time'}")
            if status.plan.links is not None:
                _say(f"links: {status.plan.links}")
            if status.plan.agent is not None:
                _say(f"agent: {status.plan.agent.value}")
            for line in status.plan.missing_fields or ():
                _say(f"not set: {line}")
            for rejected in status.plan.rejected:
                _say(f"- {rejected.summary}: {rejected.reason}")
            return 0
        return None


def _say(line: str) -> None:
    print(line, flush=True)
    sys.stdout.flush()


def _described(found: ResultAnalysis) -> str:
    """Return the analysis of the predictions on held-out data in one line."""
    parts = [f"held-out {found.metric} {found.value:.4g}"]
    if found.baseline is not None:
        parts.append(f"without inputs {found.baseline:.4g}")
    parts += [f"{each.name} {each.value:.4g}" for each in found.other_models or ()]
    if found.calibration_error is not None:
        parts.append(f"calibration error {found.calibration_error:.2g}")
    parts += [f"class {each.name}: F1 {each.f1:.3g}" for each in (found.worst_classes or ())[:1]]
    return ", ".join(parts)
