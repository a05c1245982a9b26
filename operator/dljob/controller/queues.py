"""Kueue on this cluster: find its API version, watch the Workloads of jobs, and read what these refer to.

A Workload is Kueue's request for the admission of a job. It refers to ResourceFlavors (kinds of nodes) and priority
classes. Kueue may be installed, upgraded or removed while the operator runs, so its API is looked up again and again.
While it is not served, jobs with the label of a queue wait.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from time import monotonic

from dljob.job.observed import JOB_LABEL, JobSeen, Observed
from dljob.job.queue import Flavor, KueueAccess
from dljob.kube import Api, ApiError, Cache, JobKey, RejectedError
from dljob.kube.kinds import Kind
from dljob.kube.watch import Reflector
from dljob.kube.watch.reflector import SILENCE_S, Changed
from dljob.reconcile import WorkloadChange

log = logging.getLogger("dljob.queues")

GROUP = "kueue.x-k8s.io"
VERSIONS = ("v1beta2", "v1beta1")
"""Versions of the API that the operator knows. It uses the first one that the API server serves."""
RECHECK_S = 10.0
"""Seconds between two checks whether the API server serves Kueue's API, and in which version."""
FLAVOR_S = 30.0
"""Seconds for which a ResourceFlavor or a priority class that was read is used without reading it again."""
FIRST_LOOK_S = 30.0
"""Seconds after which a start of the operator no longer waits for Kueue's API, or for the first list of Workloads."""
NOT_SERVED = (
    f"the label {GROUP}/queue-name: found no Kueue in this cluster; expected its API {GROUP}. Install Kueue, or remove "
    "the label to run the job without a queue"
)
FORBIDDEN = (
    f"the label {GROUP}/queue-name: the operator may not read the Workloads of Kueue; expected the permission to "
    "read them. "
    "Upgrade the operator's chart, now that Kueue is installed, or set its value kueue.enabled: true"
)
UNREADABLE = (
    f"the label {GROUP}/queue-name: the API server does not list the Workloads of Kueue ({{}}); expected a list. Check "
    "the API server and the conversion webhook of Kueue. The operator tries again until then; pods that run are left "
    "as they are"
)


class Queues:
    """Access to Kueue: watches Workloads, reads flavors and priority classes, and writes the Workloads of jobs.

    Use it in one event loop only. ``namespaces``: those whose jobs the operator manages; empty: all.
    """

    def __init__(
        self,
        api: Api,
        cache: Cache,
        namespaces: Sequence[str],
        changed: Callable[[JobKey], None],
        silence_s: float = SILENCE_S,
    ) -> None:
        """``changed``: called with the key of a job if its Workload has changed. It is also called for each job in a
        queue if the API version of Kueue has changed, or the reason why the operator cannot use Kueue for the job.

        ``silence_s``: seconds without an event after which a watch is opened again.
        """
        self._api, self._cache, self._namespaces, self._requeue = api, cache, namespaces, changed
        self._silence_s = silence_s
        self._watches: dict[str | None, tuple[Reflector, asyncio.Task[None]]] = {}
        """The watches of Workloads by namespace (None: all namespaces), where the operator may read these."""
        self.reflectors: tuple[Reflector, ...] = ()
        """The watches of Workloads, for other threads; empty while Kueue is not there."""
        self._watched = ""
        """API version of the Workloads that are watched; empty: none."""
        self._began_s = 0.0
        """Time of the event loop in seconds at which the last watch began."""
        self._known: dict[tuple[str, str], tuple[float, dict[str, object]]] = {}
        """Cluster-wide objects by plural and name: when each was read, and its body.

        Each read drops those that were read more than ``FLAVOR_S`` ago.
        """
        self.looked = asyncio.Event()
        """Set when it is known whether Kueue is there and, if so, all Workloads of jobs are in the cache.

        Also set if that is not known after about ``FIRST_LOOK_S`` seconds, so that jobs without a queue go on. Jobs
        with a queue then wait, and their condition Admitted says why.
        """
        cache.kueue = KueueAccess(problem=NOT_SERVED)

    async def run(self) -> None:
        """Check forever which API version Kueue serves, and watch its Workloads. When cancelled, stop the watches."""
        began_s = asyncio.get_running_loop().time()
        try:
            while True:
                try:
                    await self._look()
                except ApiError as error:
                    log.warning("the API of Kueue could not be looked up (%s); trying again", error)
                    if not self.looked.is_set() and asyncio.get_running_loop().time() - began_s >= FIRST_LOOK_S:
                        self._set(KueueAccess(problem=UNREADABLE.format(error)))
                        self.looked.set()
                else:
                    self.looked.set()
                await asyncio.sleep(RECHECK_S if self.looked.is_set() else 1.0)
        finally:
            await self._end_watches()

    async def _look(self) -> None:
        served = await self._api.versions_of(GROUP)
        version = next((f"{GROUP}/{each}" for each in VERSIONS if each in served), "")
        if version != self._watched:
            await self._end_watches()
            self._watched = version
        if not version:
            self._set(KueueAccess(problem=NOT_SERVED))
            return
        problems = await self._begin_watches(_workload_kind(version))
        for namespace in await self._unsynced():
            problems[namespace] = UNREADABLE.format("the first list is missing; the operator's log has the error")
        if None in problems:  # The only watch is that of all namespaces.
            self._set(KueueAccess(problem=problems[None]))
        else:
            self._set(KueueAccess(version, problems={name: text for name, text in problems.items() if name}))

    def _set(self, access: KueueAccess) -> None:
        """Use another API version of Kueue, or none, in all or some namespaces. Queue the jobs that this affects."""
        before = self._cache.kueue
        if access == before:
            return
        if access.of("") != before.of(""):
            log.info("Kueue: %s", access.api_version or access.problem)
        for name, text in access.problems.items():
            if text != before.problems.get(name):
                log.warning("Kueue in namespace %s: %s", name, text)
        for name in before.problems.keys() - access.problems.keys():
            log.info("Kueue in namespace %s: %s", name, access.api_version or access.problem)
        self._cache.kueue = access
        for job in self._cache.jobs():
            if job.queue and access.of(job.namespace) != before.of(job.namespace):
                self._requeue(job.key)

    async def _begin_watches(self, kind: Kind) -> dict[str | None, str]:
        """Watch the Workloads in each namespace in which they are not watched yet, if the operator may read them.

        Return the problem of each namespace in which it may not.
        """
        problems: dict[str | None, str] = {}
        for namespace in self._namespaces or (None,):
            if namespace in self._watches:
                if not self._watches[namespace][1].done():
                    continue
                await self._end_watches([namespace])
            try:
                await self._api.page(kind, namespace, JOB_LABEL, 1, "")
            except ApiError as error:
                if error.forbidden:
                    problems[namespace] = FORBIDDEN
                    continue  # After other errors, the watch tries again.
            each = Reflector(
                self._api, self._cache, kind, namespace, JOB_LABEL, self._changed(), self._requeue, self._silence_s
            )
            self._watches[namespace] = each, asyncio.create_task(each.run(), name=f"watch of {each.name}")
            self._began_s = asyncio.get_running_loop().time()
        self.reflectors = tuple(each for each, _ in self._watches.values())
        return problems

    async def _unsynced(self) -> list[str | None]:
        """Wait for the first lists of all watches. Return the namespaces (None: all) whose list is missing.

        Wait until ``FIRST_LOOK_S`` seconds after the last watch began, so that a list that never comes does not delay
        each look.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._began_s + FIRST_LOOK_S):
                for each in self.reflectors:
                    await each.synced.wait()
        return [namespace for namespace, (each, _) in self._watches.items() if not each.synced.is_set()]

    async def _end_watches(self, namespaces: Sequence[str | None] | None = None) -> None:
        """End the watches in ``namespaces``; None: all watches."""
        ended = [self._watches.pop(each)[1] for each in (list(self._watches) if namespaces is None else namespaces)]
        self.reflectors = tuple(each for each, _ in self._watches.values())
        for task in ended:
            task.cancel()
        for result in await asyncio.gather(*ended, return_exceptions=True):
            if isinstance(result, Exception):
                log.warning(
                    "a watch of Kueue's Workloads ended (%s: %s); the operator opens it again while the API server "
                    "serves Kueue", type(result).__name__, result,
                )  # fmt: skip

    def _changed(self) -> Changed:
        def changed(_: Kind, body: object) -> None:
            assert isinstance(body, dict)
            meta = body["metadata"]
            if job := (meta.get("labels") or {}).get(JOB_LABEL):
                self._requeue((meta["namespace"], job))

        return changed

    async def added_to(self, observed: Observed) -> Observed:
        """Return the observed state of a job with what its Workload refers to, if the job is in a queue of Kueue.

        That is the ResourceFlavors (node labels and tolerations) with which Kueue admitted the job, and the value of
        its priority class. Return the state unchanged while pods of the job should run: the stored plan then has what
        the pods need of the flavors.
        """
        seen, job = observed.queue, observed.job
        if not seen.api_version or not job.queue or any(item.replicas for item in observed.sets):
            return observed
        workload = seen.workload
        flavors: dict[str, Flavor] = {}
        if workload is not None and workload.is_true("Admitted"):
            kind = Kind(seen.api_version, "ResourceFlavor", "resourceflavors", namespaced=False)
            for name in sorted({name for each in workload.assignments.values() for name in each.flavors}):
                body = await self._read(kind, name)
                if body is not None:
                    flavors[name] = _flavor(body)
        priority = await self._priority(job, seen.api_version) if workload is None or not flavors else None
        return replace(observed, queue=replace(seen, flavors=flavors, priority=priority))

    async def _priority(self, job: JobSeen, api_version: str) -> int | None:
        pods = (job.spec.get("scheduling") or {}).get("priorityClassName")
        if name := job.queue_priority:
            kind = Kind(api_version, "WorkloadPriorityClass", "workloadpriorityclasses", namespaced=False)
        elif isinstance(pods, str) and pods:
            kind, name = Kind("scheduling.k8s.io/v1", "PriorityClass", "priorityclasses", namespaced=False), pods
        else:
            return None
        body = await self._read(kind, name)
        value = None if body is None else body.get("value")
        return value if isinstance(value, int) else None

    async def _read(self, kind: Kind, name: str) -> dict[str, object] | None:
        """Return a cluster-wide object, which may be up to ``FLAVOR_S`` old; None if it does not exist."""
        found = self._known.get((kind.plural, name))
        if found is not None and monotonic() - found[0] < FLAVOR_S:
            return found[1]
        try:
            body: dict[str, object] = await self._api.get(kind, None, name)
        except ApiError as error:
            if not error.not_found:
                raise
            return None
        now_s = monotonic()
        self._known = {key: each for key, each in self._known.items() if now_s - each[0] < FLAVOR_S}
        self._known[kind.plural, name] = now_s, body
        return body

    async def change(self, job: JobSeen, change: WorkloadChange) -> None:
        """Create, change or delete the Workload of a job, as ``change`` says.

        Do nothing if Kueue is not served, or if the Workload has changed or gone meanwhile: the job is reconciled again
        when the watch reports that. Raise RejectedError if the API server, or a webhook of Kueue, rejects the Workload.
        """
        version, _ = self._cache.kueue.of(job.namespace)
        if not version:
            return
        kind = _workload_kind(version)
        identity = {key: value for key, value in (("uid", change.uid), ("resourceVersion", change.version)) if value}
        try:
            if change.apply is not None:
                meta = change.apply["metadata"] | ({"uid": change.uid} if change.uid else {})
                answer = await self._api.apply(kind, {**change.apply, "metadata": meta}, force=bool(change.uid))
            elif change.delete:
                remains = await self._api.delete(kind, job.namespace, change.name, uid=change.uid)
                if remains is None:
                    self._cache.drop(kind, job.namespace, change.name, change.uid)
                    return
                answer = remains
            elif change.spec is not None:
                body: dict[str, object] = {"metadata": identity, "spec": change.spec}
                answer = await self._api.merge(kind, job.namespace, change.name, body)
            else:
                body = {"metadata": identity, "status": change.status}
                answer = await self._api.merge(kind, job.namespace, change.name, body, subresource="status")
        except ApiError as error:
            if error.conflict or (error.not_found and change.apply is None):
                return
            if error.rejected:
                raise RejectedError("Workload", change.name, error.message) from error
            raise
        self._cache.put(kind, answer)
        self._requeue(job.key)  # The watch event will not say anything new.


def _workload_kind(api_version: str) -> Kind:
    return Kind(api_version, "Workload", "workloads")


def _flavor(body: dict[str, object]) -> Flavor:
    spec = body.get("spec")
    spec = spec if isinstance(spec, dict) else {}
    return Flavor(spec.get("nodeLabels") or {}, tuple(spec.get("tolerations") or ()))
