"""Read objects over a connection that stays open. Tests that wait ask several times a second, which kubectl is too slow for."""

import http.client
import json
import threading
import urllib.parse
from functools import cache
from typing import Any

from support.cluster.api_server import access

Json = dict[str, Any]
DISCOVERY = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"


class ReadError(Exception):
    """The API server refused the request, did not answer, or does not know the kind."""


class Objects:
    """Objects of the API server of a kubeconfig's current context, as ``kubectl get -o json`` returns them."""

    def __init__(self, kubeconfig: str) -> None:
        self._url, self._tls = access(kubeconfig)
        self._kinds: dict[str, tuple[str, bool]] = {}
        self._local = threading.local()

    def get(self, kind: str, namespace: str, name: str) -> Json | None:
        """Return an object, or None if it does not exist. ``kind``: plural, singular or short name, as for kubectl."""
        return self._read(f"{self._path(kind, namespace)}/{name}")

    def list(self, kind: str, namespace: str, selector: str) -> list[Json]:
        """Return the objects whose labels match ``selector``; all of them if it is empty."""
        query = urllib.parse.urlencode({"labelSelector": selector} if selector else {})
        found = self._read(f"{self._path(kind, namespace)}?{query}")
        if found is None:
            raise ReadError(f"the server has no resource type {kind!r} any more")
        # Items of a list lack their kind.
        same = {"apiVersion": found["apiVersion"], "kind": found["kind"].removesuffix("List")}
        return [_without_managers({**same, **item}) for item in found["items"]]

    def _path(self, kind: str, namespace: str) -> str:
        if kind not in self._kinds:
            self._discover()
        if kind not in self._kinds:
            raise ReadError(f"the server has no resource type {kind!r}")
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

    def _read(self, path: str, accept: str = "application/json") -> Json | None:
        for attempt in (1, 2):  # The server may have closed a connection that was idle.
            connection = self._connection()
            try:
                connection.request("GET", path, headers={"Accept": accept})
                answer = connection.getresponse()
                text = answer.read()
                break
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                if attempt == 2:
                    raise ReadError(f"GET {path}: {error!r}") from error
        if answer.status == http.HTTPStatus.NOT_FOUND:
            return None
        if answer.status != http.HTTPStatus.OK:
            raise ReadError(f"GET {path}: {answer.status} {text.decode(errors='replace')[:500]}")
        return _without_managers(json.loads(text))

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
