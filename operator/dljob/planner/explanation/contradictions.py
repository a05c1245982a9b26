"""Contradictions in a request, and the field that is their cause.

Without these checks, messages would be about free nodes or about the global batch size, and hide the cause.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

from dljob.cluster import ClusterView, catalogue
from dljob.perf.resources import memory
from dljob.perf.step.zero import UNKNOWN_UNIT, knows_units
from dljob.perf.workload.workload import Workload, in_precision, recomputing
from dljob.planner.candidates.accumulation import MAX_MICRO_BATCHES
from dljob.planner.candidates.node_layout import layouts, ranks_per_node_choices
from dljob.planner.candidates.pools import Eligible, Pool, excluded, wanted
from dljob.planner.candidates.precision import searched
from dljob.planner.candidates.strategies import zero
from dljob.planner.explanation.infeasible import RECOMPUTE, for_script
from dljob.planner.types import Choice, Infeasible, Request
from dljob.planner.types.texts import duration, gibibytes, samples

LONG_STEP_S = 86400.0
"""Longest predicted step, in seconds, without a warning. Costs in a wrong unit give longer steps, and no training that
somebody would wait for does."""


def nothing_requested(request: Request) -> Infeasible | None:
    """Return ``Infeasible`` if the spec sets the CPUs or the memory of a pod to 0, else None.

    The scheduler would place such pods on nodes without free CPUs, where their ranks wait for a processor.
    """
    fields = {
        "cpu": ("2", "chooses the CPUs", request.cpu_per_pod),
        "cpuLimit": ("2", "sets no limit", request.cpu_limit_per_pod),
        "memory": ("4Gi", "predicts the memory", request.memory_per_pod_nbytes),
    }
    for name, (example, without, value) in fields.items():
        if value is not None and value <= 0:
            return Infeasible(
                "ZeroResources",
                f"spec.resources.{name}",
                f"found 0; expected more than 0, such as {example}: set an amount, or remove resources.{name}, so that "
                f"dljob {without}",
            )
    return None


def too_low_limit(request: Request) -> Infeasible | None:
    """Return ``Infeasible`` if a pod requests more CPUs than its CPU limit, so that the API server rejects it."""
    cpu, limit = request.cpu_per_pod, request.cpu_limit_per_pod
    if cpu is None or limit is None or cpu <= limit:
        return None
    return Infeasible(
        "LimitBelowRequest",
        "spec.resources.cpuLimit",
        f"found {limit:.6g}; expected at least {cpu:.6g}, which resources.cpu requests, because Kubernetes rejects "
        "pods that request more than their limit: raise resources.cpuLimit, or lower resources.cpu",
    )


def too_large_pods(request: Request, view: ClusterView) -> Infeasible | None:
    """Return ``Infeasible`` if a pod requests more CPUs or memory than the largest node has, busy or not, else None.

    Only nodes count that the job may use. The message says why it must not use larger ones, if there are any.
    """
    names = (*request.devices, *(group.device for group in request.fixed))
    nodes = [(node, excluded(node, request)) for node in view.nodes if not names or wanted(node.device, names)]
    cpus = [(node.cpu, reason) for node, reason in nodes]
    memory = [(inf if node.memory_nbytes is None else node.memory_nbytes, reason) for node, reason in nodes]
    return _more_than_nodes_have(
        "cpu", request.cpu_per_pod, "{} CPUs", lambda cpu: f"{cpu:.6g}", cpus
    ) or _more_than_nodes_have("memory", request.memory_per_pod_nbytes, "{} of memory", gibibytes, memory)


def _more_than_nodes_have(
    name: str, asked: float | None, words: str, shown: Callable[[float], str], nodes: Sequence[tuple[float, str | None]]
) -> Infeasible | None:
    """Return ``Infeasible`` if ``asked`` is more than each of the ``nodes`` has that the job may use, else None.

    ``name``: of the field in ``spec.resources``. ``words``, ``shown``: how the message shows an amount. ``nodes``: what
    each has, and why the job must not use it, or None.
    """
    most = max((has for has, reason in nodes if reason is None), default=0.0)
    if asked is None or not 0 < most < asked:
        return None
    larger = dict.fromkeys(reason for has, reason in nodes if reason is not None and has >= asked)
    return Infeasible(
        "TooFewNodes",
        f"spec.resources.{name}",
        f"found {words.format(shown(asked))} for each pod; expected at most {shown(most)}, which the largest node has "
        f"that the job may use: lower resources.{name}, or add larger nodes"
        + (f" (reasons against larger nodes: {'; '.join([*larger][:4])})" if larger else ""),
        transient=True,
    )


def too_few_for_server(request: Request, nodes: Eligible) -> Infeasible | None:
    """Return ``Infeasible`` if ``nodes.max`` leaves no room for a parameter server and a worker, else None.

    Both are ranks, so one node with 2 GPUs or 2 CPUs has room for them. ``nodes``: the nodes that the job may use.
    """
    if request.synchronization == "Synchronous" or request.nodes_max is None or request.nodes_max >= 2:
        return None
    if not nodes.pools or any(layout.ranks >= 2 for pool in nodes.pools for layout in layouts(pool, request)):
        return None
    return Infeasible(
        "TooFewNodes",
        "spec.nodes.max",
        f"found {request.nodes_max}; expected at least 2 with parallelism.synchronization {request.synchronization}, "
        "because no node that the job can use now has room for 2 ranks, the parameter server and a worker: raise "
        "nodes.max, or set parallelism.synchronization to Synchronous",
        transient=True,
        refusals=nodes.refusals,
    )


def with_cause(request: Request, workload: Workload, nodes: Eligible, wrong: Infeasible) -> Infeasible:
    """Return the reason ``wrong`` why nothing fits, with the field of the spec that is its cause.

    A batch size is the cause only if some batch size fits. ``nodes``: the nodes that the job may use.
    """
    if not nodes.pools or request.strategy in ("Pipeline", "Tensor"):
        return wrong
    pool = max(nodes.pools, key=lambda each: _room_nbytes(each, request))
    typed = [in_precision(workload, name) for name, able in searched(request, [pool], {}) if able] or [workload]
    if request.recomputation != "Never" and workload.checkpointed_nbytes is not None:
        typed = [recomputing(each) for each in typed]
    if request.strategy == "Sharded":
        return _too_large_parts(request, typed, pool, wrong)
    whole = workload = min(typed, key=lambda each: memory.rank_nbytes(each, 1, pool.is_gpu))
    if request.strategy in ("Auto", "Optimizer"):  # With many ranks, each has next to no optimizer state.
        workload = replace(workload, optimizer_slots=0.0)
    room, one = _room_nbytes(pool, request), memory.rank_nbytes(workload, 1, pool.is_gpu)
    if one > room:
        return _too_large(request, workload, whole, pool, wrong) if wrong.reason == "DoesNotFit" else wrong
    if wrong.reason == "DoesNotFit" and (too_little := _too_little_beside_gpus(request, workload, nodes, wrong)):
        return too_little
    most = sum(_largest(each, request, workload) for each in nodes.pools)
    if request.chooses_micro_batches and request.global_batch > most:
        return Infeasible(
            "DoesNotFit",
            "spec.globalBatchSize",
            f"found {request.global_batch}; expected at most {most}, because a step has at most {MAX_MICRO_BATCHES} "
            "micro-batches, each of which must fit into memory: lower globalBatchSize, or allow more nodes",
            refusals=wrong.refusals,
        )
    return wrong


def _too_little_beside_gpus(
    request: Request, workload: Workload, nodes: Eligible, wrong: Infeasible
) -> Infeasible | None:
    """Return ``Infeasible`` if the nodes lack main memory for ranks on GPUs, whose own memory is enough; else None.

    If the user fixes groups of nodes, the field is that of the first group whose nodes lack it.
    """
    if request.memory_per_pod_nbytes is not None or not all(pool.is_gpu for pool in nodes.pools):
        return None
    places = [("spec.resources.memory", pool, min(max(1, request.nodes_min), pool.nodes), 1) for pool in nodes.pools]
    if request.fixed:
        places = [
            (f"spec.planning.groups[{i}].ranksPerNode", pool, choice.nodes, choice.ranks_per_node)
            for i, choice in enumerate(request.fixed)
            for pool in nodes.pools
            if wanted(pool.device, [choice.device])
        ]
    lacking = [
        (field, ranks, free, needed)
        for field, pool, count, ranks in places
        for free in sorted(pool.memory_nbytes, reverse=True)[count - 1 : count]
        for needed in [memory.pod_nbytes(workload, 1, ranks, is_gpu=True)]
        if needed > free
    ]
    if not lacking or (not request.fixed and len(lacking) < len(places)):
        return None
    field, ranks, free, needed = lacking[0]
    with_ranks = f"a pod with {ranks} rank{'s' if ranks > 1 else ''}"
    fewer = "lower ranksPerNode, " if request.fixed else ""
    return Infeasible(
        "DoesNotFit",
        field,
        f"found {gibibytes(free)} of free main memory on GPU nodes; expected at least {gibibytes(needed)}, which "
        f"{with_ranks} requests: {fewer}wait until memory is free, add nodes with more, or set spec.resources.memory "
        f"if a pod needs less ({_lines(wrong)})",
        transient=True,
        refusals=wrong.refusals,
    )


def _room_nbytes(pool: Pool, request: Request) -> float:
    """Return the largest memory of a rank on the nodes of ``pool``, in bytes."""
    if pool.is_gpu:
        return float(pool.gpu_nbytes)
    beside_rank = memory.AGENT_NBYTES + memory.shm_nbytes(1, is_gpu=False)
    return float((request.memory_per_pod_nbytes or max(pool.memory_nbytes)) - beside_rank)


def _largest(pool: Pool, request: Request, workload: Workload) -> int:
    """Return an upper bound of the batch that all nodes of ``pool`` hold in a step, in any number of micro-batches."""
    held = memory.largest_batch(workload, _room_nbytes(pool, request), pool.is_gpu)
    places = sum(pool.free) if pool.is_gpu else pool.nodes
    return min(memory.MAX_SAMPLES, MAX_MICRO_BATCHES * held) * places


def _too_large(request: Request, workload: Workload, whole: Workload, pool: Pool, wrong: Infeasible) -> Infeasible:
    """Return the field that makes one sample too large for every device, and what the device with most memory has.

    ``workload``: with the optimizer state that a rank needs at least. ``whole``: with all of the optimizer state.
    """
    room, is_gpu = _room_nbytes(pool, request), pool.is_gpu
    one, none = (memory.rank_nbytes(workload, count, is_gpu) for count in (1, 0))
    has = f"{gibibytes(max(room, 0.0))}, the largest memory of a rank"
    limit = request.memory_per_pod_nbytes
    if not is_gpu and limit is not None and one - room <= max(pool.memory_nbytes) - limit:
        field, found = "spec.resources.memory", f"{gibibytes(limit)} for each pod"
        expected = f"at least {gibibytes(limit + one - room)}, with which one sample fits"
        remedy = "raise resources.memory"
    elif none <= room and 2 * memory.PREFETCHED_BATCHES * workload.sample_nbytes > memory.sample_nbytes(workload):
        field, found = "spec.dataset.sampleBytes", f"a sample of {gibibytes(workload.sample_nbytes)}"
        expected = f"a sample that fits into {has}"
        remedy = "correct sampleBytes, which is in bytes"
    else:
        mostly_state = none > one / 2
        mostly_frozen = memory.frozen_nbytes(workload.frozen_nbytes, is_gpu) > one / 2
        figure = "frozenBytes" if mostly_frozen else "parameters" if mostly_state else "activationBytesPerSample"
        field = _model_field(request, figure)
        without = _without_optimizer(whole, workload, is_gpu)
        found = f"a model that needs {gibibytes(one)} to train on one sample{without}: {_named_parts(workload, is_gpu)}"
        expected = f"at most {has}"
        remedy = "" if mostly_state else "correct the figure, "
        remedy += "choose a smaller model, allow devices with more memory, or "
        remedy += for_script(request) or "let ranks share the model or its optimizer state (parallelism.strategy)"
        remedy += RECOMPUTE if request.may_recompute and none < room else ""
    return replace(wrong, field=field, message=f"found {found}; expected {expected}: {remedy} ({_lines(wrong)})")


def _too_large_parts(request: Request, typed: Sequence[Workload], pool: Pool, wrong: Infeasible) -> Infeasible:
    """Return the field that makes one sample too large with strategy Sharded, or ``wrong`` if another batch would fit.

    ``typed``: the workload in each precision that the devices of ``pool`` can compute in, with activation checkpointing
    if the job may use it. ``pool``: the nodes whose ranks have the most memory. All of their GPUs together hold the
    training state.
    """
    ranks = min(sum(pool.free), request.global_batch)
    if wrong.reason != "DoesNotFit" or request.fixed or ranks < 1:
        return wrong
    if not pool.is_gpu:
        return _too_little_for_model(request, typed, pool, wrong) or wrong
    device, room = catalogue.gpu_or_assumed(pool.device), _room_nbytes(pool, request)
    workload = min(typed, key=lambda each: zero.held_nbytes(each, 3, ranks, 1, device, request))
    one, none = (zero.held_nbytes(workload, 3, ranks, count, device, request) for count in (1, 0))
    if one <= room:
        return _too_little_for_models(request, workload, pool, wrong) or wrong
    mostly_state = none > one / 2
    field = _model_field(request, "parameters" if mostly_state else "activationBytesPerSample")
    unknown = mostly_state and not knows_units(workload)
    units = (
        f" (hints have no layers, so {UNKNOWN_UNIT:.0%} of the parameters are assumed to be gathered at once, unless "
        "spec.model.hints.largestUnitParameters says how many)"
    )
    state = f"{gibibytes(none)}{units if unknown else ''}"
    remedy = "choose a smaller model, allow more devices" if mostly_state else "correct the figure, shorten the samples"
    return replace(
        wrong,
        field=field,
        message=f"found a model with which each of {ranks} ranks needs {gibibytes(one)} for one sample: activations "
        f"{gibibytes(one - none)}, its part of the training state {state}; expected at most {gibibytes(room)}, the "
        f"largest memory of a rank: {remedy}, or allow devices with more memory",
    )


def _too_little_for_model(
    request: Request, typed: Sequence[Workload], pool: Pool, wrong: Infeasible
) -> Infeasible | None:
    """Return ``Infeasible`` if ranks on CPUs have room for one sample only if they create the model in parts."""
    ranks, device, room = (
        min(pool.nodes, request.global_batch),
        catalogue.cpu(pool.device, 1),
        _room_nbytes(pool, request),
    )
    whole, parts = (
        min(zero.held_nbytes(each, 3, ranks, 1, device, replace(request, deferred_init=deferred)) for each in typed)
        for deferred in (request.deferred_init, True)
    )
    if not parts <= room < whole:
        return None
    return replace(
        wrong,
        field="spec.resources.memory",
        transient=request.memory_per_pod_nbytes is None,
        message=f"found {gibibytes(room)}, the largest memory of a rank; expected at least {gibibytes(whole)}, because "
        f"each rank creates the whole model before it keeps its part: {_deferring(request)}, or allow nodes with more "
        f"memory ({_lines(wrong)})",
    )


def _too_little_for_models(request: Request, workload: Workload, pool: Pool, wrong: Infeasible) -> Infeasible | None:
    """Return ``Infeasible`` if no node has the main memory in which its ranks create the model each; else None.

    Only the numbers of ranks per node count with which the GPUs have enough memory for one sample.
    """
    device, room = catalogue.gpu_or_assumed(pool.device), _room_nbytes(pool, request)
    free = request.memory_per_pod_nbytes or max(pool.memory_nbytes)
    needed = []
    for each in ranks_per_node_choices(pool):
        ranks = each * sum(found >= each for found in pool.free)
        if ranks <= request.global_batch and zero.held_nbytes(workload, 3, ranks, 1, device, request) <= room:
            needed.append((zero.least_host_nbytes(ranks, each, request, workload), each))
    least, each = min(needed, default=(0, 0))
    if least <= free:
        return None
    with_ranks = f"a pod with {each} rank{'s' if each > 1 else ''}"
    part = (
        "create a part of the model and copy its part of the state: allow"
        if request.deferred_init
        else "create the model, because each rank creates all of it before it keeps its part: "
        f"{_deferring(request)}, allow"
    )
    return replace(
        wrong,
        field="spec.resources.memory",
        transient=request.memory_per_pod_nbytes is None,
        message=f"found {gibibytes(free)} of free main memory for a pod; expected at least {gibibytes(least)}, in "
        f"which {with_ranks} can {part} "
        f"more nodes, so that fewer ranks on each of them are enough, or nodes with more memory ({_lines(wrong)})",
    )


def _deferring(request: Request) -> str:
    """Return how ranks with strategy Sharded create the model in parts."""
    how = "on torch's meta device" if request.reduced_by_script else "with t.create"
    return f"create it {how} and set spec.parallelism.deferredInit"


def _named_parts(workload: Workload, is_gpu: bool) -> str:
    """Return what needs the memory of a rank with one sample, the largest part first, without parts below 1 %."""
    parts = memory.parts_nbytes(workload, 1, is_gpu)
    least = sum(parts.values()) / 100
    return ", ".join(f"{name} {gibibytes(nbytes)}" for name, nbytes in parts.items() if nbytes >= least)


def _without_optimizer(whole: Workload, workload: Workload, is_gpu: bool) -> str:
    """Return a text about the optimizer state in ``whole`` that ``workload`` leaves out; empty if it has all of it."""
    left_out = memory.rank_nbytes(whole, 0, is_gpu) - memory.rank_nbytes(workload, 0, is_gpu)
    return f", even without the optimizer state of {gibibytes(left_out)}, which ranks can share" if left_out else ""


def _model_field(request: Request, hint: str) -> str:
    if request.model is not None:
        return "spec.model.name"
    return "spec.model.hints.like" if request.like is not None else f"spec.model.hints.{hint}"


def _lines(wrong: Infeasible) -> str:
    return "; ".join([f"{r.summary}: {r.reason}" for r in wrong.refusals if "does not fit" in r.reason][:4])


def contradiction_warnings(request: Request, chosen: Choice) -> list[str]:
    """Return texts about values with which the plan ``chosen`` is possible, but cannot be what the user wants."""
    found, nodes = list[str](), sum(group.nodes for group in request.fixed)
    if 0 < nodes < request.nodes_min:
        found.append(_ignored("min", request.nodes_min, nodes))
    if request.fixed and request.nodes_max is not None and nodes > request.nodes_max:
        found.append(_ignored("max", request.nodes_max, nodes))
    need = request.storage
    if need is not None and not need.sharded and need.data_nbytes is not None and need.data_nbytes > need.node_nbytes:
        found.append(
            f"spec.dataset.size: found {gibibytes(need.node_nbytes)}; expected at least {gibibytes(need.data_nbytes)}, "
            "which is dataset.samples x dataset.sampleBytes. Raise dataset.size, or correct these figures"
        )
    limit, needed = request.memory_per_pod_nbytes, chosen.prediction.host_memory_nbytes
    if limit is not None and needed > limit and any(group.is_gpu for group in chosen.groups):
        found.append(
            f"spec.resources.memory: found {gibibytes(limit)} for each pod; expected {gibibytes(needed)}, which its "
            "ranks on GPUs probably need (CUDA and its libraries, batches, a copy of the training state). Raise "
            "resources.memory, or remove it, if pods end with OOMKilled"
        )
    if chosen.prediction.step_s > LONG_STEP_S:
        field = _model_field(request, "flopsPerSample")
        stated = f"{request.flops_per_sample:.3g} operations per sample" if request.flops_per_sample else "this model"
        found.append(
            f"{field}: found {stated}, with which a step of {samples(request.global_batch)} takes "
            f"{duration(chosen.prediction.step_s)}; expected less than {duration(LONG_STEP_S)}. Check the unit of this "
            "field, or lower globalBatchSize"
        )
    return found


def _ignored(end: str, found: int, nodes: int) -> str:
    return (
        f"spec.nodes.{end}: found {found}; expected {nodes}, the number of nodes in planning.groups, which count in "
        f"mode Fixed. Remove nodes.{end}, or change planning.groups"
    )
