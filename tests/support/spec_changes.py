"""A valid change of each field of a DLJob's spec, for tests of what a change of an existing job does."""

import copy
from collections.abc import Iterator
from typing import Any

from support.manifests.admission import defaulted, schema_of
from support.specs.small_specs import HINTS, MINIMAL, SHA256, SHARDED, TASK, spec_of

Json = dict[str, Any]
SPEC = schema_of("DLJob", "spec")
TIME = "2026-03-01T12:00:00Z"
SAVED: Json = {"lastCheckpoint": {"step": 3, "time": TIME}}
"""Status of a job whose training has begun."""
ENDED: Json = SAVED | {"completionTime": TIME}
URI = {"uri": "pvc://a/b", "samples": 9, "sha256": SHA256}
FETCHED = {"uri": "https://a.example/b.npz", "samples": 9}
SCRIPT: Json = {"model": {"hints": HINTS}, "trainer": {"command": ["a"], "args": ["b"]}}
RANGE = {"min": 2, "max": 64}
TARGET = {"metric": "accuracy", "atLeast": 0.97}
STALE = {"synchronization": "StaleSynchronous", "stalenessBound": 2}
STAGES = {"strategy": "Pipeline", "stages": 2, "microBatches": 2}
SCALING = {"rule": "Linear", "baseBatchSize": 4}
TEXTS: Json = {**TASK, "task": {"type": "TextClassification"}}
GROUPS = {"mode": "Fixed", "groups": [{"device": "cpu", "nodes": 1}]}

# Specs before and after a change of a field that other rules tie to more than one field. ``None`` removes a section.
BEFORE_AND_AFTER: dict[str, tuple[Json, Json]] = {
    "model.hints": (SCRIPT, {**SCRIPT, "model": {"hints": {**HINTS, "parameters": 2}}}),
    "task.type": (TASK, TEXTS),
    "task.target": (TASK, {**TASK, "task": {**TASK["task"], "target": "a"}}),
    "task.text": (TEXTS, {**TEXTS, "task": {**TEXTS["task"], "text": "a"}}),
    "task.within": (TASK, {**TASK, "task": {**TASK["task"], "within": "20m"}}),
    "dataset.uri": ({"dataset": URI}, {"dataset": {**URI, "uri": "pvc://a/c"}}),
    "dataset.samples": ({"dataset": URI}, {"dataset": {**URI, "samples": 10}}),
    "dataset.distribution": ({"dataset": {**SHARDED, "distribution": "Full"}}, {"dataset": SHARDED}),
    "dataset.sha256": ({"dataset": URI}, {"dataset": {**URI, "sha256": "f" * 64}}),
    "dataset.size": ({"dataset": FETCHED}, {"dataset": {**FETCHED, "size": "3Gi"}}),
    "dataset.secretName": ({"dataset": FETCHED}, {"dataset": {**FETCHED, "secretName": "s"}}),
    "checkpoint.uri": ({"checkpoint": {"uri": "s3://models/a"}}, {"checkpoint": {"uri": "s3://models/b"}}),
    "checkpoint.secretName": (
        {"checkpoint": {"uri": "s3://models/a"}}, {"checkpoint": {"uri": "s3://models/a", "secretName": "s"}},
    ),
    "checkpoint.stagingSize": (
        {"checkpoint": {"uri": "s3://models/a"}}, {"checkpoint": {"uri": "s3://models/a", "stagingSize": "9Gi"}},
    ),
    "dataset.cacheClaimName": ({"dataset": FETCHED}, {"dataset": {**FETCHED, "cacheClaimName": "c"}}),
    "batchSizeRange": ({}, {"batchSizeRange": RANGE}),
    "batchSizeRange.min": ({"batchSizeRange": RANGE}, {"batchSizeRange": {**RANGE, "min": 3}}),
    "batchSizeRange.max": ({"batchSizeRange": RANGE}, {"batchSizeRange": {**RANGE, "max": 65}}),
    "epochs": ({}, {"epochs": 2}),
    "until": ({"until": TARGET}, {"until": {**TARGET, "atLeast": 0.98}}),
    "steps": ({"epochs": None, "steps": 5}, {"epochs": None, "steps": 6}),
    "optimizer.learningRateCurve": (
        {"optimizer": {"findLearningRate": True}},
        {"optimizer": {"findLearningRate": True, "learningRateCurve": "Accuracy"}},
    ),
    "optimizer.learningRateScaling": ({}, {"optimizer": {"learningRateScaling": SCALING}}),
    "trainer.command": ({}, {"trainer": {"command": ["a"]}}),
    "trainer.args": (SCRIPT, {**SCRIPT, "trainer": {"command": ["a"], "args": ["c"]}}),
    "trainer.scratch.size": ({}, {"trainer": {"scratch": {"size": "20Gi"}}}),
    "trainer.source": (
        SCRIPT, {**SCRIPT, "trainer": {**SCRIPT["trainer"], "source": {"configMap": {"name": "scripts"}}}},
    ),
    "trainer.agent": ({}, {"trainer": {"agent": "FromImage"}}),
    "trainer.elastic": (
        {"trainer": {"command": ["a"], "framework": "Torchrun"}},
        {"trainer": {"command": ["a"], "framework": "Torchrun", "elastic": True}},
    ),
    "trainer.envFrom": ({}, {"trainer": {"envFrom": [{"configMapRef": {"name": "c"}}]}}),
    "planning": ({}, {"planning": GROUPS}),
    "planning.mode": ({}, {"planning": {"mode": "PlanOnly"}}),
    "planning.groups": (
        {"planning": GROUPS},
        {"planning": {**GROUPS, "groups": [{"device": "cpu", "nodes": 2}]}},
    ),
    "parallelism.stages": ({"parallelism": STAGES}, {"parallelism": {**STAGES, "stages": 3}}),
    "parallelism.microBatches": ({"parallelism": STAGES}, {"parallelism": {**STAGES, "microBatches": 3}}),
    "parallelism.gradientAccumulation": ({}, {"parallelism": {"gradientAccumulation": "Never"}}),
    "parallelism.deferredInit": (
        {**SCRIPT, "parallelism": {"strategy": "Sharded"}},
        {**SCRIPT, "parallelism": {"strategy": "Sharded", "deferredInit": True}},
    ),
    "precision": ({}, {"precision": "BF16"}),
    "activationCheckpointing": ({}, {"activationCheckpointing": "Auto"}),
    "parallelism.synchronization": ({}, {"parallelism": {"synchronization": "Asynchronous"}}),
    "parallelism.stalenessBound": ({"parallelism": STALE}, {"parallelism": {**STALE, "stalenessBound": 3}}),
    "nodes.max": ({"nodes": {"max": 4}}, {"nodes": {"max": 5}}),
    "runPolicy.failureRules": ({}, {"runPolicy": {"failureRules": [{"action": "Ignore", "onReasons": ["Hung"]}]}}),
    "scheduling.tolerations": ({}, {"scheduling": {"tolerations": [{"key": "a", "operator": "Exists"}]}}),
    "scheduling.finishBy": ({}, {"scheduling": {"finishBy": "2026-12-01T18:00:00Z"}}),
    "podTemplateOverrides": ({}, {"podTemplateOverrides": [{"manager": "m", "spec": {"nodeSelector": {"a": "b"}}}]}),
}  # fmt: skip


def fields(schema: Json, path: str = "") -> Iterator[tuple[str, Json]]:
    """Yield every field of the spec and its schema, but no field inside a list or a map."""
    for name, field in schema.get("properties", {}).items():
        here = f"{path}.{name}".lstrip(".")
        if "properties" in field and here not in (
            "model.hints", "batchSizeRange", "optimizer.learningRateScaling", "until", "trainer.source",
        ):  # fmt: skip
            yield from fields(field, here)
        else:
            yield here, field


FIELDS = dict(fields(SPEC))
PATHS = [*FIELDS, "batchSizeRange.min", "batchSizeRange.max", "planning"]


def other(schema: Json, value: Any) -> Any:
    """Return another value that the schema of a field allows."""
    if "enum" in schema:
        return next(item for item in schema["enum"] if item != value)
    match schema.get("type"):
        case "boolean":
            return not value
        case "integer":
            return max(schema.get("minimum", 1), 1) if value is None else value + 1
        case "number":
            return 0.25
        case "array":
            item = schema["items"]
            return [other(item, None) if "properties" not in item else {"name": "A", "value": "b"}]
        case "object":
            return {"a": "b"}
    return {"9Gi": "8Gi"}.get(value, "9Gi") if "[kMGTPE]" in schema.get("pattern", "") else "2h" if "ms|s" in schema.get("pattern", "") else "a"  # fmt: skip


def at(spec: Json, path: str) -> Any:
    for name in path.split("."):
        spec = spec.get(name, {}) if isinstance(spec, dict) else {}
    return spec if spec != {} else None


def pair(path: str) -> tuple[Json, Json]:
    """Return valid specs before and after a change of the field, with defaults, as an API server stores them."""
    if path in BEFORE_AND_AFTER:
        before, after = (spec_of(changes) for changes in BEFORE_AND_AFTER[path])
    else:
        before = defaulted(SPEC, MINIMAL)
        after = copy.deepcopy(before)
        *sections, name = path.split(".")
        target = after
        for section in sections:
            target = target.setdefault(section, {})
        target[name] = other(FIELDS[path], at(before, path))
    return defaulted(SPEC, before), defaulted(SPEC, after)
