"""Laws of changes of an existing job's spec: table, CEL rules and the operator's check agree about every field."""

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dljob.api import DLJobSpec, DLJobStatus, PlanningMode, crd
from dljob.api.change_rules import is_change_rule
from dljob.api.changes import (
    AFTER_END,
    CHANGE_REFUSED,
    CHANGES,
    FIXED,
    JOB_ENDED,
    SAME_COMPUTATION,
    Effect,
    change_of,
    computed_fields,
    ended_paths,
    has_begun,
    planned_fields,
    refused_change,
    refused_update,
    with_immediate_fields,
)
from dljob.job.plan.stored import spec_digest
from support.manifests.admission import change_refusals, defaulted, schema_of
from support.spec_changes import ENDED, FIELDS, PATHS, SAVED, SCRIPT, SPEC, TIME, URI, pair
from support.specs.cases import CASES
from support.specs.small_specs import MINIMAL, spec_of

Json = dict[str, Any]


def job(spec: Json, status: Json | None) -> Json:
    return {"metadata": {"name": "a"}, "spec": spec} | ({} if status is None else {"status": status})


def progress(step: int) -> Json:
    return {"progress": {"step": step, "steps": 10, "percent": 10 * step}}


def volume(size: int | str) -> Json:
    return {"checkpoint": {"volume": {"size": size}}}


ACCEPTED = {"type": "Accepted", "status": "False", "reason": CHANGE_REFUSED, "lastTransitionTime": TIME}
NOT_BEGUN: list[Json | None] = [None, progress(0)]
BEGUN: list[Json] = [SAVED, progress(1)]


def by_server(before: Json, after: Json, status: Json | None) -> list[str]:
    return change_refusals(job(before, status), job(after, status))


def by_operator(before: Json, after: Json, status: Json | None) -> str | None:
    specs = (DLJobSpec.model_validate(spec) for spec in (before, after))
    found = refused_change(*specs, DLJobStatus.model_validate(status or {}))
    return None if found is None else found.message


def test_every_field_has_a_row_and_every_row_a_field() -> None:
    rows = {change_of(path).path for path in FIELDS}
    assert rows == {change.path for change in CHANGES}
    assert len(CHANGES) == len({change.path for change in CHANGES})
    with pytest.raises(KeyError):
        change_of("mascot")


@pytest.mark.parametrize("path", PATHS)
def test_change_has_the_effect_in_the_table(path: str) -> None:
    before, after = pair(path)
    change, digests = change_of(path), [spec_digest(DLJobSpec.model_validate(spec)) for spec in (before, after)]
    assert (digests[0] == digests[1]) == (change.effect is Effect.AT_ONCE), "a new digest needs a new plan"
    if change.effect is not Effect.FIXED:
        assert by_server(before, after, SAVED) == [] and by_operator(before, after, SAVED) is None
        return
    for status in NOT_BEGUN:
        assert by_server(before, after, status) == [] and by_operator(before, after, status) is None
    for status in BEGUN:
        found = by_operator(before, after, status)
        assert found is not None and found.startswith(f"spec.{path}: found ")
        assert by_server(before, after, status) == [found]


@pytest.mark.parametrize("path", PATHS)
def test_after_the_end_only_the_time_to_live_may_change(path: str) -> None:
    before, after = pair(path)
    found = by_operator(before, after, ENDED)
    if path in AFTER_END:
        assert found is None and by_server(before, after, ENDED) == []
        return
    assert found is not None and "after the job has ended" in found and "Create a new job" in found
    (text,) = by_server(before, after, ENDED)
    assert text == found
    assert text.split(":")[0] in (f"spec.{path}", f"spec.{path.partition('.')[0]}")


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ({"seed": 3}, {}, "spec.seed: found 0; expected 3, as when training began"),
        ({}, {"model": {"name": "lenet"}}, "spec.model.name: found lenet; expected mlp"),
        ({}, SCRIPT, "spec.model.name: found no value; expected mlp"),
        ({}, {"optimizer": {"momentum": 0.5}}, "spec.optimizer.momentum: found 0.5; expected 0.9"),
        ({}, {"optimizer": {"findLearningRate": True}}, "spec.optimizer.findLearningRate: found true; expected false"),
        ({}, {"trainer": {"command": ["a"]}}, "spec.trainer.command: found a value; expected no value"),
        ({"dataset": URI}, {"dataset": {**URI, "samples": 7}}, "spec.dataset.samples: found 7; expected 9"),
        (volume(2**30), volume("2Gi"), "spec.checkpoint.volume.size: found 2Gi; expected 1073741824"),
        (volume(2**30), {}, "spec.checkpoint.volume.size: found 1Gi; expected 1073741824"),
        (volume("9Gi"), volume(2**30), "spec.checkpoint.volume.size: found 1073741824; expected 9Gi"),
        (volume(1), volume(2**30), "spec.checkpoint.volume.size: found 1073741824; expected 1"),
        (
            {},
            {"checkpoint": {"volume": {"claimName": "c"}}},
            "spec.checkpoint.volume.claimName: found c; expected no value",
        ),
    ],
)
def test_message_has_field_and_both_values(before: Json, after: Json, words: str) -> None:
    specs = [defaulted(SPEC, spec_of(changes)) for changes in (before, after)]
    text = by_operator(specs[0], specs[1], SAVED)
    assert text is not None and text.startswith(words)
    assert any(found.startswith(words) for found in by_server(specs[0], specs[1], SAVED))


@pytest.mark.parametrize(("old", "new"), [(2**30, 2**30), (2**30, "1073741824"), ("1073741824", 2**30)])
def test_integer_and_its_text_are_the_same_size(old: int | str, new: int | str) -> None:
    before, after = (defaulted(SPEC, spec_of(volume(size))) for size in (old, new))
    assert by_operator(before, after, SAVED) is None and by_server(before, after, SAVED) == []
    digests = {spec_digest(DLJobSpec.model_validate(spec)) for spec in (before, after)}
    assert len(digests) == 1, "the job needs no new plan"


def chosen(batch: int) -> Json:
    """Return the status of a job with a checkpoint and this global batch size, which the operator has chosen."""
    plan = {
        "number": 1, "digest": "d", "summary": "s", "nodes": 1, "ranks": 1, "collective": "Ring",
        "predicted": {"stepSeconds": 1, "stepSecondsP90": 1, "totalSeconds": 1, "samplesPerSecond": 1},
        "batchChoice": {"globalBatchSize": batch, "steps": 5, "message": "m"},
    }  # fmt: skip
    return SAVED | {"plan": plan}


@pytest.mark.parametrize(
    ("after", "batch", "allowed"),
    [
        ({"batchSizeRange": {"max": 64}}, 32, True),
        ({"batchSizeRange": {"max": 16}}, 32, False),
        ({"batchSizeRange": {"min": 4, "max": 64}}, 4, True),
        ({"batchSizeRange": {"max": 64}}, 4, False),
        ({}, 32, False),
        ({}, 8, True),
        ({"batchSizeRange": {"min": 2, "max": 128}}, 200, True),
    ],
)
def test_range_of_batch_sizes_keeps_the_chosen_one(after: Json, batch: int, allowed: bool) -> None:
    specs = [defaulted(SPEC, spec_of(c)) for c in ({"batchSizeRange": {"min": 2, "max": 128}}, after)]
    old, new = (DLJobSpec.model_validate(spec) for spec in specs)
    found = refused_update(old, new, DLJobStatus.model_validate(chosen(batch)))
    assert bool(by_server(specs[0], specs[1], chosen(batch))) == (not allowed)
    assert (found is None) == allowed
    if found is not None:
        assert found.message.startswith("spec.batchSizeRange: found") and str(batch) in found.message


ALLOWED: dict[str, tuple[Json, Json]] = {
    "another command": (SCRIPT, {**SCRIPT, "trainer": {"command": ["z"], "args": ["b"]}}),
    "a checksum is added": ({"dataset": {**URI, "sha256": None}}, {"dataset": URI}),
    "a checksum is removed": ({"dataset": URI}, {"dataset": {**URI, "sha256": None}}),
    "an explicit default": ({}, {"seed": 0, "optimizer": {"name": "SGD"}, "trainer": {"command": []}}),
}


def cleaned(changes: Json) -> Json:
    return {k: {n: v for n, v in s.items() if v is not None} if isinstance(s, dict) else s for k, s in changes.items()}


@pytest.mark.parametrize("case", ALLOWED)
def test_parts_of_fixed_fields_may_change(case: str) -> None:
    before, after = (defaulted(SPEC, spec_of(cleaned(changes))) for changes in ALLOWED[case])
    assert by_operator(before, after, SAVED) is None and by_server(before, after, SAVED) == []


def test_fields_as_stored_by_an_older_crd_without_defaults_are_compared() -> None:
    """A rule that cannot be evaluated would refuse the change."""
    assert by_server(MINIMAL, {**MINIMAL, "epochs": 2}, SAVED) == []
    (text,) = by_server(MINIMAL, {**MINIMAL, "seed": 2}, SAVED)
    assert text.startswith("spec.seed: found 2; expected 0")
    assert by_server(MINIMAL, dict(MINIMAL), ENDED) == []


def test_jobs_without_checkpoints_may_change_every_field() -> None:
    before, after = (defaulted(SPEC, spec_of({"checkpoint": {"enabled": False}, **more})) for more in ({}, {"seed": 2}))
    assert by_server(before, after, progress(5)) == [] and by_operator(before, after, progress(5)) is None
    assert by_server(before, after, SAVED) != [] and by_operator(before, after, SAVED) is not None


def test_several_changes_are_all_named() -> None:
    before, after = defaulted(SPEC, MINIMAL), defaulted(SPEC, spec_of({"seed": 2, "model": {"name": "lenet"}}))
    text = by_operator(before, after, SAVED)
    assert text is not None and "spec.seed: found 2" in text and "spec.model.name: found lenet" in text
    assert fields_in("; ".join(by_server(before, after, SAVED))) == {"spec.seed", "spec.model.name"}


STATUSES = st.fixed_dictionaries(
    {},
    optional={
        "phase": st.sampled_from(["Running", "Complete"]),
        "conditions": st.lists(st.just(ACCEPTED), max_size=1),
        "progress": st.integers(0, 2).map(lambda step: progress(step)["progress"]),
        "lastCheckpoint": st.just(SAVED["lastCheckpoint"]),
        "completionTime": st.just(TIME),
    },
)
VALID = [changes for changes, words in CASES.values() if not words]
WITHOUT_EMPTY = [changes for changes in VALID if changes != {"trainer": {"args": []}}]
"""To an API server, an empty list differs from none."""


@settings(max_examples=60, deadline=None)
@given(changes=st.sampled_from(VALID), stored=st.booleans(), old=st.none() | STATUSES, new=st.none() | STATUSES)
def test_updates_of_the_status_are_never_refused(
    changes: Json, stored: bool, old: Json | None, new: Json | None
) -> None:
    spec = defaulted(SPEC, spec_of(changes)) if stored else spec_of(changes)
    assert change_refusals(job(spec, old), job(spec, new)) == []


def fields_in(message: str) -> set[str]:
    """Return the fields that a refusal names."""
    return set(re.findall(r"spec\.[\w.]+(?=: found|, spec\.)", message))


@settings(max_examples=60, deadline=None)
@given(before=st.sampled_from(WITHOUT_EMPTY), after=st.sampled_from(WITHOUT_EMPTY), status=STATUSES)
def test_server_and_operator_agree(before: Json, after: Json, status: Json) -> None:
    specs = [defaulted(SPEC, spec_of(changes)) for changes in (before, after)]
    old, new = (DLJobSpec.model_validate(spec) for spec in specs)
    found = refused_update(old, new, DLJobStatus.model_validate(status))
    messages = by_server(specs[0], specs[1], status)
    assert bool(messages) == (found is not None)
    if found is not None:
        assert fields_in("; ".join(messages)) <= fields_in(found.message)


def test_spec_that_the_operator_refused_can_be_set_back() -> None:
    """The API server admitted the first change, because the status did not show yet that training had begun."""
    before, after = defaulted(SPEC, spec_of({"seed": 7})), defaulted(SPEC, MINIMAL)
    refused = SAVED | {"conditions": [ACCEPTED]}
    assert by_server(before, after, refused) == [] and by_server(before, after, SAVED) != []
    specs = [DLJobSpec.model_validate(spec) for spec in (before, after)]
    assert refused_update(specs[0], specs[1], DLJobStatus.model_validate(refused)) is None
    ended = refused_update(specs[0], specs[1], DLJobStatus.model_validate(refused | ENDED))
    assert ended is not None and ended.reason == JOB_ENDED


@given(status=STATUSES)
def test_a_job_has_begun_once_its_next_pods_would_find_a_checkpoint(status: Json) -> None:
    spec = DLJobSpec.model_validate(MINIMAL)
    parsed = DLJobStatus.model_validate(status)
    assert has_begun(spec, parsed) == ("lastCheckpoint" in status or status.get("progress", {}).get("step", 0) > 0)


@pytest.mark.parametrize("path", PATHS)
def test_immediate_fields_are_those_of_the_new_spec(path: str) -> None:
    before, after = (DLJobSpec.model_validate(spec) for spec in pair(path))
    followed = with_immediate_fields(before, after)
    plan_only = after.planning.mode is PlanningMode.PLAN_ONLY
    assert followed == (after if change_of(path).effect is Effect.AT_ONCE or plan_only else before)


@pytest.mark.parametrize("planned", [{}, {"mode": "Fixed", "groups": [{"device": "cpu", "nodes": 2}]}])
def test_plan_only_takes_effect_although_other_changes_are_refused(planned: Json) -> None:
    before = DLJobSpec.model_validate(spec_of({"planning": planned}))
    after = DLJobSpec.model_validate(spec_of({"planning": {"mode": "PlanOnly", "resize": "Never"}, "seed": 7}))
    followed = with_immediate_fields(before, after)
    assert followed.planning == after.planning and followed.seed == before.seed


def test_planned_fields_are_those_of_the_digest() -> None:
    spec = DLJobSpec.model_validate(
        spec_of({"suspend": True, "runPolicy": {"nodeLostSeconds": 30, "backoffLimit": 2}, "nodes": {"min": 1}})
    )
    assert planned_fields(spec) == spec_of({"runPolicy": {"backoffLimit": 2}})
    assert spec_digest(DLJobSpec.model_validate(planned_fields(spec))) == spec_digest(spec)


def test_computed_fields_are_those_that_the_memory_of_a_pod_depends_on() -> None:
    for path in SAME_COMPUTATION:
        rows = [each for each in CHANGES if f"{path}.".startswith(f"{each.path}.") or each.path.startswith(f"{path}.")]
        assert Effect.RESTART in {each.effect for each in rows}, path
    planned = spec_of({"epochs": 3, "resources": {"cpu": "2", "memory": "1Gi"}, "optimizer": {"learningRate": 0.5}})
    before = str(planned)
    expected = {key: value for key, value in planned.items() if key not in ("epochs", "steps", "nodes", "optimizer")}
    assert computed_fields(planned) == expected | {"resources": {"memory": "1Gi"}}
    assert str(planned) == before


def test_digests_are_those_of_the_last_release() -> None:
    """Another digest would restart every running job at an upgrade."""
    policy = {"backoffLimit": 2, "activeDeadlineSeconds": 9, "ttlSecondsAfterFinished": 5, "nodeLostSeconds": 30}
    spec = DLJobSpec.model_validate(spec_of({"suspend": True, "runPolicy": policy, "devices": ["cpu"]}))
    assert spec_digest(spec) == "v1-8b07fc5474a18fb4"
    assert spec_digest(DLJobSpec.model_validate(spec_of({"suspend": True}))) == "v1-8111d612d6976b85"


def test_rules_about_changes_name_all_fields_that_they_compare() -> None:
    rules = [rule for rule in schema_of("DLJob")["x-kubernetes-validations"] if is_change_rule(rule)]
    text = " ".join(rule.get("messageExpression", rule["message"]) for rule in rules)
    paths = [*(change.path for change in FIXED), *ended_paths(tuple(SPEC["properties"]))]
    assert [path for path in paths if f"'spec.{path}" not in text] == []
    assert len(rules) < 10, "the API server evaluates each with each write of a status"
    assert all("optionalOldSelf" not in rule for rule in rules), "a new object is not refused"
    assert crd.job_definition()["spec"]["versions"][0]["subresources"]["status"] == {}
