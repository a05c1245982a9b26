"""Watch objects of the Kubernetes API: maintain a local copy, and run a function after changes."""

from __future__ import annotations

import http.client
import sys
import threading
import time
from collections.abc import Callable

from devcluster.embedded.services.api import Api, ApiError, Object

_RETRY_S = 0.3


class Mirror:
    """A local copy of all objects of one kind. A separate thread lists and watches them.

    `path`: API path that lists the objects. `changed`: function to call after each change of the copy.
    """

    def __init__(self, api: Api, path: str, changed: Callable[[], None]) -> None:
        self._api, self._path, self._changed = api, path, changed
        self._objects: dict[tuple[str, str], Object] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._follow, daemon=True).start()

    def objects(self) -> list[Object]:
        """Return a snapshot of the objects."""
        with self._lock:
            return list(self._objects.values())

    def _follow(self) -> None:
        while True:
            try:
                listed = self._api.request("GET", self._path)
                with self._lock:
                    self._objects = {_key(one): one for one in listed.get("items") or []}
                self._changed()
                for event in self._api.watch(self._path, listed):
                    with self._lock:
                        if event["type"] == "DELETED":
                            self._objects.pop(_key(event["object"]), None)
                        else:
                            self._objects[_key(event["object"])] = event["object"]
                    self._changed()
            except (OSError, ApiError, ValueError, http.client.HTTPException) as failure:
                print(f"watching {self._path}: {failure!r}", file=sys.stderr, flush=True)
                time.sleep(_RETRY_S)


def _key(one: Object) -> tuple[str, str]:
    return one["metadata"].get("namespace", ""), one["metadata"]["name"]


class Reconciler:
    """A loop that runs the function `step` after each call of `wake`, or once after several calls.

    If `step` fails, the loop runs it again. `name`: name of the loop in error messages.
    """

    def __init__(self, step: Callable[[], None], name: str) -> None:
        self._step, self._name = step, name
        self._wake = threading.Event()

    def wake(self) -> None:
        self._wake.set()

    def run(self) -> None:
        """Run forever."""
        while True:
            self._wake.wait()
            self._wake.clear()
            try:
                self._step()
            except (OSError, ApiError, http.client.HTTPException) as failure:
                print(f"{self._name}: {failure!r}", file=sys.stderr, flush=True)
                time.sleep(_RETRY_S)
                self._wake.set()
