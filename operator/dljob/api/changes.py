"""The effect that a change of each field of the spec has on an existing job. ``CHANGES`` is the only table of effects.

It determines the CEL rules of the CRD (``change_rules``), the operator's own check (``refused_change``), the digest of
a spec (``planned_fields``) and the table in docs/reference/api.md.

Training has begun for a job that has a checkpoint, or that will write one when its pods stop. From then on, a change
that contradicts this checkpoint would fail the job, have no effect, or lose the progress. Before that, and in jobs
without checkpoints, every new pod starts from step 0, and the user may change everything.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from dljob.api.spec import DLJobSpec
from dljob.api.spec.planning import PlanningMode
from dljob.api.status.job import ConditionStatus, DLJobStatus

Json = Mapping[str, Any]


class Effect(StrEnum):
    """The effect of a change of a field of the spec on a job that has a plan."""

    AT_ONCE = "At once"
    """The change takes effect without a restart."""
    RESTART = "Restart"
    """The job gets a new plan, its pods write a checkpoint and stop, and new pods continue from the checkpoint."""
    FIXED = "Fixed"
    """Until training has begun, the change has the effect RESTART. After that, the change is refused."""


class Compared(StrEnum):
    """The kind of difference in a field with Effect.FIXED for which a change is refused after training has begun."""

    VALUE = "value"
    """Every change of the value is refused. An unset field has its default value."""
    PRESENCE = "presence"
    """Adding or removing the value is refused. A change from one value to another is allowed."""
    SET_VALUE = "set value"
    """A change from one value to another is refused. Adding or removing the value is allowed."""


@dataclass(frozen=True)
class Change:
    """A row of the table of changes. ``path``: a field of the spec. The row also holds for its inner fields.

    ``note``: text for users, such as the reason why the field is fixed. ``compared``: the kind of difference that is
    refused, for Effect.FIXED only.
    """

    path: str
    effect: Effect
    note: str = ""
    compared: Compared = Compared.VALUE
    after_end: bool = False
    """True if the field may change after the job has ended."""


def _rows(effect: Effect, notes: Mapping[str, str]) -> tuple[Change, ...]:
    """Return one row for each field in ``notes`` (path → note for users), all with the same ``effect``."""
    return tuple(Change(path, effect, note) for path, note in notes.items())


_IN_CHECKPOINT = "Training continues with the value in the checkpoint."

CHANGES: tuple[Change, ...] = (
    *_rows(
        Effect.AT_ONCE,
        {
            "suspend": "true: the pods write a checkpoint and stop. false: the pods start again.",
            "runPolicy.activeDeadlineSeconds": "",
            "runPolicy.nodeLostSeconds": "",
            "scheduling.startTimeout": "",
            "scheduling.finishBy": "The order of the queue changes accordingly.",
            "planning.resize": "",
        },
    ),
    Change(
        "runPolicy.ttlSecondsAfterFinished",
        Effect.AT_ONCE,
        "This field may also change after the job has ended.",
        after_end=True,
    ),
    Change("task.type", Effect.FIXED, "The checkpoint is of the model for this task."),
    Change("task.target", Effect.FIXED, "The checkpoint is of the model for this column."),
    Change("task.text", Effect.FIXED, "The checkpoint is of the model for this column."),
    Change("task.within", Effect.FIXED, "The limit decided on the model and its epochs."),
    Change("model.name", Effect.FIXED, "A checkpoint fits only its own model."),
    Change("dataset.name", Effect.FIXED, "The order of samples, and often the model's shape, depend on it."),
    Change("dataset.samples", Effect.FIXED, "The order of samples depends on it."),
    Change("dataset.distribution", Effect.FIXED, "The order of samples depends on it."),
    Change(
        "dataset.sha256",
        Effect.FIXED,
        "Another checksum means other data. A checksum may be added or removed.",
        Compared.SET_VALUE,
    ),
    Change("globalBatchSize", Effect.FIXED, "The order of samples, epochs and the learning rate depend on it."),
    Change("seed", Effect.FIXED, "The order of samples depends on it."),
    Change("optimizer.name", Effect.FIXED, "A checkpoint fits only its own optimizer."),
    Change("optimizer.momentum", Effect.FIXED, _IN_CHECKPOINT),
    Change("optimizer.weightDecay", Effect.FIXED, _IN_CHECKPOINT),
    Change("optimizer.findLearningRate", Effect.FIXED, "The learning rate is searched before the first step."),
    Change("optimizer.learningRateCurve", Effect.FIXED, "The learning rate is searched before the first step."),
    Change("trainer.framework", Effect.FIXED, "Each framework has its own kind of script."),
    Change(
        "trainer.command",
        Effect.FIXED,
        "A script cannot continue from the checkpoint of a built-in model, and vice versa. Another command of a script "
        "takes effect by a restart.",
        Compared.PRESENCE,
    ),
    Change("checkpoint.uri", Effect.FIXED, "The checkpoint is at this location."),
    Change("checkpoint.volume.claimName", Effect.FIXED, "The checkpoint is in this claim."),
    Change("checkpoint.volume.storageClassName", Effect.FIXED, "The claim already exists."),
    Change("checkpoint.volume.shared", Effect.FIXED, "The claim already exists."),
    Change("checkpoint.volume.size", Effect.FIXED, "The claim already exists. To expand the claim, edit it."),
    Change("checkpoint.volume.reclaimPolicy", Effect.FIXED, "The claim already exists."),
    *_rows(
        Effect.RESTART,
        {
            "model.hints": "",
            "model.syncBatchNorm": "",
            "dataset.uri": "The new location must have the same data. `dataset.sha256` verifies this.",
            "dataset.sampleBytes": "",
            "dataset.size": "",
            "dataset.secretName": "",
            "dataset.cacheClaimName": "",
            "batchSizeRange": "The range must contain the global batch size of the checkpoint "
            "(`status.plan.batchChoice`).",
            "epochs": "A job that has already trained for this many epochs completes.",
            "steps": "A job that has already made this many steps completes.",
            "until": "The next value of the metric decides.",
            "optimizer.learningRate": "",
            "optimizer.learningRateScaling": "",
            "trainer.image": "",
            "trainer.agent": "",
            "trainer.elastic": "",
            "trainer.imagePullPolicy": "",
            "trainer.imagePullSecrets": "",
            "trainer.args": "",
            "trainer.source": "New pods run the new files. A script continues from its own checkpoint, if it can.",
            "trainer.env": "",
            "trainer.scratch": "",
            "trainer.envFrom": "",
            "nodes": "The scale subresource (kubectl scale, autoscalers) also changes this field.",
            "devices": "",
            "objective": "",
            "planning": "`mode: PlanOnly` stops the pods.",
            "collective": "",
            "gradientCompression": "",
            "precision": "Training continues from the checkpoint, whose parameters are float32, in the new precision.",
            "activationCheckpointing": "Training continues from the checkpoint: results do not depend on it.",
            "parallelism": "",
            "checkpoint.enabled": "false: the job starts again from step 0.",
            "checkpoint.interval": "",
            "checkpoint.keep": "",
            "checkpoint.secretName": "New content of the same Secret takes effect without a restart.",
            "checkpoint.stagingSize": "",
            "runPolicy.backoffLimit": "",
            "runPolicy.failureRules": "",
            "runPolicy.compareParametersSteps": "",
            "runPolicy.terminationGracePeriodSeconds": "",
            "scheduling": "",
            "resources": "",
            "podTemplateOverrides": "",
        },
    ),
)
FIXED = tuple(change for change in CHANGES if change.effect is Effect.FIXED)
_AT_ONCE = tuple(change.path for change in CHANGES if change.effect is Effect.AT_ONCE)
AFTER_END = tuple(change.path for change in CHANGES if change.after_end)
SAME_COMPUTATION = (
    "epochs", "steps", "until", "optimizer.learningRate", "optimizer.learningRateScaling", "dataset.secretName",
    "trainer.imagePullPolicy", "trainer.imagePullSecrets", "nodes", "devices", "objective", "checkpoint", "runPolicy",
    "scheduling", "resources.cpu", "resources.cpuLimit",
)  # fmt: skip
"""Fields with Effect.RESTART whose changes leave alone what ranks compute in a step: the script or model, its data and
its global batch size. What a job has learned about the memory of its pods outlasts such changes."""

CHANGE_REFUSED = "ChangeRefused"
JOB_ENDED = "JobEnded"
AS_BEGUN = (
    ", as when training began. Restore the former value, or delete the job and create it again to train from the "
    "beginning"
)
BATCH_OUT_OF_RANGE = "spec.batchSizeRange: found a range without the job's global batch size; expected a range with "
ENDED = (
    f": found a change after the job has ended; expected changes of {', '.join(AFTER_END)} only, because changes "
    "of other fields have no effect. Create a new job with another name, or delete this job first"
)


@dataclass(frozen=True)
class RefusedChange:
    """The refusal of a change of a spec. ``reason`` and ``message``: those of the condition Accepted."""

    reason: str
    message: str


def change_of(path: str) -> Change:
    """Return the row of ``CHANGES`` for a field of the spec, such as ``nodes.max``. Raise KeyError if there is none.

    The row may be that of a section that contains the field, here ``nodes``.
    """
    found = [change for change in CHANGES if f"{path}.".startswith(f"{change.path}.")]
    if not found:
        raise KeyError(path)
    return found[0]


def refused_change(old: DLJobSpec, new: DLJobSpec, status: DLJobStatus, *, begun: bool = False) -> RefusedChange | None:
    """Return why a job with the spec ``old`` must not get the spec ``new``; None if the operator may apply the change.

    Before training has begun (see ``has_begun``), every change is allowed. ``begun``: True if the caller knows that it
    has begun although ``status`` does not show it yet. After the job's end, only fields in ``AFTER_END`` may change.
    """
    before, after = old.manifest(), new.manifest()
    if status.completion_time is not None:
        changed = ended_changes(before, after)
        text = f"{', '.join(f'spec.{path}' for path in changed)}{ENDED}"
        return RefusedChange(JOB_ENDED, text) if changed else None
    if not (begun or has_begun(old, status)):
        return None
    differences = [_difference(change, _at(before, change.path), _at(after, change.path)) for change in FIXED]
    found = "; ".join(text for text in differences if text)
    return RefusedChange(CHANGE_REFUSED, f"{found}{AS_BEGUN}") if found else None


def has_begun(spec: DLJobSpec, status: DLJobStatus) -> bool:
    """Return True if training has begun: fields with Effect.FIXED must not change any more.

    This is the case if the job has a checkpoint, or if it writes checkpoints and has made a step, because it then
    writes one when its pods stop.
    """
    stepped = status.progress is not None and status.progress.step > 0
    return status.last_checkpoint is not None or (spec.checkpoint.enabled and stepped)


def refused_update(old: DLJobSpec, new: DLJobSpec, status: DLJobStatus) -> RefusedChange | None:
    """Return why the CRD's rules refuse a change of a spec from ``old`` to ``new``; None if they allow the change.

    ``dljob plan`` and ``dljob run`` call this, because the cluster may have an older CRD without these rules. If the
    operator has refused an earlier change that ``old`` still contains, these rules allow nearly every change, because
    users must be able to reverse the refused one. The operator then decides. The rules still refuse changes after the
    job's end, and a ``batchSizeRange`` that lacks the job's global batch size.
    """
    found = refused_change(old, new, status)
    if found is not None and (found.reason == JOB_ENDED or not _is_refused(status)):
        return found
    return _batch_out_of_range(old, new, status)


def _batch_out_of_range(old: DLJobSpec, new: DLJobSpec, status: DLJobStatus) -> RefusedChange | None:
    """Return a refusal if training has begun, and the new ``batchSizeRange`` lacks the job's global batch size.

    This is the size that the planner has chosen. Return None if the range contains it or does not change, or if no size
    was chosen. ``refused_change`` does not check this: the operator refuses such a range when it plans
    (``reconcile.planning``).
    """
    choice, bounds = status.plan.batch_choice if status.plan is not None else None, new.batch_size_range
    if choice is None or bounds == old.batch_size_range or not has_begun(old, status):
        return None
    batch = choice.global_batch_size
    if new.global_batch_size is None:
        return None  # Only a job with trainer.framework Torchrun or MPI, for which the planner chooses no batch size.
    least, most = (bounds.min or new.global_batch_size, bounds.max) if bounds else (new.global_batch_size,) * 2
    if least <= batch <= most:
        return None
    return RefusedChange(CHANGE_REFUSED, f"{BATCH_OUT_OF_RANGE}{batch}{AS_BEGUN}")


def _is_refused(status: DLJobStatus) -> bool:
    """Return True if the operator has refused a change that is still in the spec.

    The condition Accepted shows this. Somebody must set the changed fields back to their former values.
    """
    return any(
        (c.type, c.status, c.reason) == ("Accepted", ConditionStatus.FALSE, CHANGE_REFUSED) for c in status.conditions
    )


def ended_changes(before: Json, after: Json) -> tuple[str, ...]:
    """Return the paths of all differences between two specs that are not allowed after the job has ended.

    ``before``, ``after``: the manifests of the old and the new spec. A path is that of a section, such as ``nodes``, or
    of a field. The result is empty if nothing differs, or only fields that may change after the end.
    """
    return tuple(
        path for path in ended_paths(tuple(dict.fromkeys([*before, *after]))) if _at(before, path) != _at(after, path)
    )


def ended_paths(sections: tuple[str, ...]) -> Iterator[str]:
    """Yield the paths in a spec that must not change after a job has ended.

    ``sections``: names of the fields at the top of the spec, such as ``nodes``. Each of them is yielded. If some inner
    fields of a section may change, its other fields in ``CHANGES`` are yielded instead of the section.
    """
    for section in sections:
        inside = [c for c in CHANGES if c.path.startswith(f"{section}.")]
        if any(c.after_end for c in inside):
            yield from (c.path for c in inside if not c.after_end)
        else:
            yield section


def planned_fields(spec: DLJobSpec) -> dict[str, Any]:
    """Return the spec's manifest without the fields that take effect at once (Effect.AT_ONCE).

    The plan and the pods depend on exactly these fields, so that a job needs a new plan if the result differs from that
    of the planned spec. Fields that have their default values are left out, so that a release that adds a field with a
    default returns the same manifest as before.
    """
    return _without(spec.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True), _AT_ONCE)


def computed_fields(planned: Json) -> dict[str, Any]:
    """Return those of the ``planned_fields`` of a spec on which it depends what ranks compute in a step."""
    return _without(planned, SAME_COMPUTATION)


def _without(manifest: Json, paths: Iterable[str]) -> dict[str, Any]:
    """Return a manifest without the fields at ``paths``, and without sections that are empty then."""
    kept = dict(manifest)
    for path in paths:
        section, _, name = path.rpartition(".")
        if not section:
            kept.pop(name, None)
        elif section in kept:
            inner = {key: value for key, value in kept.pop(section).items() if key != name}
            kept |= {section: inner} if inner else {}
    return kept


def with_immediate_fields(accepted: DLJobSpec, new: DLJobSpec) -> DLJobSpec:
    """Return ``accepted``, but with the values of ``new`` in all fields that take effect at once (Effect.AT_ONCE).

    A field that ``new`` does not set gets its default. The result has the mode PlanOnly if ``new`` has it: a user can
    then always stop the pods. The operator uses the result if it refuses the other changes in ``new``.
    """
    given = new.manifest()
    manifest = planned_fields(accepted)
    if new.planning.mode is PlanningMode.PLAN_ONLY:
        manifest["planning"] = {"mode": PlanningMode.PLAN_ONLY.value}
    for path in _AT_ONCE:
        if (value := _at(given, path)) is not None:
            section, _, name = path.rpartition(".")
            (manifest.setdefault(section, {}) if section else manifest)[name] = value
    return DLJobSpec.model_validate(manifest)


def _difference(change: Change, before: Any, after: Any) -> str | None:
    """Describe how the new value of a field differs from its fixed value; None if the difference is allowed.

    ``before``, ``after``: the old and the new value, None if unset. None is also returned if the values do not differ.
    """
    match change.compared:
        case Compared.VALUE:
            differs = before != after
        case Compared.PRESENCE:
            differs = bool(before) != bool(after)
        case Compared.SET_VALUE:
            differs = before is not None and after is not None and before != after
    if not differs:
        return None
    if change.compared is Compared.PRESENCE:
        before, after = ("a value" if value else None for value in (before, after))
    return f"spec.{change.path}: found {_shown(after)}; expected {_shown(before)}"


def _shown(value: Any) -> str:
    """Format the value of a field for a message, in the same way as the messages of the CEL rules; None: 'no value'."""
    if value is None:
        return "no value"
    return f"{value:g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)


def _at(manifest: Json, path: str) -> Any:
    value: Any = manifest
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
