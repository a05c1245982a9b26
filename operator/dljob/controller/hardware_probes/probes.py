"""Start and delete the pods of the operator's probes."""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from dljob.calibrate.learned import hardware_of
from dljob.cluster.hardware import KEY
from dljob.controller.hardware_probes.storing import UnusableError, store
from dljob.controller.hardware_probes.tries import MAX_PAUSE_S, Pauses, Tries
from dljob.controller.metrics import Metrics
from dljob.job.plan.first_plans import FirstMeasurements
from dljob.job.probes.changes import Software, changed_classes
from dljob.job.probes.links import unmeasured_links
from dljob.job.profiles import learned_by_model
from dljob.kube import Api, ApiError, Cache
from dljob.kube.kinds import POD
from dljob.reconcile.probes import Action, Connect, Ending, ProbePod, Remove, Start, Store, Subject, decide
from dljob.render.config import Manifest
from dljob.render.helpers.probe import (
    BY_OPERATOR,
    CLIENT_NODE_ANNOTATION,
    DEVICE_ANNOTATION,
    LINK_ANNOTATION,
    NODE_ANNOTATION,
    PEER_DEVICE_ANNOTATION,
    PROBE_LABEL,
    ProbeImage,
    link_client_pod,
    link_server_pod,
    probe_pod,
)
from dljob.status import Event
from dljob.status.events import MAX_MESSAGE

log = logging.getLogger("dljob")

LOOK_S = 10.0
"""Seconds between two looks while no probe runs."""
LOOK_RUNNING_S = 1.0
"""Seconds between two looks while a probe runs: a job may need its node, and first plans wait for its result."""
Record = Callable[[str, Event, datetime], Awaitable[None]]
"""Function that posts an event about the node with this name."""


class HardwareProbes:
    """Start and delete the probes' pods in the operator's namespace, and store what they measure.

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
        gpus: bool,
        links: bool,
    ) -> None:
        """``namespace``: the operator's own. ``measurements``: those that first plans await.

        ``ended``: called when plans no longer wait for a measurement. ``gpus``: False to measure no GPUs. ``links``:
        False to measure no links between nodes.
        """
        self._api, self._cache, self._namespace, self._image, self._now = api, cache, namespace, image, now
        self._metrics, self._record, self._measurements, self._ended = metrics, record, measurements, ended
        self._tries, self._pauses = Tries(), Pauses()
        self._over: set[str] = set()
        """Names of probe pods that are being deleted and still exist."""
        self._existing: dict[str, Subject] = {}
        """Name of each probe pod that existed at the last look, or was started then → what it measures."""
        self._unanswered: set[str] = set()
        """Names of the pods whose creation got no answer at the last look. They may exist nevertheless."""
        self._broken: set[Subject] = set()
        """Links of which others have deleted a pod. The other pod has to go, too."""
        self._gpus, self._links = gpus, links
        self._running = True
        """False if the operator has no probe pods. At first it may have those of a former leader."""
        self._said = ""

    async def run(self) -> None:
        """Call ``look`` again and again, until cancelled. Log an error of the API server once, and go on."""
        self.begin()
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

    def begin(self) -> None:
        """Begin to lead: another operator may have led, and have started and deleted probe pods meanwhile."""
        self._existing, self._over, self._unanswered, self._broken = {}, set(), set(), set()
        self._running = True

    async def look(self) -> None:
        """Decide once which probe pods to start or delete, and which measurements to store, and do this.

        A type whose measured node has another kernel or driver now is measured again. Until then, plans use what was
        measured before. If requests fail, raise the first error after all other actions. A pod is then not started, or
        a measurement not stored, before its pause is over.
        """
        now = self._now()
        pods = await self._listed(now)
        profiles = self._cache.profiles()
        changed = changed_classes(profiles, self._software())
        learned = learned_by_model(profiles, self._namespace)
        known = {key: each for key, each in learned.items() if not (key[0] == KEY and key[1] in changed)}
        measured = {device for key, device in known if key == KEY and hardware_of(device, known) is not None}
        links = {ends for ends in unmeasured_links(profiles) if measured.issuperset(ends)} if self._links else set()
        self._tries.restart(lambda subject: subject.ends in links if subject.link else subject.device not in measured)
        for pod in pods:  # Those that a former leader has started count, too.
            began = now - timedelta(seconds=pod.age_s)
            if pod.name in self._unanswered:
                self._tries.answered_late(pod.subject, began)
            self._tries.found(pod.subject, began)
            if not pod.link:
                self._measurements.begin(pod.device, pod.age_s)
        self._unanswered.clear()
        busy, waiting = self._nodes_of_jobs()
        actions = decide(
            self._cache.ledger.view(),
            known,
            pods,
            self._tries.counts(now),
            busy,
            waiting,
            self._image.tolerations,
            gpus=self._gpus,
            unmeasured_links=links,
        )
        self._pauses.keep({_paused_as(action) for action in actions})
        due = [action for action in actions if self._pauses.over(_paused_as(action), now)]
        # Before the first request, because a pod may exist although its creation got no answer.
        self._running = bool(pods) or any(isinstance(action, Start) for action in due)
        errors = []
        for action in due:
            if isinstance(action, Start) and not action.link and (why := changed.get(action.target.device)):
                log.info("the hardware of %s is measured again: %s", action.target.device, why)
            try:
                await self._act(action, now)
            except ApiError as error:
                if key := _paused_as(action):
                    self._pauses.fail(key, now)
                errors.append(error)
        if errors:
            raise errors[0]

    async def _listed(self, now: datetime) -> list[ProbePod]:
        """Return the probe pods, and note those that others have deleted since the last look."""
        selector = f"{PROBE_LABEL}={BY_OPERATOR}"
        listed = await self._api.find(POD, self._namespace, labelSelector=selector) if self._running else []
        pods = [_seen(body, now) for body in listed]
        self._note_gone({pod.name: pod.subject for pod in pods})
        self._over &= {pod.name for pod in pods}
        self._broken &= {pod.subject for pod in pods}
        return [replace(pod, alone=True) if pod.subject in self._broken else pod for pod in pods]

    def _nodes_of_jobs(self) -> tuple[set[str], bool]:
        """Return (names of nodes with pods of jobs, True if pods of jobs have no node yet)."""
        at = [pod.node for job in self._cache.jobs() for pod in self._cache.pods_of(job.key)]
        looks = [look for job in self._cache.jobs() if (look := self._cache.look_of(job)) is not None]
        at += [look.node or None for look in looks if look.phase not in ("Succeeded", "Failed")]
        return {node for node in at if node is not None}, None in at

    def _note_gone(self, listed: Mapping[str, Subject]) -> None:
        """Note the probe pods that others have deleted, such as the scheduler for a pod of higher priority.

        These give way, so that such a try does not count. ``listed``: name of each probe pod that exists → what it
        measures.
        """
        gone = {name: each for name, each in self._existing.items() if name not in listed and name not in self._over}
        for subject in dict.fromkeys(gone.values()):
            names = ", ".join(name for name, each in gone.items() if each == subject)
            log.info("measuring %s: %s was deleted, such as for a pod of higher priority", subject, names)
            self._gave_way(subject)
            self._end(subject)
            if subject.link:
                self._broken.add(subject)
        self._existing = dict(listed)

    def _gave_way(self, subject: Subject) -> None:
        self._metrics.hardware_probes.labels(Ending.GAVE_WAY).inc()
        self._tries.gave_way(subject)

    def _end(self, subject: Subject) -> None:
        """Let no first plan wait for this measurement any longer."""
        if not subject.link:
            self._measurements.end(subject.device)
            self._ended()

    def _software(self) -> dict[str, Software]:
        return {node.name: Software.of(node.kernel, node.labels) for node in self._cache.nodes()}

    async def _act(self, action: Action, now: datetime) -> None:
        if isinstance(action, Start):
            await self._start(action, now)
        elif isinstance(action, Connect):
            await self._connect(action, now)
        else:
            pod = action.pod
            if pod.name not in self._over:
                if isinstance(action, Store):
                    await self._store(pod, now)
                else:
                    await self._removed(action, now)
                self._over.add(pod.name)
                self._end(pod.subject)
            await self._api.delete(POD, self._namespace, pod.name, grace_s=0)

    async def _removed(self, action: Remove, now: datetime) -> None:
        pod = action.pod
        log.info("measuring %s: pod %s ends, because %s", pod.subject, pod.name, action.why)
        if action.ending is Ending.FAILED:
            await self._failed(pod.subject, pod.node, action.why, now)
        elif action.ending is Ending.GAVE_WAY:
            self._gave_way(pod.subject)

    async def _start(self, action: Start, now: datetime) -> None:
        """Start a probe pod. If the API server rejects it, such as for a quota, this counts as a failed try.

        Another error does not count, unless the next look finds that the pod exists.
        """
        target, subject = action.target, action.subject
        name = f"dljob-probe-{'link-' if action.link else ''}{secrets.token_hex(3)}"
        before = self._tries.of(subject)
        self._tries.begin(subject, now)
        if action.link:
            log.info("measuring %s, from node %s to pod %s on node %s", subject, target.node, name, target.peer)
            body = link_server_pod(name, self._namespace, target, self._image)
        else:
            log.info("measuring %s on node %s in pod %s", subject, target.node, name)
            body = probe_pod(name, self._namespace, target, self._image, by=BY_OPERATOR)
        try:
            if not await self._created(body, subject, now):
                return
        except ApiError:
            self._tries.withdraw(subject, before)
            self._unanswered.add(name)
            raise
        if not action.link:
            self._measurements.begin(target.device)

    async def _connect(self, action: Connect, now: datetime) -> None:
        """Start the client of a link. If the API server rejects it, the try has failed, and the server is deleted."""
        server = action.pod
        body = link_client_pod(f"{server.name}-client", self._namespace, action.target, self._image, server.address)
        if not await self._created(body, server.subject, now):
            self._over.add(server.name)
            await self._api.delete(POD, self._namespace, server.name, grace_s=0)

    async def _created(self, body: Manifest, subject: Subject, now: datetime) -> bool:
        """Create a pod. Return False if the API server rejects it; this counts as a failed try."""
        name, node = body["metadata"]["name"], body["metadata"]["annotations"][NODE_ANNOTATION]
        try:
            await self._api.create(POD, body)
        except ApiError as error:
            if not error.rejected:
                raise
            await self._failed(subject, node, f"the API server rejected its pod: {error}", now, "refused")
            return False
        self._existing[name] = subject
        return True

    async def _failed(self, subject: Subject, node: str, why: str, now: datetime, result: str = Ending.FAILED) -> None:
        """Say in the log, in an event about the node and in a metric that a measurement has failed."""
        left = self._tries.left(subject)
        then = f"{left} more tries" if left > 0 else "no more tries until the operator restarts; see dljob probe"
        text = f"{subject} was not measured on node {node}, because {why}; {then}"
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
        software = self._software().get(pod.node, Software())
        try:
            name = await store(self._api, self._cache, pod, now, software)
        except UnusableError as error:
            await self._failed(pod.subject, pod.node, str(error), now)
            return
        self._metrics.hardware_probes.labels("measured").inc()
        text = f"{pod.subject} was measured on node {pod.node}, and stored as dlprofile/{name}"
        log.info("%s", text)
        await self._post(pod.node, Event("Normal", "HardwareMeasured", text), now)


def _paused_as(action: Action) -> Subject | str:
    """Return what pauses if the action fails: a subject to measure, or a pod to store or to connect to.

    Return "" for a deletion, which never pauses: a job may need the node of the pod.
    """
    if isinstance(action, Start):
        return action.subject
    return "" if isinstance(action, Remove) else action.pod.name


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
        link=str(marks.get(LINK_ANNOTATION, "")),
        client_node=str(marks.get(CLIENT_NODE_ANNOTATION, "")),
        address=str(status.get("podIP") or ""),
        other=str(marks.get(PEER_DEVICE_ANNOTATION, "")),
    )
