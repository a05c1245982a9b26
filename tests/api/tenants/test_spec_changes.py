"""Changes of an existing job's spec in a real API server: rules of the CRD, and the operator's own check."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from dlcontract import CheckpointMark, RunPhase
from dljob.api import DLJobSpec, DLJobStatus
from dljob.api.changes import AFTER_END, Effect, change_of, refused_change
from dljob.cli import main
from support.cluster.api_server import Answer, Server
from support.cluster.kubectl import Kubectl, KubectlError, condition, wait_for
from support.cluster.live_job import Play
from support.cluster.operator_process import OperatorProcess
from support.spec_changes import ENDED, PATHS, SAVED, TIME, pair
from support.specs.cases import CASES
from support.specs.small_specs import JOB, MINIMAL, spec_of

Json = dict[str, Any]
pytestmark = pytest.mark.api
REFUSED = {
    "type": "Accepted", "status": "False", "reason": "ChangeRefused", "message": "no", "lastTransitionTime": TIME,
}  # fmt: skip
STORED = {"checkpoint": {"volume": {"size": "1Mi"}}}


@pytest.fixture(scope="module")
def server(kubectl: Kubectl) -> Server:
    """Return the API server with the CRDs, and a namespace that no operator watches."""
    name = f"{kubectl.namespace}-rules"
    kubectl.run("create", "namespace", name)
    return Server(kubectl.kubeconfig, name)


def create(server: Server, name: str, spec: Json) -> None:
    answer = server.create({**JOB, "metadata": {"name": name}, "spec": spec})
    assert answer.code == 201, answer.body.get("message")


def merge(server: Server, path: str, body: Json) -> Answer:
    return server.call("PATCH", f"{server.jobs}/{path}", body, "merge-patch+json")


def report(server: Server, name: str, status: Json) -> None:
    answer = merge(server, f"{name}/status", {"status": status})
    assert answer.code == 200, answer.body.get("message")


def replace(server: Server, name: str, spec: Json) -> Answer:
    stored = server.call("GET", f"{server.jobs}/{name}").body
    return server.call("PUT", f"{server.jobs}/{name}?dryRun=All", {**stored, "spec": spec})


def name_of(path: str) -> str:
    return f"case-{PATHS.index(path)}"


@pytest.mark.parametrize("path", PATHS)
def test_change_is_admitted_or_refused_as_the_table_says(path: str, server: Server) -> None:
    before, after = pair(path)
    create(server, name_of(path), before)
    assert replace(server, name_of(path), after).code == 200, "training has not begun"
    for status in (SAVED, ENDED):
        report(server, name_of(path), status)
        specs = (DLJobSpec.model_validate(spec) for spec in (before, after))
        expected = refused_change(*specs, DLJobStatus.model_validate(status))
        allowed = path in AFTER_END if status is ENDED else change_of(path).effect is not Effect.FIXED
        assert (expected is None) == allowed
        answer = replace(server, name_of(path), after)
        assert answer.code == (200 if allowed else 422), answer.body.get("message")
        if expected is not None:
            assert expected.message in answer.body["message"], answer.body["message"]
        assert replace(server, name_of(path), before).code == 200, "the spec is unchanged"
        assert merge(server, name_of(path), {"metadata": {"labels": {"a": status.get("completionTime", "b")[:4]}}}).code == 200  # fmt: skip


@pytest.mark.parametrize("case", [case for case, (_, words) in CASES.items() if not words])
def test_status_of_every_valid_spec_can_be_written(case: str, server: Server) -> None:
    name = f"status-{list(CASES).index(case)}"
    create(server, name, spec_of(CASES[case][0]))
    for status in (SAVED, {"conditions": [REFUSED]}, ENDED, {"completionTime": None}):
        report(server, name, status)


def test_refused_change_that_got_past_the_server_can_be_set_back(server: Server) -> None:
    create(server, "raced", spec_of({"seed": 7}))
    report(server, "raced", SAVED)
    assert replace(server, "raced", MINIMAL).code == 422
    report(server, "raced", {"conditions": [REFUSED]})
    assert replace(server, "raced", MINIMAL).code == 200


def test_overrides_of_an_ended_job_are_compared(server: Server) -> None:
    """Their schema preserves unknown fields, which CEL does not see one by one."""
    override = {"manager": "m", "spec": {"nodeSelector": {"zone": "a"}}}
    create(server, "overridden", spec_of({"podTemplateOverrides": [override]}))
    report(server, "overridden", ENDED)
    other = {**override, "spec": {"nodeSelector": {"zone": "b"}}}
    assert replace(server, "overridden", spec_of({"podTemplateOverrides": [other]})).code == 422
    assert replace(server, "overridden", spec_of({"podTemplateOverrides": [override]})).code == 200


def test_scale_of_a_running_and_of_an_ended_job(server: Server) -> None:
    create(server, "scaled", MINIMAL)
    for status, code in ((SAVED, 200), (ENDED, 422)):
        report(server, "scaled", status)
        answer = merge(server, "scaled/scale", {"spec": {"replicas": 4 + code % 7}})
        assert answer.code == code, answer.body.get("message")


def accepted(job: Json) -> bool:
    found = condition(job, "Accepted")
    return found is not None and found["status"] == "True"


def test_running_job_refuses_and_follows_changes(play: Play) -> None:
    play.run("changing", **STORED)
    play.kubectl.wait_job("changing", "progress", lambda j: j["status"].get("progress", {}).get("step") == 10, 30)
    with pytest.raises(
        KubectlError,
        match=r"spec\.seed: found 3; expected 0, as when training began\. Restore the former value",
    ):
        play.patch("changing", seed=3)
    pods = {p["metadata"]["uid"] for p in play.kubectl.list("pods", "dljob.dev/job=changing")}
    play.patch("changing", runPolicy={"ttlSecondsAfterFinished": 600})
    play.patch("changing", epochs=7)
    play.kubectl.wait_job("changing", "plan 2", lambda j: j["status"]["plan"]["number"] == 2, 30)
    play.until_ready("changing")
    assert pods.isdisjoint(p["metadata"]["uid"] for p in play.kubectl.list("pods", "dljob.dev/job=changing"))
    assert (play.plan("changing").epochs, play.plan("changing").seed) == (7, 0)
    play.finish("changing")
    with pytest.raises(KubectlError, match=r"spec\.epochs: found a change after the job has ended"):
        play.patch("changing", epochs=9)
    play.patch("changing", runPolicy={"ttlSecondsAfterFinished": 300})


def test_operator_refuses_what_the_server_has_admitted(play: Play, operator: OperatorProcess) -> None:
    play.run("bypassed", **STORED)
    mark = CheckpointMark(step=10, unix_s=1.0)
    play.report("bypassed", RunPhase.RUNNING, step_s=0.01, last_checkpoint=mark)
    play.kubectl.wait_job("bypassed", "a checkpoint", lambda j: "lastCheckpoint" in j["status"], 30)
    pods = {p["metadata"]["uid"] for p in play.kubectl.list("pods", "dljob.dev/job=bypassed")}
    assert operator.stop() == 0, operator.log
    try:
        nothing = {"status": {"progress": None, "lastCheckpoint": None}}
        play.kubectl.patch("dljob", "bypassed", nothing, status=True)
        play.patch("bypassed", optimizer={"name": "Adam"})
    finally:
        operator.start()
    play.until_reported(
        "bypassed", "Accepted", "ChangeRefused", "spec.optimizer.name: found Adam; expected SGD", "spec of plan 1"
    )
    job = play.kubectl.wait_phase("bypassed", "Running", 30)
    assert job["status"]["plan"]["number"] == 1
    # The operator counts the change after it has written the status.
    wait_for("the count", lambda: operator.metric("dljob_operator_changes_refused_total") == 1, 30)
    play.patch("bypassed", optimizer={"name": "SGD"})
    play.kubectl.wait_job("bypassed", "Accepted", accepted, 30)
    assert pods == {p["metadata"]["uid"] for p in play.kubectl.list("pods", "dljob.dev/job=bypassed")}
    play.finish("bypassed")


def test_dljob_run_reports_a_refused_change(play: Play, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    play.run("commanded", **STORED)
    play.kubectl.wait_job("commanded", "progress", lambda j: j["status"].get("progress", {}).get("step") == 10, 30)
    stored = play.kubectl.job("commanded")
    manifest = {key: stored[key] for key in ("apiVersion", "kind", "spec")} | {
        "metadata": {"name": "commanded", "namespace": play.kubectl.namespace}
    }
    manifest["spec"]["globalBatchSize"] = 90
    manifest["spec"].pop("mascot", None)  # A default of the CRD that test_upgrade.py installs meanwhile.
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(manifest))
    for command in ("run", "plan"):
        assert main([command, str(file)]) == 2
        assert "spec.globalBatchSize: found 90; expected 60, as when training began" in capsys.readouterr().err
    play.finish("commanded")
