"""Tests of the commands' connection: unusable certificates, and an API server that restarts while a job is followed."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from dljob.cli import main, remote
from dljob.cli.commands import run
from dljob.client import access
from dljob.kube import Api, ApiError
from dljob.kube.kinds import DLJOB
from dljob.sdk import Client, DLJobError, JobNotFoundError, requests
from support.servers.threaded_api import PretendOperator, kubeconfig, threaded_api
from support.specs.small_specs import JOB


@pytest.mark.parametrize(
    ("certificate", "found"),
    [
        ({"certificate-authority": "/nowhere/ca.crt"}, "certificate-authority: found /nowhere/ca.crt, which does not"),
        ({"certificate-authority": "/dev/null"}, "found unusable certificates or keys"),
        ({"certificate-authority-data": "bm8gY2VydGlmaWNhdGU="}, "found unusable certificates or keys"),
    ],
)
def test_unusable_certificates_are_named(
    certificate: dict[str, str],
    found: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Fixed bug: the commands ended with a traceback."""
    config = kubeconfig("https://127.0.0.1:1", "team-a")
    config["clusters"][0]["cluster"] |= certificate
    (tmp_path / "config").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    assert main(["top"]) == 2
    assert capsys.readouterr().err.startswith(f"dljob: kubeconfig: {found}")
    with Client() as client, pytest.raises(DLJobError, match=f"kubeconfig: {found}"):
        client.jobs()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ApiError(500, "", "boom"), "the API server answered with code 500: boom"),
        (ApiError(400, "", "Client sent HTTP"), "the API server answered with code 400: Client sent HTTP"),
        (ApiError(404, "NotFound", 'namespaces "x" not found'), "Create it with kubectl create namespace"),
        (ApiError(409, "Conflict", "a conflict"), "a conflict"),
    ],
)
def test_error_of_the_api_server_says_where_it_comes_from(error: ApiError, expected: str) -> None:
    """Fixed bug: the text of a proxy was the whole message, without the API server and the code."""
    assert expected in access.in_words(error)


@pytest.mark.parametrize("name", ["", "team/digits", "digits/status"])
def test_what_is_no_name_of_a_job_is_no_job(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: the API server answered with the list of all jobs, or with the status of another one."""
    with threaded_api(tmp_path) as server:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
        for command in (["logs", name], ["report", name], ["get-model", name, str(tmp_path / "model")]):
            assert main(command) == 2
            shown = capsys.readouterr().err
            assert "found no DLJob" in shown and name in shown
        with Client() as client, pytest.raises(JobNotFoundError):
            client.job(name)


class TestFollowing:
    @pytest.fixture(autouse=True)
    def _quick(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(requests, "PAUSE_S", 0.01)
        monkeypatch.setattr(remote, "PAUSE_S", 0.01)

    @staticmethod
    def failing(monkeypatch: pytest.MonkeyPatch, errors: list[int]) -> None:
        """Let reads of the job fail with these HTTP status codes, after the job was applied."""
        read, apply = Api.get, Api.apply

        async def get(self: Api, *where: Any) -> Any:
            if errors:
                raise ApiError(errors.pop(0), "Unavailable", "restarting")
            return await read(self, *where)

        async def applied(self: Api, *what: Any, **options: Any) -> Any:
            if not options.get("dry_run"):
                monkeypatch.setattr(Api, "get", get)
            return await apply(self, *what, **options)

        monkeypatch.setattr(Api, "apply", applied)

    def test_run_survives_a_restart_of_the_api_server(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Fixed bug: one request without an answer ended the command with exit code 2, and the job went on."""
        errors = [0, 503, 500]
        with threaded_api(tmp_path) as server, PretendOperator(server):
            monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
            self.failing(monkeypatch, errors)
            (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
            assert main(["run", str(tmp_path / "job.yaml")]) == 0
        shown = capsys.readouterr()
        assert "phase Complete" in shown.out and not errors
        assert shown.err == "dljob: the API server does not answer (restarting); the job continues\n"

    @pytest.mark.parametrize(
        ("last", "code"),
        [
            ({"phase": "Complete", "result": {"steps": 10, "seconds": 2.5, "accuracy": 0.9}}, 0),
            ({"phase": "Failed"}, 1),
        ],
        ids=["complete", "failed"],
    )
    def test_run_sees_the_end_of_a_job_that_is_deleted_at_once(
        self, last: dict[str, Any], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:  # fmt: skip
        """Fixed bug: with a short ttlSecondsAfterFinished, the command said that the job was not found."""
        apply, ended = Api.apply, list[str]()
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
        with threaded_api(tmp_path) as server:

            async def applied(self: Api, *what: Any, **options: Any) -> Any:
                answer = await apply(self, *what, **options)
                if not options.get("dry_run"):
                    ended.append("")
                    server.report_status(JOB["metadata"]["name"], **last)
                    server.delete(DLJOB, "team-a", JOB["metadata"]["name"])
                return answer

            monkeypatch.setattr(Api, "apply", applied)
            monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
            assert main(["run", str(tmp_path / "job.yaml")]) == code and ended == [""]
        shown = capsys.readouterr()
        assert f"phase {last['phase']}" in shown.out and shown.err == ""

    def test_run_says_that_the_job_was_deleted_before_its_end(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        apply = Api.apply
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
        with threaded_api(tmp_path) as server:

            async def applied(self: Api, *what: Any, **options: Any) -> Any:
                answer = await apply(self, *what, **options)
                if not options.get("dry_run"):
                    server.delete(DLJOB, "team-a", JOB["metadata"]["name"])
                return answer

            monkeypatch.setattr(Api, "apply", applied)
            monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
            assert main(["run", str(tmp_path / "job.yaml")]) == 2
        assert "the job was deleted from namespace team-a" in capsys.readouterr().err

    def test_run_says_that_no_operator_processes_the_manifest(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Fixed bug: without an operator, the command followed the job in silence."""
        monkeypatch.setattr(run, "SILENT_S", 0.0)
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
        with threaded_api(tmp_path) as server:
            monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
            assert main(["run", str(tmp_path / "job.yaml"), "--timeout", "0.2"]) == 1
        assert capsys.readouterr().err.count("no operator has processed the manifest") == 1

    @pytest.mark.parametrize(("code", "patience_s"), [(403, 600.0), (503, -1.0)])
    def test_run_ends_if_waiting_does_not_help(
        self, code: int, patience_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(requests, "PATIENCE_S", patience_s)
        with threaded_api(tmp_path) as server:
            monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
            self.failing(monkeypatch, [code] * 99)
            (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
            assert main(["run", str(tmp_path / "job.yaml")]) == 2

    @staticmethod
    def watching(monkeypatch: pytest.MonkeyPatch, errors: list[int]) -> None:
        """Let lists fail with these HTTP status codes after the first table. Ctrl-C follows the second table."""
        find, tables = Api.find, list[float]()

        def slept(seconds: float) -> None:
            tables.append(seconds)
            if len(tables) == 2:
                raise KeyboardInterrupt

        async def found(self: Api, *where: Any, **options: Any) -> Any:
            if tables and errors:
                raise ApiError(errors.pop(0), "Unavailable", "restarting")
            return await find(self, *where, **options)

        monkeypatch.setattr(Api, "find", found)
        monkeypatch.setattr("dljob.cli.commands.top.time.sleep", slept)

    def test_top_survives_a_restart_of_the_api_server(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Fixed bug: one request without an answer ended ``dljob top --watch``."""
        errors = [0, 503, 500]
        with threaded_api(tmp_path) as server:
            monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
            self.watching(monkeypatch, errors)
            assert main(["top", "--watch"]) == 130
        shown = capsys.readouterr()
        assert shown.out.count("no DLJobs in namespace team-a") == 2 and not errors
        assert "\x1b" not in shown.out, "only a terminal is cleared"
        assert shown.err == "dljob: the API server does not answer (restarting); the table is out of date\n"

    @pytest.mark.parametrize(("code", "patience_s"), [(403, 600.0), (503, -1.0)])
    def test_top_ends_if_waiting_does_not_help(
        self, code: int, patience_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(remote, "PATIENCE_S", patience_s)
        with threaded_api(tmp_path) as server:
            monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
            self.watching(monkeypatch, [code] * 99)
            assert main(["top", "--watch"]) == 2
