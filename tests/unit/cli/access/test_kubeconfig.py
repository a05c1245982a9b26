"""Tests of the credentials of commands and of the SDK: several kubeconfigs, plugins, and tokens that expire."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dljob.cli import main, remote
from dljob.client import access
from dljob.controller.proxy import proxy_from_environment
from dljob.sdk import Client, requests
from support.servers.http_api import HttpApiServer
from support.servers.threaded_api import PretendOperator, kubeconfig, threaded_api
from support.specs.small_specs import JOB

EMPTY = {"apiVersion": "v1", "kind": "Config", "current-context": "", "clusters": None, "contexts": None, "users": None}
"""What ``kubectl config unset current-context`` leaves of a file without entries."""


def files(monkeypatch: pytest.MonkeyPatch, folder: Path, *documents: Any) -> list[Path]:
    """Write kubeconfigs, name all of them in KUBECONFIG, and return their paths."""
    folder.mkdir(exist_ok=True)
    paths = [folder / f"config-{i}" for i in range(len(documents))]
    for path, document in zip(paths, documents, strict=True):
        path.write_text(yaml.safe_dump(document))
    monkeypatch.setenv("KUBECONFIG", ":".join(map(str, paths)))
    return paths


class TestSeveralFiles:
    def test_first_current_context_that_is_not_empty_applies(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Fixed bug: a first file without entries ended each command with ``KeyError`` or ``TypeError``."""
        files(monkeypatch, tmp_path, EMPTY, kubeconfig("https://127.0.0.1:1", "team-a"))
        assert remote.default_namespace() == "team-a"
        with Client(context="other") as client:
            assert client.namespace == "team-b"

    def test_missing_file_is_left_out_if_another_exists(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Fixed bug: one missing file ended each command, although kubectl works."""
        (path,) = files(monkeypatch, tmp_path, kubeconfig("https://127.0.0.1:1", "team-a"))
        monkeypatch.setenv("KUBECONFIG", f"/nowhere/config:{path}")
        assert remote.default_namespace() == "team-a"

    def test_relative_paths_begin_at_the_folder_of_their_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Fixed bug: they began at the present folder, where no certificate was found."""
        config = kubeconfig("https://127.0.0.1:1", "team-a")
        config["clusters"][0]["cluster"]["certificate-authority"] = "pki/ca.crt"
        config["users"][0]["user"] |= {"client-certificate": "./me.crt", "client-key": f"{tmp_path}/me.key"}
        files(monkeypatch, tmp_path / "kube", config)
        (tmp_path / "kube/pki").mkdir()
        for name in ("kube/pki/ca.crt", "kube/me.crt", "me.key"):
            (tmp_path / name).touch()
        info = access.connection().info
        assert info.ca_path == str(tmp_path / "kube/pki/ca.crt")
        assert (info.certificate_path, info.private_key_path) == (
            str(tmp_path / "kube/me.crt"),
            str(tmp_path / "me.key"),
        )

    @pytest.mark.parametrize("document", ["no kubeconfig", ["a"], {"users": [1]}, {"current-context": "gone"}])
    def test_file_that_is_no_kubeconfig_is_named(
        self, document: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Fixed bug: text or a list ended the commands with a traceback."""
        files(monkeypatch, tmp_path, document)
        assert main(["top"]) == 2
        assert capsys.readouterr().err.startswith("dljob: kubeconfig: found an invalid file")


class Plugin:
    """A plugin that logs in, as cloud providers have them: each login has another token."""

    def __init__(self, folder: Path) -> None:
        self._count, self.asked = folder / "count", folder / "asked"
        program = folder / "bin/login"
        program.parent.mkdir()
        program.write_text(
            f"#!/bin/sh\necho . >> {self._count}\nprintenv KUBERNETES_EXEC_INFO > {self.asked}\n"
            f"""printf '{{"status": {{"token": "token-%s"}}}}' $(wc -l < {self._count})\n"""
        )
        program.chmod(0o755)

    @property
    def logins(self) -> int:
        return len(self._count.read_text().splitlines()) if self._count.exists() else 0


def with_plugin(url: str, **plugin: Any) -> dict[str, Any]:
    config = kubeconfig(url, "team-a")
    given = {"apiVersion": "client.authentication.k8s.io/v1", "command": "./bin/login"}
    config["users"][0]["user"] = {"exec": given | plugin}
    return config


def test_proxy_of_the_kubeconfig_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fixed bug: commands tried to reach the API server without the proxy."""
    with threaded_api(tmp_path) as server:
        config = kubeconfig("http://api.invalid:6443", "team-a")
        config["clusters"][0]["cluster"]["proxy-url"] = server.server.url
        files(monkeypatch, tmp_path, config)
        assert main(["top"]) == 0
    assert capsys.readouterr().out == "no DLJobs in namespace team-a\n"


def test_proxy_of_the_environment_is_used_unless_the_kubeconfig_names_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fixed bug: commands tried to reach the API server without the proxy that kubectl uses."""
    for name in ("HTTP_PROXY", "http_proxy", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with threaded_api(tmp_path) as server:
        monkeypatch.setenv("HTTP_PROXY", server.server.url)
        config = kubeconfig("http://api.invalid:6443", "team-a")
        files(monkeypatch, tmp_path, config)
        assert main(["top"]) == 0
    assert capsys.readouterr().out == "no DLJobs in namespace team-a\n"
    config["clusters"][0]["cluster"]["proxy-url"] = "http://127.0.0.1:3"
    files(monkeypatch, tmp_path, config)
    assert access.connection().info.proxy_url == "http://127.0.0.1:3"


API = "https://api.example.com:6443"


@pytest.mark.parametrize(
    ("server", "excluded", "used"),
    [
        (API, "", True),
        (API, "*", False),
        (API, "example.com", False),
        (API, ".example.com", False),
        (API, "*.example.com", False),
        (API, "other.com, api.example.com", False),
        (API, "API.example.com", False),
        (API, "pi.example.com", True),
        (API, ".api.example.com", True),
        (API, "api.example.com:6443", False),
        (API, "api.example.com:443", True),
        (API, ":6443", True),
        ("https://10.96.0.1", "10.0.0.0/8", False),
        ("https://10.96.0.1", "192.168.0.0/16,10.96.0.1:443", False),
        ("https://10.96.0.1", "10.96.0.1:6443", True),
        ("https://10.96.0.1", "10.96.0.0/99", True),
        ("https://[fd00::1]:6443", "fd00::/8", False),
        ("https://[fd00::1]:6443", "[fd00::1]:6443", False),
        ("https://[fd00::1]:6443", "fd00::2", True),
        ("https://localhost:6443", "", False),
        ("https://127.0.0.1:6443", "", False),
        ("http://api.example.com", "", False),
    ],
)
def test_environment_names_the_proxy_as_for_kubectl(server: str, excluded: str, used: bool) -> None:
    environment = {"HTTPS_PROXY": "proxy.example:3128", "NO_PROXY": excluded}
    assert proxy_from_environment(server, environment) == ("http://proxy.example:3128" if used else None)
    lower = {name.lower(): value for name, value in environment.items()}
    assert proxy_from_environment(server, lower) == proxy_from_environment(server, environment)


def test_proxy_of_another_kind_is_refused_without_its_password() -> None:
    with pytest.raises(ValueError, match="HTTPS_PROXY: found a proxy of the kind socks5; expected http://HOST:PORT"):
        proxy_from_environment(API, {"HTTPS_PROXY": "socks5://user:secret@proxy.example:1080"})
    for proxy in ("http://user:secret@proxy.example:3128", "https://proxy.example"):
        assert proxy_from_environment(API, {"https_proxy": proxy}) == proxy


@pytest.mark.parametrize("name", [None, "", "api.example.com"])
def test_server_name_of_the_kubeconfig_is_that_of_its_current_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str | None
) -> None:
    config = kubeconfig("https://127.0.0.1:1", "team-a")
    other = {"name": "other", "cluster": {"server": "https://other", "tls-server-name": "other"}}
    config["clusters"].append(other)
    if name is not None:
        config["clusters"][0]["cluster"]["tls-server-name"] = name
    files(monkeypatch, tmp_path, config)
    assert access.connection().server_name == (name or None)


def test_plugin_leaves_the_namespace_of_the_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed bug: with a plugin of a cloud provider, commands used the namespace ``default``."""
    plugin = Plugin(tmp_path)
    config = with_plugin("https://127.0.0.1:1", provideClusterInfo=True)
    config["clusters"][0]["cluster"]["proxy-url"] = "http://127.0.0.1:3"
    files(monkeypatch, tmp_path, config)
    assert remote.default_namespace() == "team-a" and plugin.logins == 0, "its name needs no login"
    info = access.connection().info
    assert (info.default_namespace, info.token, info.proxy_url) == ("team-a", "token-1", "http://127.0.0.1:3")
    asked = json.loads(plugin.asked.read_text())
    assert asked["kind"] == "ExecCredential" and asked["apiVersion"] == "client.authentication.k8s.io/v1"
    cluster = {"server": "https://127.0.0.1:1", "proxy-url": "http://127.0.0.1:3"}
    assert asked["spec"] == {"interactive": False, "cluster": cluster}


def test_plugin_may_give_a_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = json.dumps({"status": {"clientCertificateData": "CERT", "clientKeyData": "KEY"}})
    files(monkeypatch, tmp_path, with_plugin("https://127.0.0.1:1", command="echo", args=[answer]))
    info = access.connection().info
    found = info.certificate_data, info.private_key_data
    assert [base64.b64decode(str(each)) for each in found] == [b"CERT", b"KEY"] and info.token is None


@pytest.mark.parametrize(
    ("plugin", "found", "remedy"),
    [
        (
            {"command": "no-login", "installHint": "Get it\n from x.example"},
            "no plugin no-login",
            "Get it from x.example",
        ),
        (
            {"command": "sh", "args": ["-c", "echo expired >&2; exit 3"]},
            "plugin sh ended with exit code 3",
            "Log in anew",
        ),
        ({"command": "echo", "args": ["hello"]}, "plugin echo printed no credentials", "Log in anew"),
        ({"command": "echo", "args": ['{"status": {}}']}, "plugin echo printed no credentials", "Log in anew"),
        ({"command": ""}, "exec: found no command", "Get a new kubeconfig"),
    ],
    ids=lambda value: value.get("command") or "nothing" if isinstance(value, dict) else "",
)
def test_plugin_that_does_not_log_in_is_named(
    plugin: dict[str, Any],
    found: str,
    remedy: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Fixed bug: the request was sent without credentials, and its answer was about the user system:anonymous."""
    with threaded_api(tmp_path) as server:
        files(monkeypatch, tmp_path, with_plugin(server.server.url, **plugin))
        assert main(["top"]) == 2
    captured = capfd.readouterr()
    assert captured.out == "" and "dljob: kubeconfig: exec: found " in captured.err and found in captured.err
    assert remedy in captured.err and ("expired" in captured.err) is (plugin["command"] == "sh")


class TestEntries:
    """Entries of a kubeconfig that cannot be used, and those that kubectl can use."""

    @pytest.mark.parametrize(
        ("kind", "changes", "found"),
        [
            ("context", {"cluster": "gone"}, "context test: found the cluster gone; expected one of its clusters: c"),
            ("context", {"user": "gone"}, "context test: found the user gone; expected one of its users: u"),
            ("cluster", {"server": None}, "cluster c: found no server"),
            ("cluster", {"certificate-authority": "/no/ca.crt"}, "certificate-authority: found /no/ca.crt, which does"),
            ("user", {"tokenFile": "token"}, "tokenFile: found {}/token, which does not exist"),
        ],
    )
    def test_unusable_entry_is_named(
        self,
        kind: str,
        changes: dict[str, Any],
        found: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """Fixed bug: messages were the name alone, in a KeyError, or of Python, and a missing token was no error."""
        config = kubeconfig("https://127.0.0.1:1", "team-a")
        config[f"{kind}s"][0][kind] |= changes
        files(monkeypatch, tmp_path, config)
        assert main(["top"]) == 2
        assert capsys.readouterr().err.startswith(f"dljob: kubeconfig: {found.format(tmp_path)}")

    def test_text_in_another_encoding_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (path,) = files(monkeypatch, tmp_path, kubeconfig("https://127.0.0.1:1", "team-a"))
        path.write_bytes(b"\xff" + path.read_bytes())
        assert main(["top"]) == 2
        assert capsys.readouterr().err.startswith("dljob: kubeconfig: found an invalid file")

    def test_token_is_read_from_its_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Fixed bug: without a package that the installation does not have, requests had no credentials."""
        config = kubeconfig("https://127.0.0.1:1", "team-a")
        config["users"][0]["user"] = {"tokenFile": "token", "token": "old"}
        files(monkeypatch, tmp_path, config)
        (tmp_path / "token").write_text("new\n")
        assert access.connection().info.token == "new"

    @pytest.mark.parametrize(
        ("server", "changes", "expected"),
        [
            ("10.0.0.1:6443", {"insecure-skip-tls-verify": True}, "https://10.0.0.1:6443"),
            ("localhost:8080", {}, "http://localhost:8080"),
        ],
    )
    def test_server_without_a_scheme_is_that_of_kubectl(
        self, server: str, changes: dict[str, Any], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = kubeconfig(server, "team-a")
        config["clusters"][0]["cluster"] |= changes
        files(monkeypatch, tmp_path, config)
        assert access.connection().server == expected

    def test_data_of_a_certificate_take_precedence_over_its_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Fixed bug: both together were an error."""
        config = kubeconfig("https://127.0.0.1:1", "team-a")
        both = {"certificate-authority": "gone.crt", "certificate-authority-data": "Q0E="}
        config["clusters"][0]["cluster"] |= both
        files(monkeypatch, tmp_path, config)
        info = access.connection().info
        assert (info.ca_data, info.ca_path) == ("Q0E=", None)


class TestExpiredToken:
    @pytest.fixture(autouse=True)
    def _quick(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(requests, "PAUSE_S", 0.01)

    @staticmethod
    def expiring(monkeypatch: pytest.MonkeyPatch, requests: int) -> None:
        """Let the server accept each token for so many requests."""
        from aiohttp import web

        answered: dict[str, int] = {}
        answer = HttpApiServer._answer

        async def checked(self: HttpApiServer, request: web.Request) -> web.StreamResponse:
            token = request.headers.get("Authorization", "")
            answered[token] = answered.get(token, 0) + 1
            if answered[token] > requests:
                return web.json_response({"kind": "Status", "code": 401, "reason": "Unauthorized"}, status=401)
            return await answer(self, request)

        monkeypatch.setattr(HttpApiServer, "_answer", checked)

    def test_run_follows_a_job_for_longer_than_a_token_is_valid(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Fixed bug: the command ended with exit code 2 when the first token expired, and the job went on."""
        plugin = Plugin(tmp_path)
        self.expiring(monkeypatch, requests=2)
        with threaded_api(tmp_path) as server, PretendOperator(server):
            files(monkeypatch, tmp_path, with_plugin(server.server.url))
            (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
            assert main(["run", str(tmp_path / "job.yaml")]) == 0
        assert plugin.logins > 1

    def test_client_waits_for_longer_than_a_token_is_valid(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plugin = Plugin(tmp_path)
        self.expiring(monkeypatch, requests=2)
        with threaded_api(tmp_path) as server, PretendOperator(server):
            files(monkeypatch, tmp_path, with_plugin(server.server.url))
            with Client() as client:
                assert client.submit(JOB).wait(timeout=60).phase.value == "Complete"
        assert plugin.logins > 1

    def test_token_that_no_login_renews_is_an_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.expiring(monkeypatch, requests=0)
        with threaded_api(tmp_path) as server:
            monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
            assert main(["top"]) == 2
        assert capsys.readouterr().err == "dljob: the API server rejected the credentials. Check the kubeconfig\n"
