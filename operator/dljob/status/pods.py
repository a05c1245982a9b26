"""What a job's pods say, as one condition: the first thing that keeps them from being ready, with its remedy."""

from collections.abc import Sequence

from dljob.job.observed import DATASET_CONTAINER, Observed, PodSeen
from dljob.status.conditions import FALSE, TRUE, Verdict

_IMAGE = {
    "ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError",
    "RegistryUnavailable", "SignatureValidationFailed",
}  # fmt: skip
_CRASH = {"CrashLoopBackOff", "Error", "OOMKilled", "Completed"}
NOT_YET = {"ContainerCreating", "PodInitializing"}
"""Reasons of a container that is on its way."""


def pods_ready(observed: Observed, wanted: int) -> Verdict:
    """The PodsReady condition of ``wanted`` pods."""
    pods = [pod for pod in observed.pods if not pod.deleting]
    ready = sum(pod.ready for pod in pods)
    if observed.refused is not None:
        refused = observed.refused
        text = f"the API server refused {refused.kind} {refused.name}: {refused.message}"
        return Verdict("PodsReady", FALSE, "ObjectRefused", text)
    if wanted == 0:
        reason = "Stopping" if observed.pods else "Stopped"
        return Verdict("PodsReady", FALSE, reason, f"{len(observed.pods)} pods left, none wanted")
    if ready >= wanted:
        return Verdict("PodsReady", TRUE, "AllReady", f"{ready} of {wanted} pods are ready")
    starting = Verdict("PodsReady", FALSE, "Starting", f"{ready} of {wanted} pods are ready")
    return _stuck(pods) or _fetching(pods) or _unschedulable(pods) or _not_made(observed) or starting


def _others(pods: Sequence[PodSeen]) -> str:
    return f" ({len(pods)} pods in all)" if len(pods) > 1 else ""


def _stuck(pods: Sequence[PodSeen]) -> Verdict | None:
    stuck = [pod for pod in pods if pod.stuck is not None and pod.stuck.reason not in NOT_YET]
    if not stuck:
        return None
    pod = stuck[0]
    assert pod.stuck is not None
    why, image = pod.stuck, pod.stuck.image
    if why.reason in _IMAGE:
        text = (
            f"spec.trainer.image: pod {pod.name}{_others(stuck)} cannot get image {image!r}: {why.reason}: "
            f"{why.message}; "
            "correct the image's name, push it, or name a Secret with the registry's credentials in "
            "spec.trainer.imagePullSecrets"
        )
        return Verdict("PodsReady", FALSE, "ImagePullFailed", text)
    if why.reason in _CRASH:
        text = (
            f"the agent in pod {pod.name}{_others(stuck)} ended {pod.restarts} times: {why.reason}: {why.message}; "
            f"see kubectl logs {pod.name} --previous, and build your own image FROM the trainer image"
        )
        return Verdict("PodsReady", FALSE, "AgentCrashing", text)
    text = (
        f"the container of pod {pod.name}{_others(stuck)} does not start: {why.reason}: {why.message}; "
        "check spec.trainer, spec.dataset.secretName and spec.podTemplateOverrides"
    )
    return Verdict("PodsReady", FALSE, "ContainerNotStarted", text)


def _fetching(pods: Sequence[PodSeen]) -> Verdict | None:
    """What cannot succeed ends the job (``reconcile.run``); here is what is tried again, or goes on."""
    fetching = [pod for pod in pods if pod.fetching is not None]
    failed = [pod for pod in fetching if pod.fetching and pod.fetching.exit_code is not None]
    if failed:
        pod, again = failed[0], failed[0].fetching
        assert again is not None
        text = (
            f"spec.dataset.uri: pod {pod.name}{_others(failed)} could not get the data and tries again: "
            f"{again.message} (exit code {again.exit_code}); see kubectl logs {pod.name} -c {DATASET_CONTAINER}"
        )
        return Verdict("PodsReady", FALSE, "DatasetNotFetched", text)
    if fetching:
        text = f"{len(fetching)} pods fetch the dataset; see kubectl logs {fetching[0].name} -c {DATASET_CONTAINER}"
        return Verdict("PodsReady", FALSE, "FetchingDataset", text)
    return None


def _unschedulable(pods: Sequence[PodSeen]) -> Verdict | None:
    # A pod that waits for its volume is the VolumeReady condition's to explain.
    waiting = [pod for pod in pods if pod.unschedulable and "PersistentVolumeClaim" not in pod.unschedulable]
    if not waiting:
        return None
    text = (
        f"no node takes pod {waiting[0].name}{_others(waiting)}: {waiting[0].unschedulable}; free a node, lower "
        "spec.resources, or widen spec.devices and spec.scheduling"
    )
    return Verdict("PodsReady", FALSE, "Unschedulable", text)


def _not_made(observed: Observed) -> Verdict | None:
    """A quota, a policy or an override that is refused for pods but not for their StatefulSet."""
    for item in observed.sets:
        if item.problem and item.replicas:
            text = (
                f"StatefulSet {item.name} cannot make its pods: {item.problem}; raise the quota, relax the policy, or "
                "correct spec.podTemplateOverrides and spec.resources"
            )
            return Verdict("PodsReady", FALSE, "PodsRefused", text)
    return None
