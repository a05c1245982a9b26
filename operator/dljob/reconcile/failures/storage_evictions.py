"""Count evictions of pods that used more storage than they may, so that such a job ends.

The kubelet evicts a pod whose volume on the node's disk exceeds its size limit, or whose volumes and logs together
exceed the pod's limit of ephemeral storage. The next pod fills its volume too. Such evictions therefore count like
failures of the training script. Evictions from a node that is low on memory or disk do not count, because other pods
may have caused them. The exception is a pod that used more ephemeral storage than it requested. Pods that are evicted
in the same attempt count once.
"""

import re
from dataclasses import dataclass, replace
from datetime import datetime

from dljob.api import DLJobSpec
from dljob.api.spec.dataset import DEFAULT_SIZE
from dljob.cluster import quantity
from dljob.job.observed import Eviction
from dljob.job.plan.failures import MAX_EVICTED, FailureRecord
from dljob.job.plan.stored import StoredPlan
from dljob.reconcile.desired import Draft
from dljob.reconcile.parsed import ParsedJob
from dljob.render.volumes import checkpoints, dataset, scratch
from dljob.status import FALSE, TRUE, Event, Verdict, find
from dljob.status.events import MAX_MESSAGE

CONDITION = "StorageExceeded"
TOGETHER_S = 180.0
"""Seconds within which evictions of several pods count as one: ranks of one attempt write as much. Kubelets measure the
volumes of a pod every 60 to 120 s (``volumeStatsAggPeriod``, with jitter), and compare every 10 s."""

# Messages of pkg/kubelet/eviction/helpers.go in Kubernetes 1.30 to 1.37.
_VOLUME = re.compile(r'Usage of EmptyDir volume "([^"]*)" exceeds the limit "([^"]*)"')
_POD = re.compile(r"Pod ephemeral local storage usage exceeds the total limit of containers ([0-9A-Za-z.]+[0-9A-Za-z])")
_CONTAINER = re.compile(r'Container (\S+) exceeded its local ephemeral storage limit "([^"]*)"')
_NODE = re.compile(r"The node was low on resource: ephemeral-storage")
_USED = re.compile(r"Container (\S+) was using (\S+), request is (\S+), has larger consumption of ephemeral-storage")


@dataclass(frozen=True)
class Cause:
    """Why a pod was evicted because of storage. ``text``: part of a message, with the field to change and a remedy.

    ``counts``: True if the eviction counts against ``spec.runPolicy.backoffLimit`` like a failure of the training
    script; False if other pods may have caused the eviction.
    """

    counts: bool
    text: str


def cause_of(eviction: Eviction, spec: DLJobSpec) -> Cause | None:
    """Return the cause of an eviction because of storage; None for an eviction for any other reason.

    The cause is read from the kubelet's message. Its text names the field of ``spec``, the value found and a remedy.
    """
    message = eviction.message
    if found := _VOLUME.search(message):
        return Cause(True, _volume_exceeded(found[1], found[2], spec))
    if (found := _POD.search(message)) or (found := _CONTAINER.search(message)):
        used, limit = "the pod's volumes and logs", found.groups()[-1]
        return Cause(True, f"{_size(spec)}; {used} exceed the limit of ephemeral storage ({limit}). {_raise(spec)}")
    if not _NODE.search(message):
        return None
    for container, used, request in _USED.findall(message):
        if _nbytes(used) > _nbytes(request) > 0:
            text = f"{_size(spec)}; container {container} used {used}, more than its request ({request})"
            return Cause(True, f"{text}, while the node's disk was full. {_raise(spec)}")
    text = "the node's disk was full; this eviction does not count against spec.runPolicy.backoffLimit"
    if spec.trainer.scratch is None:
        text += ". Set spec.trainer.scratch.size, so that pods run only on nodes with that much free space"
    return Cause(False, text)


def counted(parsed: ParsedJob, draft: Draft) -> ParsedJob:
    """Return the job with new evictions because of storage added to the record of failures in its stored plan.

    Also add an event for each new eviction, and the condition StorageExceeded, to the draft. After a change of the
    spec, the count of evictions starts at 0 again, because the new spec may allow more storage.
    """
    accepted, spec = parsed.accepted, parsed.spec
    if accepted is None or spec is None:
        return parsed
    before = accepted.failures
    record = before or FailureRecord()
    for eviction in parsed.observed.evictions:
        if eviction.uid in record.evicted or (cause := cause_of(eviction, spec)) is None:
            continue
        text = f"pod {eviction.pod} on node {eviction.node} was evicted: {cause.text}"
        evicted = (*record.evicted, eviction.uid)[-MAX_EVICTED:]
        together = cause.counts and _is_together(eviction, record)
        record = record.model_copy(update={"evicted": evicted})
        if together:
            pods = (*record.evicted_pods, eviction.pod)[-MAX_EVICTED:]
            record = record.model_copy(update={"evicted_pods": pods})
            text = f"{text} (it counts together with the eviction of another pod)"
        elif cause.counts:
            record = _with(record, accepted, eviction, text)
            limit = accepted.plan.backoff_limit
            text = f"{text} (this is eviction {record.evictions} that counts; spec.runPolicy.backoffLimit is {limit})"
        draft.events.append(Event("Warning", "PodEvicted", text[:MAX_MESSAGE]))
    if record.evictions and record.eviction_digest == accepted.spec_digest:
        draft.verdicts.append(
            Verdict(
                CONDITION,
                TRUE,
                "PodEvicted",
                f"{record.eviction}. Number of evictions because of storage: {record.evictions}",
            )
        )
    elif find(parsed.before.conditions, CONDITION) is not None:
        text = "no pod was evicted because of its storage since the spec changed"
        draft.verdicts.append(Verdict(CONDITION, FALSE, "SpecChanged", text))
    if record == (before or FailureRecord()):
        return parsed
    return replace(parsed, accepted=accepted.with_failures(record))


def _is_together(eviction: Eviction, record: FailureRecord) -> bool:
    """Return True if an eviction belongs to the one that was counted last, of another pod in the same attempt."""
    try:
        first, at = (datetime.fromisoformat(text) for text in (record.evicted_at, eviction.at))
        return (at - first).total_seconds() < TOGETHER_S and eviction.pod not in record.evicted_pods
    except (ValueError, TypeError):
        return False


def _with(record: FailureRecord, accepted: StoredPlan, eviction: Eviction, text: str) -> FailureRecord:
    """Return the record with one more eviction that counts, which ``text`` describes."""
    changes = {
        "evictions": record.evictions + 1 if record.eviction_digest == accepted.spec_digest else 1,
        "eviction": text[:2048],
        "eviction_digest": accepted.spec_digest,
        "evicted_at": eviction.at,
        "evicted_pods": (eviction.pod,),
    }
    return record.model_copy(update=changes)


def ending(parsed: ParsedJob) -> Verdict | None:
    """Return the verdict Failed if evictions because of storage have made the job fail; None otherwise.

    It has failed if these evictions and the failures of the training script together exceed the backoff limit. Without
    such an eviction, the result is None, whatever the number of failures.
    """
    accepted, report = parsed.accepted, parsed.report
    record = accepted.failures if accepted is not None else None
    if accepted is None or record is None or not record.evictions:
        return None
    limit = accepted.plan.backoff_limit
    failures = max(0, report.failures - record.ignored) if report is not None else 0
    if record.evictions + failures <= limit or record.eviction_digest != accepted.spec_digest:
        return None
    more = f" and {failures} failures of the training script" if failures else ""
    text = (
        f"{record.evictions} evictions because of storage{more}, and spec.runPolicy.backoffLimit is {limit}; "
        f"last eviction: {record.eviction}"
    )
    return Verdict("Failed", TRUE, "StorageExceeded", text)


def _volume_exceeded(name: str, limit: str, spec: DLJobSpec) -> str:
    if name == scratch.volume(spec)["name"]:
        return f"{_size(spec)}; the files in {scratch.DIRECTORY} exceed this size. {_raise(spec)}"
    if name in {item["name"] for item in checkpoints.staging(spec)}:
        return (
            f"spec.checkpoint.stagingSize: found {checkpoints.staging_size(spec)}; the files in $DLJOB_CHECKPOINT_DIR, "
            "or the checkpoint that is restored, exceed this size. Set a larger size, or keep fewer checkpoints"
        )
    if name in {item["name"] for item in dataset.volume(spec)}:
        found = spec.dataset.size or f"{DEFAULT_SIZE} (the default)"
        other = "more nodes" if spec.dataset.sharded else "dataset.cacheClaimName"
        return f"spec.dataset.size: found {found}; the data is larger. Set a larger size, or use {other}"
    return (
        f"spec.podTemplateOverrides: found sizeLimit {limit} of the emptyDir volume {name}, whose files exceed this "
        "limit. Raise sizeLimit, or let the script write less data"
    )


def _size(spec: DLJobSpec) -> str:
    return f"spec.trainer.scratch.size: found {scratch.described(spec)}"


def _raise(spec: DLJobSpec) -> str:
    return "Set a larger size, such as " + scratch.doubled(spec)


def _nbytes(text: str) -> int:
    """Return the bytes of a quantity in the kubelet's message; 0 if ``text`` is not a quantity."""
    try:
        return int(quantity(text.rstrip(",.")))
    except (ValueError, ArithmeticError):
        return 0
