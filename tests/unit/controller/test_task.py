"""A job with ``spec.task`` on a cluster in memory: its look pod, its suggestion, and the plan that follows."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from dljob.api import DLJobSpec
from dljob.api.overrides import SECRET_LABEL, OverridePolicy
from dljob.job.task.suggestion import SUGGESTION_KEY, SuggestedModel, Suggestion, task_digest
from dljob.kube import JobKey
from dljob.kube.kinds import CONFIG_MAP, DLJOB, POD, STATEFUL_SET, Kind
from dljob.render import RenderConfig
from support.builders import CONFIG
from support.controller.fake_operator import Operator, on_two_nodes
from support.servers.fake_api import FakeCluster

Json = dict[str, Any]
TASK: Json = {
    "task": {"type": "TabularClassification", "target": "species"},
    "dataset": {"uri": "https://data.example/iris.csv?token=secret"},
}
LOOKS: RenderConfig = replace(CONFIG, look_image="registry.example/dljob-operator:0.1.0")
MODEL = SuggestedModel(
    name="linear model", why="the table has 150 rows", parameters=15, flops_per_sample=72.0, activation_nbytes=28,
    batch=16, epochs=20, samples=120, sample_nbytes=18,
)  # fmt: skip


async def answered(cluster: FakeCluster, key: JobKey, spec: Json = TASK, **changes: Any) -> None:
    """Act as the look pod: write the suggestion, and end."""
    uid = (await cluster.api.get(DLJOB, *key))["metadata"]["uid"]
    fields: Json = {"uid": uid, "digest": task_digest(DLJobSpec.model_validate(spec)), "model": MODEL, **changes}
    files = {SUGGESTION_KEY: Suggestion(**fields).to_json(), "train.py": "import data"}
    await cluster.api.merge(CONFIG_MAP, key[0], f"{key[1]}-suggestion", {"data": files})
    await cluster.api.merge(POD, key[0], f"{key[1]}-look", {"status": {"phase": "Succeeded"}})


def pods(cluster: FakeCluster) -> list[str]:
    return [name for plural, _, name in cluster.api.objects if plural == "pods"]


async def sets(cluster: FakeCluster, key: JobKey) -> list[Json]:
    return [
        item for item in await cluster.api.find(STATEFUL_SET, key[0]) if item["metadata"]["name"].startswith(key[1])
    ]


async def status(cluster: FakeCluster, key: JobKey) -> Json:
    found: Json = (await cluster.api.get(DLJOB, *key))["status"]
    return found


def test_a_task_becomes_a_planned_job_whose_pods_run_the_written_script() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        cluster.claim("models", "ReadWriteMany")
        key = cluster.submit("iris", **TASK, checkpoint={"volume": {"claimName": "models"}})
        await operator.watch()
        assert operator.condition(key, "DataInspected") == ("Unknown", "Looking")
        assert operator.condition(key, "Accepted") == ("True", "Accepted")
        assert pods(cluster) == ["iris-look"] and not await sets(cluster, key)
        await answered(cluster, key)
        await operator.watch()
        assert operator.condition(key, "DataInspected") == ("True", "Suggested")
        assert operator.planned(key) == "Planned" and pods(cluster) == []
        shown = (await status(cluster, key))["suggestion"]
        assert (shown["model"], shown["configMap"]) == ("linear model", "iris-suggestion")
        (item,) = await sets(cluster, key)
        (trainer,) = item["spec"]["template"]["spec"]["containers"]
        env = {each["name"]: each.get("value") for each in trainer["env"]}
        assert env["MODEL_DIR"].endswith("/suggested-model") and env["DLJOB_DATASET"].endswith("/iris.csv")
        fetching = [each["name"] for each in item["spec"]["template"]["spec"]["initContainers"]]
        assert fetching == ["source", "dataset"]

    on_two_nodes(body, config=LOOKS)


def test_another_operator_does_not_look_again() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        key = cluster.submit("iris", **TASK)
        await operator.watch()
        await answered(cluster, key)
        await operator.watch()
        before = await status(cluster, key)
        async with Operator(cluster, config=LOOKS) as successor:
            successor.queue.add(key)
            await successor.watch()
            assert pods(cluster) == [] and successor.condition(key, "DataInspected") == ("True", "Suggested")
        assert await status(cluster, key) == before

    on_two_nodes(body, config=LOOKS)


def test_an_error_of_the_data_is_shown_until_the_suggestion_is_deleted() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        key = cluster.submit("iris", **TASK)
        await operator.watch()
        wrong = "spec.task.target: found 'species'; expected a column. Correct it."
        await answered(cluster, key, model=None, error=wrong)
        await operator.watch()
        assert operator.condition(key, "DataInspected") == ("False", "DataNotUsable")
        message = operator.message(key, "DataInspected")
        assert wrong in message and "delete the ConfigMap iris-suggestion" in message
        assert pods(cluster) == [] and not await sets(cluster, key)
        await cluster.api.delete(CONFIG_MAP, key[0], "iris-suggestion")
        operator.queue.add(key)
        await operator.watch()
        assert pods(cluster) == ["iris-look"]

    on_two_nodes(body, config=LOOKS)


def test_another_task_is_looked_at_again() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        key = cluster.submit("iris", **TASK)
        await operator.watch()
        await answered(cluster, key, model=None, error="spec.task.target: found another.")
        await operator.watch()
        await cluster.edit(key, task={"target": "kind"})
        await operator.watch()
        changed = {**TASK, "task": {**TASK["task"], "target": "kind"}}
        pod = await cluster.api.get(POD, key[0], "iris-look")
        assert f"--digest={task_digest(DLJobSpec.model_validate(changed))}" in pod["spec"]["containers"][0]["args"]
        # A pod of an earlier spec is replaced, also if another field than the task changes.
        await cluster.edit(key, resources={"memory": "3Gi"})
        await operator.watch()
        other = await cluster.api.get(POD, key[0], "iris-look")
        assert other["metadata"]["uid"] != pod["metadata"]["uid"]

    on_two_nodes(body, config=LOOKS)


def test_invalid_suggestions_are_not_followed() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        key = cluster.submit("iris", **TASK)
        await operator.watch()
        await answered(cluster, key)
        valid = json.loads((await cluster.api.get(CONFIG_MAP, key[0], "iris-suggestion"))["data"][SUGGESTION_KEY])
        broken: list[tuple[str, str]] = [
            ("{", "suggestion.json"),
            ("[" * 2000, "suggestion.json"),
            ("x" * 70_000, "expected at most 65536"),
            (json.dumps({**valid, "image": "evil"}), "image"),
            (json.dumps({**valid, "model": {**valid["model"], "batch": 0}}), "batch"),
            (json.dumps({**valid, "model": {**valid["model"], "flops_per_sample": 1e400}}), "flops"),
            (json.dumps({**valid, "model": {**valid["model"], "name": "a\x1b[31m"}}), "name"),
            (json.dumps({**valid, "findings": ["x"] * 100}), "findings"),
        ]
        for text, named in broken:
            await cluster.api.merge(CONFIG_MAP, key[0], "iris-suggestion", {"data": {SUGGESTION_KEY: text}})
            await operator.watch()
            assert operator.condition(key, "DataInspected") == ("False", "SuggestionNotValid"), text[:50]
            assert named in operator.message(key, "DataInspected")
        extra = {SUGGESTION_KEY: json.dumps(valid), "sitecustomize.py": "import os"}
        await cluster.api.merge(CONFIG_MAP, key[0], "iris-suggestion", {"data": extra})
        await operator.watch()
        assert "found the key sitecustomize.py" in operator.message(key, "DataInspected")
        assert not await sets(cluster, key)

    on_two_nodes(body, config=LOOKS)


def test_problems_of_the_pod_are_shown_with_a_remedy() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        key = cluster.submit("iris", **TASK)
        await operator.watch()
        ended = {"exitCode": 64, "reason": "Error", "message": "spec.dataset.uri: found 404 Not Found"}
        waiting = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}}
        init = [{"name": "dataset", "state": waiting, "lastState": {"terminated": ended}}]
        pending = {"phase": "Pending", "initContainerStatuses": init}
        await cluster.api.merge(POD, key[0], "iris-look", {"status": pending})
        await operator.watch()
        assert operator.condition(key, "DataInspected") == ("False", "LookDelayed")
        assert "did not fetch the data so far" in operator.message(key, "DataInspected")
        assert "404 Not Found" in operator.message(key, "DataInspected")
        killed = [{"name": "look", "state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}]
        running = {"phase": "Running", "initContainerStatuses": [], "containerStatuses": killed}
        await cluster.api.merge(POD, key[0], "iris-look", {"status": running})
        await operator.watch()
        assert "Set spec.resources.memory" in operator.message(key, "DataInspected")
        await cluster.api.merge(POD, key[0], "iris-look", {"status": {"phase": "Failed", "reason": "DeadlineExceeded"}})
        await operator.watch()
        assert operator.condition(key, "DataInspected") == ("False", "LookFailed")
        assert pods(cluster) == ["iris-look"]
        await cluster.api.delete(POD, key[0], "iris-look")
        operator.queue.add(key)
        await operator.watch()
        assert operator.condition(key, "DataInspected") == ("Unknown", "Looking") and pods(cluster) == ["iris-look"]

    on_two_nodes(body, config=LOOKS)


def test_no_pod_looks_for_suspended_jobs_or_without_an_image() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        key = cluster.submit("iris", **TASK, suspend=True)
        await operator.watch()
        assert operator.condition(key, "DataInspected") == ("Unknown", "NotStarted") and pods(cluster) == []
        assert (await status(cluster, key))["phase"] == "Suspended"
        await cluster.edit(key, suspend=False)
        await operator.watch()
        assert pods(cluster) == ["iris-look"] and (await status(cluster, key))["phase"] == "Pending"

    on_two_nodes(body, config=LOOKS)

    async def without(cluster: FakeCluster, operator: Operator) -> None:
        key = cluster.submit("iris", **TASK)
        await operator.watch()
        assert operator.condition(key, "DataInspected") == ("False", "NotAvailable") and pods(cluster) == []

    on_two_nodes(without, config=CONFIG)


def test_a_pod_whose_creation_got_no_answer_is_the_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed bug: the request was repeated, and the job's condition said that another pod has the name."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        create = cluster.api.create

        async def repeated(kind: Kind, wanted: Mapping[str, Any]) -> Json:
            created = await create(kind, wanted)
            return created if kind is not POD else await create(kind, wanted)

        monkeypatch.setattr(cluster.api, "create", repeated)
        key = cluster.submit("iris", **TASK)
        await operator.watch()
        assert operator.condition(key, "DataInspected") == ("Unknown", "Looking")
        await answered(cluster, key)
        await operator.watch()
        assert operator.condition(key, "DataInspected") == ("True", "Suggested")

    on_two_nodes(body, config=LOOKS)


def test_a_pod_of_another_owner_is_left_alone() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        key = cluster.submit("iris", **TASK)
        foreign = {"metadata": {"name": "iris-look", "namespace": key[0]}, "spec": {"containers": []}}
        await cluster.api.create(POD, foreign)
        await operator.watch()
        assert operator.condition(key, "DataInspected") == ("False", "ObjectRejected")
        assert "found one that belongs to no DLJob" in operator.message(key, "DataInspected")
        assert (await cluster.api.get(POD, key[0], "iris-look"))["spec"] == {"containers": []}

    on_two_nodes(body, config=LOOKS)


def test_a_rejected_pod_is_shown() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        cluster.api.refused.add("Pod")
        key = cluster.submit("iris", **TASK)
        await operator.watch()
        assert operator.condition(key, "DataInspected") == ("False", "ObjectRejected")
        assert "exceeded quota" in operator.message(key, "DataInspected")

    on_two_nodes(body, config=LOOKS)


def test_no_pod_looks_before_its_priority_class_exists() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        cluster.priority_class("usual", 1)
        spec = {**TASK, "scheduling": {"priorityClassName": "urgent"}}
        key = cluster.submit("iris", **spec)
        await operator.watch()
        assert operator.condition(key, "PriorityClassFound") == ("False", "PriorityClassNotFound")
        assert operator.condition(key, "DataInspected") == ("Unknown", "NotStarted") and pods(cluster) == []
        cluster.priority_class("urgent", 100)
        await operator.watch(20.0)
        assert operator.condition(key, "PriorityClassFound") == ("True", "PriorityClassFound")
        assert operator.condition(key, "DataInspected") == ("Unknown", "Looking") and pods(cluster) == ["iris-look"]

    on_two_nodes(body, config=LOOKS)


def test_the_look_pod_uses_only_secrets_that_jobs_may_use() -> None:
    """The pod that looks runs before the job has a plan, and must not read what the job's pods may not."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        cluster.secret("payroll")
        spec = {**TASK, "dataset": {**TASK["dataset"], "secretName": "payroll"}}
        key = cluster.submit("iris", **spec)
        await operator.watch()
        assert operator.condition(key, "Accepted") == ("False", "SecretNotUsable") and pods(cluster) == []
        cluster.secret("payroll", **{SECRET_LABEL: "true"})
        operator.queue.add(key)
        await operator.watch()
        assert pods(cluster) == ["iris-look"]

    on_two_nodes(body, config=replace(LOOKS, overrides=OverridePolicy.SAFE))
