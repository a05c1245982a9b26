"""Reduce the look pod of a job, and bound the suggestion that it writes. The module does no I/O."""

from collections.abc import Mapping
from typing import Any

from dljob.job.observed import DIGEST_ANNOTATION, LookSeen
from dljob.job.task.suggestion import FILES, MAX_NBYTES, SUGGESTION_KEY, printable
from dljob.kube.objects.pods.evictions import eviction
from dljob.kube.objects.pods.rejections import rejection

MAX_PROBLEM = 1000
_STARTING = ("ContainerCreating", "PodInitializing")


def pod(body: Mapping[str, Any]) -> LookSeen:
    """Return the look pod with the problem that keeps it from its result."""
    meta, status = body["metadata"], body.get("status") or {}
    container, problem = "", str(status.get("message") or status.get("reason") or "")
    for each in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        if found := _problem(each):
            container, problem = str(each.get("name", "")), found
            break
    scheduled: Mapping[str, Any] = next(
        (item for item in status.get("conditions") or () if item.get("type") == "PodScheduled"), {}
    )
    if not problem and scheduled.get("status") == "False":
        problem = str(scheduled.get("message") or scheduled.get("reason") or "")
    return LookSeen(
        name=meta["name"],
        uid=meta["uid"],
        digest=(meta.get("annotations") or {}).get(DIGEST_ANNOTATION, ""),
        phase=str(status.get("phase") or "Pending"),
        reason=str(status.get("reason") or ""),
        node=str((body.get("spec") or {}).get("nodeName") or ""),
        deleting="deletionTimestamp" in meta,
        rejection=rejection(body),
        eviction=eviction(body),
        problem=printable(problem[-MAX_PROBLEM:], MAX_PROBLEM),
        container=container,
    )


def _problem(container: Mapping[str, Any]) -> str:
    """Return why a container waits or how it failed the last time; empty if it starts, runs or has succeeded."""
    state = container.get("state") or {}
    waiting = state.get("waiting") or {}
    ended = state.get("terminated") or (container.get("lastState") or {}).get("terminated") or {}
    if ended.get("exitCode"):
        lines = str(ended.get("message") or "").strip().splitlines()
        return f"{ended.get('reason') or 'Error'}, exit code {ended['exitCode']}{f': {lines[-1]}' if lines else ''}"
    if waiting and waiting.get("reason") not in (None, *_STARTING):
        return f"{waiting['reason']}: {waiting.get('message') or ''}"
    return ""


def suggestion_problem(data: Mapping[str, str]) -> str | None:
    """Return a message if the operator must not read the suggestion in the data of a ConfigMap; None if it may."""
    if len(data[SUGGESTION_KEY]) > MAX_NBYTES:
        return f"{SUGGESTION_KEY}: found {len(data[SUGGESTION_KEY])} characters; expected at most {MAX_NBYTES}"
    if others := sorted(data.keys() - {SUGGESTION_KEY, *FILES}):
        return f"found the key {printable(others[0], 100)}; expected {SUGGESTION_KEY} and {', '.join(FILES)} only"
    return None
