"""Faults of a live cluster: of operators, pods, ranks, nodes, quotas and the control plane.

Nodes and the control plane are those of the embedded development cluster.
"""

import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

from devcluster.embedded.processes import send
from devcluster.embedded.state import State
from support.chaos.faulty_api import DISTURBANCES, Disturbance, FaultyApi
from support.cluster.kubectl import ROOT, Kubectl, KubectlError
from support.cluster.operator_process import OperatorProcess

KILL_A_PROCESS = """
import os, random, signal, sys
random.seed(sys.argv[1])
own = {os.getpid(), os.getppid(), 1}
found = sorted(int(name) for name in os.listdir('/proc') if name.isdigit() and int(name) not in own)
if found:
    pid = random.choice(found)
    name = open(f'/proc/{pid}/comm').read().strip()
    os.kill(pid, int(sys.argv[2]))
    print(name)
"""
"""Program that sends a signal to a random process of a pod, but not to its agent, and prints the process's name."""
QUOTA = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "full"}, "spec": {"hard": {"pods": "0"}}}
CLOCK_STEPS_S = (-3600, -60, 60, 3600)


@dataclass(frozen=True)
class Operators:
    """Two operators as local processes, each with a proxy in front of the API server and a clock that can be set."""

    processes: tuple[OperatorProcess, ...]
    proxies: tuple[FaultyApi, ...]
    clocks: tuple[Path, ...]
    """Files with the offset of each operator's clock, as libfaketime reads them."""


@dataclass(frozen=True)
class Place:
    """Where faults happen. ``cluster``: name of the embedded cluster."""

    kubectl: Kubectl
    cluster: str
    state: State
    operators: Operators


Fault = Callable[[Place, Random], AbstractContextManager[str]]
"""A fault that lasts while the context is open. The context's value describes what it concerns."""


@contextmanager
def disturbed(api: FaultyApi, found: Disturbance) -> Iterator[None]:
    """Let the proxy disturb an operator's requests while the context is open."""
    api.begin(found)
    yield
    api.end()


@contextmanager
def killed(operator: OperatorProcess) -> Iterator[None]:
    """Kill an operator. Start it again when the context closes."""
    operator.stop(signal.SIGKILL)
    yield
    operator.start(ready=False)


@contextmanager
def paused(operator: OperatorProcess) -> Iterator[None]:
    """Pause an operator while the context is open."""
    operator.send(signal.SIGSTOP)
    yield
    operator.send(signal.SIGCONT)


@contextmanager
def full_quota(kubectl: Kubectl) -> Iterator[None]:
    """Let a quota of the namespace allow no further pod while the context is open."""
    kubectl.apply(QUOTA)
    yield
    kubectl.delete("resourcequota", "full")


def _of_operator(lasting: Callable[[OperatorProcess], AbstractContextManager[None]]) -> Fault:
    @contextmanager
    def fault(place: Place, random: Random) -> Iterator[str]:
        i = random.randrange(len(place.operators.processes))
        with lasting(place.operators.processes[i]):
            yield f"operator {i}"

    return fault


def _disturbance(found: Disturbance) -> Fault:
    @contextmanager
    def fault(place: Place, random: Random) -> Iterator[str]:
        i = random.randrange(len(place.operators.proxies))
        with disturbed(place.operators.proxies[i], found):
            yield f"operator {i}"

    return fault


@contextmanager
def _step_clock(place: Place, random: Random) -> Iterator[str]:
    i, step_s = random.randrange(len(place.operators.clocks)), random.choice(CLOCK_STEPS_S)
    place.operators.clocks[i].write_text(f"{step_s:+d}\n")
    yield f"operator {i}, {step_s:+d} s"
    place.operators.clocks[i].write_text("+0\n")


def _signal_process(number: signal.Signals) -> Fault:
    @contextmanager
    def fault(place: Place, random: Random) -> Iterator[str]:
        pod = _pod(place, random)
        if pod is None:
            yield "no pod"
            return
        words = ("python3", "-c", KILL_A_PROCESS, str(random.random()), str(int(number)))
        try:
            name = place.kubectl.run("exec", pod, "-c", "trainer", "--", *words, timeout_s=30).strip()
        except (KubectlError, subprocess.TimeoutExpired) as error:
            name = str(error)[-80:]  # The pod has just ended.
        yield f"{name} in {pod}"

    return fault


def _delete_pod(*flags: str) -> Fault:
    @contextmanager
    def fault(place: Place, random: Random) -> Iterator[str]:
        pod = _pod(place, random)
        if pod is not None:
            place.kubectl.delete("pod", pod, "--wait=false", *flags)
        yield str(pod)

    return fault


def _delete_object(kind: str) -> Fault:
    @contextmanager
    def fault(place: Place, random: Random) -> Iterator[str]:
        found = sorted(item["metadata"]["name"] for item in place.kubectl.list(kind, "dljob.dev/job"))
        name = random.choice(found) if found else None
        if name is not None:
            place.kubectl.delete(kind, name, "--wait=false")
        yield str(name)

    return fault


@contextmanager
def _full_quota(place: Place, random: Random) -> Iterator[str]:
    with full_quota(place.kubectl):
        yield place.kubectl.namespace


def _node(begin: str, end: str) -> Fault:
    @contextmanager
    def fault(place: Place, random: Random) -> Iterator[str]:
        nodes = sorted(item["metadata"]["name"] for item in place.kubectl.list("nodes"))
        name = random.choice(nodes)
        _hack_cluster(place, begin, name)
        try:
            yield name
        finally:
            _hack_cluster(place, end, name)

    return fault


def _pause_program(name: str) -> Fault:
    """Return a fault that pauses a program of the control plane, such as etcd."""

    @contextmanager
    def fault(place: Place, random: Random) -> Iterator[str]:
        identity = place.state.processes.get(name)
        assert identity is not None, f"the cluster has no process {name}"
        send(identity, signal.SIGSTOP)
        try:
            yield name
        finally:
            send(identity, signal.SIGCONT)

    return fault


FAULTS: dict[str, tuple[Fault, float]] = {
    **{f"api: {found.name}": (_disturbance(found), 1.0) for found in DISTURBANCES},
    "operator: killed": (_of_operator(killed), 3.0),
    "operator: paused": (_of_operator(paused), 2.0),
    "operator: clock stepped": (_step_clock, 2.0),
    "process: killed": (_signal_process(signal.SIGKILL), 6.0),
    "process: stopped": (_signal_process(signal.SIGSTOP), 3.0),
    "pod: deleted": (_delete_pod(), 3.0),
    "pod: deleted by force": (_delete_pod("--force", "--grace-period=0"), 2.0),
    "object: StatefulSet deleted": (_delete_object("statefulsets"), 1.0),
    "object: ConfigMap deleted": (_delete_object("configmaps"), 1.0),
    "object: Service deleted": (_delete_object("services"), 1.0),
    "quota: full": (_full_quota, 2.0),
    "node: stopped": (_node("stop", "start"), 2.0),
    "node: cut off": (_node("cut", "heal"), 3.0),
    "control plane: etcd paused": (_pause_program("etcd"), 1.5),
    "control plane: API server paused": (_pause_program("apiserver"), 1.5),
}
"""Name → fault, and how often it is drawn in comparison to the others."""


def draw(seed: int, number: int) -> tuple[str, Fault, Random]:
    """Return the name of a fault, the fault, and the random numbers for it. Equal arguments give equal results."""
    random = Random(f"{seed}/{number}")
    [name] = random.choices(list(FAULTS), [weight for _, weight in FAULTS.values()])
    return name, FAULTS[name][0], random


def _pod(place: Place, random: Random) -> str | None:
    found = sorted(
        pod["metadata"]["name"]
        for pod in place.kubectl.list("pods", "dljob.dev/job")
        if "deletionTimestamp" not in pod["metadata"] and pod["status"].get("phase") == "Running"
    )
    return random.choice(found) if found else None


def _hack_cluster(place: Place, action: str, node: str) -> None:
    command = [str(ROOT / "hack/cluster"), "node", action, node, "--name", place.cluster, "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"
