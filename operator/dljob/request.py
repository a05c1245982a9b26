"""Between the API and the planner: a DLJob becomes a question, a decision becomes status and contract.

Pure. Users: ``reconcile`` for jobs in the cluster; ``service`` and ``cli`` for manifests that are not there yet.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from math import ceil

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from dljob import contract
from dljob.api import (
    BatchCandidate,
    BatchChoice,
    Candidate,
    Collective,
    DLJobSpec,
    Framework,
    OptimizerName,
    ParallelismStrategy,
    PlanGroup,
    PlanningMode,
    PlanStatus,
    Predicted,
    Rejected,
    ScalingRule,
    duration_s,
)
from dljob.api.base import AUTO_INTERVAL, PATTERNS
from dljob.cluster import quantity
from dljob.perf.datasets import DATASETS
from dljob.perf.models import MODELS
from dljob.planner import BatchChoice as ChosenBatch
from dljob.planner import Batches, Choice, Decision, FixedChoice, Group, Kept, Prediction, Request
from dljob.planner.modelsplit import MICRO_BATCHES_PER_STAGE
from dljob.planner.types import CollectiveName

_COLLECTIVES: dict[Collective, CollectiveName | None] = {
    Collective.AUTO: None,
    Collective.RING: "Ring",
    Collective.MPI: "MPI",
    Collective.TREE: "Tree",
    Collective.BUTTERFLY: "Butterfly",
    Collective.HALVING_DOUBLING: "HalvingDoubling",
    Collective.PARAMETER_SERVER: "ParameterServer",
    Collective.TORCH: "Torch",
}

TCP_SEGMENT_NBYTES = 56 * 2**10
"""Below Open MPI's eager limit over TCP (64 KiB), so that a segment needs no handshake."""


def in_words(error: ValidationError, root: str = "spec") -> str:
    """What is wrong with a spec: ``spec.nodes.min: found 0, expected …``, problems separated by semicolons."""
    return "; ".join(_in_words(item, root) for item in error.errors())


def _in_words(error: ErrorDetails, root: str) -> str:
    where = ".".join([root, *(str(part) for part in error["loc"])])
    if error["type"] == "value_error":  # a rule, which names its own field
        rule = error["msg"].removeprefix("Value error, ")
        return f"{where}.{rule}{_found(rule, error['input'])}"
    if error["type"] == "missing":
        return f"{where}: found nothing, expected a value; add it"
    if error["type"] == "extra_forbidden":
        return f"{where}: found an unknown field; remove it, or see kubectl explain dljob.spec"
    return f"{where}: found {error['input']!r:.200}, expected {_expected(error)}"


def _expected(error: ErrorDetails) -> str:
    """In words that follow "expected"."""
    if meaning := PATTERNS.get(str(error.get("ctx", {}).get("pattern"))):
        return meaning
    message = error["msg"]
    if (rest := message.removeprefix("Input should be ")) != message:
        return f"a number {rest}" if rest.startswith(("greater", "less")) else rest
    return f"otherwise: {message[:1].lower()}{message[1:]}"


def _found(rule: str, given: object) -> str:
    """What stands in the fields that a rule speaks of, of the object that breaks it."""
    found = {name: _at(given, name) for name in re.findall(r"[A-Za-z][A-Za-z.]*[A-Za-z]", rule)}
    known = [name for name, value in found.items() if value is not None]
    inner = [name for name in known if not any(other.startswith(f"{name}.") for other in known)]
    texts = [f"{name}: {json.dumps(found[name], default=str):.100}" for name in inner]
    return f" (found {', '.join(texts)})" if texts else " (found none of them)"


def _at(given: object, path: str) -> object:
    for name in path.split("."):
        given = given.get(name) if isinstance(given, Mapping) else None
    return given


def train_samples(spec: DLJobSpec) -> int:
    """Samples of one epoch: the built-in dataset's training part, or dataset.samples."""
    if spec.dataset.name is not None:
        return DATASETS[spec.dataset.name.value].train_samples
    assert spec.dataset.samples is not None, "a rule of the API requires samples with uri"
    return spec.dataset.samples


def total_steps(spec: DLJobSpec) -> int:
    """Optimizer steps of the whole training; a partial last batch of an epoch is a step."""
    if spec.steps is not None:
        return spec.steps
    assert spec.epochs is not None, "a rule of the API requires epochs or steps"
    return spec.epochs * ceil(train_samples(spec) / spec.global_batch_size)


def profile_key(spec: DLJobSpec) -> str:
    """Model part of the DLProfile's key: what makes two jobs cost the same per sample.

    A built-in model's name, with the dataset unless it is the one that the model is made for (its samples' shape sets
    the cost); else a digest of the user's program.
    """
    if spec.trainer.command:
        program = [spec.trainer.image, spec.trainer.command, spec.trainer.args, spec.model.manifest()]
        return f"program-{hashlib.sha256(json.dumps(program).encode()).hexdigest()[:12]}"
    assert spec.model.name is not None, "a rule of the API requires a command with hints"
    name = spec.model.name.value
    if spec.dataset.name is not None:
        return name if spec.dataset.name.value == MODELS[name][1] else f"{name}.{spec.dataset.name.value}"
    return f"{name}.data-{hashlib.sha256(str(spec.dataset.uri).encode()).hexdigest()[:8]}"


def data_key(spec: DLJobSpec) -> str:
    """What makes two jobs of a model train on the same data, and so with the same noise in their gradients."""
    if spec.dataset.name is not None:
        return spec.dataset.name.value
    return f"data-{hashlib.sha256(str(spec.dataset.uri).encode()).hexdigest()[:8]}"


def learning_rate_rule(spec: DLJobSpec, batch: int) -> tuple[ScalingRule, int] | None:
    """By which rule the learning rate is adapted to a batch, and the batch that it is for; None: it is for this one.

    What the spec says; else, for a batch that the planner chose, AdaScale for SGD (Johnson et al. 2020) and the root
    for Adam and AdamW, whose steps do not grow with the gradient (Malladi et al. 2022). A rate that is searched for is
    found with the batch chosen.
    """
    told = spec.optimizer.learning_rate_scaling
    if told is not None:
        return told.rule, told.base_batch_size
    if batch == spec.global_batch_size or spec.optimizer.find_learning_rate:
        return None
    sgd = spec.optimizer.name is OptimizerName.SGD
    return ScalingRule.ADA_SCALE if sgd else ScalingRule.SQUARE_ROOT, spec.global_batch_size


def _batches(spec: DLJobSpec, kept: Kept | None) -> Batches | None:
    """What the planner may choose the batch from; no more than the data has samples."""
    if spec.batch_size_range is None:
        return None
    base, epoch = spec.global_batch_size, train_samples(spec)
    most = max(base, min(spec.batch_size_range.max, epoch))
    return Batches(spec.batch_size_range.min or base, most, data_key(spec), epoch, kept)


def planner_request(name: str, spec: DLJobSpec, kept: Kept | None = None) -> Request:
    """The question that a job's spec asks of the planner. ``kept``: the batch of a job that has begun."""
    hints, resources, torchrun = spec.model.hints, spec.resources, spec.trainer.framework is Framework.TORCHRUN
    collective, strategy = _COLLECTIVES[spec.collective], spec.parallelism.strategy
    if strategy is ParallelismStrategy.AUTO and spec.trainer.command:
        strategy = ParallelismStrategy.DATA  # whether a program's optimizer can be shared out is not known
    if spec.gradient_compression is not None:
        collective = "Ring"  # whose traffic it has, at half the bytes
    apart, sample_nbytes = spec.parallelism.apart, spec.dataset.sample_bytes
    return Request(
        job=name,
        global_batch=spec.global_batch_size,
        total_steps=total_steps(spec),
        batches=_batches(spec, kept),
        model=spec.model.name.value if spec.model.name else None,
        profile=profile_key(spec),
        dataset=spec.dataset.name.value if spec.dataset.name else None,
        like=hints.like.value if hints and hints.like else None,
        parameters=hints.parameters if hints else None,
        flops_per_sample=hints.flops_per_sample if hints else None,
        activation_nbytes_per_sample=hints.activation_bytes_per_sample if hints else None,
        sample_nbytes=sample_nbytes,
        dataset_samples=spec.dataset.samples if spec.dataset.uri else None,
        optimizer=spec.optimizer.name.value,
        momentum=spec.optimizer.momentum,
        nodes_min=max(2, spec.nodes.min) if apart else spec.nodes.min,  # a worker, and a server
        nodes_max=spec.nodes.max,
        devices=spec.devices,
        node_selector=spec.scheduling.node_selector,
        tolerations=spec.scheduling.tolerations,
        cpu_per_pod=float(quantity(resources.cpu)) if resources.cpu else None,
        cpu_limit_per_pod=float(quantity(resources.cpu_limit)) if resources.cpu_limit else None,
        memory_per_pod_nbytes=int(quantity(resources.memory)) if resources.memory else None,
        minimize=spec.objective.minimize.value,
        deadline_s=duration_s(spec.objective.deadline) if spec.objective.deadline else None,
        # A torchrun script sums with torch.distributed whatever the plan says, and knows nothing of shares.
        collective=collective or ("Torch" if torchrun else "ParameterServer" if apart else None),
        strategy=strategy.value,
        whole="optimizer.findLearningRate needs ranks that hold the whole model"
        if spec.optimizer.find_learning_rate
        else None,
        stages=spec.parallelism.stages,
        micro_batches=micro_batches(spec),
        compressed=spec.gradient_compression is not None,
        synchronization=spec.parallelism.synchronization.value,
        staleness_bound=spec.parallelism.staleness_bound,
        uneven=spec.planning.uneven and not torchrun,
        fixed=tuple(FixedChoice(g.device, g.nodes, g.ranks_per_node, g.batch_per_rank) for g in spec.planning.groups)
        if spec.planning.mode is PlanningMode.FIXED
        else (),
        candidates_kept=spec.planning.candidates,
    )


def micro_batches(spec: DLJobSpec) -> int:
    """Parts of a batch that pass a pipeline one after the other, each with a sample; 1 where there is no pipeline."""
    default = MICRO_BATCHES_PER_STAGE * (spec.parallelism.stages or 0)
    return min(spec.parallelism.micro_batches or max(1, default), spec.global_batch_size)


def figures(value: float) -> float:
    """Four significant figures: more than any prediction is good for, and what people can read in a column."""
    return float(f"{value:.4g}")


def predicted(prediction: Prediction) -> Predicted:
    return Predicted(
        step_seconds=figures(prediction.step_s),
        step_seconds_p90=figures(prediction.step_p90_s),
        compute_seconds=figures(prediction.compute_s),
        communication_seconds=figures(prediction.communication_s),
        total_seconds=figures(prediction.total_s),
        samples_per_second=figures(prediction.samples_per_s),
        energy_joules=None if prediction.energy_J is None else figures(prediction.energy_J),
        cost=None if prediction.cost_usd is None else figures(prediction.cost_usd),
        memory_bytes=prediction.memory_nbytes,
        bottleneck=prediction.bottleneck,
        basis=prediction.basis,
    )


def _batch_choice(spec: DLJobSpec, found: ChosenBatch) -> BatchChoice:
    rule = learning_rate_rule(spec, found.chosen)
    rows = []
    for option in found.options:
        p = option.prediction
        known = {
            "step_seconds": p and figures(p.step_s),
            "total_seconds": p and figures(p.total_s),
            "energy_joules": p and p.energy_J and figures(p.energy_J),
            "cost": p and p.cost_usd and figures(p.cost_usd),
        }
        rows.append(
            BatchCandidate(
                global_batch_size=option.batch,
                chosen=option.batch == found.chosen,
                efficiency=figures(option.efficiency),
                steps=option.steps,
                reason=option.reason or None,
                **known,
            )
        )
    return BatchChoice(
        global_batch_size=found.chosen,
        steps=found.steps,
        message=found.text,
        noise_scale=None if found.noise is None else figures(found.noise),
        learning_rate_scaling=rule[0].value if rule else None,
        candidates=tuple(rows),
    )


def _candidate(choice: Choice, chosen: Choice) -> Candidate:
    return Candidate(summary=choice.summary, chosen=choice == chosen, predicted=predicted(choice.prediction))


def plan_status(spec: DLJobSpec, decision: Decision, number: int, digest: str) -> PlanStatus:
    """What ``status.plan`` says about an accepted decision; ``digest`` is the contract plan's."""
    chosen = decision.chosen
    return PlanStatus(
        number=number,
        digest=digest,
        summary=chosen.summary,
        groups=tuple(
            PlanGroup(name=g.name, device=g.device, nodes=g.nodes, ranks=len(g.shares), batch_per_rank=g.shares)
            for g in chosen.groups
        ),
        nodes=sum(g.nodes for g in chosen.groups),
        ranks=sum(len(g.shares) for g in chosen.groups),
        collective=chosen.collective,
        parallelism=_parallelism(spec, chosen),
        micro_batches=chosen.micro_batches if chosen.strategy == "Pipeline" else None,
        batch_choice=_batch_choice(spec, decision.batch) if decision.batch else None,
        predicted=predicted(chosen.prediction),
        candidates=tuple(_candidate(c, chosen) for c in decision.candidates),
        trade_offs=tuple(_candidate(c, chosen) for c in decision.trade_offs if len(decision.trade_offs) > 1),
        next_measurement=decision.next_measurement,
        rejected=tuple(Rejected(summary=r.summary, reason=r.reason) for r in decision.refusals),
    )


def _ranks(job: str, groups: tuple[Group, ...], domain: str) -> tuple[contract.Rank, ...]:
    ranks: list[contract.Rank] = []
    for group in groups:
        for i, share in enumerate(group.shares):
            node, local_rank = divmod(i, group.ranks_per_node)
            pod = f"{job}-{group.name}-{node}"
            ranks.append(
                contract.Rank(
                    rank=len(ranks),
                    pod=pod,
                    host=f"{pod}.{domain}",
                    group=group.name,
                    device=group.device,
                    local_rank=local_rank,
                    gpu=group.is_gpu,
                    share=share,
                    role=contract.Role.WORKER if share else contract.Role.SERVER,
                )
            )
    return tuple(ranks)


def _dataset(spec: DLJobSpec) -> contract.DatasetRef:
    if spec.dataset.name is not None:
        return contract.DatasetRef(name=spec.dataset.name.value, samples=train_samples(spec))
    return contract.DatasetRef(path=spec.dataset.path, samples=spec.dataset.samples)


def _measures(spec: DLJobSpec, chosen: Choice, strategy: str) -> bool:
    """Whether ranks may find out by themselves how to sum: the model's choice is then but its expectation."""
    several = sum(len(group.shares) for group in chosen.groups) > 1
    theirs = spec.collective is Collective.AUTO and spec.gradient_compression is None and strategy == "Data"
    return several and theirs and chosen.collective in contract.MEASURABLE


def _parallelism(spec: DLJobSpec, chosen: Choice) -> str:
    """As asked for, even on one rank, which shares nothing out."""
    asked = spec.parallelism.strategy
    return chosen.strategy if asked is ParallelismStrategy.AUTO else asked.value


def _min_ranks(spec: DLJobSpec, choice: Choice) -> int:
    """Fewest ranks the trainer may go on with: those of the smallest ``nodes.min`` nodes, and the servers; all of them
    where each has a part of the model."""
    if choice.in_parts:
        return sum(len(g.shares) for g in choice.groups)
    servers = sum(share == 0 for g in choice.groups for share in g.shares)
    per_node = sorted(g.ranks_per_node for g in choice.groups for _ in range(g.nodes))
    return min(sum(per_node), max(1, sum(per_node[: spec.nodes.min]) + servers))


def _checkpoint(spec: DLJobSpec) -> contract.CheckpointRef:
    given = contract.CheckpointRef(enabled=spec.checkpoint.enabled, keep=spec.checkpoint.keep)
    if spec.checkpoint.interval == AUTO_INTERVAL:
        return given.model_copy(update={"choose_interval": True})
    return given.model_copy(update={"interval_s": duration_s(spec.checkpoint.interval)})


def _grace_s(spec: DLJobSpec) -> float:
    """Seconds a pod gets to end, pod-template overrides included: what its last checkpoint must fit in."""
    found = [override.spec.get("terminationGracePeriodSeconds") for override in spec.pod_template_overrides]
    changed = [seconds for seconds in found if isinstance(seconds, int) and seconds > 0]
    return float([spec.run_policy.termination_grace_period_seconds, *changed][-1])


def contract_plan(
    name: str,
    namespace: str,
    uid: str,
    spec: DLJobSpec,
    decision: Decision,
    number: int,
    term: int,
    service: str,
    cluster_domain: str,
) -> contract.Plan:
    """The decision as the trainer reads it.

    Pods are named as their StatefulSets name them, ``<job>-<group>-<index>``, and found through the headless
    ``service`` as ``<pod>.<service>.<namespace>.svc.<cluster_domain>``.
    """
    chosen, optimizer = decision.chosen, spec.optimizer
    spread = sum(g.nodes for g in chosen.groups) > 1
    strategy = _parallelism(spec, chosen)
    batch = decision.batch.chosen if decision.batch else spec.global_batch_size
    # With another batch than the spec's there are steps for the same progress, which need not be whole epochs.
    steps = decision.batch.steps if decision.batch and batch != spec.global_batch_size else spec.steps
    rule = learning_rate_rule(spec, batch)
    return contract.Plan(
        job=name,
        namespace=namespace,
        uid=uid,
        number=number,
        term=term,
        ranks=_ranks(name, chosen.groups, f"{service}.{namespace}.svc.{cluster_domain}"),
        global_batch=batch,
        collective=chosen.collective,
        measure_collective=_measures(spec, chosen, strategy),
        compression=spec.gradient_compression.value if spec.gradient_compression else None,
        parallelism=strategy,
        micro_batches=chosen.micro_batches,
        synchronization=spec.parallelism.synchronization.value,
        staleness_bound=spec.parallelism.staleness_bound,
        **({"segment_nbytes": TCP_SEGMENT_NBYTES} if spread else {}),
        model=contract.ModelRef(
            name=spec.model.name.value if spec.model.name else None,
            command=(*spec.trainer.command, *spec.trainer.args),
            framework=spec.trainer.framework.value,
            sync_batch_norm=spec.model.sync_batch_norm,
        ),
        dataset=_dataset(spec),
        optimizer=contract.OptimizerRef(
            name=optimizer.name.value,
            learning_rate=optimizer.learning_rate,
            momentum=optimizer.momentum,
            weight_decay=optimizer.weight_decay,
            find_rate=optimizer.find_learning_rate,
            scaling=rule[0].value if rule else None,
            base_batch=rule[1] if rule else None,
        ),
        epochs=spec.epochs if steps is None else None,
        steps=steps,
        seed=spec.seed,
        # Shares that the user dictates stay, and so do those of a torchrun script, which knows nothing of shares.
        rebalance=spec.planning.uneven
        and all(group.batch_per_rank is None for group in spec.planning.groups)
        and spec.trainer.framework is not Framework.TORCHRUN
        and not chosen.in_parts
        and not spec.parallelism.apart,
        checkpoint=_checkpoint(spec),
        compare_steps=spec.run_policy.compare_parameters_steps,
        min_ranks=_min_ranks(spec, chosen),
        backoff_limit=spec.run_policy.backoff_limit,
        grace_s=_grace_s(spec),
        expected=contract.Expectation(
            step_s=chosen.prediction.step_s,
            step_p90_s=chosen.prediction.step_p90_s,
            total_s=chosen.prediction.total_s,
        ),
    )
