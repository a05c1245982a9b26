"""The spec of a job with a task: what the suggestion adds, what the user keeps, and what may still change."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from dlcontract import Outcome, RunPhase
from dljob.api import DLJobSpec
from dljob.api.defaults import JobDefaults
from dljob.job.observed import DIGEST_ANNOTATION, ClaimSeen, LookSeen, Observed
from dljob.job.task.suggested_spec import suggested_spec
from dljob.job.task.suggestion import (
    SUGGESTION_KEY,
    BaselineScore,
    JudgedBaseline,
    SuggestedModel,
    Suggestion,
    task_digest,
)
from dljob.kube.objects import trim
from dljob.kube.objects.pods import looks
from dljob.reconcile import reconcile
from dljob.reconcile.look import MAX_EVICTIONS, REJECTED_RETRY_S
from dljob.reconcile.parsed import parse_observed
from dljob.render.helpers.look import look_objects, look_pod
from support.builders import CONFIG, NOW, UID, after, changed, planned, report, seen, settled
from support.manifests.schema_validation import assert_valid
from support.specs.small_specs import MINIMAL as SMALL

Json = dict[str, Any]
TASK: Json = {"task": {"type": "TabularRegression"}, "dataset": {"uri": "pvc://prices/folder/table.csv"}}
MODEL = SuggestedModel(
    name="linear model", why="the table has 150 rows", parameters=15, flops_per_sample=72.0, activation_nbytes=28,
    batch=16, epochs=20, samples=120, sample_nbytes=18,
)  # fmt: skip
SCORES = JudgedBaseline(
    measure="accuracy", scores=(BaselineScore(model="trees", validation=0.95, error=0.01, test=0.96),), seconds=3.21
)
LOOKS = replace(CONFIG, look_image="operator")


def suggestion(spec: Json = TASK, **changes: Any) -> Suggestion:
    fields: Json = {"uid": UID, "digest": task_digest(DLJobSpec.model_validate(spec)), "model": MODEL, **changes}
    return Suggestion(**fields)


def completed(spec: Json, **model: Any) -> DLJobSpec:
    found = suggestion(spec, model=MODEL.model_copy(update=model))
    return suggested_spec(DLJobSpec.model_validate(spec), found, "prices-suggestion", "prices-uid")


def looked(spec: Json = TASK, **more: Any) -> Observed:
    claims = {name: ClaimSeen(name, "Bound", ("ReadWriteMany",)) for name in ("prices", "copies")}
    return seen(spec, name="prices", suggestion=suggestion(spec).to_json(), claims=claims, **more)


def running(observed: Observed) -> Observed:
    """Return the job with its pods in training, after its first step."""
    started = settled(after(observed, reconcile(observed, LOOKS, NOW)))
    started = replace(started, report=report(started))
    return after(started, reconcile(started, LOOKS, NOW))


def test_the_suggestion_fills_what_the_user_left_out() -> None:
    found = completed(TASK)
    assert found.task is None and found.global_batch_size == 16 and found.epochs == 20
    assert found.dataset.samples == 120 and found.trainer.command == ("python", "train.py")
    assert found.trainer.source is not None and found.trainer.source.config_map is not None
    assert found.trainer.source.config_map.name == "prices-suggestion"
    assert (found.nodes.min, found.nodes.max) == (1, 1) and found.resources.memory is None


def test_what_the_user_sets_stays() -> None:
    own = {
        **TASK, "nodes": {"min": 2, "max": 3}, "resources": {"memory": "3Gi"},
        "trainer": {"env": [{"name": "MODEL_DIR", "value": "/a"}, {"name": "SEED", "value": "1"}]},
    }  # fmt: skip
    found = completed(own, data_nbytes=2**30)
    assert (found.nodes.min, found.nodes.max) == (2, 3) and found.resources.memory == "3Gi"
    assert {each.name: each.value for each in found.trainer.env} == {"MODEL_DIR": "/a", "SEED": "1"}


def test_large_data_gets_memory() -> None:
    assert completed(TASK, data_nbytes=2**30).resources.memory == "1625Mi"


@pytest.mark.parametrize(
    "defaults", [JobDefaults(), JobDefaults.model_validate({"trainer": {"scratch": {"size": "5Gi"}}})]
)
def test_the_completed_job_is_planned_once(defaults: JobDefaults) -> None:
    config = replace(LOOKS, job_defaults=defaults)
    observed = looked()
    first = planned(observed, config)
    parsed = parse_observed(after(observed, reconcile(observed, config, NOW)), defaults=defaults)
    assert parsed.digest == first.spec_digest and parsed.looking is None
    assert parsed.suggestion is not None and parsed.suggestion.model == "linear model"


def test_a_job_that_looks_has_no_spec_and_cannot_be_planned() -> None:
    observed = seen(TASK, name="prices")
    parsed = parse_observed(observed)
    assert parsed.spec is None and parsed.looking is not None and parsed.refusal is None
    kinds = [item["kind"] for item in reconcile(observed, LOOKS, NOW).objects]
    assert kinds == ["ConfigMap", "ServiceAccount", "Role", "RoleBinding", "Pod"]


def test_a_suggestion_of_another_job_or_other_data_is_not_used() -> None:
    assert parse_observed(replace(looked(), suggestion=suggestion(uid="other").to_json())).looking is not None
    other = {**TASK, "dataset": {"uri": "pvc://prices/other.csv"}}
    assert parse_observed(replace(looked(), suggestion=suggestion(other).to_json())).looking is not None


def test_a_suggestion_that_breaks_a_rule_of_the_api_is_refused() -> None:
    observed = looked({**TASK, "optimizer": {"findLearningRate": True}})
    parsed = parse_observed(observed)
    assert parsed.looking is not None and parsed.looking.problem is not None
    assert parsed.looking.problem.reason == "SuggestionNotValid"
    assert "findLearningRate" in parsed.looking.problem.message


def test_after_the_first_step_another_task_is_refused_and_the_job_goes_on() -> None:
    observed = changed(running(looked()), task={"type": "TabularClassification"})
    parsed = parse_observed(observed)
    assert parsed.refusal is not None and parsed.refusal.reason == "ChangeRefused"
    assert parsed.accepted is not None and parsed.digest == parsed.accepted.spec_digest


def test_the_suggestion_of_a_removed_task_leaves_the_status() -> None:
    """Fixed bug: the job of another model was compared with a baseline, and told to copy it from a volume it lacks."""
    job = after(looked(), reconcile(looked(), LOOKS, NOW))
    assert job.job.status["suggestion"]["model"] == "linear model"
    own = {**SMALL, "checkpoint": {"uri": "s3://models/a", "secretName": "s3"}}
    removed = reconcile(replace(job, job=replace(job.job, spec=own, generation=2)), LOOKS, NOW)
    assert removed.status is not None and removed.status.suggestion is None
    trained = running(looked())
    refused = reconcile(replace(trained, job=replace(trained.job, spec=own, generation=2)), LOOKS, NOW)
    assert refused.status is not None and refused.status.suggestion is not None, "training goes on with the task"


def test_after_the_first_step_the_same_data_may_move() -> None:
    parsed = parse_observed(changed(running(looked()), dataset={"uri": "pvc://copies/table.csv"}))
    assert parsed.refusal is None and parsed.spec is not None
    assert parsed.spec.dataset.uri == "pvc://copies/table.csv" and parsed.spec.dataset.samples == 120


def test_after_the_first_step_a_lost_suggestion_is_replaced_by_the_plan() -> None:
    for lost in ({"suggestion": None}, {"suggestion": "{"}, {"suggestion": None, "suggestion_problem": "too long"}):
        observed = replace(running(looked()), **lost)
        parsed = parse_observed(observed)
        assert parsed.spec is not None and parsed.accepted is not None
        assert parsed.digest == parsed.accepted.spec_digest and parsed.looking is None


def test_the_pod_is_restricted_and_bounded_and_its_data_is_read_only() -> None:
    spec = DLJobSpec.model_validate({
        **TASK, "task": {"type": "TabularRegression", "target": "$(HOME) --to=/x", "within": "20m"},
        "scheduling": {"nodeSelector": {"a": "b"}},
    })  # fmt: skip
    pod = look_pod(seen(TASK, name="prices").job, spec, JobDefaults(), LOOKS)
    own = pod["spec"]
    (container,) = own["containers"]
    assert "--target=$$(HOME) --to=/x" in container["args"]
    assert own["activeDeadlineSeconds"] == 720 and container["resources"]["limits"] == {"memory": "2Gi"}
    assert own["securityContext"]["runAsNonRoot"] and not own["automountServiceAccountToken"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    (data,) = [each for each in own["volumes"] if each["name"] == "dataset"]
    assert data["persistentVolumeClaim"] == {"claimName": "prices", "readOnly": True}
    (mount,) = [each for each in container["volumeMounts"] if each["name"] == "dataset"]
    assert mount["readOnly"] and own["nodeSelector"] == {"a": "b"}
    assert pod["metadata"]["ownerReferences"][0]["uid"] == UID
    assert trim.pod({**pod, "metadata": {**pod["metadata"], "uid": "p"}}) == looks.pod(
        {**pod, "metadata": {**pod["metadata"], "uid": "p"}}
    )


@pytest.mark.parametrize("uri", ["pvc://prices/table.csv", "https://data.example/table.csv"])
def test_the_objects_of_the_pod_are_valid_for_every_kubernetes(uri: str) -> None:
    spec = DLJobSpec.model_validate({**TASK, "dataset": {"uri": uri}})
    job = seen(TASK, name="prices").job
    for manifest in (*look_objects(job), look_pod(job, spec, JobDefaults(), LOOKS)):
        assert_valid(manifest)


@pytest.mark.parametrize(
    "uri", ["pvc://pictures/folder", "https://data.example/pictures.tar", "s3://bucket/pictures.npz"]
)
def test_a_job_of_images_finds_them_where_the_look_pod_saw_them(uri: str) -> None:
    images: Json = {"task": {"type": "ImageClassification"}, "dataset": {"uri": uri}}
    pod = look_pod(seen(images, name="prices").job, DLJobSpec.model_validate(images), JobDefaults(), LOOKS)
    path, *arguments = pod["spec"]["containers"][0]["args"]
    assert "--type=ImageClassification" in arguments and not any("--target" in each for each in arguments)
    assert completed(images, activation_nbytes=2**20).dataset.path == path


def test_the_cache_reads_only_the_document() -> None:
    text = suggestion().to_json()
    assert looks.suggestion_problem({SUGGESTION_KEY: text, "train.py": "x" * 500_000}) is None
    assert looks.suggestion_problem({SUGGESTION_KEY: text, "x.pth": ""}) is not None


def test_a_job_waits_for_the_suggestion_of_a_predecessor_to_be_gone() -> None:
    found = reconcile(seen(TASK, name="prices", leftovers=("ConfigMap prices-suggestion",)), LOOKS, NOW)
    assert found.status is not None and not found.objects
    assert "prices-suggestion" in next(c.message for c in found.status.conditions if c.type == "PodsReady")


def test_after_the_first_step_a_suggestion_that_breaks_a_rule_is_replaced_by_the_plan() -> None:
    """Fixed bug: the running job had no spec any more, so that nothing replaced its lost pods."""
    observed = running(looked())
    wrong = suggestion(model=MODEL.model_copy(update={"batch": 10**12}))
    parsed = parse_observed(replace(observed, suggestion=wrong.to_json()))
    assert parsed.looking is None and parsed.spec is not None and parsed.spec.global_batch_size == 16


def _look(phase: str, reason: str = "") -> LookSeen:
    [wanted] = [each for each in reconcile(seen(TASK, name="prices"), LOOKS, NOW).objects if each["kind"] == "Pod"]
    digest = wanted["metadata"]["annotations"][DIGEST_ANNOTATION]
    return LookSeen("prices-look", "pod-uid", digest, phase, reason=reason, node="n1")


def test_a_look_pod_that_its_node_took_away_is_replaced() -> None:
    shut = reconcile(seen(TASK, name="prices", look=_look("Failed", "NodeShutdown")), LOOKS, NOW)
    assert [(target.name, target.force) for target in shut.deletes] == [("prices-look", False)]
    lost = reconcile(seen(TASK, name="prices", look=_look("Running"), lost_nodes={"n1": NOW}), LOOKS, NOW)
    assert [(target.name, target.force) for target in lost.deletes] == [("prices-look", True)]
    failed = reconcile(seen(TASK, name="prices", look=_look("Failed", "DeadlineExceeded")), LOOKS, NOW)
    assert not failed.deletes, "whoever reads its log deletes it"


def test_a_look_pod_that_a_kubelet_rejected_is_replaced_after_a_pause() -> None:
    """Fixed bug: the job waited for ever for somebody to delete the pod, although it had never started."""
    status = {"phase": "Failed", "reason": "OutOfcpu", "message": "Pod was rejected: Node didn't have enough resource"}
    meta = {"name": "prices-look", "uid": "u", "creationTimestamp": NOW.isoformat()}
    pod = looks.pod({"metadata": meta, "spec": {"nodeName": "n1"}, "status": status})
    pod = replace(_look("Failed", "OutOfcpu"), rejection=pod.rejection)
    waiting = reconcile(seen(TASK, name="prices", look=pod), LOOKS, NOW)
    assert waiting.status is not None and not waiting.deletes and waiting.requeue_after_s == REJECTED_RETRY_S
    shown = next(c for c in waiting.status.conditions if c.type == "DataInspected")
    assert shown.reason == "LookDelayed" and "OutOfcpu: Node didn't have enough resource" in shown.message
    later = reconcile(seen(TASK, name="prices", look=pod), LOOKS, NOW + timedelta(seconds=REJECTED_RETRY_S))
    assert [target.name for target in later.deletes] == ["prices-look"] and not later.objects


LOW = "The node was low on resource: memory. Threshold quantity: 100Mi, available: 50Mi. "
FULL = 'Usage of EmptyDir volume "dataset" exceeds the limit "1Gi". '


@pytest.mark.parametrize(
    ("message", "times", "reason"),
    [
        (LOW, 1, "Looking"),
        (LOW, MAX_EVICTIONS, "Looking"),
        (LOW, MAX_EVICTIONS + 1, "LookFailed"),
        ("", 1, "Looking"),
        (FULL, 1, "LookFailed"),
    ],
    ids=["first", "last", "too many", "without a message", "its own data"],
)
def test_a_look_pod_that_its_node_evicted_is_replaced_some_times(message: str, times: int, reason: str) -> None:
    """Fixed bug: an evicted look pod stayed Failed until somebody deleted it."""
    status = {"phase": "Failed", "reason": "Evicted", "message": message}
    found = looks.pod({"metadata": {"name": "prices-look", "uid": "u"}, "spec": {"nodeName": "n1"}, "status": status})
    assert found.eviction is not None
    pod = replace(_look("Failed", "Evicted"), eviction=found.eviction)
    desired = reconcile(seen(TASK, name="prices", look=pod, look_evictions=times * (found.eviction,)), LOOKS, NOW)
    assert [target.name for target in desired.deletes] == ["prices-look"] * (reason == "Looking")
    assert desired.status is not None
    shown = next(c for c in desired.status.conditions if c.type == "DataInspected")
    assert (
        shown.reason == reason and f"node n1 evicted pod prices-look ({message or 'no reason given'})" in shown.message
    )
    assert ("delete the pod to look again" in shown.message) is (reason == "LookFailed")
    assert ("the last of 4 evicted pods" in shown.message) is (times > MAX_EVICTIONS)


@pytest.mark.parametrize(
    ("resources", "requested"),
    [({}, "500m"), ({"cpuLimit": "250m"}, "250m"), ({"cpuLimit": "2"}, "500m"), ({"cpu": "1", "cpuLimit": "2"}, "1")],
)
def test_a_look_pod_requests_no_more_cpus_than_its_limit(resources: Json, requested: str) -> None:
    """Fixed bug: the API server rejected the pod of a job with only a small ``resources.cpuLimit``."""
    found = reconcile(seen({**TASK, "resources": resources}, name="prices"), LOOKS, NOW).objects
    [pod] = [each for each in found if each["kind"] == "Pod"]
    assert pod["spec"]["containers"][0]["resources"]["requests"]["cpu"] == requested


def test_a_finished_job_is_deleted_after_its_time_to_live_although_its_config_maps_are_gone() -> None:
    """Without its plan and its suggestion, the job seems to look at its data again."""
    observed = running(looked({**TASK, "runPolicy": {"ttlSecondsAfterFinished": 60}}))
    observed = replace(
        observed, report=report(observed, phase=RunPhase.SUCCEEDED, outcome=Outcome(steps=75, seconds=40))
    )
    ended = after(observed, reconcile(observed, LOOKS, NOW))
    gone = replace(ended, plan=None, suggestion=None, report=None)
    assert parse_observed(gone).looking is not None
    for found in (ended, gone):
        assert not reconcile(found, LOOKS, NOW + timedelta(seconds=59)).delete_job
        assert reconcile(found, LOOKS, NOW + timedelta(seconds=60)).delete_job


@pytest.mark.parametrize(
    ("baseline", "others", "expected"),
    [
        (JudgedBaseline(problem="the baseline failed: x"), (), "No comparison with a baseline: the baseline failed: x"),
        (
            SCORES,
            ({"name": "trees", "value": 0.96},),
            "trees: accuracy 0.96, better than this model (0.9). To use the baseline",
        ),
    ],
)
def test_the_result_compares_the_model_with_the_baseline(
    baseline: JudgedBaseline, others: tuple[Json, ...], expected: str
) -> None:
    observed = running(replace(looked(), suggestion=suggestion(baseline=baseline).to_json()))
    scores = {"task": "classification", "samples": 360, "metric": "accuracy", "value": 0.9, "other_models": others}
    worse = [{"name": "WorseThanOtherModel", "message": "Use that model"}] if others else []
    outcome = Outcome.model_validate({"steps": 75, "seconds": 40, "analysis": scores, "findings": worse})
    ended = after(
        observed,
        reconcile(replace(observed, report=report(observed, phase=RunPhase.SUCCEEDED, outcome=outcome)), LOOKS, NOW),
    )
    shown = ended.job.status
    assert shown["result"]["comparison"].startswith(expected)
    assert shown["suggestion"]["baseline"]["seconds"] == round(baseline.seconds, 1)
    assert shown["suggestion"]["baseline"].get("problem") == baseline.problem


@pytest.mark.parametrize("fields", [{}, {"measure": "r2"}, {**dict(SCORES), "problem": "x"}])
def test_a_baseline_has_either_scores_or_a_problem(fields: Json) -> None:
    with pytest.raises(ValueError, match="expected one of them"):
        JudgedBaseline(**fields)


def test_a_suggestion_of_an_earlier_release_has_no_baseline() -> None:
    observed = looked()
    assert "baseline" not in (observed.suggestion or "")
    found = parse_observed(observed).suggestion
    assert found is not None and found.baseline is None


def test_texts_of_the_suggestion_and_of_the_pod_have_no_control_characters() -> None:
    with pytest.raises(ValueError) as refusal:
        Suggestion.parse('{"\\u001b[31mred\\u202e": 1}')
    assert str(refusal.value).isprintable()
    container = {"name": "look", "state": {"terminated": {"exitCode": 1, "message": "a\x1b[31mb"}}}
    body = {"metadata": {"name": "prices-look", "uid": "u"}, "status": {"containerStatuses": [container]}}
    assert looks.pod(body).problem.isprintable()
