"""Requests about one job: read it, watch it, change it, and find out why it failed."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from time import monotonic
from typing import Any

from dlcontract import REPORT_KEY, Report, config_map_names
from dljob.api import ConditionStatus, DLJobStatus
from dljob.client.access import FIELD_OWNER, PATIENCE_S
from dljob.client.errors import BadInputError
from dljob.client.output.records import logs_of, output_of, ranks_of
from dljob.sdk.errors import JobDeletedError, JobFailedError, JobNotFoundError

Body = Mapping[str, Any]
WATCH_S, SILENCE_S = 300, 90.0
LAST_LOOK_S = 10
"""Maximum number of seconds in which ``changes`` asks for the last state of a job that no longer exists."""
PAUSE_S = 1.0
"""Seconds between two watches. Without permission to watch, the job is read in this interval."""
MAX_LINES = 20
"""Maximum number of lines of a failed rank's output in an exception."""


async def found(api: Any, namespace: str, name: str) -> Body:
    """Return the job of this name. Raise JobNotFoundError if there is none."""
    from dljob.kube import ApiError
    from dljob.kube.kinds import DLJOB

    try:
        body: Body = await api.get(DLJOB, namespace, name)
    except ApiError as error:
        if not error.not_found or "requested resource" in error.message or "page not found" in error.message:
            raise
        raise JobNotFoundError(
            f"{name}: found no DLJob of this name in namespace {namespace}; expected an existing job. Correct the name "
            "or the namespace"
        ) from None
    return body


async def listed(api: Any, namespace: str) -> list[Body]:
    """Return the jobs of a namespace."""
    from dljob.kube.kinds import DLJOB

    bodies: list[Body] = await api.find(DLJOB, namespace)
    return bodies


async def read(api: Any, namespace: str, name: str, uid: str) -> Body:
    """Return the job with this uid. Raise JobDeletedError if it no longer exists."""
    try:
        body = await found(api, namespace, name)
    except JobNotFoundError:
        raise _deleted(namespace, name) from None
    if body["metadata"]["uid"] != uid:
        raise _deleted(namespace, name)
    return body


async def changes(
    api: Any,
    namespace: str,
    name: str,
    uid: str,
    known: Body | None = None,
    unanswered: Callable[[str], None] = lambda message: None,
) -> AsyncGenerator[Body, None]:
    """Yield the job now and after each change, by a watch. Raise JobDeletedError when it no longer exists.

    ``known``: the job as the API server has just returned it, which is not yielded again. ``unanswered``: called with
    the message of each temporary error of the API server that is not raised.

    The last state of a deleted job is yielded too, if the API server still has it: the operator may delete a job as
    soon as it is complete. After the first answer, temporary errors of the API server are only raised if they last
    longer than ``PATIENCE_S``.
    """
    from dljob.kube import ApiError
    from dljob.kube.watch.reflector import TEMPORARY

    seen: Body = known or {}
    version = seen["metadata"]["resourceVersion"] if seen else ""
    answered_s = monotonic()
    while True:
        deleted: JobDeletedError | None = None
        try:
            body = await read(api, namespace, name, uid)
        except ApiError as error:
            if not seen or error.code not in TEMPORARY or monotonic() - answered_s > PATIENCE_S:
                raise
            unanswered(error.message)
            await asyncio.sleep(PAUSE_S)
            continue
        except JobDeletedError as error:
            if not seen:
                raise
            deleted = error
        else:
            answered_s, version = monotonic(), body["metadata"]["resourceVersion"]
            if not seen or version != seen["metadata"]["resourceVersion"]:
                yield body
            seen = body
        try:
            async for kind, found in _events(
                api, namespace, name, version, WATCH_S if deleted is None else LAST_LOOK_S
            ):
                meta = found["metadata"]
                version = meta.get("resourceVersion") or version
                if kind == "BOOKMARK" or meta["name"] != name:
                    continue
                is_end = kind == "DELETED" or meta["uid"] != uid
                if meta["uid"] == uid and not (is_end and _is_same(found, seen)):
                    yield found
                if is_end:
                    raise deleted or _deleted(namespace, name)
                seen = found
            answered_s = monotonic()
        except ApiError as error:
            if deleted is None and not (error.forbidden or error.code == 410 or error.code in TEMPORARY):
                raise
        if deleted is not None:
            raise deleted
        await asyncio.sleep(PAUSE_S)


async def _events(api: Any, namespace: str, name: str, version: str, seconds: int) -> AsyncIterator[tuple[str, Body]]:
    """Yield the type and the object of the events of a job after the resourceVersion ``version``, until an ERROR.

    The events also end after ``seconds``, or if the connection breaks.
    """
    from dljob.kube.kinds import DLJOB
    from dljob.kube.objects.bounds import MAX_OBJECT_NBYTES, bounded_event

    async for line in api.watch(DLJOB, namespace, "", version, seconds, min(seconds, SILENCE_S), name=name):
        event = json.loads(bounded_event(line, MAX_OBJECT_NBYTES))
        if event["type"] == "ERROR":
            return
        yield event["type"], event["object"]


def _is_same(body: Body, other: Body) -> bool:
    """Return True if two versions of a job have the same spec and status. A deletion changes only the metadata."""
    return all(body.get(field) == other.get(field) for field in ("spec", "status"))


async def records(api: Any, namespace: str, name: str, uid: str) -> Body:
    """Return the ConfigMap with the output and report of the job with this uid; an empty mapping if there is none.

    Raise JobDeletedError if the job no longer exists, because the records may be those of a new job of its name.
    """
    await read(api, namespace, name, uid)
    return await logs_of(api, namespace, config_map_names(name)[2])


async def change(api: Any, namespace: str, name: str, uid: str, spec: Body) -> None:
    """Merge ``spec`` into the spec of the job with this uid. Raise JobDeletedError if it no longer exists."""
    from dljob.kube import ApiError
    from dljob.kube.kinds import DLJOB

    patch = {
        "metadata": {"uid": uid},
        "spec": spec,
    }  # metadata.uid makes the patch fail for a new job of the same name.
    try:
        await api.merge(DLJOB, namespace, name, patch, owner=FIELD_OWNER)
    except ApiError as error:
        if not (error.not_found or error.conflict):
            raise
        raise _deleted(namespace, name) from None


async def delete(api: Any, namespace: str, name: str, uid: str) -> None:
    """Delete the job with this uid. Do nothing if it does not exist."""
    from dljob.kube.kinds import DLJOB

    await api.delete(DLJOB, namespace, name, uid=uid)


async def failure(api: Any, namespace: str, name: str, uid: str, status: DLJobStatus) -> JobFailedError:
    """Return the exception for a failed job, with the last output of the rank that failed, if it is stored."""
    failed = [each for each in status.conditions if each.type == "Failed" and each.status is ConditionStatus.TRUE]
    reason, message = (failed[0].reason, failed[0].message) if failed else ("Failed", "the status has no reason")
    rank, tail = await _last_output(api, namespace, name, uid)
    lines = tuple(line for line in tail.splitlines() if line.strip())[-MAX_LINES:]
    return JobFailedError(name, reason, message, rank, lines)


async def _last_output(api: Any, namespace: str, name: str, uid: str) -> tuple[int | None, str]:
    """Return (the rank that failed first, its last output). Return None and an empty text for what is unknown."""
    from dljob.kube import ApiError
    from dljob.kube.kinds import CONFIG_MAP

    _, report_name, logs_name = config_map_names(name)
    rank, tail = None, ""
    try:
        data = (await api.get(CONFIG_MAP, namespace, report_name)).get("data") or {}
        report = Report.parse(data.get(REPORT_KEY, ""))
        if report.uid == uid and report.failure is not None:
            rank, tail = report.failure.rank, report.failure.log_tail
        records = {} if rank is None else await logs_of(api, namespace, logs_name)
        return rank, output_of(records, rank) if rank is not None and rank in ranks_of(records) else tail
    except (ApiError, BadInputError, ValueError):  # The failure itself is what the caller needs to know.
        return rank, tail


def _deleted(namespace: str, name: str) -> JobDeletedError:
    return JobDeletedError(
        f"{name}: found that the job was deleted from namespace {namespace}; expected an existing job. Submit it again"
    )
