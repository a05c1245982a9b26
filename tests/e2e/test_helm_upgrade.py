"""Upgrade and roll back the operator with Helm while jobs run in real pods (hack/test upgrade). No job restarts.

The last release runs with its own images, as at a user's cluster. The later chart has one more field in the spec.
"""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.cluster.helm import SYSTEM, helm, run
from support.cluster.kubectl import ROOT, Kubectl, KubectlError, condition, example, step_of, wait_for
from support.cluster.release import last_release

pytestmark = [pytest.mark.e2e, pytest.mark.upgrade]
Json = dict[str, Any]
IMAGES_S = 1800
"""Time limit in seconds for building the images of the last release, with an empty cache."""
CRD = "files/crds/dljob.dev_dljobs.yaml"
JOBS: dict[str, Json] = {
    "plain": {"nodes": {"min": 1, "max": 1}, "checkpoint": {"enabled": False}, "epochs": 800},
    "saving": {"nodes": {"min": 2, "max": 2}, "epochs": 100_000},
    # The chart of the checkout allows only safe overrides.
    "refused": {
        "nodes": {"min": 1, "max": 1}, "epochs": 100_000,
        "podTemplateOverrides": [{"manager": "me", "spec": {"dnsPolicy": "Default"}}],
    },
}  # fmt: skip


def images_of(source: Path) -> tuple[str, ...]:
    """Build the images of the checkout ``source`` and put them on the nodes. Return the chart's values for them."""
    name = os.environ.get("DLJOB_TEST_CLUSTER", "test")
    refs = json.loads(run(source / "hack/images", "--name", name, "--load", timeout_s=IMAGES_S))
    values: tuple[str, ...] = ()
    for part, prefix in (("operator", ""), ("trainer", "trainer.")):
        repository, _, tag = refs[part].rpartition(":")
        values += ("--set", f"{prefix}image.repository={repository}", "--set-string", f"{prefix}image.tag={tag}")
    return values


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the source of the last release."""
    return last_release(tmp_path_factory)


@pytest.fixture(scope="module")
def later_chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the chart of the checkout, whose CRD has one more field, with a default."""
    chart = tmp_path_factory.mktemp("chart") / "dljob"
    shutil.copytree(ROOT / "charts/dljob", chart)
    definition = yaml.safe_load((chart / CRD).read_text())
    schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    schema["properties"]["mascot"] = {"type": "string", "default": "gopher"}
    (chart / CRD).write_text(yaml.safe_dump(definition))
    return chart


@pytest.fixture(scope="module")
def only_the_last_release(admin: Kubectl, released: Path) -> Iterator[None]:
    """Install the last release in place of the checkout's, and the checkout's again at the end."""
    before = images_of(ROOT)
    helm(admin, "uninstall")
    helm(admin, "install", str(released / "charts/dljob"), "--set", "overrides=all", *images_of(released))
    yield
    helm(admin, "upgrade", str(ROOT / "charts/dljob"), *before)


def pods(kubectl: Kubectl) -> dict[str, str]:
    """Return {pod: uid and restarts of its containers} of all jobs."""
    return {
        pod["metadata"][
            "name"
        ]: f"{pod['metadata']['uid']} {[c['restartCount'] for c in pod['status']['containerStatuses']]}"
        for pod in kubectl.list("pods", "dljob.dev/job")
    }


def operator_image(admin: Kubectl) -> str:
    [pod] = [
        pod
        for pod in Kubectl(admin.kubeconfig, SYSTEM).list("pods", "app.kubernetes.io/name=dljob")
        if "deletionTimestamp" not in pod["metadata"]
    ]
    return str(pod["spec"]["containers"][0]["image"])


def goes_on(kubectl: Kubectl, name: str) -> Json:
    """Wait until the operator shows a later step of a job than it shows now."""
    now = step_of(kubectl.job(name))
    return kubectl.wait_job(name, f"a step after {now}", lambda job: step_of(job) > now, 60)


def operators(admin: Kubectl) -> dict[str, Json]:
    """Return {uid: pod} of the operator's pods that are not being deleted."""
    found = Kubectl(admin.kubeconfig, SYSTEM).list("pods", "app.kubernetes.io/name=dljob")
    return {pod["metadata"]["uid"]: pod for pod in found if "deletionTimestamp" not in pod["metadata"]}


def test_upgrade_with_wrong_defaults_fails_and_the_operator_goes_on(admin: Kubectl) -> None:
    """The chart's schema cannot see that both names are of one GPU."""
    before = operators(admin)
    wrong = 'jobDefaults={"prices": {"usdPerDeviceHour": {"Tesla-T4": 1, "t4": 2}}}'
    with pytest.raises(AssertionError, match="dljob"):
        helm(admin, "upgrade", str(ROOT / "charts/dljob"), "--reuse-values", "--set-json", wrong, wait_s=15)
    after = operators(admin)
    assert before.keys() < after.keys() and all(_ready(after[uid]) for uid in before)
    [broken] = after.keys() - before.keys()
    name = after[broken]["metadata"]["name"]
    wait_for(
        "the reason in the log", lambda: "jobDefaults.prices.usdPerDeviceHour" in _log(admin, name), 30,
        lambda: _log(admin, name),
    )  # fmt: skip
    helm(admin, "rollback")
    assert operators(admin).keys() == before.keys()


def _ready(pod: Json) -> bool:
    found = condition(pod, "Ready")
    return found is not None and found["status"] == "True"


def _log(admin: Kubectl, pod: str) -> str:
    try:
        return Kubectl(admin.kubeconfig, SYSTEM).run("logs", pod, "--tail=20")
    except KubectlError as error:  # Its container has not started yet.
        return str(error)


def test_helm_upgrade_and_rollback_restart_no_job(
    admin: Kubectl, kubectl: Kubectl, only_the_last_release: None, later_chart: Path
) -> None:
    for name, changes in JOBS.items():
        kubectl.apply(example("digits.yaml", job=name, **changes))
    for name in JOBS:
        kubectl.wait_phase(name, "Running", 240)
        kubectl.wait_job(name, "a step", lambda job: step_of(job) > 0, 120)
    before, old_image = pods(kubectl), operator_image(admin)

    helm(admin, "upgrade", str(later_chart), *images_of(ROOT))
    assert operator_image(admin) != old_image
    for name in JOBS:
        job = goes_on(kubectl, name)
        assert (job["status"].get("restarts", 0), job["status"]["plan"]["number"]) == (0, 1), kubectl.describe_job(name)
    refused = kubectl.wait_job("refused", "a verdict", lambda job: _accepted(job) == "False", 30)
    assert "dnsPolicy" in str(condition(refused, "Accepted"))
    assert pods(kubectl) == before, "the upgrade restarted a pod"

    # What the later operator writes for a lost pod must run with the job's older image, whose agents read its plans.
    image = kubectl.list("pods", "dljob.dev/job=saving")[0]["spec"]["containers"][0]["image"]
    kubectl.delete("pod", "saving-cpu-1", "--wait=true")
    kubectl.wait_job("saving", "a restart", lambda job: job["status"].get("restarts", 0) > 0, 90)
    kubectl.wait_phase("saving", "Running", 120)
    goes_on(kubectl, "saving")
    assert {pod["spec"]["containers"][0]["image"] for pod in kubectl.list("pods", "dljob.dev/job=saving")} == {image}
    before = pods(kubectl)

    helm(admin, "rollback")
    wait_for("the last release's operator", lambda: operator_image(admin) == old_image, 60)
    for name in JOBS:
        goes_on(kubectl, name)
    kubectl.wait_job("refused", "its acceptance", lambda job: _accepted(job) == "True", 30)
    assert pods(kubectl) == before, "the rollback restarted a pod"

    for name in ("saving", "refused"):
        kubectl.delete("dljob", name)
    done = kubectl.wait_phase("plain", "Complete", 900)
    assert done["status"]["result"]["accuracy"] >= 0.97
    assert (done["status"].get("restarts", 0), done["status"]["plan"]["number"]) == (0, 1)


def _accepted(job: Json) -> str | None:
    found = condition(job, "Accepted")
    return None if found is None else str(found["status"])
