"""Serve a finished job and the folder of its checkpoints as an API server does, with pods that run commands."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from dlcontract import CHECKPOINT_DIR
from dljob.client import reader_pod

Json = dict[str, Any]
NAMESPACE, UID = "team-a", "0c8ad8a4"


def stored_in_s3(last: str | None = None, name: str | None = None) -> Json:
    """Return a job whose last checkpoint has the path ``last``. ``name``: that of an upload of a script's folder."""
    found = job()
    saved = {"path": last} | ({"name": name} if name else {})
    status = {**found["status"], "lastCheckpoint": saved} if last else found["status"]
    return {**found, "spec": {**found["spec"], "checkpoint": {"uri": "s3://models/a"}}, "status": status}


def job(phase: str = "Complete", *, checkpoint: str | None = "step-0000000300", **spec: Any) -> Json:
    path = f"{CHECKPOINT_DIR}/digits-{UID}/{checkpoint}"
    return {
        "metadata": {"name": "digits", "namespace": NAMESPACE, "uid": UID},
        "spec": {"trainer": {"image": "trainer:1"}, **spec},
        "status": {"phase": phase, **({"result": {"checkpoint": path}} if checkpoint else {})},
    }


@dataclass
class ModelCluster:
    """An API server with one job and its volume, which is the folder ``volume``. Pods run at once."""

    volume: Path
    job: Json | None = field(default_factory=job)
    claim: bool = True
    pod_status: Json = field(default_factory=lambda: {"containerStatuses": [{"state": {"running": {}}}]})
    cut: int | None = None
    """Number of bytes of the output after which the connection breaks."""
    exec_code: int = 0
    operator_image: str = ""
    false_operator_image: str = ""
    """Image in a pod of another user that looks like an operator. Empty: there is no such pod."""
    defaults: str = "{}"
    """The administrator's defaults of jobs in the settings of the operator, as JSON."""
    scripts: Json | None = None
    """Data of the ConfigMap with the scripts of a job with ``spec.task``."""
    pods: dict[str, Json] = field(default_factory=dict)
    created: list[Json] = field(default_factory=list)

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        parts = request.path.strip("/").split("/")
        resource, name = parts[-2:] if parts[-1] != "exec" else ("exec", parts[-2])
        if resource == "exec":
            return await self._run(request)
        if resource == "dljobs" and self.job is not None and name == "digits":
            return web.json_response(self.job)
        if resource == "configmaps" and name == "digits-suggestion" and self.scripts is not None:
            return web.json_response({"data": self.scripts})
        if resource == "persistentvolumeclaims" and self.claim and name == "digits-checkpoints":
            return web.json_response({})
        if request.method == "POST" and parts[-1] == "pods":
            body = await request.json()
            self.created.append(body)
            self.pods[body["metadata"]["name"]] = body | {"status": self.pod_status}
            return web.json_response(body, status=201)
        if parts[-1] == "pods":
            assert request.query["labelSelector"] == "app.kubernetes.io/name=dljob"
            settings = {
                "DLJOB_TRAINER_IMAGE": self.operator_image,
                "DLJOB_WATCH_NAMESPACES": "",
                "DLJOB_JOB_DEFAULTS": self.defaults,
            }
            env = [{"name": key, "value": value} for key, value in settings.items()]
            meta = {"name": "dljob-0", "namespace": "dljob-system", "labels": {"app.kubernetes.io/name": "dljob"}}
            pod = {"metadata": meta, "spec": {"containers": [{"name": "operator", "env": env}]}}
            items = [pod] if self.operator_image else []
            if self.false_operator_image:
                false = json.loads(json.dumps(pod).replace(self.operator_image, self.false_operator_image))
                items.insert(0, false | {"metadata": {**meta, "namespace": "team-b"}})
            return web.json_response({"items": items})
        if resource == "pods" and name in self.pods:
            found = self.pods.pop(name) if request.method == "DELETE" else self.pods[name]
            return web.json_response(found)
        message = f'{resource} "{name}" not found'
        return web.json_response({"kind": "Status", "reason": "NotFound", "message": message}, status=404)

    async def _run(self, request: web.Request) -> web.StreamResponse:
        """Run the command that the pod is to run, with the volume's folder in place of its mount."""
        if self.exec_code:
            return web.json_response({"message": "no"}, status=self.exec_code)
        assert request.query["container"] == reader_pod.CONTAINER
        socket = web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
        await socket.prepare(request)
        assert socket.ws_protocol == "v4.channel.k8s.io"
        words = [word.replace(CHECKPOINT_DIR, str(self.volume)) for word in request.query.getall("command")]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(sys.executable, *words[1:], stdout=pipe, stderr=pipe)
        assert process.stdout is not None and process.stderr is not None
        sent = 0
        await socket.send_bytes(b"\x01")  # As API servers do, to open the channel.
        while data := await process.stdout.read(1000):
            sent += len(data)
            if self.cut is not None and sent > self.cut:
                process.kill()
                await process.wait()
                await socket.close()
                return socket
            await socket.send_bytes(b"\x01" + data)
        await socket.send_bytes(b"\x02" + await process.stderr.read())
        end: Json = {"status": "Success"}
        if code := await process.wait():
            end = {"status": "Failure", "message": f"command terminated with exit code {code}"}
        await socket.send_bytes(b"\x03" + json.dumps(end).encode())
        await socket.close()
        return socket
