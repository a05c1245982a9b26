"""Read and write objects over a connection that stays open.

A kubectl takes a tenth of a second of processor time. Tests that wait ask several times a second, and most tests write.
"""

import http.client
import json
import threading
import urllib.parse
from functools import cache
from typing import Any

from support.cluster.api_server import access

Json = dict[str, Any]
DISCOVERY = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"


MANAGER = "kubectl"
"""Field manager of applied objects: the one of ``kubectl apply --server-side``, which some tests use as well."""


class RequestError(Exception):
    """The API server refused the request, did not answer, or does not know the kind."""


class Objects:
    """Objects of the API server of a kubeconfig's current context, as ``kubectl get -o json`` returns them."""

    def __init__(self, kubeconfig: str) -> None:
        self._url, self._tls = access(kubeconfig)
        self._kinds: dict[str, tuple[str, bool]] = {}
        self._manifests: dict[tuple[str, str], str] = {}
        self._local = threading.local()

    def get(self, kind: str, namespace: str, name: str) -> Json | None:
        """Return an object, or None if it does not exist. ``kind``: plural, singular or short name, as for kubectl."""
        return self._read(f"{self._path(kind, namespace)}/{name}")

    def list(self, kind: str, namespace: str, selector: str) -> list[Json]:
        """Return the objects whose labels match ``selector``; all of them if it is empty."""
        query = urllib.parse.urlencode({"labelSelector": selector} if selector else {})
        found = self._read(f"{self._path(kind, namespace)}?{query}")
        if found is None:
            raise RequestError(f"the server has no resource type {kind!r} any more")
        # Items of a list lack their kind.
        same = {"apiVersion": found["apiVersion"], "kind": found["kind"].removesuffix("List")}
        return [_without_managers({**same, **item}) for item in found["items"]]

    def apply(
        self, manifest: Json, namespace: str, user: str = "", *, force: bool = True, dry_run: bool = False
    ) -> None:
        """Create or change an object like ``kubectl apply --server-side``.

        ``namespace``: of an object that names none. ``user``: whom to impersonate. ``force``: take fields from other
        managers.
        """
        kind = manifest["apiVersion"], manifest["kind"]
        if kind not in self._manifests:
            self._discover()
        if kind not in self._manifests:
            raise RequestError(f"the server has no kind {kind}")
        meta = manifest["metadata"]
        query = {"fieldManager": MANAGER, "force": str(force).lower(), "fieldValidation": "Strict"}
        query |= {"dryRun": "All"} if dry_run else {}
        path = f"{self._path(self._manifests[kind], meta.get('namespace', namespace))}/{meta['name']}"
        self._write("PATCH", f"{path}?{urllib.parse.urlencode(query)}", manifest, "apply-patch+yaml", user)

    def patch(
        self, kind: str, namespace: str, name: str, change: Json, *, status: bool = False, user: str = ""
    ) -> None:
        """Merge a change into an object, or into its status."""
        path = f"{self._path(kind, namespace)}/{name}{'/status' if status else ''}"
        self._write("PATCH", f"{path}?fieldManager={MANAGER}", change, "merge-patch+json", user)

    def delete(self, kind: str, namespace: str, name: str) -> str | None:
        """Delete an object and return its uid, or None if it did not exist. Do not wait for the end of its finalizers."""
        path = f"{self._path(kind, namespace)}/{name}"
        answer = self._write("DELETE", path, {"propagationPolicy": "Background"}, "json", "", missing=True)
        return None if answer is None else (answer.get("details") or answer["metadata"]).get("uid")

    def _write(self, method: str, path: str, body: Json, kind: str, user: str, *, missing: bool = False) -> Json | None:
        headers = {"Content-Type": f"application/{kind}", "Accept": "application/json"}
        headers |= {"Impersonate-User": user} if user else {}
        status, text = self._request(method, path, json.dumps(body), headers)
        if missing and status == http.HTTPStatus.NOT_FOUND:
            return None
        found: Json = json.loads(text)
        if status >= http.HTTPStatus.BAD_REQUEST:
            raise RequestError(f"{method} {path}: {found.get('message', text.decode(errors='replace'))}")
        return found

    def _path(self, kind: str, namespace: str) -> str:
        if kind not in self._kinds:
            self._discover()
        if kind not in self._kinds:
            raise RequestError(f"the server has no resource type {kind!r}")
        prefix, namespaced = self._kinds[kind]
        group, _, plural = prefix.rpartition("/")
        return f"{group}/namespaces/{namespace}/{plural}" if namespaced else prefix

    def _discover(self) -> None:
        """Learn the names of all kinds. Where several versions serve a kind, the server's preferred one comes first."""
        for root in ("/api", "/apis"):
            for group in (self._read(root, DISCOVERY) or {"items": ()})["items"]:
                suffix = group["metadata"].get("name", "")
                for version in group["versions"]:
                    for each in version.get("resources", ()):
                        path = "/".join(filter(None, (root, suffix, version["version"], each["resource"])))
                        for name in (each["resource"], each.get("singularResource"), *each.get("shortNames", ())):
                            for called in (name, f"{name}.{suffix}"):
                                self._kinds.setdefault(called, (path, each["scope"] == "Namespaced"))
                        api = "/".join(filter(None, (suffix, version["version"])))
                        # A name with its group, as two groups may have the same one.
                        self._manifests.setdefault((api, each["responseKind"]["kind"]), f"{each['resource']}.{suffix}")

    def _read(self, path: str, accept: str = "application/json") -> Json | None:
        status, text = self._request("GET", path, None, {"Accept": accept})
        if status == http.HTTPStatus.NOT_FOUND:
            return None
        if status != http.HTTPStatus.OK:
            raise RequestError(f"GET {path}: {status} {text.decode(errors='replace')[:500]}")
        return _without_managers(json.loads(text))

    def _request(self, method: str, path: str, body: str | None, headers: dict[str, str]) -> tuple[int, bytes]:
        for attempt in (1, 2):  # The server may have closed a connection that was idle.
            connection = self._connection()
            try:
                connection.request(method, path, body, headers)
                answer = connection.getresponse()
                return answer.status, answer.read()
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                if attempt == 2:
                    raise RequestError(f"{method} {path}: {error!r}") from error
        raise AssertionError("unreachable")

    def _connection(self) -> http.client.HTTPSConnection:
        if not hasattr(self._local, "connection"):
            host = urllib.parse.urlsplit(self._url)
            self._local.connection = http.client.HTTPSConnection(
                host.hostname or "", host.port, context=self._tls, timeout=30
            )
        connection: http.client.HTTPSConnection = self._local.connection
        return connection


def _without_managers(body: Json) -> Json:
    """Return an object without its managed fields, which kubectl does not show either."""
    body.get("metadata", {}).pop("managedFields", None)
    return body


@cache
def objects_of(kubeconfig: str) -> Objects:
    """Return the objects of a kubeconfig's cluster. The connection is shared."""
    return Objects(kubeconfig)
