"""Tests of the SDK against an API server over HTTP: jobs, their changes, waits and results."""

import signal
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from dlcontract import REPORT_KEY, Failure, Report, RunPhase
from dljob.api import DLJobSpec, Phase
from dljob.kube import Api, ApiError
from dljob.kube.kinds import CONFIG_MAP, DLJOB
from dljob.sdk import (
    Client,
    DLJobError,
    InvalidJobError,
    JobDeletedError,
    JobFailedError,
    JobNotFoundError,
    JobTimeoutError,
    ServerError,
    requests,
)
from support.servers.threaded_api import ThreadedApiServer
from support.spec_changes import ENDED
from support.specs.small_specs import JOB, MINIMAL
from support.stored_records import put_records, stored_records

Json = dict[str, Any]


def condition(name: str, status: str, reason: str, message: str) -> Json:
    moment = "2026-11-01T00:00:00Z"
    return {"type": name, "status": status, "reason": reason, "message": message, "lastTransitionTime": moment}


FAILED = {"phase": "Failed", "conditions": [condition("Failed", "True", "RankFailed", "rank 1 exited with code 3")]}
NODES: Json = {"nodes": [{"device": "cpu", "count": 3, "cpu": 4, "memory": "8Gi"}]}
COMPLETE = {"phase": "Complete", "result": {"steps": 10, "seconds": 2.5, "accuracy": 0.9}}


def later(action: Callable[[], None], seconds: float = 0.1) -> None:
    timer = threading.Timer(seconds, action)
    timer.daemon = True
    timer.start()


def put_failure(api: ThreadedApiServer, uid: str) -> None:
    failure = Failure(reason="RankFailed", message="m", rank=1, log_tail="short")
    report = Report(
        uid=uid, plan_number=1, plan_digest="d", term=1, phase=RunPhase.FAILED, unix_s=1.0, failure=failure
    ).to_json()
    api.put(CONFIG_MAP, {"metadata": {"name": "a-report", "namespace": "team-a"}, "data": {REPORT_KEY: report}})


class TestSubmit:
    @pytest.mark.parametrize("form", ["path", "text path", "manifest", "spec", "model"])
    def test_job_is_applied_in_each_form(
        self, form: str, client: Client, api: ThreadedApiServer, tmp_path: Path
    ) -> None:
        path = tmp_path / "job.yaml"
        path.write_text(yaml.safe_dump(JOB))
        model = DLJobSpec.model_validate(MINIMAL)
        given: Any = {"path": path, "text path": str(path), "manifest": JOB, "spec": MINIMAL, "model": model}[form]
        job = client.submit(given, name="mine")
        assert (job.name, job.namespace, repr(job)) == ("mine", "team-a", "Job(team-a/mine)")
        assert api.job("mine")["spec"] == MINIMAL

    def test_namespace_of_the_manifest_counts(self, client: Client, api: ThreadedApiServer) -> None:
        client.submit({**JOB, "metadata": {"name": "a", "namespace": "team-c"}})
        assert api.job("a", "team-c")
        with Client(namespace="team-a") as other, pytest.raises(InvalidJobError) as raised:
            other.submit({**JOB, "metadata": {"name": "a", "namespace": "team-c"}})
        assert (raised.value.field, raised.value.found) == ("metadata.namespace", "team-c")

    def test_all_problems_of_a_manifest_have_field_found_and_expected(self, client: Client) -> None:
        with pytest.raises(InvalidJobError) as raised:
            client.submit({**MINIMAL, "epochs": 0, "nodes": {"min": 3, "max": 1}, "colour": 1}, name="a")
        found = {each.field: each for each in raised.value.problems}
        assert found.keys() == {"spec.epochs", "spec.nodes.min", "spec.colour"}
        assert (found["spec.epochs"].found, found["spec.nodes.min"].found) == ("0", "min: 3, max: 1")
        assert found["spec.epochs"].expected and found["spec.colour"].expected

    def test_spec_needs_a_name(self, client: Client) -> None:
        with pytest.raises(InvalidJobError) as raised:
            client.submit(MINIMAL)
        assert raised.value.field == "metadata.name"

    def test_label_has_field_and_found(self, client: Client) -> None:
        with pytest.raises(InvalidJobError) as raised:
            client.submit({**JOB, "metadata": {"name": "a", "labels": {"example.com/a": 1}}})
        assert (raised.value.field, raised.value.found) == ("metadata.labels.example.com/a", "1")

    def test_rejection_of_the_server_has_its_causes(self, client: Client, api: ThreadedApiServer) -> None:
        api.server.causes = [
            {"field": "spec.epochs", "message": "Invalid value: 1: spec.epochs in body should be at least 2"},
            {"field": "spec.seed", "message": "Forbidden: not today"},
        ]
        with pytest.raises(InvalidJobError) as raised:
            client.submit(JOB)
        assert raised.value.field == "spec.epochs"
        assert (raised.value.found, raised.value.expected) == ("1", "spec.epochs in body should be at least 2")
        assert "not today" in str(raised.value)

    def test_refused_change_of_an_existing_job(self, client: Client, api: ThreadedApiServer) -> None:
        client.submit(JOB)
        api.report_status("a", **ENDED)
        with pytest.raises(InvalidJobError) as raised:
            client.submit({**JOB, "spec": {**MINIMAL, "epochs": 9}})
        assert raised.value.field == "spec.epochs" and api.job("a")["spec"] == MINIMAL


class TestReading:
    def test_jobs_of_the_namespace_are_found(self, client: Client) -> None:
        for name in ("b", "a"):
            client.submit(JOB, name=name)
        client.submit({**JOB, "metadata": {"name": "c", "namespace": "team-c"}})
        assert [job.name for job in client.jobs()] == ["a", "b"]
        assert client.job("b").manifest["spec"] == MINIMAL
        with pytest.raises(JobNotFoundError):
            client.job("c")

    def test_properties_are_current(self, client: Client, api: ThreadedApiServer) -> None:
        job = client.submit(JOB)
        assert (job.phase, job.progress) == (Phase.PENDING, None)
        api.report_status("a", phase="Running", progress={"step": 3, "steps": 10, "percent": 30}, later="field")
        assert job.phase is Phase.RUNNING and job.progress is not None and job.progress.percent == 30

    def test_new_job_of_the_same_name_is_another_job(
        self, client: Client, api: ThreadedApiServer, tmp_path: Path
    ) -> None:
        job = client.submit(JOB)
        api.delete(DLJOB, "team-a", "a")
        client.submit(JOB)
        put_records(api, {"rank-0.log.gz": "of the new job", "report.json.gz": "{}"})
        api.report_status("a", **COMPLETE)
        model = lambda: job.model(tmp_path / "model")  # noqa: E731 - one of several calls
        for call in (lambda: job.status, job.suspend, job.wait, job.logs, job.report, model):
            with pytest.raises(JobDeletedError):
                call()
        job.delete()
        assert api.job("a"), "the new job is not deleted"


class TestWait:
    def test_wait_returns_the_status_of_a_complete_job(self, client: Client, api: ThreadedApiServer) -> None:
        job = client.submit(JOB)
        later(lambda: api.report_status("a", **COMPLETE))
        status = job.wait(timeout=20)
        assert status.result is not None and status.result.steps == 10

    def test_status_of_an_earlier_generation_does_not_count(self, client: Client, api: ThreadedApiServer) -> None:
        job = client.submit(JOB)
        api.report_status("a", phase="Running")
        client.submit({**JOB, "spec": {**MINIMAL, "epochs": 2}})
        with pytest.raises(JobTimeoutError):
            job.wait(timeout=0.3, until="Running")
        api.report_status("a", phase="Running")
        assert job.wait(timeout=20, until="Running").phase is Phase.RUNNING

    def test_plan_for_an_earlier_spec_does_not_count(self, client: Client, api: ThreadedApiServer) -> None:
        """Regression: the operator writes the status for a new spec before its plan, and the wait returned the old one."""
        job = client.submit(JOB)
        plan = Client().plan(MINIMAL, cluster=NODES).document["plan"]
        planned = condition("Planned", "True", "Planned", "1 node")
        planned["observedGeneration"] = job.manifest["metadata"]["generation"]
        api.report_status("a", phase="Running", plan=plan, conditions=[planned])
        assert job.wait(timeout=20, until="Planned").plan
        client.submit({**JOB, "spec": {**MINIMAL, "nodes": {"max": 2}}})
        api.report_status("a", phase="Running", plan=plan, conditions=[planned])
        with pytest.raises(JobTimeoutError):
            job.wait(timeout=0.3, until="Planned")
        anew = planned | {"observedGeneration": job.manifest["metadata"]["generation"]}
        api.report_status("a", phase="Running", plan=plan, conditions=[anew])
        assert job.wait(timeout=20, until="Planned").plan
        api.report_status("a", phase="Complete", plan=plan, conditions=[planned])
        assert job.wait(timeout=20, until="Planned").plan, "a job that has ended gets no other plan"

    def test_wait_survives_the_end_of_a_watch(self, client: Client, api: ThreadedApiServer) -> None:
        job = client.submit(JOB)
        later(lambda: api.end_watches(DLJOB))
        later(lambda: api.report_status("a", **COMPLETE), 0.3)
        assert job.wait(timeout=20).phase is Phase.COMPLETE

    def test_wait_survives_an_api_server_that_does_not_answer(
        self, client: Client, api: ThreadedApiServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Regression: an API server that restarted for a few seconds ended a wait of hours."""
        job, errors, read = client.submit(JOB), [503, 0], Api.get

        async def failing(self: Api, *where: Any) -> Any:
            if reads and errors:
                if len(errors) == 1:
                    api.report_status("a", **COMPLETE)
                raise ApiError(errors.pop(0), "Unavailable", "restarting")
            reads.append(where)
            return await read(self, *where)

        async def ended(*_: object, **__: object) -> AsyncIterator[bytes]:
            raise ApiError(0, "ClientConnectorError", "restarting")
            yield b""

        reads: list[Any] = []
        monkeypatch.setattr(Api, "get", failing)
        monkeypatch.setattr(Api, "watch", ended)
        assert job.wait(timeout=20).phase is Phase.COMPLETE
        assert not errors

    def test_wait_ends_if_the_api_server_never_answers_again(
        self, client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def failing(*_: object) -> Any:
            raise ApiError(503, "Unavailable", "down")

        async def ended(*_: object, **__: object) -> AsyncIterator[bytes]:
            monkeypatch.setattr(Api, "get", failing)
            raise ApiError(0, "ClientConnectorError", "down")
            yield b""

        job = client.submit(JOB)
        monkeypatch.setattr(requests, "PATIENCE_S", 0.05)
        monkeypatch.setattr(Api, "watch", ended)
        with pytest.raises(ServerError, match="down"):
            job.wait(timeout=20)

    def test_failure_has_the_last_lines_of_the_failed_rank(self, client: Client, api: ThreadedApiServer) -> None:
        job = client.submit(JOB)
        put_failure(api, job.uid)
        put_records(api, {"rank-0.log.gz": "fine", "rank-1.log.gz": "\n".join(map(str, range(50)))})
        api.report_status("a", **FAILED)
        with pytest.raises(JobFailedError) as raised:
            job.wait(timeout=20)
        assert (raised.value.reason, raised.value.message) == ("RankFailed", "rank 1 exited with code 3")
        assert (raised.value.rank, raised.value.last_lines[-1]) == (1, "49")
        assert "rank 1:" in str(raised.value) and "49" in str(raised.value)

    def test_failure_with_damaged_records_has_the_tail_of_the_report(
        self, client: Client, api: ThreadedApiServer
    ) -> None:
        """Fixed bug: the wait ended with an error of zlib in place of the job's failure."""
        job = client.submit(JOB)
        put_failure(api, job.uid)
        api.put(CONFIG_MAP, stored_records({"rank-1.log.gz": b"no gzip"}))
        api.report_status("a", **FAILED)
        with pytest.raises(JobFailedError) as raised:
            job.wait(timeout=20)
        assert (raised.value.rank, raised.value.last_lines) == (1, ("short",))

    def test_failure_without_records_has_its_reason(self, client: Client, api: ThreadedApiServer) -> None:
        job = client.submit(JOB)
        api.report_status("a", **FAILED)
        with pytest.raises(JobFailedError) as raised:
            job.wait(timeout=20, until="Running")
        assert (raised.value.reason, raised.value.rank, raised.value.last_lines) == ("RankFailed", None, ())

    @pytest.mark.parametrize(
        ("status", "words"),
        [
            (None, "no operator has seen the job"),
            ({"conditions": [condition("Planned", "False", "DeviceBusy", "2 nodes are busy")]}, "2 nodes are busy"),
            ({"phase": "Running", "progress": {"step": 3, "steps": 9}, "remaining": "5m"}, "step 3/9, 5m left"),
        ],
        ids=["no operator", "waits", "runs"],
    )
    def test_timeout_says_what_the_job_waits_for(
        self, status: Json | None, words: str, client: Client, api: ThreadedApiServer
    ) -> None:
        job = client.submit(JOB)
        if status is not None:
            api.report_status("a", **status)
        with pytest.raises(TimeoutError) as raised:
            job.wait(timeout=0.3)
        assert words in str(raised.value) and isinstance(raised.value, JobTimeoutError)
        assert job.phase, "the job can still be used"

    def test_deletion_ends_the_wait(self, client: Client, api: ThreadedApiServer) -> None:
        job = client.submit(JOB)
        later(lambda: api.delete(DLJOB, "team-a", "a"))
        with pytest.raises(JobDeletedError):
            job.wait(timeout=20)

    def test_interrupted_wait_leaves_a_usable_client(self, client: Client) -> None:
        job = client.submit(JOB)
        main = threading.main_thread().ident
        assert main is not None
        later(lambda: signal.pthread_kill(main, signal.SIGINT), 0.3)
        with pytest.raises(KeyboardInterrupt):
            job.wait(timeout=20)
        assert job.phase is Phase.PENDING

    def test_wait_polls_without_permission_to_watch(
        self, client: Client, api: ThreadedApiServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def forbidden(*_: object, **__: object) -> AsyncIterator[bytes]:
            raise ApiError(403, "Forbidden", "no watch")
            yield b""

        monkeypatch.setattr(Api, "watch", forbidden)
        job = client.submit(JOB)
        later(lambda: api.report_status("a", **COMPLETE))
        assert job.wait(timeout=20).phase is Phase.COMPLETE

    def test_states_that_a_job_cannot_reach(self, client: Client, api: ThreadedApiServer) -> None:
        job = client.submit({**JOB, "spec": {**MINIMAL, "planning": {"mode": "PlanOnly"}}})
        api.report_status("a", phase="Planned")
        with pytest.raises(DLJobError, match="PlanOnly"):
            job.wait(timeout=20)
        done = client.submit(JOB, name="done")
        api.report_status("done", **COMPLETE)
        with pytest.raises(DLJobError, match="complete job"):
            done.wait(timeout=20, until="Suspended")
        with pytest.raises(ValueError, match="until"):
            done.wait(until="Ended")  # type: ignore[arg-type]

    def test_watch_yields_each_status_until_the_end(self, client: Client, api: ThreadedApiServer) -> None:
        job = client.submit(JOB)
        phases = []
        for status in job.watch(timeout=20):
            phases.append(status.phase.value)
            if len(phases) == 1:
                api.report_status("a", phase="Running")
            elif len(phases) == 2:
                api.report_status("a", **COMPLETE)
        assert phases == ["Pending", "Running", "Complete"]
        for _ in job.watch():  # A caller may stop early.
            break


class TestConnection:
    def test_context_and_kubeconfig_are_used(self, api: ThreadedApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
        with Client(context="other") as client:
            assert client.namespace == "team-b" and client.jobs() == []
        monkeypatch.setenv("KUBECONFIG", "/nowhere")
        with Client(kubeconfig=api.kubeconfig) as client:
            assert client.namespace == "team-a" and client.jobs() == []
        with Client(kubeconfig=api.kubeconfig, context="missing") as client, pytest.raises(DLJobError):
            client.jobs()
        with Client() as client, pytest.raises(DLJobError, match="kubeconfig"):
            client.jobs()

    def test_closed_client_cannot_be_used(self, client: Client) -> None:
        job = client.submit(JOB)
        client.close()
        client.close()
        with pytest.raises(DLJobError, match="closed"):
            job.status  # noqa: B018 - the property sends a request

    def test_server_without_dljob(self, client: Client, api: ThreadedApiServer) -> None:
        job = client.submit(JOB)
        api.server.objects.clear()
        with pytest.raises(JobDeletedError):
            job.phase  # noqa: B018 - the property sends a request

    def test_client_works_inside_a_running_event_loop(self, client: Client) -> None:
        import asyncio

        async def cell() -> str:
            return client.submit(JOB).name

        assert asyncio.run(cell()) == "a"


def test_server_error_has_its_code() -> None:
    assert ServerError(403, "no").code == 403
