"""An API server for Helm that stores CRDs and Deployments alone. Helm itself stores its releases in memory."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import yaml

from support.servers.threaded_api import kubeconfig

Json = dict[str, Any]
NOT_FOUND: Json = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
_VERBS = ["create", "delete", "get", "list", "patch", "update"]
_SERVER_VALIDATES = {"parameters": [{"name": "fieldValidation", "in": "query"}], "responses": {}}


@dataclass(frozen=True)
class _Kind:
    """A kind whose objects are stored. ``where``: the part of the path before the plural that names the namespace."""

    group: str
    name: str
    plural: str
    where: str = ""

    @property
    def api(self) -> str:
        return f"{self.group}/v1"

    @property
    def path(self) -> str:
        return f"/apis/{self.api}{self.where}/{self.plural}"

    @property
    def discovery(self) -> dict[str, Json]:
        about = {"name": self.plural, "singularName": "", "namespaced": bool(self.where), "verbs": _VERBS}
        gvk = {"group": self.group, "version": "v1", "kind": self.name}
        return {
            f"/apis/{self.api}": {
                "kind": "APIResourceList",
                "groupVersion": self.api,
                "resources": [{**about, "kind": self.name}],
            },
            f"/openapi/v3/apis/{self.api}": {
                "openapi": "3.0.0",
                "info": {"title": self.name, "version": "v1"},
                "paths": {
                    f"{self.path}/{{name}}": {"patch": {"x-kubernetes-group-version-kind": gvk, **_SERVER_VALIDATES}}
                },
            },
        }


KINDS = (
    _Kind("apiextensions.k8s.io", "CustomResourceDefinition", "customresourcedefinitions"),
    _Kind("apps", "Deployment", "deployments", "/namespaces/system"),
)
_GROUPS = [{"name": kind.group, "versions": [{"groupVersion": kind.api, "version": "v1"}]} for kind in KINDS]
DISCOVERY: dict[str, Json] = {
    "/version": {"major": "1", "minor": "33", "gitVersion": "v1.33.0"},
    "/api": {"kind": "APIVersions", "versions": []},
    "/apis": {
        "kind": "APIGroupList",
        "groups": [{**group, "preferredVersion": group["versions"][0]} for group in _GROUPS],
    },
    "/openapi/v3": {
        "paths": {f"apis/{kind.api}": {"serverRelativeURL": f"/openapi/v3/apis/{kind.api}"} for kind in KINDS}
    },
    **{path: body for kind in KINDS for path, body in kind.discovery.items()},
}


@contextmanager
def helm_api() -> Iterator[tuple[str, dict[str, Json]]]:
    """Start the server. Yield a kubeconfig, and the objects that are stored, by name."""
    stored: dict[str, Json] = {}

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def _answer(self) -> None:
            path = self.path.partition("?")[0]
            body = yaml.safe_load(self.rfile.read(int(self.headers.get("Content-Length") or 0)))
            code, found = _changed(stored, self.command, path, body)
            data = json.dumps(found).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _answer

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield json.dumps(kubeconfig(f"http://127.0.0.1:{server.server_port}", "default")), stored
        server.shutdown()


def _changed(stored: dict[str, Json], verb: str, path: str, body: Json | None) -> tuple[int, Json]:
    """Return the code and the body of the answer to a request. Change what is stored."""
    if path in DISCOVERY:
        return 200, DISCOVERY[path]
    kind = next((kind for kind in KINDS if path.startswith(kind.path)), None)
    if kind is None:
        return 404, NOT_FOUND
    name = body["metadata"]["name"] if verb == "POST" and body is not None else path.removeprefix(f"{kind.path}/")
    if verb in ("GET", "DELETE") and name not in stored:
        return 404, NOT_FOUND
    if verb == "DELETE":
        return 200, stored.pop(name)
    if verb != "GET" and body is not None:  # Helm patches with server-side apply.
        stored[name] = {**body, "metadata": {**body["metadata"], "uid": name}}
    return 200, stored[name]
