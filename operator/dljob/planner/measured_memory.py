"""Plan the jobs of a training script with at least the main memory that its earlier runs were measured to need."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from dljob.calibrate.learned import Learned
from dljob.calibrate.memory import MemoryPoint, Split, amounts_nbytes
from dljob.cluster import ClusterView
from dljob.cluster.catalogue import gpu
from dljob.perf.resources.memory import GPU_PROCESS_NBYTES, PROCESS_NBYTES
from dljob.planner.observed import with_pod_memory
from dljob.planner.types import Choice, Decision, Group, Infeasible, Request
from dljob.planner.types.texts import gibibytes

Constants = Mapping[tuple[str, str], Learned]
ROUNDS = 4
"""Maximum number of plans with more and more memory. More memory can lead to a plan with other devices or other ranks
per node, whose measured need is another one."""


def with_measured_memory(
    request: Request, view: ClusterView, learned: Constants, plan: Callable[[Request], Decision | Infeasible]
) -> Decision | Infeasible:
    """Return the plan of ``plan``, with pods that request at least the memory that earlier runs were measured to need.

    Nodes with less free memory are left out. If no node has as much, and the plan therefore uses other devices or other
    ranks per node, its pods request what these were measured to need. A plan never requests less than without
    measurements. Without measurements of the job's script, and if the spec or Kueue sets the memory, return the plan
    unchanged.

    Pods get a margin beside the measured peak. If less was enough for a complete run, they get only as much in two
    cases: if the margin alone would change the nodes or ranks of the plan, or if no plan is possible with it.
    """
    found, keys = plan(request), request.keys
    measured = any(known.memory and name in keys for (name, _), known in learned.items())
    if request.memory_per_pod_nbytes is not None or request.memory_admitted or not measured:
        return found
    full = _raised(request, found, view, learned, plan)
    if isinstance(found, Infeasible) or (isinstance(full, Decision) and _places(full) == _places(found)):
        return full
    bare = _without_margins(request, learned)
    if bare == learned:
        return full
    lower = _raised(request, found, view, bare, plan)
    if isinstance(full, Infeasible) and isinstance(lower, Decision):
        return lower
    return lower if isinstance(lower, Decision) and _places(lower) == _places(found) else full


def _places(decision: Decision) -> list[tuple[str, int, int]]:
    """Return (type of device, nodes, ranks per node) of each group of the chosen plan."""
    return [(group.device, group.nodes, group.ranks_per_node) for group in decision.chosen.groups]


def _without_margins(request: Request, learned: Constants) -> Constants:
    """Return ``learned`` with the measured memory of the job's script without margins (``without_margin``)."""
    return {
        key: replace(known, memory=tuple(point.without_margin for point in known.memory))
        if known.memory and key[0] in request.keys
        else known
        for key, known in learned.items()
    }


def _raised(
    request: Request,
    found: Decision | Infeasible,
    view: ClusterView,
    learned: Constants,
    plan: Callable[[Request], Decision | Infeasible],
) -> Decision | Infeasible:
    """Return ``found``, the plan without regard to measured memory, or another one, with pods that request enough."""
    given = request
    for _ in range(ROUNDS):
        if isinstance(found, Infeasible):
            return found
        amounts = _amounts(request, found.chosen, learned)
        if not amounts:
            return found
        room = max(request.memory_least_nbytes, found.chosen.prediction.host_memory_nbytes)
        if not request.missing and _has_room(found.chosen, view, amounts[0]):
            room = max(room, amounts[0])
        within = [nbytes for nbytes in (amounts if request.memory_measured else amounts[:1]) if nbytes <= room]
        if within:
            return _explained(given, with_pod_memory(found, within[0]), learned, amounts)
        for nbytes in amounts:
            asked = replace(request, memory_least_nbytes=max(request.memory_least_nbytes, nbytes), memory_measured=True)
            found = plan(asked)
            if isinstance(found, Decision):
                request = asked
                break
    return found if isinstance(found, Infeasible) else with_pod_memory(found, request.memory_least_nbytes)


def _amounts(request: Request, choice: Choice, learned: Constants) -> tuple[int, ...]:
    """Return the amounts of memory in bytes to give each pod of a plan at least, those to prefer first."""
    found = [
        amounts_nbytes(
            _points(request, choice, group.device, learned),
            group.ranks_per_node,
            _batch(request, choice, group),
            choice.strategy,
            GPU_PROCESS_NBYTES if group.is_gpu else PROCESS_NBYTES,
            _split(request, choice),
        )
        for group in choice.groups
    ]
    return max(found, default=())


def _points(request: Request, choice: Choice, device: str, learned: Constants) -> tuple[MemoryPoint, ...]:
    """Return the measurements on a type of device; if it has none, those on all other types of CPUs, or of GPUs."""
    key = request.key(choice.precision, choice.recomputes)
    own = learned.get((key, device), Learned()).memory
    if own:
        return own
    same = [(name, other) for name, other in learned if name == key and (gpu(other) is None) == (gpu(device) is None)]
    return tuple(point for each in sorted(same) for point in learned[each].memory)


def _batch(request: Request, choice: Choice, group: Group) -> int | None:
    """Return the largest local batch size of a group, of a micro-batch; None if the script decides it."""
    if not request.global_batch:
        return None
    return max(1, -(-max(group.shares, default=1) // choice.micro_batches))


def _split(request: Request, choice: Choice) -> Split | None:
    if not choice.splits_model:
        return None
    ranks = sum(len(group.shares) for group in choice.groups)
    return Split(ranks // choice.replicas, choice.replicas, choice.micro_batches, request.checkpoints)


def _has_room(choice: Choice, view: ClusterView, nbytes: int) -> bool:
    """Return True if all nodes of the plan's types of devices have so much free memory."""
    devices = {group.device for group in choice.groups}
    return all(node.free_memory_nbytes >= nbytes for node in view.nodes if node.device in devices)


def _explained(request: Request, found: Decision, learned: Constants, amounts: tuple[int, ...]) -> Decision:
    """Return the plan with a text about the measurements, if its pods request so much because of them."""
    given = max(request.memory_least_nbytes, found.chosen.prediction.host_memory_nbytes)
    if given > max(amounts, default=0) or not amounts:
        return found
    groups = {group.device: _points(request, found.chosen, group.device, learned) for group in found.chosen.groups}
    kind = found.chosen.strategy, _split(request, found.chosen)
    points = [point for each in groups.values() for point in each if (point.strategy, point.split) == kind]
    # The amounts follow from some of the runs. Those that needed more than the pods get had larger pods or batches.
    peaks = [point.peak_nbytes for point in points if point.peak_nbytes]
    peak = max((each for each in peaks if each <= given), default=0)
    amounts_too_small = [point.insufficient_nbytes or 0 for point in points]
    tight = max((each for each in amounts_too_small if each < given), default=0)
    text = f"measured in an earlier run: a pod needed {gibibytes(peak)}"
    if tight and tight >= peak:
        text = f"measured in an earlier run: {gibibytes(tight)} was too little"
    elif not peak and peaks:
        text = f"estimated from an earlier run: a larger pod needed {gibibytes(min(peaks))}"
    elif not peak:
        text = f"measured in an earlier run: {gibibytes(given)} was enough"
    return replace(with_pod_memory(found, given), memory_text=text)
