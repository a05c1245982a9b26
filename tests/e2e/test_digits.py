"""Tests of examples/digits.yaml from apply to Complete."""

import os
from typing import Any

import pytest
import yaml

from support.cluster.kubectl import OWNED, ROOT, Kubectl, condition, example, no_pods, wait_for

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def digits(admin: Kubectl, kubectl: Kubectl) -> Kubectl:
    """Return a client of the job's namespace: where hack/quickstart has just run it, or that of this module."""
    if namespace := os.environ.get("DLJOB_TEST_QUICKSTART_JOB"):
        return Kubectl(admin.kubeconfig, namespace)
    kubectl.run("apply", "-f", str(ROOT / "examples" / "digits.yaml"))
    return kubectl


@pytest.fixture(scope="module")
def done(digits: Kubectl) -> dict[str, Any]:
    """Return the finished job."""
    return digits.wait_phase("digits", "Complete", 240)


def test_model_learns(done: dict[str, Any]) -> None:
    assert done["status"]["result"]["accuracy"] >= 0.97
    assert done["status"]["progress"]["percent"] == 100


def test_three_ranks_run_on_three_nodes(done: dict[str, Any]) -> None:
    plan = done["status"]["plan"]
    assert (plan["nodes"], plan["ranks"]) == (3, 3)
    assert sum(b for g in plan["groups"] for b in g["batchPerRank"]) == done["spec"]["globalBatchSize"]


def test_status_shows_predicted_and_measured_times(done: dict[str, Any]) -> None:
    status = done["status"]
    assert status["plan"]["predicted"]["stepSeconds"] > 0
    assert status["measured"]["stepSeconds"] > 0
    predicted, measured = status["plan"]["predicted"]["stepSeconds"], status["measured"]["stepSeconds"]
    assert status["measured"]["stepError"] == pytest.approx((predicted - measured) / measured, abs=0.02)


def test_status_shows_conditions_and_startup_times(done: dict[str, Any]) -> None:
    complete = condition(done, "Complete")
    assert complete is not None and complete["status"] == "True" and complete["message"]
    assert condition(done, "Failed") is None or condition(done, "Failed")["status"] == "False"  # type: ignore[index]
    startup = done["status"]["startup"]
    parts = [startup[f"{part}Seconds"] for part in ("admission", "pods", "rendezvous", "firstStep")]
    assert all(part >= 0 for part in parts) and startup["totalSeconds"] >= max(parts)
    assert done["status"]["restarts"] == 0


def test_events_describe_the_run(done: dict[str, Any], digits: Kubectl) -> None:
    digits.wait_events("digits", "Planned", "Running", "Complete")


def test_use_is_counted_until_the_pods_are_gone(done: dict[str, Any], digits: Kubectl) -> None:
    no_pods(digits, "digits", 30)
    ended = digits.wait_job("digits", "to use nothing", lambda job: job["status"]["usage"]["rate"]["devices"] == 0, 30)
    used = ended["status"]["usage"]
    plan = done["status"]["plan"]
    assert used["deviceSeconds"] > 0 and used["cost"] > 0 and used["energySource"] in ("Measured", "Modelled", "Mixed")
    assert used["energyJoules"] > 0.1 * plan["predicted"]["energyJoules"], "start-up counts, too"


def test_pods_are_deleted_and_the_checkpoint_remains(done: dict[str, Any], digits: Kubectl) -> None:
    no_pods(digits, "digits", 30)
    assert done["status"]["lastCheckpoint"]["step"] == done["status"]["progress"]["steps"]
    claims = digits.list("persistentvolumeclaims", "dljob.dev/job=digits")
    assert [c["status"]["phase"] for c in claims] == ["Bound"]


def test_printer_columns_show_the_main_fields(done: dict[str, Any], digits: Kubectl) -> None:
    header, row = digits.run("get", "dljob", "digits", "-o", "wide").splitlines()
    for column in (
        "PHASE",
        "NODES",
        "READY",
        "PROGRESS",
        "REMAINING",
        "RESTARTS",
        "AGE",
        "PLAN",
        "PREDICTED",
        "MEASURED",
    ):
        assert column in header
    assert "Complete" in row and "100%" in row


def test_explain_shows_descriptions(kubectl: Kubectl) -> None:
    text = kubectl.run("explain", "dljob.spec.objective.deadline")
    node = yaml.safe_load((ROOT / "crds" / "dljob.dev_dljobs.yaml").read_text())
    node = node["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for field in ("spec", "objective", "deadline"):
        node = node["properties"][field]
    assert " ".join(node["description"].split()) in " ".join(text.split())


def test_deletion_removes_all_objects_of_the_job(done: dict[str, Any], kubectl: Kubectl) -> None:
    again = example("digits.yaml", job="again")
    kubectl.apply(again)
    kubectl.wait_phase("again", "Running", 120)
    kubectl.delete("dljob", "again", "--wait=false")
    for kind in OWNED:
        wait_for(f"{kind} of the deleted job to go", lambda k=kind: not kubectl.list(k, "dljob.dev/job=again"), 20)  # type: ignore[misc]
