"""Tests that the SDK uses the last state of a job that the operator or a user deletes."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from dljob.api import Phase
from dljob.kube import Api, ApiError
from dljob.kube.kinds import DLJOB
from dljob.sdk import Client, JobDeletedError
from support.servers.threaded_api import ThreadedApiServer
from support.specs.small_specs import JOB

COMPLETE = {"phase": "Complete", "result": {"steps": 10, "seconds": 2.5, "accuracy": 0.9}}


@pytest.mark.parametrize("when", ["in the event", "between two watches"])
def test_job_that_is_deleted_as_soon_as_it_is_complete_is_complete(
    when: str, client: Client, api: ThreadedApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: with a short ttlSecondsAfterFinished, the wait said that the job was deleted."""
    watch, ended = Api.watch, list[str]()

    async def watching(self: Api, *where: Any, **options: Any) -> AsyncIterator[bytes]:
        if not ended:
            ended.append(when)
            if when == "in the event":
                api.job("a")["status"] = {"observedGeneration": 1, **COMPLETE}
            else:
                api.report_status("a", **COMPLETE)
            api.delete(DLJOB, "team-a", "a")
            if when == "between two watches":
                return
        async for line in watch(self, *where, **options):
            yield line

    job = client.submit(JOB)
    monkeypatch.setattr(Api, "watch", watching)
    assert job.wait(timeout=20).phase is Phase.COMPLETE
    with pytest.raises(JobDeletedError):
        job.wait(timeout=20)


def test_deleted_job_whose_last_state_is_unknown_is_deleted(
    client: Client, api: ThreadedApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def expired(*_: object, **__: object) -> AsyncIterator[bytes]:
        if not watches:
            api.report_status("a", **COMPLETE)
            api.delete(DLJOB, "team-a", "a")
        watches.append("")
        raise ApiError(410, "Expired", "too old resource version")
        yield b""

    job, watches = client.submit(JOB), list[str]()
    monkeypatch.setattr(Api, "watch", expired)
    with pytest.raises(JobDeletedError):
        job.wait(timeout=20)
    assert len(watches) == 2
