"""Pools: the nodes that a job may use, by device type, and the reasons why other nodes are excluded.

Kubernetes may place a pod on any node that has the device and room for it. The planner therefore assumes that every
node of a pool is like the weakest one on which the pod fits.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from dlcontract.pods import without_limits
from dljob.cluster import ClusterView, Node
from dljob.cluster.catalogue import GPU_RESOURCES, VENDORS, canonical, gpu, gpu_nbytes, vendor
from dljob.cluster.domains import Crossing
from dljob.cluster.machines import Machine, cores_of_machines, machines, smallest_cpu, together
from dljob.perf.resources.memory import PROCESS_NBYTES
from dljob.planner.types import Refusal, Request
from dljob.planner.types.storage import UNLIMITED
from dljob.planner.types.texts import gibibytes

UNEQUAL = 1.5
"""Maximum ratio of CPUs for CPU nodes of one device type. If the CPUs that a rank can use on two such nodes differ by a
larger factor, the plan has a warning."""


@dataclass(frozen=True)
class Pool:
    """The nodes with one type of device that the job may use."""

    device: str
    is_gpu: bool
    free: tuple[int, ...]
    """Free devices of each node, in falling order."""
    memory_nbytes: tuple[int, ...]
    """Free main memory of each node in bytes, in the order of ``free``."""
    cpu: float
    """Total number of CPUs, free or not, of the node that has the fewest."""
    bandwidth_Bps: float | None
    """The smallest network bandwidth in bytes/s that a node's annotation states; None if no node has the annotation."""
    unequal: bool
    """True for CPU nodes on which a rank can use very different numbers of CPUs (by more than a factor ``UNEQUAL``)."""
    room_cpu: tuple[float, ...] = ()
    """CPUs of each node that a plan may use, in the order of ``free``: ``room_cpu`` of CPU nodes, all free ones of GPU
    nodes."""
    node_cpu: tuple[float, ...] = ()
    """Allocatable CPUs of each node, in the order of ``free``."""
    cpu_per_gpu: float = 1.0
    """CPUs of a GPU node, free or not, for each of its GPUs; the smallest number over the nodes."""
    crossing: Crossing | None = None
    """Network between racks or zones, if these nodes may be in several of them; otherwise None."""
    gpu_nbytes: int = 0
    """Memory in bytes that ranks can use of each GPU, of the node where it is smallest; 0 for CPUs."""
    machines: tuple[Machine, ...] = ()
    """Machines of those CPU nodes whose labels name one. Nodes of one machine share its cores."""

    @property
    def assumed(self) -> bool:
        """Return True if the device is a GPU that the device catalogue lacks, so that its figures are assumed."""
        return self.is_gpu and gpu(self.device) is None

    @property
    def kind(self) -> str:
        """Return the kind of the device: 'CPUs', 'NVIDIA GPUs' or 'AMD GPUs'. A job uses devices of one kind only.

        The trainer image has one build of PyTorch, for CUDA or for ROCm, and NCCL does not span GPUs and CPUs.
        """
        return kind_of(self.device, self.is_gpu)

    @property
    def nodes(self) -> int:
        return len(self.free)

    @cached_property
    def falling_memory_nbytes(self) -> tuple[int, ...]:
        """Return the free main memory of all nodes in bytes, the largest first."""
        return tuple(sorted(self.memory_nbytes, reverse=True))

    @property
    def is_one_machine(self) -> bool:
        """Return True if all nodes of this pool are on one machine."""
        return any(machine.nodes == self.nodes for machine in self.machines)

    @cached_property
    def _sizes(self) -> tuple[tuple[float, float], ...]:
        """The different kinds of nodes: (CPUs that a plan may use, allocatable CPUs)."""
        return tuple(sorted(set(zip(self.room_cpu, self.node_cpu, strict=False))))

    @property
    def most_cpu(self) -> float:
        """Return the allocatable CPUs of the largest node."""
        return max((cpu for _, cpu in self._sizes), default=self.cpu)

    def cpu_with(self, cpus: float) -> float:
        """Return the allocatable CPUs of the smallest node of which a plan may use ``cpus`` CPUs.

        It is that of the smallest node of all if there is none.
        """
        return min((cpu for room, cpu in self._sizes if room >= cpus), default=self.cpu)

    def machine_nodes(self, nodes: int) -> int:
        """Return how many nodes of a plan on ``nodes`` nodes of this pool run on the same machine; at least 1."""
        return together(self.machines, self.nodes, nodes) if self.machines else 1

    def machine_cpu(self, nodes: int) -> float:
        """Return the cores of the smallest machine with at least ``nodes`` nodes; infinite if no nodes share one."""
        return smallest_cpu(self.machines, nodes)


KINDS = ("NVIDIA GPUs", "AMD GPUs", "CPUs")
"""All kinds of devices, in the order in which the search goes through them."""


def kind_of(device: str, is_gpu: bool) -> str:
    """Return the kind of a device, one of ``KINDS``."""
    return {"nvidia": "NVIDIA GPUs", "amd": "AMD GPUs"}[vendor(device)] if is_gpu else "CPUs"


def tolerates(tolerations: Iterable[Mapping[str, object]], taint: tuple[str, str, str]) -> bool:
    """Return True if a toleration matches the taint by Kubernetes' rules, and if it does so without a time limit.

    Kubernetes would evict a pod from a node with a NoExecute taint after ``tolerationSeconds``, and place the next pod
    there again.
    """
    found = _toleration(tolerations, taint)
    return found is not None and _limit_s(found, taint) is None


def _toleration(
    tolerations: Iterable[Mapping[str, object]], taint: tuple[str, str, str]
) -> Mapping[str, object] | None:
    """Return the first toleration that matches the taint, as in Kubernetes; None if none does.

    A toleration without an effect matches all effects. With the operator ``Exists``, a toleration matches all values,
    and without a key also all keys.
    """
    key, value, effect = taint
    for toleration in tolerations:
        if toleration.get("effect") not in (None, "", effect):
            continue
        operator = toleration.get("operator") or "Equal"
        if operator == "Exists" and toleration.get("key") in (None, "", key):
            return toleration
        if operator == "Equal" and toleration.get("key") == key and (toleration.get("value") or "") == value:
            return toleration
    return None


def _limit_s(toleration: Mapping[str, object], taint: tuple[str, str, str]) -> object:
    """Return for how many seconds a toleration that matches the taint tolerates it; None: without a limit."""
    return toleration.get("tolerationSeconds") if taint[2] == "NoExecute" else None


def useful_cpu(node_cpu: float) -> float:
    """Return how many CPUs must be free on a node with ``node_cpu`` CPUs so that the planner uses the node.

    This minimum applies if the job does not request CPUs. It is one CPU, or half of the node's CPUs if the node has
    fewer than two. With fewer free CPUs, ranks would train too slowly for the devices that they occupy, and more slowly
    than plans predict.
    """
    return min(1.0, node_cpu / 2)


def room_cpu(node_cpu: float, free_cpu: float) -> float:
    """Return the maximum number of CPUs that a plan may use of a node with ``free_cpu`` of ``node_cpu`` CPUs free.

    One free CPU remains for pods that start later, such as daemons, so that the pods of the plan fit. Of fewer than two
    free CPUs, half remains. The result is never below ``useful_cpu``.
    """
    return max(useful_cpu(node_cpu), free_cpu / 2, free_cpu - 1)


def usable(request: Request, view: ClusterView) -> list[Node]:
    """Return the nodes that can run a pod of the job, regardless of the types of device that the job allows.

    Each returned node meets five conditions. The cluster view does not exclude it from plans (``Node.left_out``). It
    has the labels in the job's node selector. The job tolerates its taints (those of GPUs in any case). It can mount
    the job's volumes. It has enough free devices, CPUs and memory, and enough storage for data that the job fetches.
    """
    return [node for node in view.nodes if _why_not(node, request) is None]


def allowed(request: Request, view: ClusterView) -> ClusterView:
    """Return the nodes that the job could use if no other pod ran on them, of any type of device."""
    return ClusterView(tuple(node for node in view.nodes if excluded(node, request) is None))


def excluded(node: Node, request: Request) -> str | None:
    """Return the reason why the job cannot use the node, even without other pods on it, or None."""
    if node.left_out is not None:
        return node.left_out
    for key, value in request.node_selector.items():
        if node.labels.get(key) != value:
            return f"nodeSelector {key}={value} does not match"
    for taint in node.taints:
        if node.is_gpu and taint[0] in GPU_RESOURCES.values():
            continue  # pods that request GPUs tolerate this taint
        if taint[2] in ("NoSchedule", "NoExecute") and not tolerates(request.tolerations, taint):
            found = _toleration(request.tolerations, taint)
            limit = f" for longer than {_limit_s(found, taint)} s (tolerationSeconds)" if found is not None else ""
            return f"taint {taint[0]}{'=' + taint[1] if taint[1] else ''}:{taint[2]} is not tolerated{limit}"
    if request.storage is not None and (node.storage_nbytes or UNLIMITED) < request.storage.node_nbytes:
        has, needs = gibibytes(node.storage_nbytes or 0), gibibytes(request.storage.node_nbytes)
        return f"it has {has} of storage, but the data needs {needs} (dataset.size)"
    for volume in request.volumes:
        if not volume.nodes.matches(node):
            return f"{volume.subject} needs nodes with {volume.nodes} ({volume.field})"
    return None


def _why_not(node: Node, request: Request) -> str | None:
    """Return the reason why the job cannot use the node, or None if it can."""
    return excluded(node, request) or _too_small(node, request) or _busy(node, request)


def _too_small(node: Node, request: Request) -> str | None:
    """Return the reason why the node has too few CPUs or too little memory even if no other pod runs on it, or None."""
    cpu, memory = _needs(node, request)
    if node.cpu <= 0:
        return "it reports no CPUs"
    if node.cpu < cpu:
        return f"it has {node.cpu:.3g} CPUs, but a pod needs {cpu:.3g}"
    if node.memory_nbytes is not None and node.memory_nbytes < memory:
        needs = f"an earlier run measured that a pod needs {gibibytes(memory)}" if request.memory_measured else ""
        return f"it has {gibibytes(node.memory_nbytes)} of memory, but {needs or f'a pod needs {gibibytes(memory)}'}"
    return None


def _busy(node: Node, request: Request) -> str | None:
    """Return which free resource the node lacks because of other pods, or None."""
    cpu, memory = _needs(node, request)
    if node.free_devices < 1:
        return "no free device"
    if node.free_cpu < cpu:
        return f"{node.free_cpu:.3g} CPUs are free, but {cpu:.3g} are needed"
    if node.free_memory_nbytes < memory:
        measured = "an earlier run measured that " if request.memory_measured else ""
        free, needed = gibibytes(node.free_memory_nbytes), gibibytes(memory)
        return f"{free} of memory are free, but {measured}{needed} are needed"
    return None


def _needs(node: Node, request: Request) -> tuple[float, int]:
    """Return how many CPUs, and bytes of memory, must be free on the node for a pod."""
    cpu = request.cpu_per_pod or min(useful_cpu(node.cpu), request.cpu_limit_per_pod or node.cpu)
    return cpu, request.memory_per_pod_nbytes or max(PROCESS_NBYTES, request.memory_least_nbytes)


def cores_of_rank(cpu: float, ranks: int, request: Request, *, is_gpu: bool = False) -> float:
    """Return the number of CPUs that each of ``ranks`` ranks computes with on a node that has ``cpu`` CPUs.

    The result is the CPU request of the pod divided by ``ranks``, rounded down, because only requested CPUs are
    guaranteed. It is at least 1, and 1 without a request. With a request, a number of threads that the user sets for
    ranks on CPUs counts instead, as in profiles. However, the result never exceeds the CPUs of the node or the CPU
    limit of the pod, each divided by ``ranks``, and can therefore be below 1.
    """
    threads = max(1.0, float(int((request.cpu_per_pod or ranks) / ranks)))
    if request.threads_per_rank and request.cpu_per_pod and not is_gpu:
        threads = float(request.threads_per_rank)
    return min(threads, cpu / ranks, (request.cpu_limit_per_pod or cpu) / ranks)


def wanted(device: str, names: Iterable[str]) -> bool:
    """Return True if a node's device matches one of the names in the spec.

    GPU names match without vendor and punctuation, and a family name matches its members: a100 matches
    NVIDIA-A100-SXM4-40GB, but a10 does not. CPU types must match exactly. A name without limits matches GPUs
    under any power and clock limit, and a name with one limit matches GPUs under this limit.
    """
    is_gpu, found = gpu(device) is not None, without_limits(device)
    for name in names:
        product, power_W, clock_MHz = without_limits(name)
        if power_W not in (None, found.power_limit_W) or clock_MHz not in (None, found.clock_limit_MHz):
            continue
        if product == found.product or (is_gpu and (_is(found.product, product) or _family(found.product, product))):
            return True
    return False


def _is(device: str, name: str) -> bool:
    return canonical(device) == canonical(name)


def _family(device: str, name: str) -> bool:
    words = [[w for w in re.split(r"[^a-z0-9]+", text.lower()) if w not in VENDORS] for text in (device, name)]
    return bool(words[1]) and words[0][: len(words[1])] == words[1]


@dataclass(frozen=True)
class Eligible:
    """The nodes that a job can use now, by device type (``pools``), and why it cannot use others (``refusals``)."""

    pools: tuple[Pool, ...]
    refusals: tuple[Refusal, ...]
    busy: int
    """Number of excluded nodes that the job could use if they had enough free devices, CPUs or memory."""


def eligible(request: Request, view: ClusterView) -> Eligible:
    """Return one pool (its usable nodes) for each device type that the request allows, and the excluded nodes.

    Each ``Refusal`` has a reason, and the number of nodes of one device type that are excluded for this reason.
    """
    usable: dict[tuple[str, bool], list[Node]] = defaultdict(list)
    left_out: dict[tuple[str, str], int] = defaultdict(int)
    busy = 0
    names = (*request.devices, *(f.device for f in request.fixed))
    cores = cores_of_machines(view.nodes)
    for node in view.nodes:
        never = excluded(node, request) or _too_small(node, request)
        reason = never or _busy(node, request)
        if names and not wanted(node.device, names):
            left_out[node.device, "not among the requested devices"] += 1
        elif reason is None:
            usable[node.device, node.is_gpu].append(node)
        else:
            left_out[node.device, reason] += 1
            busy += never is None
    pools = []
    for (device, is_gpu), nodes in sorted(usable.items()):
        nodes.sort(key=lambda node: -node.free_devices)
        used = [cores_of_rank(node.cpu, 1, request) for node in nodes]
        bandwidths = [node.link_bandwidth_Bps for node in nodes if node.link_bandwidth_Bps]
        pools.append(
            Pool(
                device=device,
                is_gpu=is_gpu,
                free=tuple(node.free_devices for node in nodes),
                memory_nbytes=tuple(node.free_memory_nbytes for node in nodes),
                cpu=min(node.cpu for node in nodes),
                bandwidth_Bps=min(bandwidths, default=None),
                unequal=not is_gpu and max(used) > UNEQUAL * min(used),
                room_cpu=tuple(node.free_cpu if is_gpu else room_cpu(node.cpu, node.free_cpu) for node in nodes),
                node_cpu=tuple(node.cpu for node in nodes),
                cpu_per_gpu=min(node.cpu / max(1, node.devices) for node in nodes),
                crossing=request.domain.crossing,
                gpu_nbytes=gpu_nbytes(device, *(node.labels for node in nodes)) if is_gpu else 0,
                machines=() if is_gpu else machines(nodes, cores),
            )
        )
    refusals = tuple(Refusal(f"{n} x {device}", reason) for (device, reason), n in sorted(left_out.items()))
    return Eligible(tuple(pools), refusals, busy)
