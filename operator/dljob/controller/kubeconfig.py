"""Read kubeconfigs as kubectl does: several files, relative paths, token files, and plugins that log in."""

import base64
import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import kopf
import yaml

_FILES = {
    "cluster": ("certificate-authority",),
    "context": (),
    "user": ("client-certificate", "client-key", "tokenFile"),
}
"""Kinds of entries of a kubeconfig, and their fields with paths of files."""


def default_kubeconfig(context: str | None) -> str | None:
    """Return the path of the user's kubeconfig; None if it does not exist and no context of it is wanted."""
    path = Path.home() / ".kube/config"
    return str(path) if context is not None or path.exists() else None


def login(paths: str, context: str | None, *, with_plugin: bool = True) -> tuple[kopf.ConnectionInfo, str | None]:
    """Return address and credentials of a context, and the name in the server's certificate if it is another one.

    ``paths``: one path of a kubeconfig, or several as in KUBECONFIG. ``context``: None: the current context.
    ``with_plugin``: False: do not call a plugin, which may take seconds; the credentials are then missing. Raise
    ValueError for a context or a plugin that cannot be used, and another exception for a file that is no kubeconfig.
    """
    entries, current = _merged((Path(name).expanduser() for name in _names(paths)), context)
    if not current:
        raise kopf.LoginError("the current context is not set")
    chosen = entries["context"][current]
    cluster = _entry(entries, "cluster", chosen.get("cluster"), current)
    user = _entry(entries, "user", chosen["user"], current) if chosen.get("user") else {}
    _check_files({"cluster": cluster, "user": user})
    if not (server := cluster.get("server")):
        raise ValueError(
            f"kubeconfig: cluster {chosen['cluster']}: found no server; expected the address of the API server. Add "
            "it, such as server: https://HOST:6443"
        )
    info = kopf.ConnectionInfo(
        server=_with_scheme(str(server), cluster, user),
        **_file_or_data(cluster, "ca", "certificate-authority"),
        **_file_or_data(user, "certificate", "client-certificate"),
        **_file_or_data(user, "private_key", "client-key"),
        insecure=cluster.get("insecure-skip-tls-verify"),
        username=user.get("username"),
        password=user.get("password"),
        token=_token(user),
        default_namespace=chosen.get("namespace"),
        proxy_url=cluster.get("proxy-url"),
    )
    if with_plugin and (plugin := user.get("exec")) and not _has_credentials(info):
        info = replace(info, **_credentials(plugin, cluster))
    return info, cluster.get("tls-server-name") or None


def _names(paths: str) -> list[str]:
    """Return the paths of kubeconfigs. ``paths``: one path, or several as in KUBECONFIG."""
    return [path.strip() for path in paths.split(os.pathsep) if path.strip()]


def _merged(paths: Iterable[Path], context: str | None) -> tuple[dict[str, dict[str, Any]], str]:
    """Return the entries of kubeconfigs by kind and name, and the name of the wanted context; empty if there is none.

    The first current context that is not empty and the first entry of each name apply. Files that do not exist are left
    out if another one exists. Relative paths in a file begin at its folder. Raise OSError if no file exists, and
    TypeError or AttributeError for a file that is no kubeconfig, and ValueError for a context that does not exist.
    """
    entries: dict[str, dict[str, Any]] = {kind: {} for kind in _FILES}
    current, missing, found = context or "", "", False
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            missing = missing or str(path)
            continue
        document, found = yaml.safe_load(text) or {}, True
        current = current or document.get("current-context") or ""
        for kind in _FILES:
            for item in document.get(f"{kind}s") or ():
                entries[kind].setdefault(item["name"], _absolute(kind, item.get(kind) or {}, path.absolute().parent))
    if missing and not found:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), missing)
    if (context or (current and entries["context"])) and current not in entries["context"]:
        raise ValueError(
            f"context: found {current}; expected one of the contexts of the kubeconfig: {_listed(entries['context'])}. "
            "Name one of them, or another kubeconfig"
        )
    return entries, current


def _absolute(kind: str, entry: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return an entry of a kubeconfig in ``folder`` with absolute paths. A plugin without a slash is found in PATH."""
    changed: dict[str, Any] = {name: str(folder / entry[name]) for name in _FILES[kind] if entry.get(name)}
    plugin = entry.get("exec") or {}
    if os.sep in str(plugin.get("command", "")):
        changed["exec"] = {**plugin, "command": str(folder / plugin["command"])}
    return {**entry, **changed}


def _entry(entries: Mapping[str, Mapping[str, Any]], kind: str, name: Any, context: str) -> Mapping[str, Any]:
    """Return the cluster or the user of a context. Raise ValueError if the kubeconfig lacks it."""
    if name not in entries[kind]:
        raise ValueError(
            f"kubeconfig: context {context}: found the {kind} {name}; expected one of its {kind}s: "
            f"{_listed(entries[kind])}. Correct the context, or choose another one with --context"
        )
    found: Mapping[str, Any] = entries[kind][name]
    return found


def _listed(names: Iterable[Any]) -> str:
    return ", ".join(sorted(map(str, names))) or "none"


def _check_files(chosen: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ValueError if a file that the chosen entries name does not exist. ``chosen``: kind → entry."""
    for kind, entry in chosen.items():
        for name in _FILES[kind]:
            if (path := entry.get(name)) and not entry.get(f"{name}-data") and not Path(path).exists():
                raise ValueError(
                    f"kubeconfig: {name}: found {path}, which does not exist; expected a file. Correct the path, or "
                    "get a new kubeconfig"
                )


def _with_scheme(server: str, cluster: Mapping[str, Any], user: Mapping[str, Any]) -> str:
    """Return the address of the server with a scheme. Without one, it is that of kubectl: https if TLS is set up."""
    if "://" in server:
        return server
    tls = ("insecure-skip-tls-verify", "certificate-authority", "certificate-authority-data")
    own = ("client-certificate", "client-certificate-data")
    uses_tls = any(cluster.get(name) for name in tls) or any(user.get(name) for name in own)
    return f"{'https' if uses_tls else 'http'}://{server}"


def _file_or_data(entry: Mapping[str, Any], field: str, name: str) -> dict[str, Any]:
    """Return the arguments of ConnectionInfo for a certificate or key. Its data take precedence over its file."""
    data = entry.get(f"{name}-data")
    return {f"{field}_data": data} if data else {f"{field}_path": entry.get(name)}


def _token(user: Mapping[str, Any]) -> str | None:
    if path := user.get("tokenFile"):
        return Path(path).read_text(encoding="utf-8").strip() or None
    provider = (user.get("auth-provider") or {}).get("config") or {}
    found: str | None = user.get("token") or provider.get("access-token")
    return found


def _has_credentials(info: kopf.ConnectionInfo) -> bool:
    return bool(info.token or info.username or info.certificate_path or info.certificate_data)


def _credentials(plugin: Mapping[str, Any], cluster: Mapping[str, Any]) -> dict[str, Any]:
    """Call a plugin that logs in, such as that of a cloud provider. Return its credentials for ConnectionInfo.

    The protocol is that of the API group client.authentication.k8s.io. The plugin may write to standard error, and ask
    the user on a terminal. Raise ValueError if it cannot be started, or gives no credentials.
    """
    command = plugin.get("command")
    if not command:
        raise ValueError(
            "kubeconfig: exec: found no command; expected that of a plugin which logs in. Get a new kubeconfig"
        )
    try:
        ended = _run(str(command), plugin, cluster)
    except OSError as error:
        hint = " ".join(str(plugin.get("installHint") or "").split())
        raise ValueError(
            f"kubeconfig: exec: found no plugin {command} that can be started ({error.strerror}); expected the program "
            f"that logs in. Install it, or add its folder to PATH. {hint}".rstrip()
        ) from None
    try:
        status = json.loads(ended.stdout)["status"] if ended.returncode == 0 else {}
        token, cert, key = (status.get(name) for name in ("token", "clientCertificateData", "clientKeyData"))
    except (ValueError, KeyError, TypeError, AttributeError):
        token = cert = key = None
    if not (token or (cert and key)):
        how = f"ended with exit code {ended.returncode}" if ended.returncode else "printed no credentials"
        raise ValueError(
            f"kubeconfig: exec: found that the plugin {command} {how}; expected credentials. Log in anew, as its "
            "output says"
        )
    data = {"certificate_data": cert, "private_key_data": key} if cert and key else {}
    return {"token": token} | {name: base64.b64encode(text.encode()).decode() for name, text in data.items()}


def _run(command: str, plugin: Mapping[str, Any], cluster: Mapping[str, Any]) -> "subprocess.CompletedProcess[bytes]":
    interactive = plugin.get("interactiveMode") != "Never" and sys.stdin is not None and sys.stdin.isatty()
    spec: dict[str, Any] = {"interactive": interactive}
    if plugin.get("provideClusterInfo"):
        spec["cluster"] = {
            name: value for name, value in cluster.items() if name not in ("extensions", *_FILES["cluster"])
        }
        for each in cluster.get("extensions") or ():
            if each.get("name") == "client.authentication.k8s.io/exec":
                spec["cluster"]["config"] = each.get("extension")
    version = plugin.get("apiVersion") or "client.authentication.k8s.io/v1"
    info = json.dumps({"apiVersion": version, "kind": "ExecCredential", "spec": spec})
    given = {each["name"]: str(each.get("value") or "") for each in plugin.get("env") or ()}
    return subprocess.run(
        [command, *map(str, plugin.get("args") or ())],
        env={**os.environ, **given, "KUBERNETES_EXEC_INFO": info},
        stdin=None if interactive else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        check=False,
    )
