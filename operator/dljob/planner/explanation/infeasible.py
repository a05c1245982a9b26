"""Reasons why no plan is possible. Each has the found value, the expected value and a remedy."""

from collections import Counter
from collections.abc import Mapping, Sequence

from dljob.cluster import ClusterView
from dljob.planner.candidates.pools import Eligible, wanted
from dljob.planner.types import Decision, Infeasible, Refusal, Request

_ACCUMULATE = (
    ", or let the planner divide batches into micro-batches: set spec.parallelism.gradientAccumulation to Auto"
)


RECOMPUTE = ", or let blocks keep only their inputs: set spec.activationCheckpointing to Auto"


def no_such_device(request: Request, view: ClusterView) -> Infeasible | None:
    present = ", ".join(view.device_types) or "none"
    field, names = (
        ("spec.planning.groups", [f.device for f in request.fixed])
        if request.fixed
        else ("spec.devices", list(request.devices))
    )
    missing = [name for name in names if not any(wanted(device, [name]) for device in view.device_types)]
    if names and ((request.fixed and missing) or len(missing) == len(names)):
        return Infeasible(
            "NoSuchDevice",
            field,
            f"found the device types {', '.join(missing)}, which no node has; expected a device type of the cluster "
            f"(it has {present}): correct the name of the device type, or add nodes with it",
            transient=True,
        )
    return None


def too_few(request: Request, nodes: Eligible, view: ClusterView) -> Infeasible | None:
    available = sum(pool.nodes for pool in nodes.pools)
    if not request.missing and request.global_batch < request.nodes_min:
        return Infeasible(
            "BatchTooSmall",
            "spec.globalBatchSize",
            f"found a global batch of {request.global_batch} samples; expected at least {request.nodes_min}, one per "
            "node of nodes.min: raise globalBatchSize or lower nodes.min",
        )
    needed = max(1, request.nodes_min)
    if available >= needed:
        return None
    if request.node_selector and not any(_selected(node.labels, request) for node in view.nodes) and view.nodes:
        wanted_labels = ", ".join(f"{key}={value}" for key, value in request.node_selector.items())
        return Infeasible(
            "TooFewNodes",
            "spec.scheduling.nodeSelector",
            f"found no node with the labels {wanted_labels}; expected at least {needed} such nodes: correct the "
            "labels, or label nodes",
            transient=True,
            refusals=nodes.refusals,
        )
    busy = available + nodes.busy >= needed
    return Infeasible(
        "DeviceBusy" if busy else "TooFewNodes",
        "spec.nodes.min",
        f"found {available} nodes that the job can use; expected at least {needed}: "
        + (
            f"wait until nodes are free{', or lower nodes.min' if needed > 1 else ''}"
            if busy
            else _instead_of_too_few(request, available, needed)
        )
        + _reasons(nodes.refusals),
        transient=True,
        refusals=nodes.refusals,
    )


def _selected(labels: Mapping[str, str], request: Request) -> bool:
    return all(labels.get(key) == value for key, value in request.node_selector.items())


def _instead_of_too_few(request: Request, available: int, needed: int) -> str:
    """Return what users can do if the job has fewer nodes than it needs, busy or not."""
    missing = needed - available
    ways = [f"add {missing} {'nodes' if missing > 1 else 'node'} with {' or '.join(request.devices) or 'any device'}"]
    if available:
        ways.append(f"lower nodes.min to {available}")
    if request.devices:
        ways.append("add device types to spec.devices")
    if request.node_selector:
        ways.append("remove labels from scheduling.nodeSelector")
    return ", or ".join(ways)


def _too_few_of_one_kind(request: Request, nodes: Eligible) -> Infeasible | None:
    """Return ``Infeasible`` if the job has enough nodes only with devices of several kinds, else None."""
    needed, kinds = max(1, request.nodes_min), Counter[str]()
    for pool in nodes.pools:
        kinds[pool.kind] += pool.nodes
    if request.fixed or not kinds or (most := max(kinds.values())) >= needed:
        return None
    listed = " and ".join(f"{count} with {kind}" for kind, count in sorted(kinds.items()))
    kind = kinds.most_common(1)[0][0]
    busy = most + nodes.busy >= needed
    missing = needed - most
    remedy = f"add {missing} {'nodes' if missing > 1 else 'node'} with {kind}, or lower nodes.min to {most}"
    return Infeasible(
        "DeviceBusy" if busy else "TooFewNodes",
        "spec.nodes.min",
        f"found {listed}, of the nodes that the job can use; expected at least {needed} nodes with devices of one "
        f"kind, because a job cannot use several kinds: {'wait until such nodes are free, ' if busy else ''}{remedy}"
        + _reasons(nodes.refusals),
        transient=True,
        refusals=nodes.refusals,
    )


def _reasons(refusals: Sequence[Refusal]) -> str:
    """Return the reasons why the job cannot use other nodes, for the end of a message."""
    found = "; ".join(f"{each.summary}: {each.reason}" for each in refusals[:5])
    return f" ({found})" if found else ""


def for_script(request: Request) -> str:
    """Return what to do about a script that needs less memory than predicted; empty if the trainer runs the job."""
    if not request.reduced_by_script:
        return ""
    said = (
        "say what the script does to need less (precision, activationCheckpointing, parallelism.strategy Optimizer or "
        "Sharded, parallelism.microBatches)"
        if request.collective == "Torch"
        else "set parallelism.microBatches if the program accumulates gradients"
    )
    return f"{said}, or remove spec.model, without which nothing is predicted"


def nothing_fits(request: Request, nodes: Eligible, refusals: tuple[Refusal, ...]) -> Infeasible:
    memory_lines = [r for r in refusals if "does not fit" in r.reason]
    lines = "; ".join(f"{r.summary}: {r.reason}" for r in (memory_lines or refusals)[:4])
    if not memory_lines and (short := _too_few_of_one_kind(request, nodes)) is not None:
        return short
    if not memory_lines:
        return Infeasible(
            "TooFewNodes",
            "spec.nodes",
            "found no set of nodes that a plan can use; expected nodes of one kind (GPUs or CPUs), at least "
            f"{request.nodes_min}{f' and at most {request.nodes_max}' if request.nodes_max else ''} nodes, and at most "
            f"{request.global_batch} ranks, because every rank needs a sample: change spec.nodes, spec.devices or "
            f"spec.globalBatchSize{f' ({lines})' if lines else ''}",
            transient=True,
            refusals=refusals,
        )
    could_accumulate, script = request.may_accumulate and not request.chooses_micro_batches, for_script(request)
    return Infeasible(
        "DoesNotFit",
        "spec.globalBatchSize",
        f"found a global batch of {request.global_batch} samples, with which the job fits into the memory of no "
        "allowed set of nodes; expected a batch that fits: lower spec.globalBatchSize, allow more nodes, or allow "
        f"devices with more memory{_ACCUMULATE if could_accumulate else ''}{f', or {script}' if script else ''}"
        f"{RECOMPUTE if request.may_recompute else ''} ({lines})",
        refusals=refusals,
    )


def wrong_ranks(request: Request, found: Decision, *, busy: bool) -> Infeasible | None:
    """Return why the plan ``found`` must not run if its number of ranks is not allowed; None if it is.

    The job's script has failed on this number, or a data stream binds the training to another one. ``busy``: True if
    other jobs use nodes that the job could use.
    """
    ranks = sum(group.nodes * group.ranks_per_node for group in found.chosen.groups)
    if request.allows_ranks(ranks):
        return None
    if ranks in request.refused_ranks:
        sizes = ", ".join(str(size) for size in sorted(request.refused_ranks))
        why = f"the script failed on {sizes} ranks; expected nodes for another number of ranks"
        remedy = (
            "Wait until more nodes are free, let the script resume with fewer ranks, or set spec.nodes.min to the "
            "fewest nodes with which it can"
        )
    else:
        why = (
            f"each rank reads its own part of a data stream, and the checkpoint has the positions of "
            f"{request.bound_ranks} ranks; expected nodes for {request.bound_ranks} ranks"
        )
        remedy = (
            "Wait until they are free, allow as many ranks in spec.nodes, or delete the job and create it again to "
            "train from the beginning"
        )
    text = f"found free nodes for {ranks} ranks ({found.chosen.summary}), but {why}. {remedy}"
    reason = "DeviceBusy" if busy else "TooFewNodes"
    return Infeasible(reason, "spec.nodes", text, transient=True, refusals=found.refusals)
