"""Measure the hardware of device types while the operator runs (chart value ``probes.enabled``)."""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

from dlcontract.hardware import HardwareMeasure
from dljob.calibrate.learned import hardware_of
from dljob.cluster.hardware import KEY
from dljob.controller.metrics import Metrics
from dljob.job.plan.first_plans import FirstMeasurements
from dljob.job.probes.changes import Software, changed_classes
from dljob.job.probes.hardware import hardware_body, hardware_profile, with_stored_regression
from dljob.job.probes.targets import Target
from dljob.job.profiles import MANAGED_LABEL, MANAGER, learned_by_model
from dljob.kube import Api, ApiError, Cache
from dljob.kube.kinds import POD, PROFILE
from dljob.reconcile.hardware_probes import (
    MAX_CROWDED,
    MAX_STARTS,
    Action,
    ProbePod,
    Remove,
    Start,
    Starts,
    Store,
    decide,
)
from dljob.render.helpers.probe import (
    BY_OPERATOR,
    DEVICE_ANNOTATION,
    NODE_ANNOTATION,
    PROBE_LABEL,
    ProbeImage,
    probe_pod,
)
from dljob.status import Event, merge_patch
from dljob.status.events import MAX_MESSAGE

log = logging.getLogger("dljob")

LOOK_S = 10.0
"""Seconds between two looks while no probe runs."""
LOOK_RUNNING_S = 1.0
"""Seconds between two looks while a probe runs: a job may need its node, and first plans wait for its result."""
PAUSE_FIRST_S, MAX_PAUSE_S = 10.0, 600.0
"""Seconds after which a failed request is sent again: they double with each failure in a row, up to the maximum."""
Record = Callable[[str, Event, datetime], Awaitable[None]]
"""Function that posts an event about the node with this name."""


class HardwareProbes:
    """Start and delete the probe's pods in the operator's namespace, and store what they measure.

    Only the leading operator may use it.
    """

    def __init__(
        self,
        api: Api,
        cache: Cache,
        namespace: str,
        image: ProbeImage,
        now: Callable[[], datetime],
        metrics: Metrics,
        record: Record,
        measurements: FirstMeasurements,
        ended: Callable[[], None],
        *,
        gpus: bool = True,
    ) -> None:
        """``namespace``: the operator's own. ``measurements``: those that first plans await.

        ``ended``: called when plans no longer wait for a measurement. ``gpus``: False to measure no GPUs.
        """
        self._api, self._cache, self._namespace, self._image, self._now = api, cache, namespace, image, now
        self._metrics, self._record, self._measurements, self._ended = metrics, record, measurements, ended
        self._starts: dict[str, tuple[int, datetime]] = {}
        """Device type → number of tries since its last measurement, and the time of the last try."""
        self._over: set[str] = set()
        """Names of probe pods that are being deleted and still exist."""
        self._existing: dict[str, str] = {}
        """Name of each probe pod that existed at the last look, or was started then → its device type."""
        self._unanswered: set[str] = set()
        """Names of the pods whose creation got no answer at the last look. They may exist nevertheless."""
        self._paused: dict[str, tuple[int, datetime]] = {}
        """Device type to measure, or pod to store → failed requests in a row, and when to send the next one."""
        self._gpus = gpus
        self._running = True
        """False if the operator has no probe pods. At first it may have those of a former leader."""
        self._said = ""

    async def run(self) -> None:
        """Call ``look`` again and again, until cancelled. Log an error of the API server once, and go on."""
        while True:
            try:
                await self.look()
                self._said = ""
            except ApiError as error:
                if str(error) != self._said:
                    log.warning(
                        "hardware probes wait for the API server (%s); trying again within %.0f s", error, MAX_PAUSE_S
                    )
                    self._said = str(error)
            await asyncio.sleep(LOOK_RUNNING_S if self._running else LOOK_S)

    async def look(self) -> None:
        """Decide once which probe pods to start or delete, and which measurements to store, and do this.

        A type whose measured node has another kernel or driver now is measured again. Until then, plans use what was
        measured before. If requests fail, raise the first error after all other actions. A pod is then not started, or
        a measurement not stored, before its pause is over.
        """
        now = self._now()
        selector = f"{PROBE_LABEL}={BY_OPERATOR}"
        listed = await self._api.find(POD, self._namespace, labelSelector=selector) if self._running else []
        pods = [_seen(body, now) for body in listed]
        at = [pod.node for job in self._cache.jobs() for pod in self._cache.pods_of(job.key)]
        looks = [look for job in self._cache.jobs() if (look := self._cache.look_of(job)) is not None]
        at += [look.node or None for look in looks if look.phase not in ("Succeeded", "Failed")]
        self._note_gone({pod.name: pod.device for pod in pods})
        self._over &= {pod.name for pod in pods}
        profiles = self._cache.profiles()
        changed = changed_classes(profiles, self._software())
        learned = learned_by_model(profiles, self._namespace)
        known = {key: each for key, each in learned.items() if not (key[0] == KEY and key[1] in changed)}
        for device, (_, last) in self._starts.items():
            if hardware_of(device, known) is not None:
                self._starts[device] = (0, last)
        for pod in pods:  # Those that a former leader has started count, too.
            if pod.name in self._unanswered and (before := self._starts.get(pod.device)) is not None:
                self._starts[pod.device] = (before[0] + 1, now - timedelta(seconds=pod.age_s))
            self._starts.setdefault(pod.device, (1, now - timedelta(seconds=pod.age_s)))
            self._measurements.begin(pod.device, pod.age_s)
        self._unanswered.clear()
        starts = {device: Starts(count, (now - last).total_seconds()) for device, (count, last) in self._starts.items()}
        actions = decide(
            self._cache.ledger.view(),
            known,
            pods,
            starts,
            {node for node in at if node is not None},
            None in at,
            self._image.tolerations,
            gpus=self._gpus,
        )
        wanted = {_paused_as(action) for action in actions}
        self._paused = {key: each for key, each in self._paused.items() if key in wanted}
        due = [each for each in actions if now >= self._paused.get(_paused_as(each), (0, now))[1]]
        # Before the first request, because a pod may exist although its creation got no answer.
        self._running = bool(pods) or any(isinstance(action, Start) for action in due)
        errors = []
        for action in due:
            if isinstance(action, Start) and (why := changed.get(action.target.device)):
                log.info("the hardware of %s is measured again: %s", action.target.device, why)
            try:
                await self._act(action, now)
            except ApiError as error:
                self._pause(action, now)
                errors.append(error)
        if errors:
            raise errors[0]

    def _pause(self, action: Action, now: datetime) -> None:
        """Let an action that has failed pause, except a deletion: a job may need the node of the pod."""
        if key := _paused_as(action):
            failures, _ = self._paused.get(key, (0, now))
            pause_s = min(PAUSE_FIRST_S * 2.0 ** min(failures, 32), MAX_PAUSE_S)
            self._paused[key] = failures + 1, now + timedelta(seconds=pause_s)

    def _note_gone(self, listed: Mapping[str, str]) -> None:
        """Note the probe pods that others have deleted, such as the scheduler for a pod of higher priority.

        These give way, so that such a try does not count. ``listed``: name of each probe pod that exists → its device
        class.
        """
        for name, device in self._existing.items():
            if name not in listed and name not in self._over:
                log.info("hardware probe of %s: pod %s was deleted, such as for a pod of higher priority", device, name)
                self._gave_way(device)
                self._measurements.end(device)
                self._ended()
        self._existing = dict(listed)

    def _gave_way(self, device: str) -> None:
        self._metrics.hardware_probes.labels("gave_way").inc()
        if (before := self._starts.get(device)) is not None:
            self._starts[device] = (max(before[0] - 1, 0), before[1])

    def _software(self) -> dict[str, Software]:
        return {node.name: Software.of(node.kernel, node.labels) for node in self._cache.nodes()}

    async def _act(self, action: Action, now: datetime) -> None:
        if isinstance(action, Start):
            await self._start(action.target, now)
            return
        pod = action.pod
        if pod.name not in self._over:
            if isinstance(action, Store):
                await self._store(pod, now)
            else:
                await self._removed(action, now)
            self._over.add(pod.name)
            self._measurements.end(pod.device)
            self._ended()
        await self._api.delete(POD, self._namespace, pod.name, grace_s=0)

    async def _removed(self, action: Remove, now: datetime) -> None:
        pod = action.pod
        log.info("hardware probe of %s: pod %s ends, because %s", pod.device, pod.name, action.why)
        if not action.for_job:
            await self._failed(pod.device, pod.node, action.why, now)
            return
        self._gave_way(pod.device)

    async def _start(self, target: Target, now: datetime) -> None:
        """Start a probe pod. If the API server rejects it, such as for a quota, this counts as a failed try.

        Another error does not count, unless the next look finds that the pod exists.
        """
        name = f"dljob-probe-{secrets.token_hex(3)}"
        before = self._starts.get(target.device)
        self._starts[target.device] = (before[0] + 1 if before else 1, now)
        log.info("measuring the hardware of %s on node %s in pod %s", target.device, target.node, name)
        try:
            await self._api.create(POD, probe_pod(name, self._namespace, target, self._image, by=BY_OPERATOR))
        except ApiError as error:
            if not error.rejected:
                if before is None:
                    del self._starts[target.device]
                else:
                    self._starts[target.device] = before
                self._unanswered.add(name)
                raise
            await self._failed(target.device, target.node, f"the API server rejected its pod: {error}", now, "refused")
            return
        self._existing[name] = target.device
        self._measurements.begin(target.device)

    async def _failed(self, device: str, node: str, why: str, now: datetime, result: str = "failed") -> None:
        """Say in the log, in an event about the node and in a metric that a type was not measured."""
        tries = self._starts.get(device, (1, now))[0]
        left = MAX_STARTS - tries
        then = f"{left} more tries" if left > 0 else "no more tries until the operator restarts; see dljob probe"
        text = f"the hardware of {device} was not measured on node {node}, because {why}; {then}"
        self._metrics.hardware_probes.labels(result).inc()
        log.warning("%s", text)
        await self._post(node, Event("Warning", "HardwareNotMeasured", text[:MAX_MESSAGE]), now)

    async def _post(self, node: str, event: Event, now: datetime) -> None:
        try:
            await self._record(node, event, now)
        except ApiError as error:  # An operator that is limited to some namespaces may not post it.
            log.debug("an event about node %s was not posted: %s", node, error)

    async def _store(self, pod: ProbePod, now: datetime) -> None:
        """Store what a pod has measured. If it cannot be used, count this as a failed try."""
        # In a sandboxed container, the probe sees another kernel than the node's. The node's words are compared later.
        node = self._software().get(pod.node, Software())
        try:
            measure = HardwareMeasure.parse(pod.message)
            said = {"kernel": node.kernel or measure.kernel, "driver": node.driver or measure.driver}
            measure = measure.model_copy(update=said)
            profile = hardware_profile(measure, pod.device, pod.node)
            body = hardware_body(with_stored_regression(profile, pod.device, self._cache.profiles()), pod.device, now)
        except (ValueError, ArithmeticError) as error:  # Such as a time so short that a factor of it is 0.
            reason = " ".join(str(error).split())[:200]
            why = (
                f"found the termination message {pod.message[:60]!r} of pod {pod.name} ({reason}); expected the "
                "document of the hardware probe"
            )
            await self._failed(pod.device, pod.node, why, now)
            return
        if measure.crowded > MAX_CROWDED:
            why = f"other processes used the node: steps took {measure.crowded:.1f} times their CPU time"
            await self._failed(pod.device, pod.node, f"{why} (expected at most {MAX_CROWDED:g})", now)
            return
        name = body["metadata"]["name"]
        head = {key: value for key, value in body.items() if key != "status"}
        head["metadata"] = {"name": name, "labels": {MANAGED_LABEL: MANAGER}}
        try:
            await self._api.create(PROFILE, head)
        except ApiError as error:
            if not error.conflict:  # it exists without measurements
                raise
        patch = merge_patch(self._status_of(name), self._with_former_link(name, body["status"]))
        answer = await self._api.merge(PROFILE, None, name, {"status": patch}, subresource="status")
        self._cache.put(PROFILE, answer)
        self._metrics.hardware_probes.labels("measured").inc()
        text = f"hardware of {pod.device}: measured on node {pod.node}, stored as dlprofile/{name}"
        log.info("%s", text)
        await self._post(pod.node, Event("Normal", "HardwareMeasured", text), now)

    def _status_of(self, name: str) -> Mapping[str, Any]:
        """Return the status of a profile; empty if the profile does not exist, or has none."""
        found = next((each for each in self._cache.profiles() if each["metadata"]["name"] == name), {})
        return found.get("status") or {}

    def _with_former_link(self, name: str, status: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the new status of a profile with the link between nodes that ``dljob probe --link`` has measured.

        The operator's probes do not measure it. Everything else of the former measurement is replaced.
        """
        former = (self._status_of(name).get("hardware") or {}).get("networkLink")
        return status if former is None else {**status, "hardware": {"networkLink": former, **status["hardware"]}}


def _paused_as(action: Action) -> str:
    """Return what pauses if the action fails: a device type to measure, or a pod to store; '' for a deletion."""
    if isinstance(action, Start):
        return action.target.device
    return action.pod.name if isinstance(action, Store) else ""


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
        bool(body["spec"].get("nodeName")),
    )
