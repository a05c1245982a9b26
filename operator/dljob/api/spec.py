"""DLJobSpec: what a user asks for. Field descriptions are what ``kubectl explain`` prints."""

from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from dljob.api.base import (
    AUTO_INTERVAL,
    ApiModel,
    AutoDuration,
    Bytes,
    DnsSubdomain,
    Duration,
    Quantity,
    Rule,
    duration_s,
)
from dljob.api.dataset import Dataset


class BuiltinModel(StrEnum):
    MLP = "mlp"
    DIGITS_CNN = "digits-cnn"
    LENET = "lenet"
    RESNET18 = "resnet18"
    RESNET50 = "resnet50"
    GPT_MINI = "gpt-mini"


class ReferenceModel(StrEnum):
    """Models of the literature whose costs are known; a program of the user's trains them."""

    ALEXNET = "AlexNet"
    VGG_16 = "VGG-16"
    GOOGLENET = "GoogLeNet"
    RESNET_152 = "ResNet-152"
    BERT_BASE = "BERT-base"
    GPT_2 = "GPT-2"
    GPT_2_MEDIUM = "GPT-2-medium"
    GPT_2_LARGE = "GPT-2-large"
    GPT_2_XL = "GPT-2-XL"


BUILTIN_MODELS = tuple(member.value for member in BuiltinModel)


class Framework(StrEnum):
    """How ranks of the user's own program learn of each other."""

    DLTRAIN = "DLTrain"
    TORCHRUN = "Torchrun"


class Collective(StrEnum):
    AUTO = "Auto"
    RING = "Ring"
    MPI = "MPI"
    TREE = "Tree"
    BUTTERFLY = "Butterfly"
    HALVING_DOUBLING = "HalvingDoubling"
    PARAMETER_SERVER = "ParameterServer"
    TORCH = "Torch"


class GradientCompression(StrEnum):
    BF16 = "BF16"
    FP16 = "FP16"


class ParallelismStrategy(StrEnum):
    DATA = "Data"
    OPTIMIZER = "Optimizer"
    PIPELINE = "Pipeline"
    TENSOR = "Tensor"
    AUTO = "Auto"

    @property
    def splits_model(self) -> bool:
        """Whether ranks hold parts of the model and each sees the whole batch."""
        return self in (ParallelismStrategy.PIPELINE, ParallelismStrategy.TENSOR)


class Synchronization(StrEnum):
    SYNCHRONOUS = "Synchronous"
    ASYNCHRONOUS = "Asynchronous"
    STALE_SYNCHRONOUS = "StaleSynchronous"


PAIRED_MODELS = ("mlp", "lenet", "gpt-mini")
"""Built-in models with linear layers in pairs, which Tensor cuts through."""


class PlanningMode(StrEnum):
    AUTO = "Auto"
    PLAN_ONLY = "PlanOnly"
    FIXED = "Fixed"


class Minimize(StrEnum):
    TIME = "Time"
    ENERGY = "Energy"
    COST = "Cost"


class OptimizerName(StrEnum):
    SGD = "SGD"
    ADAM = "Adam"
    ADAMW = "AdamW"


class ReclaimPolicy(StrEnum):
    RETAIN = "Retain"
    DELETE = "Delete"


class PullPolicy(StrEnum):
    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


def _map_list(key: str) -> dict[str, Any]:
    """A list whose items are told apart by ``key``: unique, and merged item by item on server-side apply."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


Toleration = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "key": {"type": "string", "maxLength": 317, "description": "Taint key; empty matches all keys."},
                "operator": {"type": "string", "enum": ["Exists", "Equal"], "description": "How key and value match."},
                "value": {"type": "string", "maxLength": 63, "description": "Taint value, for operator Equal."},
                "effect": {
                    "type": "string",
                    "enum": ["NoSchedule", "PreferNoSchedule", "NoExecute"],
                    "description": "Taint effect; unset matches all.",
                },
                "tolerationSeconds": {"type": "integer", "description": "How long, for effect NoExecute."},
            },
        }
    ),
]
"""A toleration as in a pod spec."""


class ModelHints(ApiModel):
    """Size of a model that the trainer does not carry, so that the planner can predict it."""

    rules = (
        Rule(
            "like",
            "has(self.like) ? !has(self.parameters) && !has(self.flopsPerSample) && "
            "(!has(self.activationBytesPerSample) || self.activationBytesPerSample == 0) : "
            "has(self.parameters) && has(self.flopsPerSample)",
            "set either like (a known model) alone, or parameters and flopsPerSample, "
            "as python -m dltrain.profile prints them",
            lambda h: (
                h.parameters is None and h.flops_per_sample is None and h.activation_bytes_per_sample == 0
                if h.like
                else h.parameters is not None and h.flops_per_sample is not None
            ),
        ),
    )

    like: Annotated[
        ReferenceModel | None,
        Field(
            description="A known model that yours costs as much as, on samples of the usual size (images of 224 x 224; "
            "sequences of 512 tokens, GPT-2 of 1024); instead of the figures."
        ),
    ] = None
    parameters: Annotated[int | None, Field(ge=1, description="Number of trainable parameters.")] = None
    flops_per_sample: Annotated[
        float | None,
        Field(gt=0, description="Floating-point operations of one forward and backward pass of one sample."),
    ] = None
    activation_bytes_per_sample: Annotated[
        int, Field(ge=0, description="Bytes of activations kept for the backward pass, for one sample.")
    ] = 0


class ModelSpec(ApiModel):
    """The model to train: a built-in one by name, or hints about the one in trainer.command."""

    rules = (
        Rule(
            "name",
            "has(self.name) != has(self.hints)",
            "set either name (a built-in model) or hints (the size of your own model), not both and not neither",
            lambda m: (m.name is not None) != (m.hints is not None),
        ),
    )

    name: Annotated[BuiltinModel | None, Field(description="A built-in model.")] = None
    hints: Annotated[
        ModelHints | None, Field(description="Size of your own model, for the planner; see trainer.command.")
    ] = None
    sync_batch_norm: Annotated[
        bool,
        Field(
            description="BatchNorm layers of a dltrain program normalize over the whole batch, not each rank's part. "
            "The built-in models have none."
        ),
    ] = False


class EnvVar(ApiModel):
    name: Annotated[str, Field(pattern=r"^[-._a-zA-Z][-._a-zA-Z0-9]*$", max_length=256, description="Its name.")]
    value: Annotated[str, Field(max_length=32768, description="Its value, as it is: nothing is expanded.")] = ""


class Trainer(ApiModel):
    """The program that trains. By default the built-in one, in the operator's trainer image."""

    rules = (
        Rule(
            "args",
            "!has(self.args) || size(self.args) == 0 || (has(self.command) && size(self.command) > 0)",
            "args needs command: set command to your program",
            lambda t: not t.args or bool(t.command),
        ),
    )

    image: Annotated[
        str | None,
        Field(
            min_length=1,
            max_length=1024,
            description="Image of the pods; default: the operator's trainer image.",
        ),
    ] = None
    image_pull_policy: Annotated[
        PullPolicy | None, Field(description="When the image is pulled; default: as the operator is set, IfNotPresent.")
    ] = None
    image_pull_secrets: Annotated[
        tuple[DnsSubdomain, ...],
        Field(max_length=16, description="Names of Secrets with registry credentials."),
    ] = ()
    command: Annotated[
        tuple[str, ...],
        Field(
            max_length=64,
            description="Your training program, run once per rank; default: the built-in trainer.",
        ),
    ] = ()
    args: Annotated[tuple[str, ...], Field(max_length=256, description="Arguments of command.")] = ()
    env: Annotated[
        tuple[EnvVar, ...],
        Field(max_length=256, description="Environment of every rank.", json_schema_extra=_map_list("name")),
    ] = ()
    framework: Annotated[
        Framework,
        Field(
            description="How command's ranks find each other: DLTrain (MPI, the dltrain API) or Torchrun "
            "(RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, for unmodified scripts)."
        ),
    ] = Framework.DLTRAIN


class ScalingRule(StrEnum):
    LINEAR = "Linear"
    SQUARE_ROOT = "SquareRoot"
    ADA_SCALE = "AdaScale"


class LearningRateScaling(ApiModel):
    """How the learning rate for one batch size becomes that for globalBatchSize."""

    rule: Annotated[
        ScalingRule,
        Field(
            description="With S = globalBatchSize / baseBatchSize: Linear multiplies by S, SquareRoot by its root, "
            "AdaScale by a gain between 1 and S, measured from the noise of the gradients."
        ),
    ]
    base_batch_size: Annotated[int, Field(ge=1, le=2**31 - 1, description="Batch that learningRate is for.")]


class Optimizer(ApiModel):
    rules = (
        Rule(
            "findLearningRate",
            "!has(self.findLearningRate) || !self.findLearningRate || !has(self.learningRateScaling)",
            "findLearningRate finds the rate for globalBatchSize: remove learningRateScaling, or do not search",
            lambda o: not o.find_learning_rate or o.learning_rate_scaling is None,
        ),
    )

    name: Annotated[OptimizerName, Field(description="SGD, Adam or AdamW.")] = OptimizerName.SGD
    learning_rate: Annotated[float, Field(gt=0, le=100, description="Learning rate for the global batch.")] = 0.05
    find_learning_rate: Annotated[
        bool,
        Field(
            description="true: a range test before the first step finds the rate; learningRate is used if it finds "
            "none. Built-in models only."
        ),
    ] = False
    learning_rate_scaling: Annotated[
        LearningRateScaling | None,
        Field(description="learningRate is for another batch than globalBatchSize; default: for globalBatchSize."),
    ] = None
    momentum: Annotated[float, Field(ge=0, lt=1, description="Momentum; SGD only.")] = 0.9
    weight_decay: Annotated[float, Field(ge=0, le=1, description="L2 penalty (SGD) or decoupled decay (AdamW).")] = 0.0


class BatchSizeRange(ApiModel):
    """Global batches that the planner may choose from."""

    rules = (
        Rule(
            "min",
            "!has(self.min) || self.min <= self.max",
            "min must not be larger than max: lower min or raise max",
            lambda b: b.min is None or b.min <= b.max,
        ),
    )

    min: Annotated[int | None, Field(ge=1, le=2**31 - 1, description="Smallest batch; default: globalBatchSize.")] = (
        None
    )
    max: Annotated[int, Field(ge=1, le=2**31 - 1, description="Largest batch.")]


class NodeRange(ApiModel):
    rules = (
        Rule(
            "min",
            "!has(self.max) || !has(self.min) || self.min <= self.max",
            "min must not be larger than max: lower min or raise max",
            lambda n: n.max is None or n.min <= n.max,
        ),
    )

    min: Annotated[int, Field(ge=1, le=10000, description="Fewest nodes; the job waits below it.")] = 1
    max: Annotated[
        int | None,
        Field(ge=1, le=10000, description="Most nodes; default: as many as the planner finds useful."),
    ] = None


class Objective(ApiModel):
    rules = (
        Rule(
            "deadline",
            "!has(self.deadline) || self.deadline.matches('[1-9]')",
            "deadline must be more than 0, such as 2h",
            lambda o: o.deadline is None or duration_s(o.deadline) > 0,
        ),
    )

    minimize: Annotated[
        Minimize, Field(description="What the plan minimizes: Time, Energy (J) or Cost (US dollars).")
    ] = Minimize.TIME
    deadline: Annotated[
        Duration | None,
        Field(description="Training must end within this time, such as 2h; the plan meets it with its p90 prediction."),
    ] = None


class FixedGroup(ApiModel):
    """Part of a plan that the user dictates: so many nodes of one device."""

    device: Annotated[str, Field(min_length=1, max_length=63, description="Device type, as in the catalogue.")]
    nodes: Annotated[int, Field(ge=1, le=10000, description="Number of nodes.")]
    ranks_per_node: Annotated[int, Field(ge=1, le=64, description="Ranks (devices) on each node.")] = 1
    batch_per_rank: Annotated[
        int | None,
        Field(ge=1, description="Samples per step on each rank; default: by measured or predicted speed."),
    ] = None


class Planning(ApiModel):
    rules = (
        Rule(
            "groups",
            "(has(self.mode) && self.mode == 'Fixed') == (has(self.groups) && size(self.groups) > 0)",
            "mode Fixed needs groups, and groups need mode Fixed: list the node groups or choose mode Auto",
            lambda p: (p.mode is PlanningMode.FIXED) == bool(p.groups),
        ),
    )

    mode: Annotated[
        PlanningMode,
        Field(description="Auto: plan and run. PlanOnly: show the plan in status, run nothing. Fixed: run groups."),
    ] = PlanningMode.AUTO
    groups: Annotated[tuple[FixedGroup, ...], Field(max_length=16, description="The plan, for mode Fixed.")] = ()
    uneven: Annotated[
        bool, Field(description="Split the batch by device speed; false gives every rank the same share.")
    ] = True
    candidates: Annotated[int, Field(ge=1, le=20, description="How many candidates status shows.")] = 5


class CheckpointVolume(ApiModel):
    rules = (
        Rule(
            "claimName",
            "!has(self.claimName) || !has(self.storageClassName)",
            "storageClassName has no effect on an existing claim: remove it or remove claimName",
            lambda v: v.claim_name is None or v.storage_class_name is None,
        ),
    )

    claim_name: Annotated[
        DnsSubdomain | None, Field(description="An existing claim (ReadWriteMany for several nodes).")
    ] = None
    storage_class_name: Annotated[
        DnsSubdomain | None,
        Field(description="Class of the claim that dljob creates; default: the cluster's."),
    ] = None
    size: Annotated[Bytes, Field(description="Size of the claim that dljob creates, such as 10Gi.")] = "1Gi"
    reclaim_policy: Annotated[
        ReclaimPolicy, Field(description="Whether the claim that dljob created goes when the job is deleted.")
    ] = ReclaimPolicy.RETAIN


class Parallelism(ApiModel):
    rules = (
        Rule(
            "stages",
            "(has(self.strategy) && self.strategy == 'Pipeline') == has(self.stages)",
            "strategy Pipeline needs stages, and stages need strategy Pipeline: set both or neither",
            lambda p: (p.strategy is ParallelismStrategy.PIPELINE) == (p.stages is not None),
        ),
        Rule(
            "microBatches",
            "!has(self.microBatches) || (has(self.strategy) && self.strategy == 'Pipeline')",
            "microBatches are for strategy Pipeline: choose it, or remove them",
            lambda p: p.micro_batches is None or p.strategy is ParallelismStrategy.PIPELINE,
        ),
        Rule(
            "stalenessBound",
            "(has(self.synchronization) && self.synchronization == 'StaleSynchronous') == has(self.stalenessBound)",
            "StaleSynchronous needs stalenessBound, and stalenessBound needs StaleSynchronous: set both or neither",
            lambda p: (p.synchronization is Synchronization.STALE_SYNCHRONOUS) == (p.staleness_bound is not None),
        ),
        Rule(
            "synchronization",
            "!has(self.synchronization) || self.synchronization == 'Synchronous' || !has(self.strategy) || "
            "self.strategy == 'Data'",
            "synchronization Asynchronous and StaleSynchronous need strategy Data: remove one of the two",
            lambda p: p.synchronization is Synchronization.SYNCHRONOUS or p.strategy is ParallelismStrategy.DATA,
        ),
    )

    strategy: Annotated[
        ParallelismStrategy,
        Field(
            description="Data: every rank updates all parameters. Optimizer: each updates a part and keeps optimizer "
            "state for it alone. Pipeline: each holds some of the layers, one stage. Tensor: each holds a part of the "
            "linear layers. The result is the same. Auto: whichever serves the objective best, for built-in models; a "
            "program gets Data. Pipeline and Tensor only where they are better by more than what is uncertain, or "
            "nothing else fits or meets the deadline."
        ),
    ] = ParallelismStrategy.DATA
    stages: Annotated[
        int | None,
        Field(ge=2, le=64, description="Stages of a Pipeline: the job has as many ranks."),
    ] = None
    micro_batches: Annotated[
        int | None,
        Field(
            ge=1,
            le=4096,
            description="Parts of the batch that follow each other through a Pipeline; default: four times the stages. "
            "Of p stages and k parts, p-1 of k+p-1 turns are idle.",
        ),
    ] = None
    synchronization: Annotated[
        Synchronization,
        Field(
            description="Synchronous: all ranks make each step together. Asynchronous: a parameter server applies each "
            "worker's update as it comes, nobody waits. StaleSynchronous: the same, with workers at most "
            "stalenessBound steps apart."
        ),
    ] = Synchronization.SYNCHRONOUS
    staleness_bound: Annotated[
        int | None,
        Field(ge=1, le=10**6, description="Steps that the fastest worker may be ahead of the slowest."),
    ] = None

    @property
    def apart(self) -> bool:
        """Whether workers are at steps of their own."""
        return self.synchronization is not Synchronization.SYNCHRONOUS


class Checkpoint(ApiModel):
    rules = (
        Rule(
            "interval",
            "!has(self.interval) || self.interval == 'Auto' || self.interval.matches('[1-9]')",
            "interval must be more than 0, such as 60s, and enabled false for no checkpoints",
            lambda c: c.interval == AUTO_INTERVAL or duration_s(c.interval) > 0,
        ),
    )

    enabled: Annotated[bool, Field(description="Whether to write checkpoints; false also needs no volume.")] = True
    volume: Annotated[CheckpointVolume, Field(description="Where checkpoints are kept.")] = CheckpointVolume()
    interval: Annotated[
        AutoDuration,
        Field(
            description="Time between checkpoints, such as 90s or 1h30m. Auto: the first one after 60s, then by what "
            "they cost and how often there are faults, √(2 · cost · time between faults), at most 30 minutes."
        ),
    ] = AUTO_INTERVAL
    keep: Annotated[int, Field(ge=1, le=100, description="How many checkpoints are kept.")] = 3


class RunPolicy(ApiModel):
    backoff_limit: Annotated[
        int,
        Field(
            ge=0,
            le=1000,
            description="Failures of the training program before the job fails; evictions and lost nodes do not count.",
        ),
    ] = 3
    compare_parameters_steps: Annotated[
        int,
        Field(
            ge=0,
            le=10**9,
            description="Steps after which all ranks' parameters are compared, which must be equal to the bit; "
            "0: only before each checkpoint.",
        ),
    ] = 100
    active_deadline_seconds: Annotated[
        int | None, Field(ge=1, description="The job fails when it has been active (not suspended) for so long.")
    ] = None
    ttl_seconds_after_finished: Annotated[
        int | None,
        Field(ge=0, description="A finished job is deleted after so many seconds; default: never."),
    ] = None
    termination_grace_period_seconds: Annotated[
        int, Field(ge=1, le=3600, description="Seconds a pod has for its last checkpoint when it must go.")
    ] = 60
    node_lost_seconds: Annotated[
        int, Field(ge=10, le=3600, description="A pod on a node that has been lost for so many seconds is replaced.")
    ] = 60


class Scheduling(ApiModel):
    node_selector: Annotated[
        dict[str, str], Field(description="Labels that every node must have, such as zone: eu-1.")
    ] = {}
    tolerations: Annotated[
        tuple[Toleration, ...],
        Field(max_length=64, description="Taints the pods tolerate, as in a pod spec."),
    ] = ()
    priority_class_name: Annotated[DnsSubdomain | None, Field(description="Priority class of the pods.")] = None
    scheduler_name: Annotated[DnsSubdomain | None, Field(description="Scheduler of the pods.")] = None
    pod_group_label: Annotated[
        str | None,
        Field(
            max_length=317,
            description="Label key that gets the job's name on every pod, for gang schedulers.",
        ),
    ] = None


class Resources(ApiModel):
    """Resources of one trainer pod; what is unset is sized from the plan."""

    cpu: Annotated[
        Quantity | None,
        Field(
            description="CPUs requested, such as 2 or 500m; default: one a rank, at most half of what a node has free."
        ),
    ] = None
    cpu_limit: Annotated[Quantity | None, Field(description="CPU limit, such as 2 or 500m; default: none.")] = None
    memory: Annotated[
        Bytes | None,
        Field(description="Memory requested, and limit, such as 4Gi; default: what the plan predicts."),
    ] = None


class Metadata(ApiModel):
    labels: Annotated[dict[str, str], Field(description="Labels to add to the pods.")] = {}
    annotations: Annotated[dict[str, str], Field(description="Annotations to add to the pods.")] = {}


class PodTemplateOverride(ApiModel):
    """A change to the pod template, owned by one manager (a person, a queue, a policy tool)."""

    manager: Annotated[str, Field(min_length=1, max_length=253, description="Who wants this change.")]
    metadata: Annotated[Metadata, Field(description="Labels and annotations to add.")] = Metadata()
    spec: Annotated[
        dict[str, Any],
        Field(
            description="Part of a pod spec, such as volumes: maps are merged, lists whose items have a name are "
            "merged by name, other values replace ours. The trainer's container is called trainer."
        ),
    ] = {}


_SPLITS = (
    "(has(self.parallelism) && has(self.parallelism.strategy) && self.parallelism.strategy in ['Pipeline', 'Tensor'])"
)

_APART = (
    "(has(self.parallelism) && has(self.parallelism.synchronization) && "
    "self.parallelism.synchronization != 'Synchronous')"
)


class DLJobSpec(ApiModel):
    """What to train, by when, and within which bounds."""

    rules = (
        Rule(
            "epochs",
            "has(self.epochs) != has(self.steps)",
            "set exactly one of epochs and steps",
            lambda s: (s.epochs is None) != (s.steps is None),
        ),
        Rule(
            "trainer.command",
            "!has(self.model.hints) || "
            "(has(self.trainer) && has(self.trainer.command) && size(self.trainer.command) > 0)",
            "model.hints describes your own program: set trainer.command, or choose a built-in model by model.name",
            lambda s: s.model.hints is None or bool(s.trainer.command),
        ),
        Rule(
            "parallelism.strategy",
            "!has(self.parallelism) || !has(self.parallelism.strategy) || self.parallelism.strategy != 'Optimizer' || "
            "!has(self.collective) || self.collective in ['Auto', 'Ring', 'Torch']",
            "parallelism.strategy Optimizer needs collective Ring or Torch: remove collective, or choose one of them",
            lambda s: (
                s.parallelism.strategy is not ParallelismStrategy.OPTIMIZER
                or s.collective in (Collective.AUTO, Collective.RING, Collective.TORCH)
            ),
        ),
        Rule(
            "parallelism.strategy",
            f"!{_SPLITS} || has(self.model.name) && "
            "(!has(self.trainer) || !has(self.trainer.command) || size(self.trainer.command) == 0)",
            "parallelism.strategy Pipeline and Tensor are for built-in models: remove trainer.command, or choose "
            "another strategy",
            lambda s: not s.parallelism.strategy.splits_model or (s.model.name is not None and not s.trainer.command),
        ),
        Rule(
            "parallelism.strategy",
            "!has(self.parallelism) || !has(self.parallelism.strategy) || self.parallelism.strategy != 'Tensor' "
            f"|| !has(self.model.name) || self.model.name in {list(PAIRED_MODELS)}",
            "parallelism.strategy Tensor needs a model with linear layers in pairs: choose "
            f"{', '.join(PAIRED_MODELS)}, or another strategy",
            lambda s: (
                s.parallelism.strategy is not ParallelismStrategy.TENSOR
                or s.model.name is None
                or s.model.name in PAIRED_MODELS
            ),
        ),
        Rule(
            "collective",
            f"!{_SPLITS} || !has(self.collective) || self.collective == 'Auto' || "
            "(self.parallelism.strategy == 'Tensor' && self.collective != 'ParameterServer')",
            "collective cannot be chosen with parallelism.strategy Pipeline, and not ParameterServer with Tensor: "
            "remove it",
            lambda s: (
                not s.parallelism.strategy.splits_model
                or s.collective is Collective.AUTO
                or (
                    s.parallelism.strategy is ParallelismStrategy.TENSOR
                    and s.collective is not Collective.PARAMETER_SERVER
                )
            ),
        ),
        Rule(
            "planning.groups",
            f"!{_SPLITS} || !has(self.planning) || !has(self.planning.groups) || "
            "(size(self.planning.groups) <= 1 && self.planning.groups.all(g, !has(g.batchPerRank)))",
            "with parallelism.strategy Pipeline or Tensor every rank sees the whole batch, on one device type: give "
            "one group without batchPerRank",
            lambda s: (
                not s.parallelism.strategy.splits_model
                or (len(s.planning.groups) <= 1 and all(g.batch_per_rank is None for g in s.planning.groups))
            ),
        ),
        Rule(
            "parallelism.microBatches",
            "!has(self.parallelism) || !has(self.parallelism.microBatches) || "
            "self.parallelism.microBatches <= self.globalBatchSize",
            "parallelism.microBatches must have a sample each: lower it or raise globalBatchSize",
            lambda s: s.parallelism.micro_batches is None or s.parallelism.micro_batches <= s.global_batch_size,
        ),
        Rule(
            "parallelism.synchronization",
            f"!{_APART} || has(self.model.name) && "
            "(!has(self.trainer) || !has(self.trainer.command) || size(self.trainer.command) == 0)",
            "parallelism.synchronization Asynchronous and StaleSynchronous are for built-in models: remove "
            "trainer.command, or choose Synchronous",
            lambda s: not s.parallelism.apart or (s.model.name is not None and not s.trainer.command),
        ),
        Rule(
            "parallelism.synchronization",
            f"!{_APART} || !has(self.collective) || self.collective in ['Auto', 'ParameterServer']",
            "parallelism.synchronization Asynchronous and StaleSynchronous need collective ParameterServer: remove "
            "collective, or choose that",
            lambda s: not s.parallelism.apart or s.collective in (Collective.AUTO, Collective.PARAMETER_SERVER),
        ),
        Rule(
            "parallelism.synchronization",
            f"!{_APART} || !has(self.optimizer) || ((!has(self.optimizer.findLearningRate) || "
            "!self.optimizer.findLearningRate) && (!has(self.optimizer.learningRateScaling) || "
            "self.optimizer.learningRateScaling.rule != 'AdaScale'))",
            "parallelism.synchronization Asynchronous and StaleSynchronous know no gradient of the whole batch: remove "
            "optimizer.findLearningRate and AdaScale, or choose Synchronous",
            lambda s: (
                not s.parallelism.apart
                or not (
                    s.optimizer.find_learning_rate
                    or (
                        s.optimizer.learning_rate_scaling is not None
                        and s.optimizer.learning_rate_scaling.rule is ScalingRule.ADA_SCALE
                    )
                )
            ),
        ),
        Rule(
            "optimizer.findLearningRate",
            f"!{_SPLITS} || !has(self.optimizer) || !has(self.optimizer.findLearningRate) || "
            "!self.optimizer.findLearningRate",
            "optimizer.findLearningRate needs parallelism.strategy Data or Optimizer: remove one of the two",
            lambda s: not s.parallelism.strategy.splits_model or not s.optimizer.find_learning_rate,
        ),
        Rule(
            "optimizer.findLearningRate",
            "!has(self.optimizer) || !has(self.optimizer.findLearningRate) || !self.optimizer.findLearningRate || "
            "!has(self.trainer) || !has(self.trainer.command) || size(self.trainer.command) == 0",
            "optimizer.findLearningRate is for built-in models: remove it, or trainer.command",
            lambda s: not s.optimizer.find_learning_rate or not s.trainer.command,
        ),
        Rule(
            "optimizer.learningRateScaling.rule",
            "!has(self.optimizer) || !has(self.optimizer.learningRateScaling) || "
            "self.optimizer.learningRateScaling.rule != 'AdaScale' || !has(self.parallelism) || "
            "!has(self.parallelism.strategy) || self.parallelism.strategy == 'Data'",
            "optimizer.learningRateScaling.rule AdaScale needs parallelism.strategy Data: choose that, or another "
            "rule, for with the others no rank has the whole gradient",
            lambda s: (
                s.optimizer.learning_rate_scaling is None
                or s.optimizer.learning_rate_scaling.rule is not ScalingRule.ADA_SCALE
                or s.parallelism.strategy is ParallelismStrategy.DATA
            ),
        ),
        Rule(
            "gradientCompression",
            f"!has(self.gradientCompression) || !{_APART} && ("
            "(!has(self.collective) || self.collective == 'Auto') && "
            "(!has(self.parallelism) || !has(self.parallelism.strategy) || self.parallelism.strategy == 'Data') && "
            "(!has(self.trainer) || !has(self.trainer.framework) || self.trainer.framework == 'DLTrain'))",
            "gradientCompression has an all-reduce of its own: remove it, or else collective, parallelism.strategy "
            "other than Data, parallelism.synchronization other than Synchronous, and trainer.framework Torchrun",
            lambda s: (
                s.gradient_compression is None
                or (
                    s.collective is Collective.AUTO
                    and s.parallelism.strategy is ParallelismStrategy.DATA
                    and not s.parallelism.apart
                    and s.trainer.framework is Framework.DLTRAIN
                )
            ),
        ),
        Rule(
            "globalBatchSize",
            "!has(self.nodes) || !has(self.nodes.min) || self.globalBatchSize >= self.nodes.min",
            "globalBatchSize must give every rank a sample: raise it or lower nodes.min",
            lambda s: s.global_batch_size >= s.nodes.min,
        ),
        Rule(
            "batchSizeRange",
            "!has(self.batchSizeRange) || (has(self.batchSizeRange.min) ? "
            "self.batchSizeRange.min > self.batchSizeRange.max || self.batchSizeRange.min <= self.globalBatchSize && "
            "self.globalBatchSize <= self.batchSizeRange.max : self.globalBatchSize <= self.batchSizeRange.max)",
            "batchSizeRange must contain globalBatchSize, which epochs, steps and learningRate are for: widen it",
            lambda s: (
                s.batch_size_range is None
                or (s.batch_size_range.min or 1) <= s.global_batch_size <= s.batch_size_range.max
            ),
        ),
        Rule(
            "batchSizeRange.min",
            "!has(self.batchSizeRange) || !has(self.batchSizeRange.min) || !has(self.nodes) || !has(self.nodes.min) || "
            "self.batchSizeRange.min >= self.nodes.min",
            "batchSizeRange.min must give every rank a sample: raise it or lower nodes.min",
            lambda s: (
                s.batch_size_range is None or s.batch_size_range.min is None or s.batch_size_range.min >= s.nodes.min
            ),
        ),
        Rule(
            "batchSizeRange",
            "!has(self.batchSizeRange) || !has(self.parallelism) || "
            "(!has(self.parallelism.strategy) || self.parallelism.strategy == 'Data') && "
            "(!has(self.parallelism.synchronization) || self.parallelism.synchronization == 'Synchronous')",
            "batchSizeRange needs parallelism.strategy Data and parallelism.synchronization Synchronous: remove it, or "
            "choose those",
            lambda s: (
                s.batch_size_range is None
                or (s.parallelism.strategy is ParallelismStrategy.DATA and not s.parallelism.apart)
            ),
        ),
        Rule(
            "batchSizeRange",
            "!has(self.batchSizeRange) || !has(self.planning) || !has(self.planning.groups) || "
            "self.planning.groups.all(g, !has(g.batchPerRank))",
            "batchSizeRange leaves the batch open: remove it, or batchPerRank from planning.groups",
            lambda s: s.batch_size_range is None or all(g.batch_per_rank is None for g in s.planning.groups),
        ),
        Rule(
            "batchSizeRange",
            "!has(self.batchSizeRange) || !has(self.trainer) || !has(self.trainer.framework) || "
            "self.trainer.framework == 'DLTrain'",
            "batchSizeRange needs trainer.framework DLTrain, for a Torchrun script has a batch of its own: remove one "
            "of the two",
            lambda s: s.batch_size_range is None or s.trainer.framework is Framework.DLTRAIN,
        ),
        Rule(
            "trainer.framework",
            "!has(self.trainer) || !has(self.trainer.framework) || self.trainer.framework == 'DLTrain' || "
            "(!has(self.collective) || self.collective in ['Auto', 'Torch']) && "
            "(!has(self.parallelism) || !has(self.parallelism.strategy) || self.parallelism.strategy == 'Data') && "
            "(!has(self.model.syncBatchNorm) || !self.model.syncBatchNorm) && "
            "(!has(self.optimizer) || !has(self.optimizer.learningRateScaling))",
            "trainer.framework Torchrun runs scripts that sum gradients and update parameters by themselves: remove "
            "collective (but Torch), parallelism.strategy, model.syncBatchNorm and optimizer.learningRateScaling, or "
            "choose DLTrain",
            lambda s: (
                s.trainer.framework is Framework.DLTRAIN
                or (
                    s.collective in (Collective.AUTO, Collective.TORCH)
                    and s.parallelism.strategy is ParallelismStrategy.DATA
                    and not s.model.sync_batch_norm
                    and s.optimizer.learning_rate_scaling is None
                )
            ),
        ),
    )

    model: Annotated[ModelSpec, Field(description="What to train.")]
    dataset: Annotated[Dataset, Field(description="What to train on.")]
    global_batch_size: Annotated[int, Field(ge=1, le=2**31 - 1, description="Samples per step, over all ranks.")]
    batch_size_range: Annotated[
        BatchSizeRange | None,
        Field(
            description="The planner may choose another batch than globalBatchSize within this range, where the "
            "gradient's noise scale, once a run has measured it, promises the same progress sooner (or for less, as "
            "objective says). epochs, steps and learningRate remain those for globalBatchSize. Default: no choice."
        ),
    ] = None
    epochs: Annotated[int | None, Field(ge=1, le=10**6, description="Passes over the dataset.")] = None
    steps: Annotated[int | None, Field(ge=1, le=10**12, description="Optimizer steps.")] = None
    optimizer: Annotated[Optimizer, Field(description="How parameters are updated.")] = Optimizer()
    seed: Annotated[int, Field(ge=0, le=2**31 - 1, description="Seed of initialization and sampling.")] = 0
    trainer: Annotated[Trainer, Field(description="The program that trains.")] = Trainer()
    nodes: Annotated[NodeRange, Field(description="How many nodes the job may use.")] = NodeRange()
    devices: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=63)], ...],
        Field(
            max_length=32,
            description="Device types the plan may use, as nodes are labelled: nvidia.com/gpu.product, or "
            "dljob.dev/device for nodes without GPUs (no label: cpu). Default: all the cluster has.",
        ),
    ] = ()
    objective: Annotated[Objective, Field(description="What the plan is to achieve.")] = Objective()
    planning: Annotated[Planning, Field(description="Who plans.")] = Planning()
    collective: Annotated[
        Collective, Field(description="How gradients are summed over ranks; Auto: as is fastest when the ranks start.")
    ] = Collective.AUTO
    gradient_compression: Annotated[
        GradientCompression | None,
        Field(
            description="Send gradients in 16 bits a number, with error feedback; for slow networks, on CPUs. "
            "Default: as they are."
        ),
    ] = None
    parallelism: Annotated[Parallelism, Field(description="What ranks share out besides the batch.")] = Parallelism()
    checkpoint: Annotated[Checkpoint, Field(description="How training state is kept.")] = Checkpoint()
    suspend: Annotated[bool, Field(description="true: checkpoint and remove the pods; false: run or resume.")] = False
    run_policy: Annotated[RunPolicy, Field(description="Limits and clean-up.")] = RunPolicy()
    scheduling: Annotated[Scheduling, Field(description="Where pods may run.")] = Scheduling()
    resources: Annotated[Resources, Field(description="Resources of one pod.")] = Resources()
    pod_template_overrides: Annotated[
        tuple[PodTemplateOverride, ...],
        Field(
            max_length=16,
            description="Changes to the pod template, one entry per manager, applied in order.",
            json_schema_extra=_map_list("manager"),
        ),
    ] = ()
