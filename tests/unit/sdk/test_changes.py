"""Tests of the SDK against an API server over HTTP: changes of a job, and their end by another submit."""

from collections.abc import Callable
from typing import Any

import pytest

from dljob.kube import Api, ApiError
from dljob.kube.kinds import DLJOB
from dljob.sdk import Client, Job
from support.servers.threaded_api import ThreadedApiServer
from support.specs.small_specs import JOB, MINIMAL


class TestChanges:
    def test_suspend_resume_and_scale_change_the_spec(self, client: Client, api: ThreadedApiServer) -> None:
        job = client.submit({**JOB, "spec": {**MINIMAL, "nodes": {"min": 2, "max": 2}}})
        for call, changed in (
            (job.suspend, {"suspend": True}),
            (job.resume, {"suspend": False}),
            (lambda: job.scale(3), {"nodes": {"min": 2, "max": 3}}),
        ):
            call()
            spec = api.job("a")["spec"]
            assert {key: spec[key] for key in changed} == changed

    @pytest.mark.parametrize("change", [Job.suspend, lambda job: job.scale(2)], ids=["suspend", "scale"])
    def test_submit_ends_a_change_that_the_manifest_lacks(
        self, change: Callable[[Job], None], client: Client, api: ThreadedApiServer
    ) -> None:
        """Fixed bug: a suspended job stayed suspended, because the change belonged to no apply."""
        job = client.submit(JOB)
        change(job)
        assert api.job("a")["spec"] != MINIMAL
        client.submit(JOB)
        assert api.job("a")["spec"] == MINIMAL and api.job("a")["metadata"]["uid"] == job.uid

    def test_submit_keeps_a_change_by_another_field_manager(self, client: Client, api: ThreadedApiServer) -> None:
        client.submit(JOB)
        api.merge(DLJOB, "team-a", "a", {"spec": {"suspend": True}}, "kubectl-patch")
        client.submit(JOB)
        assert api.job("a")["spec"] == {**MINIMAL, "suspend": True}
        client.submit({**JOB, "spec": {**MINIMAL, "suspend": False}})
        assert api.job("a")["spec"] == {**MINIMAL, "suspend": False}

    def test_submit_ends_a_change_while_the_operator_writes_the_status(
        self, client: Client, api: ThreadedApiServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        job, merge, conflicts = client.submit(JOB), Api.merge, [1, 1]
        job.suspend()

        async def conflicting(self: Api, *where: Any, **more: Any) -> Any:
            if conflicts:
                conflicts.pop()
                raise ApiError(409, "Conflict", "the object has been modified")
            return await merge(self, *where, **more)

        monkeypatch.setattr(Api, "merge", conflicting)
        client.submit(JOB)
        assert api.job("a")["spec"] == MINIMAL and not conflicts

    def test_delete_removes_the_job(self, client: Client) -> None:
        job = client.submit(JOB)
        job.delete()
        job.delete()
        assert client.jobs() == []
