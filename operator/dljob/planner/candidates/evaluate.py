"""Exact evaluation of one candidate. The result is its local batch sizes and prediction, or the reason to reject it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, exp

import numpy as np

from dlcontract import SERVERS
from dljob.calibrate.scaling import Posterior
from dljob.perf.fit.scaling import Runs
from dljob.perf.resources import energy, memory
from dljob.perf.step.asynchronous import round_of
from dljob.perf.step.communication import Link
from dljob.perf.step.compute import active_part
from dljob.perf.step.step import P90, Step, step
from dljob.perf.workload.workload import Workload
from dljob.planner.candidates.accumulation import holding, micro_batches_of, update_part_s
from dljob.planner.candidates.batch_split import Kind, even, even_split, split
from dljob.planner.candidates.collectives import exchanged_s, priced
from dljob.planner.candidates.cost.data_fetch import Nodes, node_Bps
from dljob.planner.candidates.cost.evaluations import evaluations_s
from dljob.planner.candidates.cost.measured import communication_ratio, predicted
from dljob.planner.candidates.cost.whole_training import whole_training
from dljob.planner.candidates.node_layout import Layout, cores_text
from dljob.planner.candidates.options import Option, link_of, message_link_of, overlap_of
from dljob.planner.candidates.shard_space import largest_share, too_large, too_little_memory, too_little_space
from dljob.planner.types import Basis, Choice, CollectiveName, Group, Prediction, Refusal, Request
from dljob.planner.types.storage import Storage
from dljob.planner.types.texts import computed, duration, group_names, rate, samples

LEAST_BUSY = 0.25
"""Minimum fraction of a rank's CPUs that its pod requests. Even a rank whose steps hardly use the CPUs needs them to
start, to evaluate the model and to write checkpoints."""

SHOWN_INPUT = 0.05
"""Minimum fraction of a step that waits for input at which the bottleneck mentions it beside the computing time."""


@dataclass(frozen=True)
class Part:
    """A group of nodes with the same type of device and the same use in a candidate plan.

    A candidate plan consists of one or more such groups. ``nodes``: number of nodes in the group. ``option``: the type
    of device, the number of ranks that each node runs, and the predicted speed and memory of these ranks.
    ``batch_per_rank``: local batch size of each rank in samples, if the user fixed it; None if the planner chooses it.
    """

    option: Option
    nodes: int
    batch_per_rank: int | None = None

    @property
    def ranks(self) -> int:
        return self.nodes * self.option.ranks_per_node

    @cached_property
    def messages(self) -> tuple[Link, float]:
        """Return the result of ``message_link_of`` for the ranks of this group."""
        return message_link_of([self.option], [self.nodes])

    @property
    def fetching_nodes(self) -> Nodes:
        """Return the nodes of this group as those that fetch the job's data."""
        option = self.option
        return Nodes(self.nodes, option.ranks_per_node, option.device, node_Bps(option.pool, option.hardware))


def describe(parts: Sequence[Part]) -> str:
    """Describe the nodes and ranks of a candidate plan, such as '2 x a100 (4 ranks each) + 3 x t4'."""
    return " + ".join(f"{p.nodes} x {p.option.label}{_on_node(p.option)}" for p in parts)


def _on_node(option: Option) -> str:
    """Return the text about the ranks and cores of a node, such as ' (4 ranks each, 15 cores per rank)'; or ''."""
    ranks, cores = option.ranks_per_node, int(option.cores)
    if ranks > 1:
        return f" ({ranks} ranks each{f', {cores} cores per rank' if cores > 1 else ''})"
    return f" ({cores} cores each)" if cores > 1 else ""


def shares_of(
    parts: Sequence[Part],
    batch: int,
    uneven: bool,
    servers: int = 0,
    *,
    first: bool = False,
    storage: Storage | None = None,
) -> list[list[int]] | None:
    """Return a list of local batch sizes for each part, or None if no sizes that fit into memory add up to ``batch``.

    ``batch``: global batch size. ``uneven``: True if faster ranks get larger batches. The last ``servers`` ranks, or
    the first if ``first`` is True, are parameter servers and get 0 samples. ``storage``: the space for shards of the
    data, which limits local batch sizes; None: only memory limits them.
    """
    counts = [p.ranks for p in parts]
    for i in range(len(parts)) if first else reversed(range(len(parts))):
        taken = min(servers, counts[i])
        counts[i] -= taken
        servers -= taken
    free = [i for i, p in enumerate(parts) if p.batch_per_rank is None and counts[i]]
    result = [[p.batch_per_rank or 0] * n for p, n in zip(parts, counts, strict=True)]
    rest = batch - sum(map(sum, result))
    largest = [largest_share(p.option, batch, storage) for p in parts]
    kinds = [Kind(parts[i].option.curve, counts[i], largest[i]) for i in free]
    found = (split if uneven else even_split)(kinds, rest) if kinds else ([] if rest == 0 else None)
    if found is None:
        return None
    for i, part in zip(free, found, strict=True):
        result[i] = part
    fits = all(max(s, default=0) <= most for s, most in zip(result, largest, strict=True))
    if not fits:
        return None
    serving = [[0] * (p.ranks - len(s)) for s, p in zip(result, parts, strict=True)]
    return [[*none, *s] if first else [*s, *none] for s, none in zip(result, serving, strict=True)]


def _does_not_fit(parts: Sequence[Part], request: Request, workload: Workload, serving: int) -> Refusal:
    """Return why no local batch sizes fit. ``serving``: number of parameter servers, which have no samples."""
    ranks = sum(p.ranks for p in parts) - serving
    if request.global_batch < ranks:
        text = f"every rank needs a sample, but {ranks} ranks share a global batch of {samples(request.global_batch)}"
        return Refusal(describe(parts), text)
    asked = [(p.nodes, p.option.ranks_per_node, p.batch_per_rank) for p in parts]
    if (too_little := too_little_space(asked, request)) is not None:
        return Refusal(describe(parts), too_little)
    worst = min(parts, key=lambda p: p.option.largest_batch)
    share = ceil((worst.batch_per_rank or even(request.global_batch, ranks)[0]) / worst.option.micro_batches)
    held = held_by(parts, workload)
    return Refusal(describe(parts), too_large(held, share, worst.option, samples(share)))


def held_by(parts: Sequence[Part], workload: Workload) -> Workload:
    """Return ``workload`` with the part of its optimizer state that one rank stores, to predict the rank's memory.

    ``parts``: all groups of nodes of one candidate. If their ranks shard the optimizer (ZeRO-1), one rank stores one
    shard. Otherwise, return ``workload`` unchanged.
    """
    ranks = sum(p.ranks for p in parts)
    return memory.sharded(workload, ranks) if parts[0].option.strategy == "Optimizer" else workload


def evaluate(
    parts: Sequence[Part], collective: CollectiveName, request: Request, workload: Workload, servers: int = 1
) -> Choice | Refusal:
    """Split the batch among the ranks of ``parts`` and predict the plan, or return the reason why it is rejected.

    ``parts``: the groups of nodes of the plan. ``collective``: algorithm that reduces the gradients. ``servers``:
    number of ranks that are parameter servers, if the collective is ParameterServer. LayeredServer has one, rank 0.
    """
    ranks, nodes = sum(p.ranks for p in parts), sum(p.nodes for p in parts)
    layered = collective == "LayeredServer"
    serving = (1 if layered else servers) if collective in SERVERS and ranks > 1 else 0
    apart = request.synchronization != "Synchronous"

    def shares_with(options: Sequence[Option]) -> list[list[int]] | None:
        asked = _with(parts, options)
        return shares_of(asked, request.global_batch, request.uneven, serving, first=layered, storage=request.storage)

    held = held_by(parts, workload)
    able = [holding(p.option, held, request.global_batch) for p in parts]
    chosen, micro_batches = micro_batches_of(able, shares_with)
    parts = _with(parts, chosen)
    if apart and not serving:
        text = "asynchronous training needs at least 2 ranks (a worker and a parameter server), but the plan has 1 rank"
        return Refusal(describe(parts), text)
    shares = shares_with(chosen)
    if shares is None:
        return _does_not_fit(parts, request, workload, serving)
    pods = [(p.option, p.nodes, _pod_nbytes(p, s, held)) for p, s in zip(parts, shares, strict=True)]
    if (too_little := too_little_memory(pods, request)) is not None:
        return Refusal(describe(parts), too_little)
    link, link_spread = link_of(chosen, [p.nodes for p in parts], request.backend)
    at_work = [(p, max(s)) for p, s in zip(parts, shares, strict=True) if max(s)]
    busy_s, slowest, share = max(((p.option.curve.seconds(b), p, b) for p, b in at_work), key=lambda item: item[0])
    data_s = slowest.option.data_s(share)
    strategy = chosen[0].strategy
    sharded = strategy == "Optimizer" and ranks > 1
    saved_s = slowest.option.update_s * (1 - 1 / ranks) if sharded else 0.0
    # Measured multi-device steps replace the formulas if there are any.
    known = [] if ranks == 1 else [o.steps for o in chosen if o.steps]
    compute_s = busy_s - data_s - saved_s
    timing = step(
        compute_s=compute_s,
        data_s=data_s,
        collective=priced(collective, chosen[0].pool.is_gpu, request.reduced_by_script),
        gradient_nbytes=request.wire_nbytes(workload.gradient_nbytes),
        ranks=ranks,
        link=link,
        overlap=overlap_of(chosen),
        compute_spread=max(o.compute_spread for o in chosen),
        link_spread=link_spread,
        servers=max(1, serving),
        nodes=nodes,
        sharded=sharded,
        micro_batches=micro_batches,
        tensors=workload.tensors,
        bucket_nbytes=request.bucket_nbytes,
        packing=1.0 if serving else max(o.packing for o in chosen),
        exchanged_s=exchanged_s(request, workload, chosen, nodes, ranks, link, compute_s / micro_batches),
    )
    measured = len(known) == len(chosen) and not apart
    if apart:
        messages, _ = message_link_of(chosen, [p.nodes for p in parts])
        server = next(p.option for p, s in zip(parts, shares, strict=True) if 0 in s)
        timing = round_of(
            timing,
            ranks - serving,
            workload.gradient_nbytes,
            messages,
            request.staleness_bound,
            own_update_s=update_part_s(slowest.option),
            server_update_s=server.update_once_s,
        )
    if measured:
        busiest = max(o.ranks_per_node for o in chosen)
        to_curve = slowest.option.ratio.at(share / slowest.option.micro_batches)
        one_s = (busy_s - data_s) * to_curve / slowest.option.slowdown
        nbytes = workload.gradient_nbytes
        ratio = float(communication_ratio(collective, nbytes, ranks, nodes, link, workload.tensors, request.backend))
        at = (np.array([float(x)]) for x in (nodes, busiest, ranks, share, one_s, ratio))
        timing = _as_measured(timing, known, Runs(*at))
    sizes = "+".join(str(b) for s in shares for b in s) if ranks <= 8 else f"{request.global_batch} samples"
    names = group_names([p.option.label for p in parts])
    how = _how(collective, request, chosen[0].pool.is_gpu) if ranks > 1 else "alone"
    how += ", sharded optimizer" if sharded and ranks > 1 else ""
    how += f", {micro_batches} micro-batches" if micro_batches > 1 else ""
    how += computed(workload.precision, recomputes=workload.recomputes)
    return Choice(
        summary=f"{describe(parts)}, {how}, {sizes}",
        groups=tuple(
            Group(
                name,
                p.option.label,
                p.option.pool.is_gpu,
                p.nodes,
                p.option.ranks_per_node,
                tuple(s),
                p.option.ranks_per_node * _cpus(p.option, max(s), timing, link),
                p.option.cores,
            )
            for name, p, s in zip(names, parts, shares, strict=True)
        ),
        collective=collective,
        prediction=_prediction(
            parts, shares, timing, request, held, _bottleneck(timing, slowest, share, collective, link, measured)
        ),
        strategy="Optimizer" if sharded else "Data",
        micro_batches=micro_batches,
        precision=workload.precision,
        recomputes=workload.recomputes,
    )


def _with(parts: Sequence[Part], options: Sequence[Option]) -> list[Part]:
    return [replace(part, option=option) for part, option in zip(parts, options, strict=True)]


def _as_measured(formulas: Step, known: Sequence[Posterior], run: Runs) -> Step:
    """Return the predicted step of ``run``, based on measured multi-device steps.

    ``run``: placement and batch of the step, as arrays with one element. ``known``: distribution of step times (without
    input time) for each device type, fitted to measured steps. The distribution with the largest median predicts the
    step time. ``formulas``: the same step, predicted without measured multi-device steps. The computing time and the
    input time come from ``formulas``. All time beyond them counts as communication.
    """
    said = [predicted(p, run) for p in known]
    step_s, spread = max((float(median[0]), float(deviation[0])) for median, deviation in said)
    compute_s = min(formulas.compute_s, step_s)
    whole_s = step_s + formulas.data_s
    return Step(compute_s, step_s - compute_s, formulas.data_s, 0.0, spread * step_s / whole_s)


def _cpus(option: Option, share: int, timing: Step, link: Link) -> float:
    """Return the number of CPUs that a pod should request for one of its ranks.

    It is ``option.cores``. A GPU rank has at least one CPU, so that kernel launches never wait, and more if they
    shorten steps (``loader_cpus``). If a CPU rank has at most one, this is multiplied by the fraction of the step in
    which the rank uses it, or by ``LEAST_BUSY`` if the fraction is lower than that. More CPUs are not multiplied,
    because the rank starts a thread for each whole CPU.

    The rank uses its CPUs while it computes and fetches samples; the 90th percentile of this time counts. It also uses
    them to copy data during communication. Therefore, the fraction (bandwidth of ``link``) / (bandwidth between
    processes of a node) of the communication time counts. MPI's busy waiting does not count. ``share``: the rank's
    local batch size in samples; 0 for a parameter server. ``timing``: the predicted step.
    """
    if option.pool.is_gpu or option.cores > 1:
        return option.cores
    own_s = option.curve.seconds(share) * exp(P90 * option.compute_spread) if share else 0.0
    copying = min(1.0, link.bandwidth_Bps / option.device.peer_bandwidth_Bps)
    whole_s = max(own_s, timing.compute_s + timing.data_s) + timing.communication_s
    busy = (own_s + copying * timing.communication_s) / whole_s
    return option.cores * max(LEAST_BUSY, busy)


def _how(collective: CollectiveName, request: Request, is_gpu: bool) -> str:
    """Describe how ranks combine gradients, such as 'Ring' or 'ParameterServer within 3 steps' (a staleness bound)."""
    if collective != "Torch" and priced(collective, is_gpu, request.reduced_by_script) == "NCCL":
        return f"{collective} (NCCL)"
    within = {
        "Synchronous": "",
        "Asynchronous": ", asynchronous",
        "StaleSynchronous": f" within {request.staleness_bound} steps",
    }
    return f"{collective}{within[request.synchronization]}"


def _pod_nbytes(part: Part, shares: Sequence[int], held: Workload) -> int:
    return part.option.pod_nbytes(held, ceil(max(shares) / part.option.micro_batches))


def _prediction(
    parts: Sequence[Part], shares: list[list[int]], timing: Step, request: Request, workload: Workload, bottleneck: str
) -> Prediction:
    step_s = timing.step_s
    held = [(p, ceil(max(s) / p.option.micro_batches)) for p, s in zip(parts, shares, strict=True)]  # in a micro-batch
    pods = tuple(_pod_nbytes(p, s, workload) for p, s in zip(parts, shares, strict=True))
    first_s = max(p.option.fetching.first_s(b) for p, b in held)
    at_work = [(p.option, max(s)) for p, s in zip(parts, shares, strict=True)]
    evaluating_s = evaluations_s(request, workload, [(o.computing, o.cores, b, o.micro_batches) for o, b in at_work])
    total_s = step_s * request.total_steps + first_s + evaluating_s
    power_W = usd = alone = 0.0
    for (part, in_turn), batches in zip(held, shares, strict=True):
        option = part.option
        seconds = {b: option.curve.seconds(b) for b in set(batches)}
        busy = sum(map(seconds.__getitem__, filter(None, batches))) / step_s
        active = active_part(workload, option.device, in_turn)
        power_W += energy.rank_watts(option.device, busy / part.ranks, active) * part.ranks
        usd += energy.cost_usd(option.device, total_s, part.ranks)
        alone += part.ranks / option.alone_s(request.global_batch)
    made = Prediction(
        step_s=step_s,
        step_p90_s=timing.p90_s,
        compute_s=timing.compute_s,
        communication_s=timing.communication_s,
        total_s=total_s,
        samples_per_s=request.global_batch / step_s,
        memory_nbytes=max(p.option.needed_nbytes(workload, b) for p, b in held),
        energy_J=power_W * total_s,
        cost_usd=request.prices.with_energy_usd(usd, power_W * total_s),
        bottleneck=bottleneck,
        carbon_g=request.carbon_g(power_W * total_s, total_s),
        basis=basis_of([p.option for p in parts]),
        host_memory_nbytes=max(pods),
        pods_nbytes=pods if len(pods) > 1 else (),
        efficiency=min(1.0, 1 / (step_s * alone)),
        data_s=timing.data_s,
        total_p90_s=total_s * exp(P90 * timing.spread),
        evaluations_s=evaluating_s,
    )
    on_a_node = max(option.ranks_per_node * share for option, share in at_work)
    return whole_training(made, request, workload, [p.fetching_nodes for p in parts], on_a_node / request.global_batch)


def basis_of(chosen: Sequence[Option]) -> Basis:
    """Return where the constants of a plan come from: the weakest source among its options.

    They are, from the strongest: runs of the job's model, the hardware probe, and data sheets.
    """
    if all(o.learned and o.learned.points for o in chosen):
        return "profile"
    return "probe" if all(o.hardware or (o.learned and o.learned.points) for o in chosen) else "catalogue"


def _bottleneck(timing: Step, slowest: Part, share: int, collective: str, link: Link, measured: bool) -> str:
    """Return a text that names the part of the step that takes the most time, its percentage, and its cause.

    Example: 'communication 63 %: Ring over the network, 10 Gbit/s'. ``slowest``, ``share``: the group of nodes with the
    slowest rank, and the local batch size of that rank. ``measured``: True if measured multi-device steps predict the
    communication.
    """
    option = slowest.option
    by = (
        ""
        if option.fetching.workers
        else "; batches are loaded between steps, and would be prefetched with more CPUs per pod"
    )
    over = "(measured on several devices)" if measured else f"over {link.name}, {rate(link.bandwidth_Bps)}"
    texts = {
        timing.communication_s: f"communication {{}}: {collective} {over}",
        timing.data_s: f"data {{}}: {samples(share)} for {option.label}, mostly {option.fetching.mostly}{by}",
        timing.waiting_s: "waiting {}: ranks wait for each other",
        timing.compute_s: f"computing {{}}: {samples(share)} on {option.label}",
    }
    longest = max(texts)
    text = texts[longest].format(f"{100 * longest / timing.step_s:.0f} %")
    if longest == timing.compute_s:
        layout = Layout(option.ranks_per_node, option.cores, option.machine_nodes)
        text += cores_text(option.pool, layout, option.hardware)
    fixed, waits = option.curve.seconds(0) / timing.compute_s, timing.data_s > SHOWN_INPUT * timing.step_s
    if longest == timing.compute_s and waits and option.fetching.sets_pace(longest, share):
        whole = f"input takes {duration(longest + timing.data_s)} of the step, mostly {option.fetching.mostly}"
        text += f"; {whole}, so faster computing does not shorten it"
    elif longest == timing.compute_s and fixed > 0.3:
        text += f"; {100 * fixed:.0f} % of the computing time does not depend on the batch size"
    return text
