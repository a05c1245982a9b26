"""Tests of the operator's hardware probes in real pods: a class is measured, plans use it, and a new kernel measures again."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from support.cluster.helm import SYSTEM, helm
from support.cluster.kubectl import ROOT, Kubectl, example, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.long]
CLASS = "cpu"


def switch(admin: Kubectl, *, on: bool) -> None:
    helm(admin, "upgrade", str(ROOT / "charts/dljob"), "--reuse-values", "--set", f"probes.enabled={str(on).lower()}")


def measured(admin: Kubectl) -> dict[str, Any] | None:
    """Return the profile with the hardware of the nodes, or None."""
    found = [p for p in admin.list("dlprofiles") if p["spec"]["model"] == "hardware" and p["spec"]["device"] == CLASS]
    return next((profile for profile in found if (profile.get("status") or {}).get("hardware")), None)


@pytest.fixture
def probes(admin: Kubectl) -> Iterator[None]:
    """Switch the probes on. Afterwards they are off, and nothing that they measured is left."""
    forget(admin)
    switch(admin, on=True)
    yield
    switch(admin, on=False)
    forget(admin)


def restart(admin: Kubectl) -> None:
    operator = Kubectl(admin.kubeconfig, SYSTEM)
    operator.run("rollout", "restart", "deployment", "--selector=app.kubernetes.io/name=dljob")
    operator.run(
        "rollout", "status", "deployment", "--selector=app.kubernetes.io/name=dljob", "--timeout=90s", timeout_s=100
    )


def skip_on_a_busy_machine(admin: Kubectl) -> None:
    """Skip the test if other processes disturbed the measurement: the operator then stores none for ten minutes."""
    for event in Kubectl(admin.kubeconfig, "default").list("events"):
        if event["reason"] == "HardwareNotMeasured" and "other processes used the node" in event["message"]:
            pytest.skip(event["message"])


def forget(admin: Kubectl) -> None:
    if profile := measured(admin):
        admin.delete("dlprofile", profile["metadata"]["name"])


@pytest.mark.usefixtures("probes")
def test_operator_measures_free_nodes_and_measures_again_after_a_new_kernel(admin: Kubectl, kubectl: Kubectl) -> None:
    def until_measured(what: str, kernel: str | None) -> dict[str, Any]:
        def found() -> dict[str, Any] | None:
            skip_on_a_busy_machine(admin)
            profile = measured(admin)
            return profile if profile and kernel in (None, profile["status"]["hardware"]["kernel"]) else None

        return wait_for(what, found, 240, lambda: str(Kubectl(admin.kubeconfig, SYSTEM).list("pods")))

    profile = until_measured("the first measurement", None)
    hardware = profile["status"]["hardware"]
    node = admin.get("node", hardware["node"])
    assert node is not None
    kernel = node["status"]["nodeInfo"]["kernelVersion"]
    assert hardware["kernel"] == kernel and hardware["steps"] and hardware["factors"]["convolution"] > 0
    hints = {"parameters": 1_234_567, "flopsPerSample": 7_654_321}
    trainer = {"command": ["python", "train.py"]}
    job = example("plan-only.yaml", job="by-measured-hardware", model={"hints": hints}, trainer=trainer)
    kubectl.apply(job)
    planned = kubectl.wait_phase("by-measured-hardware", "Planned", 60)
    assert planned["status"]["plan"]["predicted"]["basis"] == "probe"

    restart(admin)  # The measurement of the network begins a minute after that of the hardware, or after a restart.

    def with_link() -> dict[str, Any] | None:
        found = measured(admin)
        return found if found and found["status"]["hardware"].get("networkLink") else None

    system = Kubectl(admin.kubeconfig, SYSTEM)
    linked = wait_for("the network's measurement", with_link, 120, lambda: str(system.list("pods")))
    link = linked["status"]["hardware"]["networkLink"]
    assert 0 < link["latencySeconds"] < 0.1 and link["bandwidthBytesPerSecond"] > 1e7 and link["measured"]
    assert linked["status"]["hardware"]["steps"] == hardware["steps"]

    old = json.dumps({"status": {"hardware": {"kernel": "5.0.0-old"}}})
    admin.run("patch", "dlprofile", profile["metadata"]["name"], "--type=merge", "--subresource=status", "-p", old)
    restart(admin)  # The same operator would wait ten minutes after its last measurement.
    again = until_measured("a measurement on the present kernel", kernel)
    assert again["metadata"]["name"] == profile["metadata"]["name"]
    pods = Kubectl(admin.kubeconfig, SYSTEM)
    wait_for(
        "the probe's pod to go",
        lambda: not pods.list("pods", "dljob.dev/hardware-probe"),
        60,
        lambda: str(pods.list("pods")),
    )
