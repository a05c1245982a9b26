"""Recognize pods that were evicted, or ended at their memory limit, and remember evicted and rejected pods of jobs.

A StatefulSet replaces an evicted or rejected pod so soon that a reconcile often does not see it.
"""

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

from dljob.job.observed import SIGKILLED, TRAINER_CONTAINER, Eviction, JobSeen, LookSeen, PodSeen
from dljob.render import Names

MAX_JOBS, MAX_PODS = 1000, 16
"""Maximum number of jobs, and of pods of each job, that are remembered. The oldest are forgotten."""
MAX_MESSAGE = 1024
REASON = "Evicted"
"""``status.reason`` of a pod that the kubelet has evicted."""


def eviction(body: Mapping[str, Any]) -> Eviction | None:
    """Return the pod, its node and the kubelet's message if the kubelet has evicted the pod; None if it has not."""
    meta, status = body["metadata"], body.get("status") or {}
    if (status.get("phase"), status.get("reason")) != ("Failed", REASON):
        return None
    node = (body.get("spec") or {}).get("nodeName") or ""
    # The kubelet adds this condition when it evicts a pod (Kubernetes 1.26).
    targets = (each for each in status.get("conditions") or () if each.get("type") == "DisruptionTarget")
    at = next((str(each.get("lastTransitionTime") or "")[:64] for each in targets), "")
    return Eviction(meta["name"], meta["uid"], node, str(status.get("message") or "")[:MAX_MESSAGE], at)


def during(job: JobSeen, found: Iterable[Eviction]) -> tuple[Eviction, ...]:
    """Return the evictions that are not older than the job: the others are of pods of an earlier job of its name.

    Pods that still stop after their job is gone can be evicted, or change, so that they are remembered anew.
    """
    return tuple(each for each in found if not each.at or _time(each.at) >= job.created)


def _time(text: str) -> datetime:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return datetime.max.replace(tzinfo=UTC)
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def memory_killed_at(container: Mapping[str, Any]) -> str:
    """Return when the kernel last ended the container of the agent and the ranks at its memory limit; else ''.

    With cgroup v2, kubelets let the kernel end all processes of a container, the agent included, if its memory runs
    out (``memory.oom.group``, since Kubernetes 1.28). The kubelet then starts the container again, in the same pod.
    A container in which the kernel has ended only a rank gets the same reason when it stops later, but another exit
    code.
    """
    if container.get("name") != TRAINER_CONTAINER:
        return ""
    ended = [(container.get(state) or {}).get("terminated") or {} for state in ("state", "lastState")]
    killed = (each for each in ended if (each.get("reason"), each.get("exitCode")) == ("OOMKilled", SIGKILLED))
    return next((str(each.get("finishedAt") or "unknown")[:64] for each in killed), "")


T = TypeVar("T")


class PodHistory(Generic[T]):
    """Events of the last pods of each job, such as their evictions, also of pods that are gone."""

    def __init__(self, of: Callable[[Any], T | None], *, looks: bool = False) -> None:
        """``of``: function that returns what to remember about a pod; None: nothing.

        ``looks``: True to remember look pods instead of the pods of StatefulSets.
        """
        self._what, self._looks = of, looks
        self._of: dict[tuple[str, str], dict[str, T]] = {}
        """Namespace and name of a job → uid of a pod → what happened to it, oldest first."""

    def note(self, job: tuple[str, str] | None, pod: Any) -> None:
        """Remember what happened to a pod, if there is something and if the pod is one of the job.

        A StatefulSet of the job controls such a pod, or it has the name of the job's look pod. ``job``: the job that
        the object's label names, if any. ``pod``: a watched object of any kind. An object that is not a pod is ignored.
        """
        if job is None or not self._concerns(job[1], pod):
            return
        if (what := self._what(pod)) is None:
            return
        found = self._of.setdefault(job, {})
        found.setdefault(pod.uid, what)
        if len(found) > MAX_PODS:
            del found[next(iter(found))]
        if len(self._of) > MAX_JOBS:
            del self._of[next(iter(self._of))]

    def _concerns(self, job: str, pod: Any) -> bool:
        if self._looks:
            return isinstance(pod, LookSeen) and pod.name == Names(job, "").look
        return isinstance(pod, PodSeen) and pod.set == f"{job}-{pod.group}"

    def forget(self, job: tuple[str, str]) -> None:
        self._of.pop(job, None)

    def of(self, job: tuple[str, str]) -> tuple[T, ...]:
        """Return what happened to the pods of a job, oldest first."""
        return tuple(self._of.get(job, {}).values())
