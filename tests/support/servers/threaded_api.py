"""Run an ``HttpApiServer`` in a thread, for tests of code that blocks."""

import base64
import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import yaml

from dljob.kube.background import BackgroundLoop
from dljob.kube.kinds import CONFIG_MAP, DLJOB, Kind
from support.servers.http_api import HttpApiServer

Json = dict[str, Any]


class ThreadedApiServer:
    """An API server over HTTP whose objects a test changes from its own thread."""

    def __init__(self, loop: BackgroundLoop, server: HttpApiServer, kubeconfig: Path) -> None:
        self._loop, self.server, self.kubeconfig = loop, server, kubeconfig

    def put(self, kind: Kind, body: Json) -> None:
        async def change() -> None:
            self.server.put(kind, body)

        self._loop.call(change())

    def delete(self, kind: Kind, namespace: str, name: str) -> None:
        async def change() -> None:
            self.server.delete(kind, namespace, name)

        self._loop.call(change())

    def merge(self, kind: Kind, namespace: str, name: str, patch: Json, manager: str) -> None:
        """Merge a patch into an object, as ``kubectl patch`` does."""

        async def change() -> None:
            self.server.merge(kind, namespace, name, patch, manager)

        self._loop.call(change())

    def write_log(self, pod: str, *lines: str) -> None:
        self._loop.call(self.server.logs.write(pod, *lines))

    def end_log(self, pod: str) -> None:
        self._loop.call(self.server.logs.end(pod))

    def end_watches(self, kind: Kind) -> None:
        async def change() -> None:
            self.server.end_watches(kind)

        self._loop.call(change())

    def job(self, name: str, namespace: str = "team-a") -> Json:
        """Return a DLJob as it is stored."""
        return self.server.objects[DLJOB.plural, namespace, name]

    def report_status(self, name: str, namespace: str = "team-a", **status: Any) -> None:
        """Write the status of a DLJob as the operator does, for the current generation."""
        body = self.job(name, namespace)
        generation = body["metadata"].get("generation", 1)
        self.put(DLJOB, {**body, "status": {"observedGeneration": generation, **status}})


@contextmanager
def threaded_api(folder: Path, namespace: str = "team-a") -> Iterator[ThreadedApiServer]:
    """Run a server until the context ends. ``folder``: gets a kubeconfig whose context names the namespace."""
    with BackgroundLoop("api-server") as loop:
        server = HttpApiServer()
        loop.call(server.__aenter__())
        try:
            path = folder / "kubeconfig.yaml"
            path.write_text(yaml.safe_dump(kubeconfig(server.url, namespace)))
            yield ThreadedApiServer(loop, server, path)
        finally:
            loop.call(server.__aexit__())


def kubeconfig(url: str, namespace: str) -> Json:
    """Return a kubeconfig with the contexts ``test`` (the current one) and ``other``, which has another namespace."""
    contexts = {"test": namespace, "other": "team-b"}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {"token": "secret"}}],
        "contexts": [
            {"name": name, "context": {"cluster": "c", "user": "u", "namespace": found}}
            for name, found in contexts.items()
        ],
    }


class PretendOperator:
    """Complete every DLJob of a server, in a thread, until the context ends."""

    def __init__(self, api: ThreadedApiServer) -> None:
        self._api, self._ended = api, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(0.05):
            for (resource, namespace, name), body in list(self._api.server.objects.items()):
                if resource != DLJOB.plural or "status" in body:
                    continue
                logs = base64.b64encode(gzip.compress(b"trained")).decode()
                meta = {"name": f"{name}-logs", "namespace": namespace}
                self._api.put(CONFIG_MAP, {"metadata": meta, "binaryData": {"rank-0.log.gz": logs}})
                result = {"steps": 300, "seconds": 6.6, "accuracy": 0.98}
                self._api.report_status(name, namespace, phase="Complete", result=result)
