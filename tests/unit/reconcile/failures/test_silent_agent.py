"""Tests of the message about an agent that runs and reports nothing."""

from dataclasses import replace
from datetime import timedelta

from dljob.job.observed import Observed
from support.builders import DIGITS, NOW, Json, after, plan_of, report, seen, settled
from support.job_lifecycle import condition_of, status, step, verdict


def starting(spec: Json | None = None, since_s: float = 10.0) -> Observed:
    """Return a job whose agents have run since ``since_s`` seconds after its creation, and report nothing."""
    first = seen(spec)
    created = settled(after(first, step(first)), ready=False)
    since = NOW + timedelta(seconds=since_s)
    return replace(created, pods=tuple(replace(pod, running_since=since) for pod in created.pods))


def test_agent_that_cannot_read_its_plan_is_named() -> None:
    image = "registry.example/trainer:0.2.0"
    observed = starting(DIGITS | {"trainer": {"image": image}, "until": {"metric": "accuracy", "atLeast": 0.9}})
    soon = step(observed, 60.0)
    assert verdict(soon, "Running") == ("False", "Starting")
    assert soon.requeue_after_s is not None and soon.requeue_after_s <= 70.0
    found = step(observed, 131.0)
    assert verdict(found, "Running") == ("False", "AgentSilent")
    message = condition_of(found, "Running").message
    assert f"spec.trainer.image {image}" in message and "spec.until (release 0.3.0)" in message
    assert f"kubectl logs {plan_of(observed).plan.pods[0]}" in message
    assert [event.type for event in found.events if event.reason == "AgentSilent"] == ["Warning"]
    assert status(found).phase.value == "Starting"
    assert not found.scales and verdict(found, "Admitted") == ("True", "Starting"), "the pods stay"
    assert not [event for event in step(after(observed, found), 200.0).events if event.reason == "AgentSilent"]


def test_plan_without_new_parts_names_no_release() -> None:
    message = condition_of(step(starting(), 131.0), "Running").message
    assert "release" not in message and "kubectl logs" in message


def test_agent_that_reports_is_not_silent() -> None:
    observed = starting()
    reporting = replace(observed, report=report(observed, step=0, step_s=None))
    assert verdict(step(reporting, 131.0), "Running")[1] != "AgentSilent"


def test_container_that_does_not_run_is_not_silent() -> None:
    """It waits for its image, or fetches data. The condition PodsReady says so."""
    observed = starting()
    pulling = replace(observed, pods=tuple(replace(pod, running_since=None) for pod in observed.pods))
    assert verdict(step(pulling, 1000.0), "Running") == ("False", "Starting")
