"""An API server for Helm that stores CRDs, and no other objects. Helm itself stores its releases in memory."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import yaml

from support.servers.threaded_api import kubeconfig

Json = dict[str, Any]
GROUP, VERSION = "apiextensions.k8s.io", "v1"
API = f"{GROUP}/{VERSION}"
CRDS = f"/apis/{API}/customresourcedefinitions"
NOT_FOUND: Json = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
_GVK = {"group": GROUP, "version": VERSION, "kind": "CustomResourceDefinition"}
_VERBS = ["create", "delete", "get", "list", "patch", "update"]
_ABOUT = {"name": "customresourcedefinitions", "singularName": "", "namespaced": False, "verbs": _VERBS}
_VERSION = {"groupVersion": API, "version": VERSION}
_SERVER_VALIDATES = {"parameters": [{"name": "fieldValidation", "in": "query"}], "responses": {}}
DISCOVERY: dict[str, Json] = {
    "/version": {"major": "1", "minor": "33", "gitVersion": "v1.33.0"},
    "/api": {"kind": "APIVersions", "versions": []},
    "/apis": {
        "kind": "APIGroupList",
        "groups": [{"name": GROUP, "versions": [_VERSION], "preferredVersion": _VERSION}],
    },
    f"/apis/{API}": {
        "kind": "APIResourceList",
        "groupVersion": API,
        "resources": [{**_ABOUT, "kind": _GVK["kind"]}],
    },
    "/openapi/v3": {"paths": {f"apis/{API}": {"serverRelativeURL": f"/openapi/v3/apis/{API}"}}},
    f"/openapi/v3/apis/{API}": {
        "openapi": "3.0.0",
        "info": {"title": "CRDs", "version": VERSION},
        "paths": {f"{CRDS}/{{name}}": {"patch": {"x-kubernetes-group-version-kind": _GVK, **_SERVER_VALIDATES}}},
    },
}


@contextmanager
def helm_api() -> Iterator[tuple[str, dict[str, Json]]]:
    """Start the server. Yield a kubeconfig, and the CRDs that are stored, by name."""
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
    name = path.removeprefix(f"{CRDS}/")
    if verb == "POST" and path == CRDS and body is not None:
        name = body["metadata"]["name"]
    elif not path.startswith(CRDS) or (verb != "PATCH" and name not in stored):
        return 404, NOT_FOUND
    if verb == "DELETE":
        return 200, stored.pop(name)
    if verb != "GET" and body is not None:  # Helm patches with server-side apply.
        stored[name] = {**body, "metadata": {**body["metadata"], "uid": name}}
    return 200, stored[name]
