"""Store what probes have measured in DLProfiles."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from dlcontract.hardware import HardwareMeasure
from dljob.cluster.hardware import KEY
from dljob.job.identity import profile_name
from dljob.job.probes.changes import Software
from dljob.job.probes.hardware import hardware_body, hardware_profile, with_stored_links, with_stored_regression
from dljob.job.probes.links import link_status, probed_link
from dljob.job.profiles import MANAGED_LABEL, MANAGER
from dljob.kube import Api, ApiError, Cache
from dljob.kube.kinds import PROFILE
from dljob.reconcile.probes import MAX_CROWDED, ProbePod
from dljob.status import merge_patch


class UnusableError(Exception):
    """What a pod has measured cannot be used. The text says why."""


async def store(api: Api, cache: Cache, pod: ProbePod, now: datetime, software: Software) -> str:
    """Store what a pod has measured, and return the name of the DLProfile.

    ``software``: what the node of the pod says. Raise UnusableError if the measurement cannot be used, and ApiError if
    the API server refuses the profile.
    """
    return await (_link(api, cache, pod, now) if pod.link else _hardware(api, cache, pod, now, software))


async def _hardware(api: Api, cache: Cache, pod: ProbePod, now: datetime, software: Software) -> str:
    # In a sandboxed container, the probe sees another kernel than the node's. The node's words are compared later.
    try:
        measure = HardwareMeasure.parse(pod.message)
        said = {"kernel": software.kernel or measure.kernel, "driver": software.driver or measure.driver}
        measure = measure.model_copy(update=said)
        profile, stored = hardware_profile(measure, pod.device, pod.node), cache.profiles()
        profile = with_stored_links(with_stored_regression(profile, pod.device, stored), pod.device, stored)
        body = hardware_body(profile, pod.device, now)
    except (ValueError, ArithmeticError) as error:  # Such as a time so short that a factor of it is 0.
        raise _unusable(pod, error) from None
    if measure.crowded > MAX_CROWDED:
        why = f"other processes used the node: steps took {measure.crowded:.1f} times their CPU time"
        raise UnusableError(f"{why} (expected at most {MAX_CROWDED:g})")
    name: str = body["metadata"]["name"]
    head = {key: value for key, value in body.items() if key != "status"}
    head["metadata"] = {"name": name, "labels": {MANAGED_LABEL: MANAGER}}
    try:
        await api.create(PROFILE, head)
    except ApiError as error:
        if not error.conflict:  # it exists without measurements
            raise
    await _merge(api, cache, name, merge_patch(_status_of(cache, name), body["status"]))
    return name


async def _link(api: Api, cache: Cache, pod: ProbePod, now: datetime) -> str:
    try:
        status = link_status(probed_link(pod.message, now), pod.other)
    except ValueError as error:
        raise _unusable(pod, error) from None
    name = profile_name(KEY, pod.device)
    await _merge(api, cache, name, status)
    return name


def _unusable(pod: ProbePod, error: Exception) -> UnusableError:
    reason = " ".join(str(error).split())[:200]
    return UnusableError(
        f"found the termination message {pod.message[:60]!r} of pod {pod.name} ({reason}); expected the document of "
        "the hardware probe"
    )


async def _merge(api: Api, cache: Cache, name: str, status: Mapping[str, Any]) -> None:
    answer = await api.merge(PROFILE, None, name, {"status": status}, subresource="status")
    cache.put(PROFILE, answer)


def _status_of(cache: Cache, name: str) -> Mapping[str, Any]:
    """Return the status of a profile; empty if the profile does not exist, or has none."""
    found = next((each for each in cache.profiles() if each["metadata"]["name"] == name), {})
    return found.get("status") or {}
