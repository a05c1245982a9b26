"""Tests that ``dljob plan`` and ``dljob run`` report a change of an existing job that would be refused."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml

from dljob.cli import main, remote
from dljob.client import preview, update_check
from dljob.kube import ApiError
from dljob.kube.kinds import DLJOB
from support.builders import CPUS
from support.manifests.admission import defaulted
from support.spec_changes import ENDED, SAVED, SPEC
from support.specs.small_specs import JOB, MINIMAL, spec_of

Json = dict[str, Any]


class FakeServer:
    """An API server with at most one job, which answers a server-side apply without rules about changes."""

    def __init__(self, stored: Json | None, *, code: int = 0) -> None:
        self.stored, self.code = stored, code
        self.applied: list[tuple[Json, bool]] = []

    async def get(self, kind: object, namespace: str, name: str) -> Json:
        if self.stored is None or kind is not DLJOB:
            raise ApiError(404, "NotFound", f"{name} not found")
        return self.stored

    async def find(self, *_: object) -> list[Json]:
        return []

    async def apply(self, kind: object, body: Json, *, dry_run: bool = False, **_: object) -> Json:
        self.applied.append((body, dry_run))
        if self.code:
            raise ApiError(self.code, "Invalid", "spec.seed: found 3; expected 0, says the server")
        metadata = {**body["metadata"], "uid": "u", "generation": 2}
        return {**body, "metadata": metadata, "spec": defaulted(SPEC, body["spec"])}


def job(status: Json, **changes: Any) -> Json:
    return {**JOB, "spec": defaulted(SPEC, spec_of(changes)), "status": status}


def refusal(server: FakeServer, **changes: Any) -> str | None:
    manifest = {**JOB, "spec": {**MINIMAL, **changes}}
    return asyncio.run(update_check.refusal(server, manifest, "team-a"))


@pytest.mark.parametrize(
    ("status", "changes", "words"),
    [
        (SAVED, {"seed": 3}, "spec.seed: found 3; expected 0, as when training began"),
        (ENDED, {"epochs": 9}, "spec.epochs: found a change after the job has ended"),
        (SAVED, {"epochs": 9}, None),
        ({}, {"seed": 3}, None),
        (ENDED, {}, None),
        ({"progress": "much"}, {"seed": 3}, None),
    ],
)
def test_change_is_refused_without_rules_of_the_server(status: Json, changes: Json, words: str | None) -> None:
    server = FakeServer(job(status))
    found = refusal(server, **changes)
    assert (found or "").startswith(words or "") and bool(found) == bool(words)
    assert [dry_run for _, dry_run in server.applied] == [True], "nothing is changed"
    assert server.applied[0][0]["metadata"]["namespace"] == "team-a"


def test_a_new_job_is_not_asked_about() -> None:
    server = FakeServer(None)
    assert refusal(server, seed=3) is None and server.applied == []


@pytest.mark.parametrize(
    ("code", "changes", "found"),
    [
        (422, {"nodes": {"max": 1}}, "spec.seed: found 3; expected 0, says the server"),
        (422, {"seed": 4}, "spec.seed: found 4; expected 0, as when training began"),
        (403, {"seed": 4}, ""),
    ],
)
def test_answer_of_the_server_counts(code: int, changes: Json, found: str) -> None:
    text = refusal(FakeServer(job(SAVED), code=code), **changes)
    assert (text or "").startswith(found) and bool(text) == bool(found)


def test_no_answer_is_an_error() -> None:
    with pytest.raises(ApiError):
        refusal(FakeServer(job(SAVED), code=500), seed=3)


def test_spec_of_a_later_release_is_left_to_the_server() -> None:
    stored = job(SAVED)
    stored["spec"]["epochs"] = -1
    assert update_check.between(stored, job({}, seed=3)) is None


class TestCommands:
    @pytest.fixture
    def server(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeServer:
        server = FakeServer(job(SAVED))

        async def observe(api: object) -> preview.ClusterState:
            return preview.ClusterState(CPUS, {})

        monkeypatch.setattr(remote, "reach", lambda work: asyncio.run(work(server)))
        monkeypatch.setattr(preview, "observe", observe)
        monkeypatch.setattr(remote, "default_namespace", lambda: "team-a")
        monkeypatch.chdir(tmp_path)
        (tmp_path / "job.yaml").write_text(yaml.safe_dump({**JOB, "spec": {**MINIMAL, "seed": 3}}))
        return server

    def test_run_does_not_send_the_change(self, server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["run", "job.yaml", "--no-follow"]) == 2
        assert (
            "a: spec.seed: found 3; expected 0, as when training began. Restore the former value"
            in capsys.readouterr().err
        )
        assert [dry_run for _, dry_run in server.applied] == [True]

    def test_run_sends_another_change(self, server: FakeServer, tmp_path: Path) -> None:
        (tmp_path / "job.yaml").write_text(yaml.safe_dump({**JOB, "spec": {**MINIMAL, "epochs": 3}}))
        assert main(["run", "job.yaml", "--no-follow"]) == 0
        assert [dry_run for _, dry_run in server.applied] == [True, False]

    def test_plan_shows_the_plan_and_the_refusal(self, server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["plan", "job.yaml"]) == 2
        shown = capsys.readouterr()
        assert shown.out.startswith("a: mlp") and "dljob: a: spec.seed: found 3; expected 0" in shown.err

    def test_plan_for_a_cluster_in_a_file_asks_no_server(self, server: FakeServer, tmp_path: Path) -> None:
        (tmp_path / "cluster.yaml").write_text("nodes: [{name: n, count: 3, cpu: 2}]")
        assert main(["plan", "job.yaml", "--cluster", "cluster.yaml"]) == 0
        assert server.applied == []
