"""Measure the memory of an operator that knows the pods of a whole cluster, in two ways.

    python -m benchmarks.cluster.pod_memory [--pods 10000] [--repeats 3] [--json]

A server on loopback serves pods with the fields of real ones: several containers, probes, mounts, a status, and the
managedFields of two managers. Two ways run in turn, each in a new process, and the output has the medians:

- list: one list of all pods, whose decoded objects are held (as before ``dljob.scheduling``, for each plan).
- ledger: a reflector reads pages and puts the pods into the cache, which holds what they request.

``rest_MB`` is the resident memory at the end, ``peak_MB`` the largest one, both without that of the process before;
``seconds`` is the time until the free resources of 500 nodes are known.
"""

import argparse
import asyncio
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

Json = dict[str, Any]
NODES = 500


def pod(i: int) -> Json:
    """Return a pod of about 6 KB of JSON, of which managedFields are the half."""
    name = f"web-{i // 40}-{i:06x}"

    def container(j: int) -> Json:
        probe = {
            "httpGet": {"path": "/healthz", "port": 8080, "scheme": "HTTP"},
            "periodSeconds": 10,
            "timeoutSeconds": 1,
        }
        return {
            "name": f"c{j}",
            "image": f"registry.example/team/application-{j}:v1.{i % 7}.0",
            "livenessProbe": probe,
            "readinessProbe": probe,
            "resources": {"requests": {"cpu": "500m", "memory": "256Mi"}, "limits": {"memory": "512Mi"}},
            "env": [{"name": f"VARIABLE_{k}", "value": f"value-{i}-{k}"} for k in range(6)],
            "ports": [{"containerPort": 8080 + j, "protocol": "TCP"}],
            "imagePullPolicy": "IfNotPresent",
            "volumeMounts": [
                {"name": "token", "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount", "readOnly": True}
            ],
            "terminationMessagePath": "/dev/termination-log",
            "terminationMessagePolicy": "File",
        }

    def fields(depth: int) -> Json:
        return {f"f:field-{depth}-{k}": fields(depth - 1) if depth else {} for k in range(4)}

    return {
        "metadata": {
            "name": name,
            "namespace": f"team-{i % 50}",
            "uid": f"{i:08x}-0a4e-4b0a-9d5c-1f2e3d4c5b6a",
            "resourceVersion": str(1000 + i),
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": {
                "app.kubernetes.io/name": "web",
                "app.kubernetes.io/instance": name,
                "pod-template-hash": f"{i:08x}",
            },
            "ownerReferences": [
                {"kind": "ReplicaSet", "name": f"web-{i // 40}", "uid": f"owner-{i // 40}", "controller": True}
            ],
            "managedFields": [
                {"manager": manager, "operation": "Update", "apiVersion": "v1", "fieldsV1": fields(2)}
                for manager in ("kube-controller-manager", "kubelet")
            ],
        },
        "spec": {
            "nodeName": f"node-{i % NODES}",
            "containers": [container(j) for j in range(2)],
            "restartPolicy": "Always",
            "volumes": [{"name": "token", "projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}}],
            "tolerations": [
                {"key": f"node.kubernetes.io/{key}", "operator": "Exists"} for key in ("not-ready", "unreachable")
            ],
        },
        "status": {
            "phase": "Running",
            "hostIP": "10.0.0.1",
            "podIP": f"10.1.{i // 250 % 250}.{i % 250}",
            "conditions": [{"type": kind, "status": "True"} for kind in ("Initialized", "Ready", "PodScheduled")],
            "containerStatuses": [
                {"name": f"c{j}", "ready": True, "restartCount": 0, "containerID": f"containerd://{i:064x}"}
                for j in range(2)
            ],
        },
    }


async def serve(count: int) -> None:
    """Serve ``count`` pods in pages. Print the port, then run until the standard input ends."""
    from aiohttp import web

    pods = [json.dumps(pod(i)) for i in range(count)]
    print(sum(map(len, pods)) // count, file=sys.stderr)

    async def answer(request: web.Request) -> web.StreamResponse:
        if "watch" in request.query:
            await asyncio.sleep(3600)
        limit, begin = int(request.query.get("limit", count)), int(request.query.get("continue") or 0)
        end = min(begin + limit, count)
        meta = json.dumps({"resourceVersion": "1000000"} | ({"continue": str(end)} if end < count else {}))
        text = f'{{"metadata":{meta},"items":[{",".join(pods[begin:end])}]}}'
        return web.Response(text=text, content_type="application/json")

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.to_thread(sys.stdin.read)


def memory_mb(field: str) -> float:
    text = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith(field))) / 1024


async def measure(way: str, port: int) -> Json:
    import aiohttp

    from dljob.kube import Api, Cache
    from dljob.kube.kinds import NODE, POD
    from dljob.kube.objects.view import cluster_view
    from dljob.kube.watch import Reflector

    cache = Cache()
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    status = {"conditions": [ready], "allocatable": {"cpu": "64", "memory": "256Gi"}}
    for i in range(NODES):
        cache.put(NODE, {"metadata": {"name": f"node-{i}", "uid": f"n{i}"}, "status": status})
    async with aiohttp.ClientSession() as session:
        api = Api(session, f"http://127.0.0.1:{port}")
        gc.collect()
        before_mb, began = memory_mb("VmRSS"), time.perf_counter()
        if way == "list":
            pods = await api.find(POD, None)
            view = cluster_view(cache.nodes(), pods)
        else:
            reflector = Reflector(api, cache, POD, None, "", lambda *_: None, lambda _: None)
            task = asyncio.create_task(reflector.run())
            await reflector.synced.wait()
            view = cache.ledger.view()
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        seconds = time.perf_counter() - began
        assert len(view.nodes) == NODES and view.nodes[0].free_cpu < 64
        gc.collect()
        rest_mb, peak_mb = memory_mb("VmRSS") - before_mb, memory_mb("VmHWM") - before_mb
    return {"rest_MB": round(rest_mb, 1), "peak_MB": round(peak_mb, 1), "seconds": round(seconds, 2)}


def child(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.cluster.pod_memory", *arguments]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pods", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--measure", nargs=2, metavar=("WAY", "PORT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options.pods))
        return
    if options.measure:
        print(json.dumps(asyncio.run(measure(options.measure[0], int(options.measure[1])))))
        return
    server = subprocess.Popen(
        child("--serve", "--pods", str(options.pods)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    )
    assert server.stdout is not None and server.stderr is not None and server.stdin is not None
    try:
        port, pod_nbytes = server.stdout.readline().strip(), int(server.stderr.readline())
        found: dict[str, list[Json]] = {"list": [], "ledger": []}
        for _ in range(options.repeats):
            for way, results in found.items():
                text = subprocess.run(child("--measure", way, port), check=True, capture_output=True, text=True).stdout
                results.append(json.loads(text))
    finally:
        server.stdin.close()
        server.wait(20)
    medians = {
        way: {field: statistics.median(each[field] for each in results) for field in results[0]}
        for way, results in found.items()
    }
    if options.json:
        print(json.dumps({"pods": options.pods, "pod_nbytes": pod_nbytes, **medians}))
        return
    print(f"{options.pods} pods of {pod_nbytes} bytes; medians of {options.repeats}")
    print(f"{'':10}{'rest_MB':>10}{'peak_MB':>10}{'seconds':>10}")
    for way, row in medians.items():
        print(f"{way:10}{row['rest_MB']:>10.1f}{row['peak_MB']:>10.1f}{row['seconds']:>10.2f}")


if __name__ == "__main__":
    main()
