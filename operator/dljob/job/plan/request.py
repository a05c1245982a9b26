"""Translate a job's spec into a request to the planner."""

from dataclasses import dataclass
from math import ceil
from typing import Literal

from dlcontract import COLLECTIVES, CollectiveName, Plan
from dlcontract import Precision as PlannedPrecision
from dljob.api import (
    ActivationCheckpointing,
    Collective,
    DLJobSpec,
    Framework,
    GradientAccumulation,
    OptimizerName,
    ParallelismStrategy,
    PlanningMode,
    Precision,
    ScalingRule,
    SpotUse,
    duration_s,
)
from dljob.api.base import AUTO_INTERVAL
from dljob.api.spec.dataset import DEFAULT_SIZE
from dljob.api.spec.model import ModelPairs
from dljob.api.spec.planning import MAX_NODES
from dljob.cluster import quantity
from dljob.cluster.site import ASSUMED_SITE, Site
from dljob.job.identity import data_key, profile_key
from dljob.perf.resources.data_fetch import SOURCE_BANDWIDTH_Bps
from dljob.perf.workload.datasets import DATASETS
from dljob.perf.workload.workload import StatedPairs
from dljob.planner import Batches, FixedChoice, Request, RunningBatch, Storage, VolumeLimit
from dljob.planner.search.hybrids import MICRO_BATCHES_PER_STAGE


def train_samples(spec: DLJobSpec) -> int:
    """Return the number of samples in one epoch: the training part of a built-in dataset, or dataset.samples."""
    if spec.dataset.name is not None:
        return DATASETS[spec.dataset.name.value].train_samples
    assert spec.dataset.samples is not None, "a rule of the API requires samples with uri"
    return spec.dataset.samples


def total_steps(spec: DLJobSpec) -> int:
    """Return the number of optimizer steps of the whole training, with the batch size in the spec.

    A partial last batch of an epoch counts as a step. The spec must have steps, or epochs and a dataset.
    """
    if spec.steps is not None:
        return spec.steps
    assert spec.epochs is not None, "a rule of the API requires epochs or steps"
    return spec.epochs * ceil(train_samples(spec) / spec.batch_size)


def known_steps(spec: DLJobSpec) -> int:
    """Return ``total_steps``, or 0 if the spec lacks the fields that it follows from."""
    counted = spec.epochs is not None and spec.dataset.given and spec.global_batch_size is not None
    return total_steps(spec) if spec.steps is not None or counted else 0


def learning_rate_rule(spec: DLJobSpec, batch: int) -> tuple[ScalingRule, int] | None:
    """Return (rule to scale the learning rate, batch size for which the spec's rate is meant); None for no scaling.

    ``batch``: global batch size of the plan. If the spec has a rule, return this rule. Otherwise, scale only if the
    planner chose another batch size than the spec's: by AdaScale for SGD (Johnson et al. 2020), and by the square root
    for Adam and AdamW, whose steps do not grow with the gradient (Malladi et al. 2022). With a learning-rate search and
    no rule in the spec, return None, because the search already uses the chosen batch size.
    """
    requested = spec.optimizer.learning_rate_scaling
    if requested is not None:
        return requested.rule, requested.base_batch_size
    if spec.missing or batch == spec.global_batch_size or spec.optimizer.find_learning_rate:
        return None
    sgd = spec.optimizer.name is OptimizerName.SGD
    return ScalingRule.ADA_SCALE if sgd else ScalingRule.SQUARE_ROOT, spec.batch_size


def _batches(spec: DLJobSpec, running: RunningBatch | None) -> Batches | None:
    """Return the range of batch sizes that the planner may choose from, or None if the spec has no range.

    The upper end is at most the number of samples in an epoch, but not below the spec's own batch size. ``running``:
    the batch size of a job that has started, which the planner must not change; None for a new job.
    """
    if spec.batch_size_range is None:
        return None
    base, epoch = spec.batch_size, train_samples(spec)
    largest = max(base, min(spec.batch_size_range.max, epoch))
    return Batches(spec.batch_size_range.min or base, largest, data_key(spec), epoch, running)


def planner_request(
    name: str,
    spec: DLJobSpec,
    running: RunningBatch | None = None,
    site: Site = ASSUMED_SITE,
    begin_s: float = 0.0,
    volumes: tuple[VolumeLimit, ...] = (),
) -> Request:
    """Return the request with which the planner is asked to plan a job with this spec. ``name``: name of the job.

    ``running``: the batch size of a job that has started, which the planner must not change; None for a new job.
    ``site``: what the administrator states about the cluster. ``begin_s``: seconds from midnight UTC to the start.
    ``volumes``: the claims of the job that only some nodes can mount.
    """
    hints, resources, framework = spec.model.hints, spec.resources, spec.trainer.framework
    collective, strategy = _collective(spec.collective), spec.parallelism.strategy
    if strategy is ParallelismStrategy.AUTO and spec.trainer.command:
        strategy = ParallelismStrategy.DATA  # A script's optimizer may not be shardable.
    if spec.gradient_compression is not None:
        collective = "Ring"  # Compressed gradients have the ring's traffic with half the bytes.
    asynchronous, sample_nbytes = spec.parallelism.asynchronous, spec.dataset.sample_bytes
    return Request(
        job=name,
        global_batch=spec.global_batch_size or 0,
        total_steps=known_steps(spec),
        batches=_batches(spec, running),
        model=spec.model.name.value if spec.model.name else None,
        profile=profile_key(spec),
        dataset=spec.dataset.name.value if spec.dataset.name else None,
        like=hints.like.value if hints and hints.like else None,
        trained_parameters=hints.trained_parameters if hints else None,
        parameters=hints.parameters if hints else None,
        flops_per_sample=hints.flops_per_sample if hints else None,
        activation_nbytes_per_sample=hints.activation_bytes_per_sample if hints else None,
        checkpointed_nbytes_per_sample=hints.checkpointed_activation_bytes_per_sample if hints else None,
        dense_output_nbytes=hints.dense_output_bytes_per_sample if hints else None,
        largest_activation_nbytes=hints.largest_activation_bytes_per_sample if hints else None,
        largest_parameter_nbytes=hints.largest_parameter_bytes if hints else None,
        largest_unit=hints.largest_unit_parameters if hints else None,
        frozen_nbytes=(hints.frozen_bytes or 0) if hints else 0,
        pairs=stated_pairs(hints.pairs) if hints and hints.pairs else None,
        # Another image may contain an earlier release of the trainer, or a build of torch with its own allocator.
        reuses_blocks=framework is Framework.DLTRAIN and spec.trainer.image is None,
        sample_nbytes=sample_nbytes,
        dataset_samples=spec.dataset.samples if spec.dataset.uri else None,
        optimizer=spec.optimizer.name.value,
        momentum=spec.optimizer.momentum,
        nodes_min=max(2, spec.nodes.min) if asynchronous else spec.nodes.min,  # at least one worker and one server
        nodes_max=spec.nodes.max if spec.nodes.max < MAX_NODES else None,
        takes_most=spec.elastic_script,
        devices=spec.devices,
        node_selector=spec.scheduling.node_selector,
        tolerations=spec.scheduling.tolerations,
        cpu_per_pod=float(quantity(resources.cpu)) if resources.cpu else None,
        cpu_limit_per_pod=float(quantity(resources.cpu_limit)) if resources.cpu_limit else None,
        threads_per_rank=spec.trainer.threads,
        memory_per_pod_nbytes=int(quantity(resources.memory)) if resources.memory else None,
        minimize=spec.objective.minimize.value,
        deadline_s=duration_s(spec.objective.deadline) if spec.objective.deadline else None,
        # Torchrun scripts and MPI programs reduce gradients themselves whatever the plan says, and ignore shares.
        collective=collective or _REDUCED_BY_SCRIPT.get(framework) or ("ParameterServer" if asynchronous else None),
        reduced_by_script=framework in _REDUCED_BY_SCRIPT,
        strategy=strategy.value,
        deferred_init=bool(spec.parallelism.deferred_init),
        no_split_reason="optimizer.findLearningRate needs ranks that hold the whole model"
        if spec.optimizer.find_learning_rate
        else None,
        stages=spec.parallelism.stages,
        replicas=spec.parallelism.replicas or (None if spec.parallelism.strategy is ParallelismStrategy.AUTO else 1),
        micro_batches=micro_batches(spec),
        may_divide_further=spec.parallelism.stages is not None and spec.parallelism.micro_batches is None,
        chooses_micro_batches=chooses_micro_batches(spec),
        may_accumulate=_may_accumulate(spec) and spec.parallelism.micro_batches is None,
        precision=precision(spec),
        float32_reason=_float32_reason(spec),
        may_scale_loss=not spec.optimizer.find_learning_rate,
        recomputation=(spec.activation_checkpointing or ActivationCheckpointing.NEVER).value,
        no_recomputation_reason=_no_recomputation_reason(spec),
        compressed=spec.gradient_compression is not None,
        synchronization=spec.parallelism.synchronization.value,
        staleness_bound=spec.parallelism.staleness_bound,
        uneven=spec.planning.uneven and framework not in _REDUCED_BY_SCRIPT,
        fixed=tuple(FixedChoice(g.device, g.nodes, g.ranks_per_node, g.batch_per_rank) for g in spec.planning.groups)
        if spec.planning.mode is PlanningMode.FIXED
        else (),
        candidates_kept=spec.planning.candidates,
        prices=site.prices,
        energy=site.energy,
        begin_s=begin_s,
        topology=site.topology,
        spot=site.spot,
        avoid_spot=spec.scheduling.spot is SpotUse.AVOID,
        checkpoints=spec.checkpoint.enabled,
        checkpoints_in_store=spec.checkpoint.enabled and spec.checkpoint.uri is not None,
        checkpoint_interval_s=None
        if spec.checkpoint.interval == AUTO_INTERVAL
        else duration_s(spec.checkpoint.interval),
        storage=storage(spec),
        data_source_Bps=site.data_source_Bps or SOURCE_BANDWIDTH_Bps,
        volumes=volumes,
        missing=spec.missing,
    )


def stated_pairs(stated: ModelPairs) -> StatedPairs:
    """Return what the spec says about the pairs of linear layers of a script's model, as the planner uses it."""
    return StatedPairs(
        stated.count,
        stated.units,
        stated.parameters,
        stated.flops_per_sample,
        stated.activation_bytes_per_sample,
        stated.reduced_bytes_per_sample,
        stated.frozen_bytes or 0,
    )


def storage(spec: DLJobSpec) -> Storage | None:
    """Return the space for data that is fetched to each node; None if no data is."""
    data = spec.dataset
    if not data.remote or data.cache_claim_name is not None:
        return None
    return Storage(
        int(quantity(data.size or DEFAULT_SIZE)),
        data.samples * data.sample_bytes if data.samples and data.sample_bytes else None,
        data.sharded,
        data.divisible,
    )


_REDUCED_BY_SCRIPT: dict[Framework, CollectiveName] = {Framework.TORCHRUN: "Torch", Framework.MPI: "MPI"}
"""Framework whose scripts reduce gradients themselves → name of the collective whose time is predicted for them."""


_PRECISION: dict[Precision, PlannedPrecision] = {Precision.BF16: "BF16", Precision.FP16: "FP16"}


def _collective(asked: Collective) -> CollectiveName | None:
    """Return the collective (algorithm of the all-reduce) that the spec names; None if the planner chooses it."""
    return next((name for name in COLLECTIVES if name == asked.value), None)


def _may_accumulate(spec: DLJobSpec) -> bool:
    """Return True if the job's trainer can accumulate gradients with the strategies Data and Optimizer."""
    if spec.parallelism.strategy.splits_model or spec.parallelism.asynchronous:
        return False
    # Its workers send each layer's gradient as soon as the backward pass has computed it.
    return spec.trainer.framework not in _REDUCED_BY_SCRIPT and spec.collective is not Collective.LAYERED_SERVER


def chooses_micro_batches(spec: DLJobSpec) -> bool:
    """Return True if the planner may choose the number of micro-batches of data-parallel plans.

    A training script must opt in, because its loop has to iterate over micro-batches.
    """
    if not _may_accumulate(spec) or spec.parallelism.micro_batches is not None or spec.missing:
        return False
    asked = spec.parallelism.gradient_accumulation
    return asked is GradientAccumulation.AUTO or (asked is None and not spec.trainer.command)


def precision(spec: DLJobSpec) -> PlannedPrecision | None:
    """Return the precision that the spec asks for; None if the planner chooses it by the devices.

    A job without the field computes in float32, so that a new release does not change its results. So does a job with
    Auto that cannot train in 16 bits (``_float32_reason``).
    """
    if spec.precision is not Precision.AUTO:
        return _PRECISION.get(spec.precision, "FP32") if spec.precision else "FP32"
    return None if _float32_reason(spec) is None else "FP32"


def _float32_reason(spec: DLJobSpec) -> str | None:
    """Return why a job with precision Auto computes in float32 on all devices; None if the devices decide."""
    if spec.precision is not Precision.AUTO:
        return None
    if spec.parallelism.strategy.splits_model:
        return "model parallelism computes in float32"
    if spec.parallelism.asynchronous:
        return "asynchronous training computes in float32"
    return "collective LayeredServer computes in float32" if spec.collective is Collective.LAYERED_SERVER else None


def _no_recomputation_reason(spec: DLJobSpec) -> str | None:
    """Return why no plan of the job can use activation checkpointing; None if plans can."""
    if spec.trainer.framework in _REDUCED_BY_SCRIPT and spec.activation_checkpointing is None:
        return "scripts for Torchrun and MPI choose it themselves"
    if spec.parallelism.strategy.splits_model:
        return "model parallelism has no activation checkpointing"
    if spec.parallelism.asynchronous:
        return "asynchronous training has no activation checkpointing"
    if spec.collective is Collective.LAYERED_SERVER:
        return "collective LayeredServer has no activation checkpointing"
    if spec.model.given and not spec.model.has_blocks:
        if spec.model.hints is not None and spec.model.hints.like is None:
            return "spec.model.hints.checkpointedActivationBytesPerSample is not set"
        return "the model has no blocks"
    return None


def micro_batches(spec: DLJobSpec) -> int:
    """Return the number of micro-batches that the spec asks for; 1 if it asks for none.

    If the spec has pipeline stages but no number, use ``MICRO_BATCHES_PER_STAGE`` for each stage. The planner may then
    choose more (``Request.may_divide_further``). The result is at most the global batch size, because each micro-batch
    needs at least one sample.
    """
    if spec.trainer.framework in _REDUCED_BY_SCRIPT and not spec.model.given:
        return 1  # What an earlier run has shown is of whole steps.
    default = MICRO_BATCHES_PER_STAGE * (spec.parallelism.stages or 0)
    return min(spec.parallelism.micro_batches or max(1, default), spec.global_batch_size or 1)


@dataclass(frozen=True)
class Computation:
    """How the ranks of a plan compute a step: what its predictions assume, and what measurements of it are of.

    ``strategy``: the parallelism strategy. ``recomputes``: True with activation checkpointing.
    """

    strategy: Literal["Data", "Optimizer", "Sharded", "Pipeline", "Tensor"]
    micro_batches: int
    precision: PlannedPrecision
    recomputes: bool


def computation(spec: DLJobSpec, plan: Plan) -> Computation:
    """Return how the ranks of ``plan``, the trainer's plan of the job, compute.

    Scripts for Torchrun and MPI choose this themselves, and their plans do not contain it. For them, the spec says it.
    """
    if spec.trainer.framework not in _REDUCED_BY_SCRIPT:
        return Computation(plan.parallelism, plan.micro_batches, plan.precision, plan.activation_checkpointing)
    always = spec.activation_checkpointing is ActivationCheckpointing.ALWAYS
    asked = spec.parallelism.strategy
    strategy: Literal["Data", "Optimizer", "Sharded"] = "Data"
    if asked is ParallelismStrategy.SHARDED or asked is ParallelismStrategy.OPTIMIZER:
        strategy = "Sharded" if asked is ParallelismStrategy.SHARDED else "Optimizer"
    return Computation(strategy, micro_batches(spec), precision(spec) or "FP32", always)
