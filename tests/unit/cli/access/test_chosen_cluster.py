"""Tests of the options ``--context`` and ``--kubeconfig``, which choose the cluster of a command."""

from pathlib import Path

import pytest
import yaml

from dljob.cli import main, remote
from dljob.client import access
from dljob.client.errors import BadInputError
from support.servers.threaded_api import kubeconfig, threaded_api

NO_SERVER = "https://127.0.0.1:1"
COMMANDS = (
    ["plan", "job.yaml"],
    ["probe"],
    ["run", "job.yaml"],
    ["top"],
    ["logs", "digits"],
    ["report", "digits"],
    ["get-model", "digits", "folder"],
)


@pytest.fixture
def unreachable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Name a kubeconfig of a server that does not exist in KUBECONFIG, and return its path."""
    path = tmp_path / "unreachable.yaml"
    path.write_text(yaml.safe_dump(kubeconfig(NO_SERVER, "team-x")))
    monkeypatch.setenv("KUBECONFIG", str(path))
    return path


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: str(command[0]))
def test_unknown_context_is_an_error_that_lists_the_contexts(
    command: list[str], unreachable: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(Path(__file__).parents[4])
    arguments = [str(Path("examples/mixed-devices.yaml")) if each == "job.yaml" else each for each in command]
    assert main([*arguments, "--context", "prod"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("dljob: context: found prod; expected one of the contexts of the kubeconfig: other, test.")


def test_kubeconfig_of_the_option_applies_instead_of_that_of_the_environment(
    tmp_path: Path, unreachable: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with threaded_api(tmp_path) as server:
        assert main(["top", "--kubeconfig", str(server.kubeconfig)]) == 0
    assert capsys.readouterr().out == "no DLJobs in namespace team-a\n"


def test_context_decides_server_and_namespace(
    tmp_path: Path, unreachable: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with threaded_api(tmp_path) as server:
        document = kubeconfig(NO_SERVER, "team-a")
        document["clusters"].append({"name": "reachable", "cluster": {"server": server.server.url}})
        document["contexts"][1]["context"]["cluster"] = "reachable"
        unreachable.write_text(yaml.safe_dump(document))
        assert main(["top", "--context", "other"]) == 0
    assert capsys.readouterr().out == "no DLJobs in namespace team-b\n"


def test_options_of_a_command_have_no_effect_on_the_next(unreachable: Path) -> None:
    main(["top", "--context", "prod"])
    assert remote.default_namespace() == "team-x"


def test_current_context_that_does_not_exist_is_the_same_error(unreachable: Path) -> None:
    unreachable.write_text(yaml.safe_dump(kubeconfig(NO_SERVER, "team-x") | {"current-context": "gone"}))
    with pytest.raises(BadInputError, match=r"context: found gone; .*: other, test\."):
        access.connection()


@pytest.mark.parametrize(
    "arguments",
    [["plan", "examples/mixed-devices.yaml", "--cluster", "cluster.yaml"], ["probe", "--local"]],
    ids=["plan --cluster", "probe --local"],
)
@pytest.mark.parametrize("option", ["--context", "--kubeconfig"])
def test_commands_without_a_cluster_refuse_the_options(
    arguments: list[str], option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(Path(__file__).parents[4])
    assert main([*arguments, option, "other"]) == 2
    assert capsys.readouterr().err.startswith(f"dljob: {option}: found ")
