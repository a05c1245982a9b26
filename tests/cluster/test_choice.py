"""Tests of the choice of the cluster provider on a machine, and of the message if none is possible."""

import os
from pathlib import Path

import pytest

from devcluster import cli, providers
from devcluster.embedded import provider as embedded
from devcluster.errors import ClusterError
from devcluster.progress import Progress


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a machine with an empty cache and without a kubeconfig."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.delenv("DLJOB_CLUSTER_DIR", raising=False)
    return tmp_path


def programs(folder: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> None:
    for name, script in scripts.items():
        path = folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}/bin:{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("docker", "kind", "unsuited", "chosen"),
    [
        ("exit 0", True, None, "kind"),
        ("exit 0", True, "needs root", "kind"),
        ("exit 1", True, None, "embedded"),
        ("exit 0", False, None, "embedded"),
    ],
)
def test_provider_follows_from_the_machine(
    machine: Path, monkeypatch: pytest.MonkeyPatch, docker: str, kind: bool, unsuited: str | None, chosen: str
) -> None:
    programs(machine, monkeypatch, docker=docker, **({"kind": "exit 0"} if kind else {}))
    monkeypatch.setattr(embedded, "unsuited", lambda: unsuited)
    assert providers.choose(None, "dev", Progress(quiet=True)).name == chosen


def test_message_says_what_to_install_if_no_provider_works(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs(machine, monkeypatch, docker="exit 1")
    monkeypatch.setattr(embedded, "unsuited", lambda: "the embedded cluster needs root")
    with pytest.raises(ClusterError) as caught:
        providers.choose(None, "dev", Progress(quiet=True))
    for word in ("no Docker engine answers", "needs root", "Install Docker", "--provider existing"):
        assert word in str(caught.value)


def test_docker_alone_is_sufficient(
    machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    programs(machine, monkeypatch, docker="exit 0")
    monkeypatch.setattr(embedded, "unsuited", lambda: "the embedded cluster needs root")
    assert providers.choose(None, "dev", Progress()).name == "kind"
    assert "installing kind" in capsys.readouterr().err
    monkeypatch.setattr(embedded, "unsuited", lambda: None)
    assert providers.choose(None, "dev", Progress()).name == "embedded"
    assert "using the embedded cluster" in capsys.readouterr().err


@pytest.mark.parametrize(("record", "chosen"), [("kind.json", "kind"), ("cluster.json", "embedded")])
def test_cluster_keeps_the_provider_that_created_it(
    machine: Path, monkeypatch: pytest.MonkeyPatch, record: str, chosen: str
) -> None:
    programs(machine, monkeypatch, docker="exit 1")
    monkeypatch.setattr(embedded, "unsuited", lambda: None)
    folder = machine / "cache/dljob/cluster/dev"
    folder.mkdir(parents=True)
    (folder / record).write_text("{}")
    assert providers.choose(None, "dev", Progress(quiet=True)).name == chosen


def test_provider_existing_uses_only_the_current_kubeconfig(
    machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["kubeconfig", "--provider", "existing"]) == 1
    assert "KUBECONFIG: found 0 files" in capsys.readouterr().err
    mine = machine / "mine"
    mine.write_text("apiVersion: v1")
    monkeypatch.setenv("KUBECONFIG", str(mine))
    assert cli.main(["kubeconfig", "--provider", "existing"]) == 0
    assert capsys.readouterr().out.strip() == str(mine)
    assert cli.main(["load", "--provider", "existing", "image.tar"]) == 1
    assert "Push them with" in capsys.readouterr().err
    assert cli.main(["up", "--provider", "existing", "--recreate"]) == 1
    assert "does not change the cluster" in capsys.readouterr().err


def test_provider_existing_checks_that_the_cluster_answers(
    machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = machine / ".kube" / "config"
    mine.parent.mkdir()
    mine.write_text("apiVersion: v1")
    programs(machine, monkeypatch, kubectl='[ "$2" = "$HOME/.kube/config" ] && printf "node/a\\nnode/b\\n"')
    assert cli.main(["up", "--provider", "existing"]) == 0
    assert "2 nodes" in capsys.readouterr().err
    programs(machine, monkeypatch, kubectl="echo connection refused >&2; exit 1")
    assert cli.main(["up", "--provider", "existing"]) == 1
    assert "start the cluster:\nconnection refused" in capsys.readouterr().err
