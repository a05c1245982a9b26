"""Measure the hardware of device classes while the operator runs (chart value ``probes.enabled``)."""

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from dlcontract.hardware import HardwareMeasure
from dljob.calibrate.learned import hardware_of
from dljob.cluster.hardware import KEY
from dljob.job.probes.changes import Software, changed_classes
from dljob.job.probes.hardware import hardware_body, hardware_profile
from dljob.job.profiles import MANAGED_LABEL, MANAGER, learned_by_model
from dljob.kube import Api, ApiError, Cache
from dljob.kube.kinds import POD, PROFILE
from dljob.reconcile.hardware_probes import Action, ProbePod, Remove, Start, Starts, Store, decide
from dljob.render import RenderConfig
from dljob.render.helpers.probe import (
    BY_OPERATOR,
    DEVICE_ANNOTATION,
    NODE_ANNOTATION,
    PROBE_LABEL,
    configured,
    probe_pod,
)

log = logging.getLogger("dljob")

LOOK_S = 10.0


class HardwareProbes:
    """Start and delete the probe's pods in the operator's namespace, and store what they measure.

    Only the leading operator may use it.
    """

    def __init__(
        self, api: Api, cache: Cache, namespace: str, config: RenderConfig, now: Callable[[], datetime]
    ) -> None:
        self._api, self._cache, self._namespace, self._config, self._now = api, cache, namespace, config, now
        self._starts: dict[str, tuple[int, datetime]] = {}
        """Device class → number of tries since its last measurement, and the time of the last try."""
        self._gave_way: set[str] = set()
        """Names of probe pods that still exist and gave way to a job."""
        self._said = ""

    async def run(self) -> None:
        """Call ``look`` every ``LOOK_S`` seconds, until cancelled. Log an error of the API server once, and go on."""
        while True:
            try:
                await self.look()
                self._said = ""
            except ApiError as error:
                if str(error) != self._said:
                    log.warning("hardware probes wait for the API server (%s); trying again in %.0f s", error, LOOK_S)
                    self._said = str(error)
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Decide once which probe pods to start or delete, and which measurements to store, and do this.

        A class whose measured node has another kernel or driver now is measured again. Until then, plans use what was
        measured before.
        """
        now = self._now()
        listed = await self._api.find(POD, self._namespace, labelSelector=f"{PROBE_LABEL}={BY_OPERATOR}")
        pods = [_seen(body, now) for body in listed]
        jobs = [pod for job in self._cache.jobs() for pod in self._cache.pods_of(job.key)]
        self._gave_way &= {pod.name for pod in pods}
        profiles = self._cache.profiles()
        changed = changed_classes(profiles, self._software())
        learned = learned_by_model(profiles, self._namespace)
        known = {key: each for key, each in learned.items() if not (key[0] == KEY and key[1] in changed)}
        for device, (_, last) in self._starts.items():
            if hardware_of(device, known) is not None:
                self._starts[device] = (0, last)
        starts = {device: Starts(count, (now - last).total_seconds()) for device, (count, last) in self._starts.items()}
        actions = decide(
            self._cache.ledger.view(),
            known,
            pods,
            starts,
            {pod.node for pod in jobs if pod.node is not None},
            any(pod.node is None for pod in jobs),
            configured(self._config).tolerations,
        )
        for action in actions:
            if isinstance(action, Start) and (why := changed.get(action.target.device)):
                log.info("the hardware of %s is measured again: %s", action.target.device, why)
            await self._act(action, now)

    def _software(self) -> dict[str, Software]:
        return {node.name: Software.of(node.kernel, node.labels) for node in self._cache.nodes()}

    async def _act(self, action: Action, now: datetime) -> None:
        if isinstance(action, Start):
            target = action.target
            name = f"dljob-probe-{secrets.token_hex(3)}"
            self._starts[target.device] = (self._starts.get(target.device, (0, now))[0] + 1, now)
            log.info("measuring the hardware of %s on node %s in pod %s", target.device, target.node, name)
            body = probe_pod(name, self._namespace, target, configured(self._config), by=BY_OPERATOR)
            await self._api.create(POD, body)
            return
        if isinstance(action, Store):
            await self._store(action.pod, now)
        elif isinstance(action, Remove):
            log.info("hardware probe of %s: pod %s ends, because %s", action.pod.device, action.pod.name, action.why)
        await self._api.delete(POD, self._namespace, action.pod.name, grace_s=0)
        if isinstance(action, Remove) and action.for_job and action.pod.name not in self._gave_way:
            self._gave_way.add(action.pod.name)
            if (before := self._starts.get(action.pod.device)) is not None:
                self._starts[action.pod.device] = (max(before[0] - 1, 0), before[1])

    async def _store(self, pod: ProbePod, now: datetime) -> None:
        """Store what a pod has measured. If its message is no document of the probe, log that."""
        try:
            measure = HardwareMeasure.parse(pod.message)
        except ValueError as error:
            reason = " ".join(str(error).split())[:200]
            log.warning(
                "hardware probe of %s: found the termination message %r of pod %s (%s); expected the document of the "
                "hardware probe. This measurement is not used", pod.device, pod.message[:60], pod.name, reason,
            )  # fmt: skip
            return
        # In a sandboxed container, the probe sees another kernel than the node's. The node's words are compared later.
        node = self._software().get(pod.node, Software())
        said = {"kernel": node.kernel or measure.kernel, "driver": node.driver or measure.driver}
        measure = measure.model_copy(update=said)
        body = hardware_body(hardware_profile(measure, pod.device, pod.node), pod.device, now)
        name = body["metadata"]["name"]
        head = {key: value for key, value in body.items() if key != "status"}
        head["metadata"] = {"name": name, "labels": {MANAGED_LABEL: MANAGER}}
        try:
            await self._api.create(PROFILE, head)
        except ApiError as error:
            if not error.conflict:  # it exists without measurements
                raise
        answer = await self._api.merge(PROFILE, None, name, {"status": body["status"]}, subresource="status")
        self._cache.put(PROFILE, answer)
        log.info("hardware of %s: measured on node %s, stored as dlprofile/%s", pod.device, pod.node, name)


def _seen(body: Mapping[str, Any], now: datetime) -> ProbePod:
    meta, status = body["metadata"], body.get("status") or {}
    marks = meta.get("annotations") or {}
    message = ""
    for each in status.get("containerStatuses") or ():
        message = ((each.get("state") or {}).get("terminated") or {}).get("message") or message
    created = datetime.fromisoformat(str(meta["creationTimestamp"]))
    return ProbePod(
        meta["name"],
        str(marks.get(DEVICE_ANNOTATION, "")),
        str(marks.get(NODE_ANNOTATION, "")),
        str(status.get("phase") or "Pending"),
        message or str(status.get("message") or ""),
        (now - created).total_seconds(),
    )
