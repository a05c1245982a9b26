"""Run the hardware probe in pods of the current cluster, one device type after another, and store the results."""

import asyncio
import secrets
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from dlcontract.hardware import HardwareMeasure
from dljob.api.profiles.profile import HardwareProfile, ProbedLink
from dljob.client.access import FIELD_OWNER
from dljob.client.errors import BadInputError
from dljob.cluster.hardware import KEY
from dljob.job.identity import profile_name
from dljob.job.probes.hardware import hardware_body, hardware_profile, with_stored_links, with_stored_regression
from dljob.job.probes.links import link_status, probed_link
from dljob.job.probes.targets import Target
from dljob.render.helpers.probe import BY_COMMAND, CONTAINER, ProbeImage, link_client_pod, peer_pod, probe_pod

LOOK_S = 1.0


async def probed(
    api: Any,
    namespace: str,
    target: Target,
    image: ProbeImage,
    timeout_s: float,
    link: bool,
    structures: int | None = None,
) -> HardwareProfile:
    """Measure a device type in a pod that is deleted afterwards, and return its hardware profile.

    ``target``: the device type and its node. ``image``: the probe's image. ``link``: True to measure the link to a
    second node too, on which a second pod answers. ``structures``: number of random networks to train. Raise
    BadInputError if a pod does not start, fails, or prints no valid document within ``timeout_s`` seconds.
    """
    from dljob.kube.kinds import POD

    suffix = secrets.token_hex(3)
    names = [f"dljob-probe-{suffix}"]
    try:
        address = None
        if link and target.peer is not None:
            names.append(f"dljob-probe-peer-{suffix}")
            address = await _serving(api, namespace, names[1], target, image, timeout_s)
        await api.create(POD, probe_pod(names[0], namespace, target, image, address, structures=structures))
        pod = await _awaited(api, namespace, names[0], {"Succeeded"}, timeout_s)
        text = _terminated(pod).get("message") or ""
        try:
            measure = HardwareMeasure.parse(text)
        except ValueError as error:
            reason = " ".join(str(error).split())[:200]
            raise BadInputError(
                f"{target.device}: found {text[:60]!r} in the termination message of pod {names[0]}; expected the "
                f"document of the hardware probe ({reason}). Use the trainer image of this release with --image"
            ) from None
    finally:
        for name in names:
            await api.delete(POD, namespace, name, grace_s=0)
    return hardware_profile(measure, target.device, target.node)


async def measured_link(
    api: Any, namespace: str, target: Target, image: ProbeImage, timeout_s: float
) -> tuple[str, ProbedLink]:
    """Measure the network between the two nodes of ``target`` in pods that are deleted afterwards, and store it.

    Return (name of the DLProfile, link). Raise BadInputError if a pod does not start, fails, or prints no valid
    document within ``timeout_s`` seconds.
    """
    from dljob.kube.kinds import POD, PROFILE

    suffix = secrets.token_hex(3)
    server, client = f"dljob-probe-peer-{suffix}", f"dljob-probe-link-{suffix}"
    try:
        address = await _serving(api, namespace, server, target, image, timeout_s)
        await api.create(POD, link_client_pod(client, namespace, target, image, address, by=BY_COMMAND))
        pod = await _awaited(api, namespace, client, {"Succeeded"}, timeout_s)
        text = _terminated(pod).get("message") or ""
        try:
            link = probed_link(text, datetime.now(UTC))
        except ValueError as error:
            reason = " ".join(str(error).split())[:200]
            raise BadInputError(
                f"found {text[:60]!r} in the termination message of pod {client}; expected the latency and bandwidth "
                f"of a link ({reason}). Use the trainer image of this release with --image"
            ) from None
    finally:
        for name in (client, server):
            await api.delete(POD, namespace, name, grace_s=0)
    name = profile_name(KEY, target.device)
    status = {"status": link_status(link, target.other)}
    await api.merge(PROFILE, None, name, status, subresource="status", owner=FIELD_OWNER)
    return name, link


async def _serving(api: Any, namespace: str, name: str, target: Target, image: ProbeImage, timeout_s: float) -> str:
    """Start the pod that answers messages on the second node of ``target``. Return its address when it runs."""
    from dljob.kube.kinds import POD

    await api.create(POD, peer_pod(name, namespace, target, image))
    pod = await _awaited(api, namespace, name, {"Running"}, timeout_s)
    return str(pod["status"].get("podIP"))


async def completed(api: Any, device: str, profile: HardwareProfile) -> HardwareProfile:
    """Return a measured profile with what is stored for its type and stays valid: the regression and the links."""
    from dljob.kube.kinds import PROFILE

    found = await api.find(PROFILE, None, fieldSelector=f"metadata.name={profile_name(KEY, device)}")
    return with_stored_links(with_stored_regression(profile, device, found), device, found)


async def stored(api: Any, device: str, profile: HardwareProfile) -> str:
    """Store a hardware profile in the cluster, in place of an earlier one of this type. Return the object's name."""
    from dljob.kube.kinds import PROFILE

    body = hardware_body(profile, device, datetime.now(UTC))
    await api.apply(PROFILE, {key: value for key, value in body.items() if key != "status"}, owner=FIELD_OWNER)
    status = {key: value for key, value in body.items() if key != "spec"}
    await api.apply(PROFILE, status, subresource="status", owner=FIELD_OWNER)
    return str(body["metadata"]["name"])


async def _awaited(api: Any, namespace: str, name: str, phases: set[str], timeout_s: float) -> Mapping[str, Any]:
    """Return the pod as soon as it is in one of the phases. Print each change of its state."""
    from dljob.kube.kinds import POD

    said = ""
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                pod: Mapping[str, Any] = await api.get(POD, namespace, name)
                phase = (pod.get("status") or {}).get("phase") or "Pending"
                if phase in phases:
                    return pod
                text = _state(pod)
                if phase in ("Failed", "Succeeded"):
                    raise BadInputError(f"pod {name}: found {text}; expected {' or '.join(sorted(phases))}")
                if text != said:
                    print(f"dljob: pod {namespace}/{name}: {text}", file=sys.stderr, flush=True)
                    said = text
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        raise BadInputError(
            f"pod {name}: found {said or 'no state'} after {timeout_s:g} s; expected {' or '.join(sorted(phases))}. "
            "Remove the cause, or allow more time with --timeout"
        ) from None


def _state(pod: Mapping[str, Any]) -> str:
    """Return the phase of a pod, and the reason if it does not start or has failed."""
    status = pod.get("status") or {}
    phase = str(status.get("phase") or "Pending")
    ended = _terminated(pod)
    if ended and ended.get("exitCode") == 0:
        return "measured"  # The message is the document.
    if ended:
        return f"{phase}, exit code {ended.get('exitCode')}: {str(ended.get('message') or ended.get('reason'))[:300]}"
    for each in status.get("containerStatuses") or ():
        waiting = (each.get("state") or {}).get("waiting")
        if waiting:
            return f"{phase}: {waiting.get('reason')} {waiting.get('message') or ''}".strip()[:300]
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return f"{phase}: {condition.get('message') or condition.get('reason')}"[:300]
    return f"{phase}: {status['message']}"[:300] if status.get("message") else phase


def _terminated(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    for each in (pod.get("status") or {}).get("containerStatuses") or ():
        if each.get("name") == CONTAINER:
            return (each.get("state") or {}).get("terminated") or {}
    return {}
