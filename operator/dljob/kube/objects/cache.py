"""Cache of the objects that the operator watches, reduced to the fields that the operator needs.

An object in the cache is replaced only by a version with a higher resourceVersion. The answer to a write may therefore
arrive before or after the watch event. ``Cache.prune`` finds deletions that a broken watch missed. Use a cache in one
event loop only.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from math import inf
from operator import attrgetter
from typing import Any

from dljob.api.compact import compact
from dljob.cluster.machines import most_on_one_machine
from dljob.job.observed import (
    JOB_LABEL,
    Eviction,
    JobSeen,
    LookSeen,
    Observed,
    PodSeen,
    Rejection,
    SetSeen,
)
from dljob.job.queue import KueueAccess, QueueSeen
from dljob.kube.kinds import (
    CLAIM,
    CONFIG_MAP,
    DLJOB,
    LIMIT_RANGE,
    NODE,
    POD,
    PRIORITY_CLASS,
    PROFILE,
    PROVISIONING_REQUEST,
    QUOTA,
    STATEFUL_SET,
    STORAGE_CLASS,
    VOLUME,
    WORKLOAD,
    Kind,
)  # fmt: skip
from dljob.kube.objects import storage, trim
from dljob.kube.objects.lost_nodes import LostNodes, failed_nodes
from dljob.kube.objects.pods.evictions import PodHistory, during
from dljob.kube.objects.priority_classes import PriorityClasses, priority_class
from dljob.kube.objects.set_owners import SetOwners
from dljob.kube.objects.store import CachedObject, JobKey, Store
from dljob.kube.objects.stored_plans import StoredPlans
from dljob.kube.objects.stored_texts import StoredTexts
from dljob.kube.objects.touched_jobs import TouchedJobs
from dljob.kube.objects.view import bound_pod, node_capacity, usable_cpus
from dljob.render import Names
from dljob.scheduling import Ledger, LimitRange, NamespaceLimits, Quota, overdrafts

MAX_DELETED = 10_000
OWNERS = (DLJOB, STATEFUL_SET)
"""Kinds whose uids other objects in the cache contain."""

_TRIM: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    DLJOB.plural: trim.job,
    POD.plural: trim.pod,
    STATEFUL_SET.plural: trim.stateful_set,
    CONFIG_MAP.plural: trim.config_map,
    CLAIM.plural: storage.claim,
    NODE.plural: trim.node,
    STORAGE_CLASS.plural: storage.storage_class,
    VOLUME.plural: storage.volume,
    PRIORITY_CLASS.plural: priority_class,
    PROFILE.plural: lambda body: body,
    WORKLOAD.plural: trim.workload,
    PROVISIONING_REQUEST.plural: trim.provisioning_request,
    QUOTA.plural: Quota.parse,
    LIMIT_RANGE.plural: LimitRange.parse,
}


def utc_now() -> datetime:
    return datetime.now(UTC)


class Cache:
    def __init__(
        self, now: Callable[[], datetime] = utc_now, *, queues: bool = False, architectures: Collection[str] = ()
    ) -> None:
        """``queues``: False: the queue labels of jobs have no effect. ``architectures``: as of ``node_capacity``."""
        self._queues, self._architectures = queues, architectures
        self.kueue = KueueAccess()
        self._lost_nodes, self._set_owners, self.texts = LostNodes(now), SetOwners(), StoredTexts()
        self._stores = {plural: Store() for plural in _TRIM}
        self.priority_classes = PriorityClasses(self._stores[PRIORITY_CLASS.plural].entries)
        claims, classes, volumes = (self._stores[kind.plural] for kind in (CLAIM, STORAGE_CLASS, VOLUME))
        self._storage = storage.CachedStorage(claims.entries, claims.by_namespace, classes.entries, volumes.entries)
        self._unreadable = set[tuple[Kind, str | None]]()
        self.ledger = Ledger()
        """Capacity of the cached nodes, and what all cached pods take from it, also pods without the label of a job."""
        self.touched, self.plans = TouchedJobs(), StoredPlans()
        self._evictions = PodHistory[Eviction](attrgetter("eviction"))
        self._rejections = PodHistory[Rejection](attrgetter("rejection"))
        self._look_evictions = PodHistory[Eviction](attrgetter("eviction"), looks=True)
        self.profiles_version = self.limits_version = 0
        """Numbers that increase with each change of a profile, and of a quota, limit range or PriorityClass."""
        self._deleted: dict[str, None] = {}
        """Uids of deleted objects, oldest first. ``put`` ignores these, because answers to writes may be late."""

    def put(self, kind: Kind, body: Mapping[str, Any]) -> bool:
        """Add or update an object. Return True if a field on which the operator's decisions depend has changed.

        Ignore a version that is older than the cached one, and an object that was deleted.
        """
        store, meta = self._stores[kind.plural], body["metadata"]
        key = (compact(meta.get("namespace") or ""), meta["name"])
        version = trim.version_number(meta.get("resourceVersion"))
        old = store.entries.get(key)
        if meta["uid"] in self._deleted or (old is not None and trim.older(version, old.version)):
            return False
        label = (meta.get("labels") or {}).get(JOB_LABEL)
        job = (key[0], compact(label)) if label else None
        stranger = kind is POD and job is None
        seen = None if stranger else _TRIM[kind.plural](body)
        if isinstance(seen, JobSeen):
            bounded = self.texts.bounded_job(key, seen)
            seen = bounded if self._queues else replace(bounded, queue="", queue_priority="")
        if isinstance(seen, trim.MapSeen):
            seen = self.texts.bounded_map(key, seen)
        if kind is VOLUME and seen != (old.seen if old is not None else None):
            self._storage.volume_changed(body)
        if kind is VOLUME and seen is None:  # Every node can mount it. There may be thousands of such volumes.
            store.forget(key)
            return old is not None
        capacity_changed = self._account(kind, body, seen, old)
        if isinstance(seen, trim.NodeSeen):
            self._lost_nodes.added(seen)
        if kind is STATEFUL_SET:
            self._set_owners.note(meta["uid"], foreign=trim.owning_job(body) is None)
        store.forget(key)
        self._note(kind, key, old.job if old is not None else None, job)
        owner, owning_job = (None, None) if stranger else (trim.owner_uid(body), trim.owning_job(body))
        uid = compact(meta["uid"]) if kind in OWNERS else meta["uid"]
        store.add(key, CachedObject(uid, version, owner, job, seen, owning_job))
        if not (isinstance(seen, PodSeen) and self._set_owners.foreign(seen.set_uid)):
            for history in (self._evictions, self._rejections, self._look_evictions):
                history.note(job, seen)
        if stranger:
            return capacity_changed or (old is not None and old.job is not None)
        return capacity_changed or old is None or old.uid != meta["uid"] or old.seen != seen

    def _note(self, kind: Kind, key: tuple[str, str], *jobs: JobKey | None) -> None:
        """Note that an object changed: raise the version of its kind, and mark the jobs to which it belongs.

        ``jobs``: the job that the object's label named before the change, and the one that it names now; None without a
        label. A change of a DLJob marks this job, whatever ``jobs`` contains.
        """
        self.profiles_version += kind is PROFILE
        self.limits_version += kind in (QUOTA, LIMIT_RANGE, PRIORITY_CLASS)
        self.touched.note((key,) if kind is DLJOB else (job for job in jobs if job is not None))

    def _account(self, kind: Kind, body: Mapping[str, Any], seen: Any, old: CachedObject | None) -> bool:
        """Enter a node or pod into ``ledger``, and ignore other kinds. Return True if that changed the ledger.

        ``seen``: the trimmed object. ``old``: the cached object that it replaces; None if there is none.
        """
        uid = body["metadata"]["uid"]
        if kind is NODE:
            return self.ledger.put_node(seen.name, node_capacity(seen, self._architectures))
        if kind is not POD:
            return False
        changed = old is not None and old.uid != uid and self.ledger.drop_pod(old.uid)
        return self.ledger.put_pod(uid, bound_pod(body)) or changed

    def drop(self, kind: Kind, namespace: str, name: str, uid: str | None = None) -> bool:
        """Remove an object. Return True if the object was removed.

        Do nothing if the object is not cached or if ``uid`` is given and the object has another uid.
        """
        store = self._stores[kind.plural]
        entry = store.entries.get((namespace, name))
        if entry is None or (uid is not None and entry.uid != uid):
            return False
        store.forget((namespace, name))
        self._note(kind, (namespace, name), entry.job)
        self._deleted[entry.uid] = None
        if kind is CONFIG_MAP:
            self.texts.forget(trim.MapSeen, (namespace, name))
        if kind is POD:
            self.ledger.drop_pod(entry.uid)
        if kind is DLJOB:
            self.texts.forget(JobSeen, (namespace, name))
            for history in (self._evictions, self._rejections, self._look_evictions):
                history.forget((namespace, name))
            self.plans.forget((namespace, name))
        if kind is NODE:
            self.ledger.drop_node(name)
            self._lost_nodes.removed(name)
        if len(self._deleted) > MAX_DELETED:
            del self._deleted[next(iter(self._deleted))]
        return True

    def prune(
        self, kind: Kind, present: Iterable[str], before: int | None, namespace: str | None = None
    ) -> list[JobKey]:
        """Remove cached objects whose uids are not in ``present``. Return the keys of the jobs of removed objects.

        ``present``: uids from a list of the API server. ``before``: resourceVersion of this list. Objects with a newer
        version are not removed; None: nothing is removed. ``namespace``: namespace of the list; None: all.
        """
        self._unreadable.discard((kind, namespace))
        uids, store, newest = set(present), self._stores[kind.plural], -1 if before is None else before
        gone = [
            key
            for key, entry in store.entries.items()
            if entry.uid not in uids and namespace in (None, key[0]) and (entry.version or inf) <= newest
        ]
        jobs = [key if kind is DLJOB else store.entries[key].job for key in gone]
        for key in gone:
            self.drop(kind, *key)
        return [job for job in jobs if job is not None]

    def unread(self, kind: Kind, namespace: str | None) -> None:
        """Note that the operator may not list a kind, until ``prune`` gets a list. ``namespace``: None: all."""
        self._unreadable.add((kind, namespace))

    def readable(self, kind: Kind, namespace: str | None = None) -> bool:
        """Return True unless the operator may not list the objects of a kind in a namespace."""
        return self._unreadable.isdisjoint({(kind, None), (kind, namespace)})

    def jobs(self) -> Iterator[JobSeen]:
        # The list is a copy, because the thread of the metrics iterates too.
        for entry in list(self._stores[DLJOB.plural].entries.values()):
            yield entry.seen

    def job(self, key: JobKey) -> JobSeen | None:
        return entry.seen if (entry := self.found(DLJOB, *key)) else None

    def nodes(self) -> list[trim.NodeSeen]:
        return [entry.seen for entry in self._stores[NODE.plural].entries.values()]

    def profiles(self) -> list[Mapping[str, Any]]:
        return [entry.seen for entry in self._stores[PROFILE.plural].entries.values()]

    def limits(self, namespace: str) -> NamespaceLimits:
        """Return all quotas and limit ranges of a namespace, also those that do not apply to pods of jobs."""
        quotas, ranges = (
            tuple(store.entries[namespace, name].seen for name in sorted(store.by_namespace.get(namespace, ())))
            for store in (self._stores[QUOTA.plural], self._stores[LIMIT_RANGE.plural])
        )
        return NamespaceLimits(quotas, ranges, self.priority_classes.default if quotas else "")

    def pods_of(self, key: JobKey) -> list[PodSeen]:
        """Return the pods that the StatefulSets of the job control. Others that have its label are not the job's."""
        return [pod for pod in self._named_pods(key) if not self._set_owners.foreign(pod.set_uid)]

    def look_of(self, job: JobSeen) -> LookSeen | None:
        """Return the look pod of a job; None if there is none."""
        seen = (each.seen for each in self._of(POD, job.key) if each.owner == job.uid)
        return next((each for each in seen if isinstance(each, LookSeen)), None)

    def _named_pods(self, key: JobKey) -> list[PodSeen]:
        """Return the pods with the job's label that are controlled by a StatefulSet with a name of the job's sets."""
        pods = (entry.seen for entry in self._of(POD, key))
        return [pod for pod in pods if pod.set and pod.set == f"{key[1]}-{pod.group}"]

    def unidentified_sets(self, key: JobKey) -> dict[str, str]:
        """Return uid → name of the StatefulSets of pods with the job's label whose owner is not known yet."""
        return {pod.set_uid: pod.set for pod in self._named_pods(key) if not self._set_owners.known(pod.set_uid)}

    def identify_set(self, uid: str, body: Mapping[str, Any] | None) -> None:
        """Note if a DLJob owns the StatefulSet with this uid. ``body``: the StatefulSet with its name, or None.

        If ``body`` has another uid or is None, the StatefulSet is gone, and its pods count as the job's.
        """
        foreign = body is not None and body["metadata"]["uid"] == uid and trim.owning_job(body) is None
        self._set_owners.note(uid, foreign=foreign)

    def found(self, kind: Kind, namespace: str, name: str) -> CachedObject | None:
        """Return an object of a watched kind; None if it is not cached."""
        return self._stores[kind.plural].entries.get((namespace, name))

    def _of(self, kind: Kind, key: JobKey) -> list[CachedObject]:
        store = self._stores[kind.plural]
        return [store.entries[key[0], name] for name in store.by_job.get(key, ())]

    def runs(self, key: JobKey) -> bool:
        """Return True if there are pods with the job's label."""
        return key in self._stores[POD.plural].by_job

    def waiting_for_volumes(self, changed: Collection[Kind]) -> list[JobKey]:
        """Return the keys of the jobs that changes of objects of the kinds ``changed`` may let start or be planned."""
        return [job.key for job in self._storage.waiting(self.jobs(), changed)]

    def on_lost_nodes(self) -> list[JobKey]:
        """Return the keys of jobs with pods on lost (deleted or NotReady) nodes. A change of nodes may affect them."""
        return [job.key for job in self.jobs() if self._lost(pod.node for pod in self.pods_of(job.key) if pod.node)]

    def observe(self, key: JobKey) -> Observed | None:
        """Return the cached state of a job; None if there is no such job.

        Only the fields that are in the cache are set. The caller sets the others, such as ``view`` and ``learned``.
        """
        if (job := self.job(key)) is None:
            return None
        names, present_sets = Names.of(job), self._of(STATEFUL_SET, key)
        sets = tuple[SetSeen, ...](each.seen for each in present_sets if each.owner == job.uid)
        others = {f"StatefulSet {each.seen.name}": each for each in present_sets if each.owner != job.uid}
        maps = dict.fromkeys((names.plan, names.report, names.suggestion), trim.MapSeen("", plan=None, report=None))
        for name, each in [(name, self.found(CONFIG_MAP, job.namespace, name)) for name in maps]:
            if each is not None and each.owner == job.uid:
                maps[name] = each.seen
            elif each is not None and (name != names.suggestion or "task" in job.spec):
                others[f"ConfigMap {name}"] = each
        claims, own = self._storage.claims(job.namespace), self.found(CLAIM, job.namespace, names.claim)
        if own is not None and own.owner not in (None, job.uid):
            others[f"PersistentVolumeClaim {names.claim}"] = own
        pods, look = self.pods_of(key), self.look_of(job)
        lost = self._lost(pod.node for pod in (*pods, *((look,) if look else ())) if pod.node)
        used = [node.seen for name in {p.node for p in pods if p.node} if (node := self.found(NODE, "", name))]
        report, suggestion = maps[names.report], maps[names.suggestion]
        observed = Observed(
            job=job,
            sets=sets,
            pods=tuple(pods),
            claims=claims,
            classes=self._storage.classes() if self.readable(STORAGE_CLASS) else None,
            volumes=self._storage.volumes(claims.values()),
            report=report.report_text,
            report_problem=report.report_problem,
            look=look,
            suggestion=suggestion.suggestion,
            suggestion_problem=suggestion.suggestion_problem,
            leftovers=tuple(text for text, each in others.items() if each.owning_job != job.name),
            being_deleted=tuple(text for text, each in others.items() if each.owning_job == job.name),
            lost_nodes=lost,
            closed_nodes=self._lost_nodes.closed,
            failed_nodes=failed_nodes(lost, {node.name: node for node in self.nodes()}) if lost else {},
            node_conditions={node.name: node.conditions for node in used},
            machine_nodes=most_on_one_machine(node.labels for node in used),
            usable_cpus=usable_cpus(used),
            queue=self._queue(job),
            evictions=during(job, self._evictions.of(key)),
            look_evictions=during(job, self._look_evictions.of(key)),
            provisioning=self._owned(PROVISIONING_REQUEST, job, names.provisioning),
            provisioning_readable=self.readable(PROVISIONING_REQUEST, job.namespace),
            rejections=self._rejections.of(key),
            overdrawn=overdrafts(self.limits(job.namespace).quotas, (pod.charge for pod in pods if pod.charge)),
        )
        return self.plans.added_to(observed, maps.get(names.plan))

    def _queue(self, job: JobSeen) -> QueueSeen:
        """Return the job's Workload in Kueue. The caller adds flavors and priority, which are not in the cache."""
        if not self._queues:
            return QueueSeen()
        return QueueSeen(*self.kueue.of(job.namespace), self._owned(WORKLOAD, job, Names.of(job).workload))

    def _owned(self, kind: Kind, job: JobSeen, name: str) -> Any:
        """Return the trimmed object with this name if the job controls it; otherwise None."""
        entry = self._stores[kind.plural].entries.get((job.namespace, name))
        return entry.seen if entry is not None and entry.owner == job.uid else None

    def _lost(self, used: Iterable[str]) -> dict[str, datetime]:
        """Return name → time of loss for each lost node among the nodes named in ``used``."""
        nodes, names = self._stores[NODE.plural].entries, set(used)
        return self._lost_nodes.among(names, {name: nodes["", name].seen for name in names if ("", name) in nodes})

    def ignores_faults(self, node: str) -> bool:
        """Return True if the administrator has marked the node, so that its faults do not count."""
        entry = self._stores[NODE.plural].entries.get(("", node))
        return entry is not None and bool(entry.seen.ignore_faults)
