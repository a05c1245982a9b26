"""The PodsReady condition of a job: the first problem that keeps its pods from being ready, with the remedy."""

from collections.abc import Sequence
from datetime import datetime

from dljob.job.observed import DATASET_CONTAINER, Observed, PodSeen, Rejection
from dljob.scheduling.book import PATIENCE_S
from dljob.status.conditions import FALSE, TRUE, Verdict

_IMAGE = {
    "ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError",
    "RegistryUnavailable", "SignatureValidationFailed",
}  # fmt: skip
_CRASH = {"CrashLoopBackOff", "Error", "Completed"}
WAITS_FOR_GANG = "pod group is unschedulable"
"""Start of the scheduler's message about a pod that fits a node but waits for other pods of its PodGroup."""
NOT_YET = {"ContainerCreating", "PodInitializing"}
"""Reasons that Kubernetes gives for the state Waiting of a container that is starting normally."""


NO_SCHEDULER_S = 60.0
"""Seconds after which a pod that no scheduler has tried to place is reported."""


def pods_ready(observed: Observed, wanted: int, now: datetime) -> Verdict:
    """Return the PodsReady condition of a job that needs ``wanted`` pods; 0: its pods should stop.

    The condition is True if at least ``wanted`` pods are ready, ``wanted`` is not 0, and the API server has not
    rejected an object of the job. Otherwise, it is False. Its message then describes the first problem and the remedy
    or, if there is no problem, how many pods are ready or are left to stop.
    """
    pods = [pod for pod in observed.pods if not pod.deleting]
    ready = len(observed.ready_pods)
    if observed.rejected is not None:
        rejected = observed.rejected
        if rejected.being_deleted:
            return Verdict("PodsReady", FALSE, "WaitingForDeletion", rejected.message)
        if rejected.taken:
            return Verdict("PodsReady", FALSE, "NamesTaken", rejected.message)
        text = f"the API server rejected {rejected.kind} {rejected.name}: {rejected.message}"
        return Verdict("PodsReady", FALSE, "ObjectRejected", text)
    if wanted == 0:
        reason = "Stopping" if observed.pods else "Stopped"
        return Verdict("PodsReady", FALSE, reason, f"{len(observed.pods)} pods of the job are left; expected 0")
    if ready >= wanted:
        return Verdict("PodsReady", TRUE, "AllReady", f"{ready} of {wanted} pods are ready")
    starting = Verdict("PodsReady", FALSE, "Starting", f"{ready} of {wanted} pods are ready")
    return (
        _stuck(pods)
        or _fetching(pods)
        or _unschedulable(pods)
        or _rejected(observed)
        or _unscheduled(pods, now)
        or _not_made(observed)
        or starting
    )


def unscheduled_in_s(observed: Observed, now: datetime) -> float | None:
    """Return the seconds until ``pods_ready`` will report that no scheduler looks at a pod; None without such a pod."""
    since = [pod.unscheduled.since for pod in observed.pods if pod.unscheduled is not None and not pod.deleting]
    left_s = [NO_SCHEDULER_S - (now - each).total_seconds() for each in since]
    return min((each for each in left_s if each > 0), default=None)


def _others(pods: Sequence[PodSeen]) -> str:
    return f" (and {len(pods) - 1} more)" if len(pods) > 1 else ""


def _stuck(pods: Sequence[PodSeen]) -> Verdict | None:
    stuck = [pod for pod in pods if pod.stuck is not None and pod.stuck.reason not in NOT_YET]
    if not stuck:
        return None
    pod = stuck[0]
    assert pod.stuck is not None
    why, image = pod.stuck, pod.stuck.image
    if why.reason in _IMAGE:
        text = (
            f"spec.trainer.image: pod {pod.name}{_others(stuck)} cannot pull image {image!r}: {why.reason}: "
            f"{why.message}; "
            "correct the image name, push the image, or name a Secret with the registry credentials in "
            "spec.trainer.imagePullSecrets"
        )
        return Verdict("PodsReady", FALSE, "ImagePullFailed", text)
    if why.reason == "OOMKilled":
        text = (
            f"pod {pod.name}{_others(stuck)} ended {pod.restarts} times and starts again, because it reached its "
            f"memory limit; see the condition MemoryExceeded, and kubectl logs {pod.name} --previous"
        )
        return Verdict("PodsReady", FALSE, "OutOfMemory", text)
    if why.reason in _CRASH:
        text = (
            f"the agent in pod {pod.name}{_others(stuck)} ended {pod.restarts} times: {why.reason}: {why.message}; "
            f"see kubectl logs {pod.name} --previous. A custom image must be built FROM the trainer image, "
            "unless the agent is injected (spec.trainer.agent)"
        )
        return Verdict("PodsReady", FALSE, "AgentCrashing", text)
    text = (
        f"the container of pod {pod.name}{_others(stuck)} does not start: {why.reason}: {why.message}; "
        "check spec.trainer, spec.dataset.secretName and spec.podTemplateOverrides"
    )
    return Verdict("PodsReady", FALSE, "ContainerNotStarted", text)


def _fetching(pods: Sequence[PodSeen]) -> Verdict | None:
    """Return the verdict about pods that still fetch the dataset or the files of the script; None if no pod does.

    If downloads have failed and are tried again, the verdict is about these. If no retry can succeed, the module
    ``reconcile.run`` fails the job instead.
    """
    fetching = [pod for pod in pods if pod.fetching is not None]
    failed = [pod for pod in fetching if pod.fetching and pod.fetching.exit_code is not None]
    if failed:
        pod, again = failed[0], failed[0].fetching
        assert again is not None
        is_data = again.container == DATASET_CONTAINER
        field, what = ("spec.dataset.uri", "the data") if is_data else ("spec.trainer.source", "the files")
        text = (
            f"{field}: pod {pod.name}{_others(failed)} could not fetch {what} and retries: "
            f"{again.message} (exit code {again.exit_code}); see kubectl logs {pod.name} -c {again.container}"
        )
        return Verdict("PodsReady", FALSE, "DatasetNotFetched" if is_data else "SourceNotFetched", text)
    if fetching:
        pod, now = fetching[0], fetching[0].fetching
        assert now is not None
        text = f"{len(fetching)} pods fetch {now.what}; see kubectl logs {pod.name} -c {now.container}"
        is_data = now.container == DATASET_CONTAINER
        return Verdict("PodsReady", FALSE, "FetchingDataset" if is_data else "FetchingSource", text)
    return None


def _unschedulable(pods: Sequence[PodSeen]) -> Verdict | None:
    # The VolumeReady condition explains pods that wait for their volume.
    waiting = [pod for pod in pods if pod.unschedulable and "PersistentVolumeClaim" not in pod.unschedulable]
    if not waiting:
        return None
    # Of the pods of a gang, only some say what is missing. The others wait for these.
    pod = min(waiting, key=lambda each: (each.unschedulable or "").startswith(WAITS_FOR_GANG))
    lower = "spec.trainer.scratch.size" if "ephemeral-storage" in (pod.unschedulable or "") else "spec.resources"
    text = (
        f"no node fits pod {pod.name}{_others(waiting)}: {pod.unschedulable}; free a node, lower "
        f"{lower}, or allow more nodes in spec.devices and spec.scheduling. After "
        f"{PATIENCE_S:.0f} s without a node, a pod no longer reserves devices, and other jobs can use these devices"
    )
    return Verdict("PodsReady", FALSE, "Unschedulable", text)


def _rejected(observed: Observed) -> Verdict | None:
    """Return the verdict about pods that a kubelet has rejected, and that have not found another node since."""
    placed = {pod.name for pod in observed.pods if pod.rejection is None and pod.node is not None}
    found = [each for each in observed.rejections if each.pod not in placed]
    if not found:
        return None
    last = found[-1]
    pods = len({each.pod for each in found})
    more = f" and {pods - 1} more" if pods > 1 else ""
    text = (
        f"node {last.node or '(unknown)'} rejected pod {last.pod}{more}: {last.reason}: {last.message}; "
        f"rejections since the pods were created: {len(found)}. {_rejection_remedy(last)}. Rejections do not count "
        "against spec.runPolicy.backoffLimit"
    )
    return Verdict("PodsReady", FALSE, "RejectedByNode", text)


def _rejection_remedy(rejection: Rejection) -> str:
    if rejection.reason.startswith("OutOf") or rejection.reason == "UnexpectedAdmissionError":
        return (
            "The node has less room than the scheduler assumed: another scheduler may place pods there too. Let one "
            "scheduler place all pods of these nodes"
        )
    return "Check the node and its kubelet"


def _unscheduled(pods: Sequence[PodSeen], now: datetime) -> Verdict | None:
    """Return the verdict about pods that no scheduler has tried to place for a long time; None without such pods."""
    waiting = [
        pod
        for pod in pods
        if pod.unscheduled is not None and (now - pod.unscheduled.since).total_seconds() >= NO_SCHEDULER_S
    ]
    if not waiting:
        return None
    pod, which = waiting[0], waiting[0].unscheduled
    assert which is not None
    text = (
        f"spec.scheduling.schedulerName: no scheduler has looked at pod {pod.name}{_others(waiting)} for "
        f"{NO_SCHEDULER_S:.0f} s; expected a running scheduler with the name {which.scheduler!r}. Start this "
        "scheduler, or correct the name, which may also be an administrator's default (jobDefaults.scheduling)"
    )
    return Verdict("PodsReady", FALSE, "NoScheduler", text)


def _not_made(observed: Observed) -> Verdict | None:
    """Return the verdict about the first StatefulSet that cannot create its pods; None if all of them can.

    A quota, a policy or an override in the spec may be the cause.
    """
    for item in observed.sets:
        if item.problem and item.replicas:
            text = (
                f"StatefulSet {item.name} cannot create its pods: {item.problem}; raise the quota, relax the policy, "
                "or correct spec.podTemplateOverrides and spec.resources. Meanwhile the job reserves no devices"
            )
            return Verdict("PodsReady", FALSE, "PodsRejected", text)
    return None
