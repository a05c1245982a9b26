"""Plan jobs whose script nobody described with the structure that an earlier run of it has shown.

The structure takes the place of ``spec.model``. If the spec has the global batch size and the number of steps, the
search for the best plan is the same as with a described model. Otherwise the nodes are those that the spec asks for,
and each rank is assumed to take as many samples as the observed one: the step time is predicted for them.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import isfinite

from dljob.calibrate.learned import Learned, LearnedPoint, Place, StepPoint
from dljob.cluster import ClusterView
from dljob.cluster.catalogue import gpu
from dljob.perf.resources.memory import AGENT_NBYTES
from dljob.perf.workload.observed import Structure
from dljob.planner.candidates.pools import excluded
from dljob.planner.types import Choice, Decision, FixedChoice, Infeasible, Prediction, Request
from dljob.planner.types.texts import duration
from dljob.planner.unpredicted import ASSUMED_GPU_NBYTES, ASSUMED_NBYTES, MAX_NODE_SHARE

Constants = Mapping[tuple[str, str], Learned]
Plan = Callable[[Request, ClusterView, Constants], Decision | Infeasible]
"""Function that plans a request whose model is known on a view of the cluster, with these constants."""
MEASURED_STEPS = 50
"""Number of steps that count as measured in an observed run."""
ROUNDS = 4
"""Number of corrections of a computing time until the predicted step is as long as the measured one."""
MAX_STEPS = 10**12
"""Largest number of steps of a training, as in the spec."""
LEAST_PART = 0.05
"""Smallest part of a measured step that counts as computing."""
CLOSE = 1.02
"""Largest ratio of the predicted to the measured step up to which the formulas of communication are used."""
MAX_NODES = 4096
"""Largest number of nodes of an observed run that are added to a view in which they are not free."""
RUN_NBYTES = 2**40
"""Free memory of these nodes: the run had enough, so that memory must not rule out its place."""
PART = 0.5
"""Part of a measured step that counts as computing if the predicted communication alone takes longer than the step."""


def described(request: Request, learned: Constants) -> Request:
    """Return the request with the structure that an earlier run of its script has shown, if its spec has no model.

    ``Request.missing`` then names the fields that are still missing for a search. With a number of steps, the dataset
    is not. Return the request unchanged if its script was never observed. If it was observed on several types of
    devices, prefer a run that was complete.
    """
    if "model" not in request.missing or request.structure is not None:
        return request
    found = [known.structure for (name, _), known in learned.items() if name == request.key() and known.structure]
    if not found:
        return request
    structure = max(found, key=lambda each: (each.step_s is not None, each.steps, each.device))
    given = {"model"} | ({"dataset", "epochs"} if request.total_steps else set())
    return replace(
        request,
        structure=structure,
        missing=tuple(name for name in request.missing if name not in given),
        sample_nbytes=request.sample_nbytes or int(structure.sample_nbytes) or None,
    )


def with_measured_step(request: Request, view: ClusterView, learned: Constants, plan: Plan) -> Constants:
    """Return ``learned`` with the computing time that follows from the measured step of the observed run.

    A script does not report its computing time. Choose it so that the predicted step at the place of this run is as
    long as the measured one. If the predicted communication alone takes longer than the measured step, the script
    reduces less than assumed, such as compressed or sparse gradients. The measured step then also counts as one of
    several devices, so that it replaces the formulas of communication.

    The nodes of this run need not be free now, and ``view`` may have only the devices that are assigned to the job: the
    step is then predicted as if they were free. Return ``learned`` unchanged if there is no measured step, if the
    profile has measured computing times, or if no node of ``view`` tells about the place of this run (``_with_run``).
    """
    seen = request.structure
    if seen is None or seen.step_s is None:
        return learned
    key = (request.key(), seen.device)
    known = learned.get(key, Learned())
    if known.points:
        return learned
    asked = _at_run(request, seen, view)
    compute_s, result = seen.step_s, learned
    for _ in range(ROUNDS):
        point = LearnedPoint(seen.batch, compute_s, MEASURED_STEPS, seen.cores, seen.ranks_per_node)
        result = {**learned, key: replace(known, points=(point,))}
        found = plan(asked, view, result)
        if isinstance(found, Infeasible):
            view = _with_run(request, seen, view)
            asked = _at_run(request, seen, view)
            found = plan(asked, view, result)
        if isinstance(found, Infeasible):
            return result if seen.ranks == 1 else learned
        choice = found.chosen
        compute_s = max(LEAST_PART * seen.step_s, compute_s + seen.step_s - choice.prediction.step_s)
    if seen.ranks == 1 or known.steps or choice.prediction.step_s <= CLOSE * seen.step_s:
        return result
    place = Place(seen.nodes, seen.ranks_per_node, choice.collective, cores=seen.cores)
    point = replace(point, compute_s=PART * seen.step_s)
    return {**learned, key: replace(known, points=(point,), steps=(StepPoint(place, seen.batch, seen.step_s),))}


def predicted(
    request: Request, view: ClusterView, decision: Decision | Infeasible, learned: Constants, plan: Plan
) -> Decision | Infeasible:
    """Return a decision of ``plan_unpredicted`` with predicted times, for a request with an observed structure.

    The nodes stay. Without a global batch size, each rank takes as many samples as the observed rank. Without a number
    of steps, that of the observed run counts, for the same number of samples. If that is unknown too, only the step is
    predicted. Pods request at least as much memory as without a prediction.
    """
    seen = request.structure
    if isinstance(decision, Infeasible) or seen is None:
        return decision
    chosen = decision.chosen
    ranks = sum(len(group.shares) for group in chosen.groups)
    batch = request.global_batch or seen.batch * ranks
    steps = request.total_steps or min(MAX_STEPS, -(-seen.steps * seen.batch * seen.ranks // batch))
    places = [
        FixedChoice(g.device, g.nodes, g.ranks_per_node, None if request.global_batch else seen.batch)
        for g in chosen.groups
    ]
    asked = replace(_at(request, places, batch), total_steps=max(1, steps))
    if request.cpu_per_pod is None and not any(group.is_gpu for group in chosen.groups):
        # The search would choose the number of CPUs. These are the CPUs that the pods request.
        cpus = [_requested_cpus(g.device, g.nodes, g.ranks_per_node, g.cores, view) for g in chosen.groups]
        asked = replace(asked, cpu_per_pod=max(cpus))
    found = plan(asked, view, learned)
    decision = replace(decision, structure=seen, missing=request.missing)
    if isinstance(found, Infeasible):
        text = f"no time is predicted from the script's observed structure: {found.field}: {found.message}"
        return replace(decision, warning="; ".join(filter(None, (decision.warning, text))))
    prediction = _with_memory(found.chosen.prediction, chosen.prediction.host_memory_nbytes)
    warnings = [decision.warning]
    if not steps:
        prediction = replace(
            prediction, total_s=0.0, total_p90_s=0.0, energy_J=None, cost_usd=None, carbon_g=None, interruptions=0.0,
            interruption_s=0.0, fetch_s=0.0, checkpoints_s=0.0,
        )  # fmt: skip
    elif request.deadline_s is not None and prediction.total_p90_s > request.deadline_s:
        warnings.append(
            f"the predicted run time is {duration(prediction.total_p90_s)} (p90); expected at most "
            f"{duration(request.deadline_s)}, as spec.objective.deadline says"
        )
    choice = replace(chosen, prediction=prediction)
    return replace(decision, chosen=choice, candidates=(choice,), warning="; ".join(filter(None, warnings)) or None)


def with_assumed_memory(request: Request, decision: Decision, view: ClusterView) -> Decision:
    """Return a decision in which pods request at least the memory that they would get without a prediction.

    An observed structure shows the memory of the model, but not that of a script's data and libraries. The assumption
    is at most half of a node's free memory, and does not apply if the spec sets the memory.
    """
    decision = replace(decision, structure=request.structure, missing=())
    if request.memory_per_pod_nbytes is not None:
        return decision
    least, most = 0, 2**63
    for group in decision.chosen.groups:
        free = sorted((node.free_memory_nbytes for node in view.nodes if node.device == group.device), reverse=True)
        each = ASSUMED_GPU_NBYTES if group.is_gpu else ASSUMED_NBYTES
        room = min(free[: group.nodes], default=0)
        least = max(least, min(AGENT_NBYTES + group.ranks_per_node * each, int(MAX_NODE_SHARE * room)))
        most = min(most, room)  # The assumption is the same for all pods.
    return with_pod_memory(decision, min(least, most))


def with_pod_memory(decision: Decision, nbytes: int) -> Decision:
    """Return a decision in which each pod requests at least ``nbytes`` bytes of main memory."""
    choice = _with_host_memory(decision.chosen, nbytes)
    candidates = tuple(choice if each == decision.chosen else each for each in decision.candidates)
    trade_offs = tuple(choice if each == decision.chosen else each for each in decision.trade_offs)
    return replace(decision, chosen=choice, candidates=candidates, trade_offs=trade_offs)


def is_finite(prediction: Prediction) -> bool:
    """Return True if the times and the throughput of a prediction are finite, and so are known energy and cost."""
    found = (
        prediction.step_s,
        prediction.step_p90_s,
        prediction.total_s,
        prediction.total_p90_s,
        prediction.samples_per_s,
        prediction.energy_J or 0.0,
        prediction.cost_usd or 0.0,
        prediction.carbon_g or 0.0,
    )
    return all(map(isfinite, found))


def with_absurd_structure(decision: Decision | Infeasible) -> Decision | Infeasible:
    """Return a decision with a warning that its script's observed structure cannot be used."""
    if isinstance(decision, Infeasible):
        return decision
    text = "no time is predicted from the script's observed structure, because its figures are impossible"
    return replace(decision, warning="; ".join(filter(None, (decision.warning, text))))


def _at_run(request: Request, seen: Structure, view: ClusterView) -> Request:
    """Return the request for a prediction at the place of an observed run, with the CPUs that its pods requested."""
    place = FixedChoice(seen.device, seen.nodes, seen.ranks_per_node, seen.batch)
    asked = _at(request, [place], seen.batch * seen.ranks)
    if seen.cores is None:
        return asked
    cpus = _requested_cpus(seen.device, seen.nodes, seen.ranks_per_node, float(seen.cores), view)
    return replace(asked, cpu_per_pod=cpus, cpu_limit_per_pod=None, threads_per_rank=None)


def _with_run(request: Request, seen: Structure, view: ClusterView) -> ClusterView:
    """Return nodes on which an observed run has room, as if all that they have were free.

    They are the nodes of its device type in ``view`` that the request does not exclude, and copies of them if these are
    too few. If there is none because the job gets another type of GPU, they are nodes with the GPU of the run: its step
    is the measurement from which that of the other type is predicted. Return ``view`` without any such node, or if the
    run, which the script itself reports, had too many.
    """
    allowed = [node for node in view.nodes if excluded(node, request) is None]
    nodes = [node for node in allowed if node.device == seen.device]
    if not nodes and gpu(seen.device) is not None:
        nodes = [replace(node, device=seen.device) for node in allowed if node.is_gpu]
    if not nodes or seen.nodes > MAX_NODES:
        return view
    copies = -(-seen.nodes // len(nodes))
    return ClusterView(
        tuple(
            replace(
                node,
                name=f"{node.name}-{number}" if number else node.name,
                devices=max(node.devices, seen.ranks_per_node) if node.is_gpu else node.devices,
                free_devices=max(node.devices, seen.ranks_per_node) if node.is_gpu else node.devices,
                free_cpu=node.cpu,
                free_memory_nbytes=max(node.free_memory_nbytes, RUN_NBYTES),
                free_pods=None,
            )
            for number in range(copies)
            for node in nodes
        )
    )


def _requested_cpus(device: str, nodes: int, ranks: int, cores: float, view: ClusterView) -> float:
    """Return the CPUs that a pod with ``ranks`` ranks requests. Each rank computes with ``cores`` CPUs.

    Pods whose ranks have at most one CPU each request less if the nodes have less free. Profiles store a part of a CPU
    as one CPU.
    """
    free = sorted((node.free_cpu for node in view.nodes if node.device == device), reverse=True)[:nodes]
    return min(ranks * cores, *free) if free and free[-1] > 0 and cores <= 1 else ranks * cores


def _at(request: Request, places: list[FixedChoice], batch: int) -> Request:
    """Return the request for a prediction at fixed places, without wishes that only matter to a search."""
    return replace(
        request,
        missing=(),
        fixed=tuple(places),
        global_batch=batch,
        total_steps=max(1, request.total_steps),
        batches=None,
        deadline_s=None,
        minimize="Time",
        takes_most=False,
        asks_unsupported=False,
    )


def _with_host_memory(choice: Choice, nbytes: int) -> Choice:
    return replace(choice, prediction=_with_memory(choice.prediction, nbytes))


def _with_memory(prediction: Prediction, nbytes: int) -> Prediction:
    pods = tuple(max(each, nbytes) for each in prediction.pods_nbytes)
    return replace(prediction, host_memory_nbytes=max(prediction.host_memory_nbytes, nbytes), pods_nbytes=pods)


def text_of(structure: Structure) -> str:
    """Describe an observed structure in one line for users."""
    ranks = f"{structure.ranks} rank{'s' if structure.ranks > 1 else ''} on {structure.nodes} x {structure.device}"
    times = f", {duration(structure.step_s)} per step on {ranks}" if structure.step_s else ""
    return (
        f"observed in an earlier run: {structure.parameters:,} parameters, {structure.flops:.3g} operations per "
        f"sample, {structure.batch} samples per rank and step{times}"
    )
