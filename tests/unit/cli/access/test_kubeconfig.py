"""Tests of the credentials of commands and of the SDK: several kubeconfigs, plugins, and tokens that expire."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from dljob.cli import main, remote
from dljob.client import access
from dljob.controller.connection import proxy_from_environment
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
        config["users"][0]["user"] |= {"client-certificate": "./me.crt", "client-key": "/keys/me.key"}
        files(monkeypatch, tmp_path / "kube", config)
        info = access.connection().info
        assert info.ca_path == str(tmp_path / "kube/pki/ca.crt")
        assert (info.certificate_path, info.private_key_path) == (str(tmp_path / "kube/me.crt"), "/keys/me.key")

    @pytest.mark.parametrize("document", ["no kubeconfig", ["a"], {"users": [1]}, {"current-context": "gone"}])
    def test_file_that_is_no_kubeconfig_is_named(
        self, document: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Fixed bug: text or a list ended the commands with a traceback."""
        files(monkeypatch, tmp_path, document)
        assert main(["top"]) == 2
        assert capsys.readouterr().err.startswith("dljob: kubeconfig: found an invalid file")


class Plugin:
    """Stands for the package ``kubernetes``, which calls the plugin of a kubeconfig: each login has another token."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.logins, self.documents = 0, list[Any]()
        package, config = ModuleType("kubernetes"), ModuleType("kubernetes.config")
        config.ConfigException = ValueError  # type: ignore[attr-defined]
        config.new_client_from_config = self._client  # type: ignore[attr-defined]
        package.config = config  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "kubernetes", package)
        monkeypatch.setitem(sys.modules, "kubernetes.config", config)

    def _client(self, path: str) -> Any:
        self.documents.append(yaml.safe_load(Path(path).read_text()))
        self.logins += 1
        header = f"Bearer token-{self.logins}"
        found = SimpleNamespace(cert_file=None, key_file=None, get_api_key_with_prefix=lambda name: header)
        return SimpleNamespace(configuration=found)


def with_plugin(url: str) -> dict[str, Any]:
    config = kubeconfig(url, "team-a")
    config["users"][0]["user"] = {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": "./bin/login"}}
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
    plugin = Plugin(monkeypatch)
    config = with_plugin("https://127.0.0.1:1")
    config["clusters"][0]["cluster"]["proxy-url"] = "http://127.0.0.1:3"
    files(monkeypatch, tmp_path, config)
    info = access.connection().info
    assert (info.default_namespace, info.token, info.proxy_url) == ("team-a", "token-1", "http://127.0.0.1:3")
    assert plugin.documents[0]["users"][0]["user"]["exec"]["command"] == str(tmp_path / "bin/login")


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
        plugin = Plugin(monkeypatch)
        self.expiring(monkeypatch, requests=2)
        with threaded_api(tmp_path) as server, PretendOperator(server):
            files(monkeypatch, tmp_path, with_plugin(server.server.url))
            (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
            assert main(["run", str(tmp_path / "job.yaml")]) == 0
        assert plugin.logins > 2

    def test_client_waits_for_longer_than_a_token_is_valid(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plugin = Plugin(monkeypatch)
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
