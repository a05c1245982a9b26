"""Pass this machine's pip configuration to image builds: indexes, local wheels, certificates, proxies.

A file:// index or a folder of wheels does not exist inside a build, so these are served over HTTP on loopback during
the build. The configuration is passed as secrets, so that no image contains its host names, paths or passwords.
"""

from __future__ import annotations

import http.server
import os
import re
import shlex
import sys
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from devcluster.shell import have, run

CA_IN_BUILD = "/run/pip-ca.pem"
_LISTS = ("index-url", "extra-index-url", "find-links", "trusted-host")
_PLAIN = ("timeout", "retries")


@dataclass(frozen=True)
class PipConfig:
    """The part of pip's settings that builds need.

    `options`: name of an option, such as index-url → its values. `ca_bundle`: file with CA certificates; None if
    the settings name no such file.
    """

    options: Mapping[str, tuple[str, ...]]
    ca_bundle: Path | None


def read() -> PipConfig:
    """Return the current configuration as pip reports it, from configuration files and the environment."""
    for command in ([sys.executable, "-m", "pip"], ["pip3"], ["pip"]):  # a Python without pip is common
        if len(command) > 1 or have(command[0]):
            done = run([*command, "config", "list"], check=False, timeout_s=60)
            if done.returncode == 0:
                return parse(done.stdout, os.environ)
    return parse("", os.environ)


def parse(listed: str, environment: Mapping[str, str]) -> PipConfig:
    """Parse the output of `pip config list`. As in pip, `install.` overrides `global.`, and PIP_* overrides both."""
    values: dict[str, str] = {}
    for section in ("global", "install"):
        for line in listed.splitlines():
            match = re.fullmatch(rf"{section}\.([a-z-]+)=(['\"])(.*)\2", line.strip())
            if match:
                values[match[1]] = match[3].replace("\\n", "\n")
    for name in (*_LISTS, *_PLAIN, "cert"):
        from_environment = environment.get("PIP_" + name.upper().replace("-", "_"))
        if from_environment:
            values[name] = from_environment
    options = {name: tuple(values[name].split()) for name in (*_LISTS, *_PLAIN) if values.get(name)}
    ca_bundle = Path(values["cert"]) if values.get("cert") else None
    return PipConfig(options, ca_bundle if ca_bundle and ca_bundle.is_file() else None)


def for_uv(config: PipConfig) -> dict[str, str]:
    """Return pip's settings as the environment variables that uv reads; uv ignores pip's own files."""
    names = {
        "index-url": "UV_DEFAULT_INDEX",
        "extra-index-url": "UV_INDEX",
        "trusted-host": "UV_INSECURE_HOST",
    }
    settings = {uv: " ".join(config.options[pip]) for pip, uv in names.items() if config.options.get(pip)}
    links = [one for one in config.options.get("find-links", ()) if "://" in one or Path(one).is_dir()]
    if links:
        settings["UV_FIND_LINKS"] = ",".join(links)
    if timeout := config.options.get("timeout"):
        settings["UV_HTTP_TIMEOUT"] = timeout[0]
    if config.ca_bundle:
        settings["SSL_CERT_FILE"] = str(config.ca_bundle)
    return settings


def local_folder(location: str) -> Path | None:
    """Return the folder that a file:// URL or an absolute path names, or None for other locations."""
    if location.startswith("file://"):
        return Path(urllib.parse.unquote(urllib.parse.urlsplit(location).path))
    return Path(location) if location.startswith("/") else None


def render(config: PipConfig, served: Mapping[str, str]) -> str:
    """Return a pip.conf for a build. `served`: local location → HTTP address that replaces it."""
    lines = ["[global]"]
    for name, values in sorted(config.options.items()):
        lines.append(f"{name} =" + "".join(f"\n    {served.get(value, value)}" for value in values))
    if config.ca_bundle:
        lines.append(f"cert = {CA_IN_BUILD}")
    return "\n".join(lines) + "\n"


def render_for_uv(config: PipConfig, served: Mapping[str, str]) -> str:
    """Return a shell script that gives uv the same settings as pip in a build, by exporting variables.

    `served`: local location → HTTP address that replaces it.
    """
    options = {name: tuple(served.get(value, value) for value in values) for name, values in config.options.items()}
    settings = for_uv(PipConfig(options, None))
    if config.ca_bundle:
        settings["SSL_CERT_FILE"] = CA_IN_BUILD
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in settings.items())


@contextmanager
def serving(config: PipConfig) -> Iterator[dict[str, str]]:
    """Serve all local locations of the configuration over HTTP. Yield original location → HTTP address."""
    served: dict[str, str] = {}
    with ExitStack() as stack:
        for name in ("index-url", "extra-index-url", "find-links"):
            for location in config.options.get(name, ()):
                folder = local_folder(location)
                if folder is None or location in served or not folder.is_dir():
                    continue
                # An index may link to files beside itself: serve from one level up.
                root = folder if name == "find-links" else folder.parent
                port = stack.enter_context(_server(root))
                tail = "" if root == folder else folder.name + "/"
                served[location] = f"http://127.0.0.1:{port}/{tail}"
        yield served


class _Handler(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        """Log nothing, because pip logs what it downloads."""


@contextmanager
def _server(root: Path) -> Iterator[int]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, directory=str(root)))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


def proxies(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the proxy variables in `environment`.

    Docker and buildah accept them as build arguments that the Dockerfile does not declare.
    """
    names = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")
    return {name: environment[name] for name in names if environment.get(name)}


if __name__ == "__main__":  # hack/env exports these lines; variables that the user has set stay
    for key, value in for_uv(read()).items():
        if key not in os.environ:
            sys.stdout.write(f"{key}={value}\n")
