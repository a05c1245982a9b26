"""The PodsReady condition of a job: the first problem that keeps its pods from being ready, with the remedy."""

from collections.abc import Sequence

from dljob.job.observed import DATASET_CONTAINER, Observed, PodSeen
from dljob.scheduling.book import PATIENCE_S
from dljob.status.conditions import FALSE, TRUE, Verdict

_IMAGE = {
    "ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError",
    "RegistryUnavailable", "SignatureValidationFailed",
}  # fmt: skip
_CRASH = {"CrashLoopBackOff", "Error", "OOMKilled", "Completed"}
WAITS_FOR_GANG = "pod group is unschedulable"
"""Start of the scheduler's message about a pod that fits a node but waits for other pods of its PodGroup."""
NOT_YET = {"ContainerCreating", "PodInitializing"}
"""Reasons that Kubernetes gives for the state Waiting of a container that is starting normally."""


def pods_ready(observed: Observed, wanted: int) -> Verdict:
    """Return the PodsReady condition of a job that needs ``wanted`` pods; 0: its pods should stop.

    The condition is True if at least ``wanted`` pods are ready, ``wanted`` is not 0, and the API server has not
    rejected an object of the job. Otherwise, it is False. Its message then describes the first problem and the remedy
    or, if there is no problem, how many pods are ready or are left to stop.
    """
    pods = [pod for pod in observed.pods if not pod.deleting]
    ready = len(observed.ready_pods)
    if observed.rejected is not None:
        rejected = observed.rejected
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
    return _stuck(pods) or _fetching(pods) or _unschedulable(pods) or _not_made(observed) or starting


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
