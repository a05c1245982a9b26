"""Predicted time, energy and cost of fetching a job's data to the nodes of a plan, before the first step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dljob.cluster.catalogue import Device
from dljob.cluster.hardware import Hardware
from dljob.perf.resources import data_fetch, energy
from dljob.perf.resources.data_fetch import Number
from dljob.perf.step.communication import ETHERNET_BANDWIDTH_Bps
from dljob.perf.step.input_data import DISK_BANDWIDTH_Bps
from dljob.planner.candidates.pools import Pool
from dljob.planner.types import Prediction, Request


@dataclass(frozen=True)
class Nodes:
    """The nodes of one group of a plan, which fetch data. ``rate_Bps``: see ``node_Bps``."""

    count: int
    ranks_per_node: int
    device: Device
    rate_Bps: float


def node_Bps(pool: Pool, hardware: Hardware | None) -> float:  # noqa: N802 - the unit is part of the name
    """Return the bytes per second at which a node of ``pool`` can store fetched data.

    It is the bandwidth of its network or of writes to its disk, whichever is lower. The network is that of the nodes'
    annotations, else the one that the hardware probe has measured, else 10 Gbit Ethernet. ``hardware``: measured
    hardware; None: not measured.
    """
    far = hardware.far if hardware is not None else None
    network_Bps = pool.bandwidth_Bps or (far.bandwidth_Bps if far is not None else ETHERNET_BANDWIDTH_Bps)
    disk_Bps = hardware.disk_write_Bps if hardware is not None else None
    return min(network_Bps, disk_Bps or DISK_BANDWIDTH_Bps)


def fetched_nbytes(request: Request, nodes: Number, part: Number) -> tuple[Number, Number]:
    """Return (bytes that all nodes of a plan fetch together, most bytes that a node fetches).

    Both are 0 if nodes fetch no data, or if the spec does not give its size. ``nodes``: number of nodes. ``part``: the
    largest part of the global batch that the ranks of a node compute. It is also the part of the data that this node
    fetches, if the data is sharded.
    """
    need = request.storage
    whole = float(need.data_nbytes or 0) if need is not None else 0.0
    return (whole, whole * part) if need is not None and need.sharded else (whole * nodes, whole)


def refetch_s(request: Request, groups: Sequence[Nodes], part: float) -> float:
    """Return the seconds in which one node of a plan fetches its data, such as a new node in place of a lost one."""
    _, nbytes = fetched_nbytes(request, 1, part)
    return float(data_fetch.fetch_s(nbytes, nbytes, _slowest_Bps(groups), request.data_source_Bps))


def with_fetch(found: Prediction, request: Request, groups: Sequence[Nodes], part: float) -> Prediction:
    """Add to ``found``, the prediction of a training, the time in which its nodes fetch their data.

    Meanwhile, their devices are idle, but have their price. The time is as uncertain as that of a step. ``groups``: the
    nodes of the plan. ``part``: see ``fetched_nbytes``.
    """
    nbytes = fetched_nbytes(request, sum(group.count for group in groups), part)
    seconds = float(data_fetch.fetch_s(*nbytes, _slowest_Bps(groups), request.data_source_Bps))
    if not seconds:
        return found
    total_s, idle_J, usd = found.total_s + seconds, 0.0, 0.0
    for group in groups:
        ranks = group.count * group.ranks_per_node
        idle_J += seconds * ranks * energy.idle_watts(group.device)
        usd += energy.cost_usd(group.device, seconds, ranks)
    energy_J = None if found.energy_J is None else found.energy_J + idle_J
    return replace(
        found,
        total_s=total_s,
        total_p90_s=found.total_p90_s + seconds * found.step_p90_s / found.step_s,
        energy_J=energy_J,
        cost_usd=None if found.cost_usd is None else found.cost_usd + request.prices.with_energy_usd(usd, idle_J),
        carbon_g=None if energy_J is None else request.carbon_g(energy_J, total_s),
        fetch_s=seconds,
    )


def _slowest_Bps(groups: Sequence[Nodes]) -> float:  # noqa: N802 - the unit is part of the name
    return min(group.rate_Bps for group in groups)
