"""The planner's entry."""

from collections import defaultdict
from collections.abc import Mapping

from dljob.cluster import ClusterView, Node
from dljob.planner.types import Choice, Decision, FixedChoice, Group, Infeasible, Learned, Prediction, Request


def _group_name(device: str, taken: set[str]) -> str:
    label = "".join(c if c.isalnum() else "-" for c in device.lower()).strip("-")[:20] or "group"
    name, n = label, 2
    while name in taken:
        name, n = f"{label}-{n}", n + 1
    taken.add(name)
    return name


def plan(request: Request, view: ClusterView, learned: Mapping[tuple[str, str], Learned]) -> Decision | Infeasible:
    """The best plan for the request on this cluster, or why there is none."""
    by_device: dict[str, list[Node]] = defaultdict(list)
    for node in view.nodes:
        if node.free_devices >= 1 and (not request.devices or node.device in request.devices):
            by_device[node.device].append(node)
    for device in (*request.devices, *(f.device for f in request.fixed)):
        if device not in view.device_types:
            return Infeasible(
                "NoSuchDevice",
                "spec.devices" if request.devices else "spec.planning.groups",
                f"found {device!r}, expected one of {', '.join(view.device_types) or 'no devices at all'}",
            )
    wanted = request.fixed
    if not wanted and by_device:
        device, nodes = max(by_device.items(), key=lambda item: len(item[1]))
        wanted = (FixedChoice(device, max(request.nodes_min, min(len(nodes), request.nodes_max or len(nodes)))),)
    ranks = sum(f.nodes * f.ranks_per_node for f in wanted)
    for choice in wanted:
        if choice.nodes > (found := len(by_device[choice.device])):
            return Infeasible(
                "TooFewNodes", "spec.nodes.min", f"found {found} free nodes, expected {choice.nodes}", transient=True
            )
    if not ranks:
        return Infeasible("TooFewNodes", "spec.nodes.min", "found no free node", transient=True)
    if request.global_batch < ranks:
        return Infeasible(
            "BatchTooSmall", "spec.globalBatchSize", f"found {request.global_batch}, expected at least {ranks}"
        )
    shares = [request.global_batch // ranks + (r < request.global_batch % ranks) for r in range(ranks)]
    groups, taken, at = [], set[str](), 0
    for choice in wanted:
        n = choice.nodes * choice.ranks_per_node
        part = tuple(shares[at : at + n])
        at += n
        is_gpu = by_device[choice.device][0].is_gpu
        name = _group_name(choice.device, taken)
        groups.append(Group(name, choice.device, is_gpu, choice.nodes, choice.ranks_per_node, part))
    step_s = 0.02
    prediction = Prediction(
        step_s,
        2 * step_s,
        step_s,
        0.0,
        step_s * request.total_steps,
        request.global_batch / step_s,
        2**29,
        None,
        None,
        "computing",
        "catalogue",
        2**29,
    )
    collective = request.collective or "Ring"
    summary = " + ".join(f"{g.nodes} x {g.device}" for g in groups)
    chosen = Choice(f"{summary}, {collective}, {'+'.join(map(str, shares))}", tuple(groups), collective, prediction)
    return Decision(chosen, (chosen,))
