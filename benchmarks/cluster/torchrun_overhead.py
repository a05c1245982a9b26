"""Compare a torchrun script in a DLJob with the same script under plain torchrun, in pods without the operator.

Run after hack/quickstart (images present, operator installed), on a machine that does nothing else:

    KUBECONFIG=$(hack/cluster kubeconfig) hack/env python -m benchmarks.cluster.torchrun_overhead --rounds 5

In each round both run one after another, on the same two nodes, with the image, requests and limits of the DLJob's
pods. Nothing polls during a run, because that would take the processors of the ranks. The script trains a small network
with DistributedDataParallel over gloo and measures its own steps. The start-up is the time from `kubectl apply` to the
end of the first step. Goals: a step takes at most 1.02 times as long, and the start at most 3 s longer.
"""

import argparse
import json
import subprocess
import sys
import time
from typing import Any

import numpy as np
import yaml
from benchmarks.cluster.jobs import kubectl
from benchmarks.lib.figures import at_most, machine, ratio

NAME = "overhead"
PORT = 29400
SCRIPT = """
import json, os, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
width, steps = int(os.environ["WIDTH"]), int(os.environ["STEPS"])
layers = [each for _ in range(4) for each in (torch.nn.Linear(width, width), torch.nn.ReLU())]
model = DistributedDataParallel(torch.nn.Sequential(*layers, torch.nn.Linear(width, 10)))
opt = torch.optim.SGD(model.parameters(), lr=0.01)
x, y = torch.randn(32, width), torch.randint(10, (32,))
ends = []
for _ in range(steps):
    opt.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    opt.step()
    ends.append(time.time())
if dist.get_rank() == 0:
    durations = sorted(after - before for before, after in zip(ends[10:], ends[11:]))
    figures = {"first": ends[0], "median": durations[len(durations) // 2], "world": dist.get_world_size()}
    print("FIGURES " + json.dumps(figures), flush=True)
dist.destroy_process_group()
"""


def script_map() -> dict[str, Any]:
    return {
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": NAME}, "data": {"train.py": SCRIPT},
    }  # fmt: skip


def mounted() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the volume mounts of the container and the volumes of the pod that have the script."""
    mounts = [{"name": "script", "mountPath": "/scripts", "readOnly": True}]
    return mounts, [{"name": "script", "configMap": {"name": NAME}}]


def managed(environment: list[dict[str, str]]) -> dict[str, Any]:
    """Return the DLJob: nothing but a command and two nodes."""
    mounts, volumes = mounted()
    container = {"name": "trainer", "volumeMounts": mounts}
    return {
        "apiVersion": "dljob.dev/v1alpha1", "kind": "DLJob", "metadata": {"name": NAME},
        "spec": {
            "trainer": {"framework": "Torchrun", "command": ["torchrun", "/scripts/train.py"], "env": environment},
            "nodes": {"min": 2}, "checkpoint": {"enabled": False},
            "podTemplateOverrides": [
                {"manager": "benchmark", "spec": {"containers": [container], "volumes": volumes}},
            ],
        },
    }  # fmt: skip


def plain(pods: list[dict[str, Any]], environment: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Return pods like those of the DLJob that run torchrun themselves, and the Service of the first."""
    mounts, volumes = mounted()
    volumes = [*volumes, {"name": "tmp", "emptyDir": {}}]
    found = []
    for number, pod in enumerate(pods):
        trainer = next(c for c in pod["spec"]["containers"] if c["name"] == "trainer")
        # What one needs without an operator: the number of nodes, this node's number, and where the first one is.
        rendezvous = [f"--master-addr={NAME}-0.{NAME}", f"--master-port={PORT}", f"--node-rank={number}"]
        container = {
            "name": "trainer", "image": trainer["image"], "resources": trainer["resources"], "env": environment,
            "command": [
                "python", "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", *rendezvous,
                "/scripts/train.py",
            ],
            "volumeMounts": [*mounts, {"name": "tmp", "mountPath": "/tmp"}],
            "securityContext": trainer.get("securityContext", {}),
        }  # fmt: skip
        spec = {
            "restartPolicy": "OnFailure", "hostname": f"{NAME}-{number}", "subdomain": NAME,
            "nodeSelector": {"kubernetes.io/hostname": pod["spec"]["nodeName"]}, "containers": [container],
            "volumes": volumes, "securityContext": pod["spec"].get("securityContext", {}),
            "automountServiceAccountToken": False, "terminationGracePeriodSeconds": 1,
        }  # fmt: skip
        meta = {"name": f"{NAME}-plain-{number}", "labels": {"app": NAME}}
        found.append({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec})
    selector = {"clusterIP": "None", "selector": {"app": NAME}, "publishNotReadyAddresses": True}
    return [{"apiVersion": "v1", "kind": "Service", "metadata": {"name": NAME}, "spec": selector}, *found]


def figures(text: str, began: float) -> dict[str, float]:
    """Return the printed seconds: from ``began`` to the first step, and of the median step. Or raise SystemExit."""
    lines = [line.partition("FIGURES ")[2] for line in text.splitlines() if "FIGURES " in line]
    if len(lines) != 1:
        raise SystemExit(f"found {len(lines)} lines of figures; expected 1. Output: {text[-2000:]}")
    found = json.loads(lines[0])
    if found["world"] != 2:
        raise SystemExit(f"found {found['world']} ranks; expected 2")
    return {"start": found["first"] - began, "step": found["median"]}


def run_managed(environment: list[dict[str, str]], deadline_s: float) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Run the DLJob. Return its figures and its pods."""
    manifest, pods = yaml.safe_dump(managed(environment)), f"-l dljob.dev/job={NAME}".split()
    began = time.time()
    kubectl("apply", "-f", "-", stdin=manifest)
    try:
        wait_phase(f"dljob/{NAME}", "Running", deadline_s)
        found = json.loads(kubectl("get", "pods", *pods, "-o", "json"))["items"]
        wait_phase(f"dljob/{NAME}", "Complete", deadline_s)
        command = [sys.executable, "-m", "dljob.cli", "logs", NAME]
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    finally:
        kubectl("delete", "--wait=true", "-f", "-", stdin=manifest)
        while kubectl("get", "pods", *pods, "-o", "name").strip():
            time.sleep(0.2)
    return figures(text, began), sorted(found, key=lambda pod: str(pod["metadata"]["name"]))


def wait_phase(name: str, phase: str, deadline_s: float) -> None:
    """Wait by a watch until an object has this phase."""
    command = ["kubectl", "wait", name, f"--for=jsonpath={{.status.phase}}={phase}", f"--timeout={deadline_s:g}s"]
    subprocess.run(command, check=True, capture_output=True)


def run_plain(pods: list[dict[str, Any]], environment: list[dict[str, str]], deadline_s: float) -> dict[str, float]:
    """Run plain torchrun in pods like ``pods``. Return its figures."""
    manifests = yaml.safe_dump_all(plain(pods, environment))
    began = time.time()
    kubectl("apply", "-f", "-", stdin=manifests)
    try:
        first = f"pod/{NAME}-plain-0"
        wait_phase(first, "Running", deadline_s)
        kubectl("get", "pods", "-l", f"app={NAME}", "-o", "json")  # as for the DLJob
        wait_phase(first, "Succeeded", deadline_s)
        return figures(kubectl("logs", f"{NAME}-plain-0"), began)
    finally:
        kubectl("delete", "--wait=true", "-f", "-", stdin=manifests)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--width", type=int, default=512, help="width of the five layers")
    parser.add_argument("--deadline", type=float, default=240.0, help="seconds for one run")
    options = parser.parse_args()
    environment = [{"name": "WIDTH", "value": str(options.width)}, {"name": "STEPS", "value": str(options.steps)}]
    print(machine())
    kubectl("apply", "-f", "-", stdin=yaml.safe_dump(script_map()))
    runs: dict[str, list[dict[str, float]]] = {"DLJob": [], "torchrun": []}
    try:
        run_managed(environment, options.deadline)  # the first run warms caches of the nodes
        for number in range(options.rounds):
            ours, pods = run_managed(environment, options.deadline)
            theirs = run_plain(pods, environment, options.deadline)
            runs["DLJob"].append(ours)
            runs["torchrun"].append(theirs)
            print(f"round {number + 1}/{options.rounds}: DLJob {ours}, torchrun {theirs}", file=sys.stderr, flush=True)
    finally:
        kubectl("delete", "configmap", NAME, "--ignore-not-found")
    steps, starts = (
        {arm: np.array([run[key] for run in found]) for arm, found in runs.items()} for key in ("step", "start")
    )
    for arm in runs:
        print(f"{arm:9} step {np.median(steps[arm]) * 1e3:7.2f} ms   start {np.median(starts[arm]):6.2f} s")
    print(f"step, DLJob / torchrun: {at_most(ratio(steps['DLJob'], steps['torchrun']), 1.02)}")
    more = starts["DLJob"] - starts["torchrun"]
    verdict = "met" if np.median(more) <= 3 else "MISSED"
    print(
        f"start, DLJob − torchrun: {np.median(more):.2f} s ({min(more):.2f} to {max(more):.2f}), goal ≤ 3 s: {verdict}"
    )


if __name__ == "__main__":
    main()
