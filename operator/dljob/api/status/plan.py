"""The accepted plan of a job, as its status shows it."""

from typing import Annotated

from pydantic import Field

from dljob.api.base import ApiModel
from dljob.api.spec.planning import Minimize
from dljob.api.spec.trainer import AgentSource


class Predicted(ApiModel):
    """The performance model's prediction for one plan."""

    step_seconds: Annotated[float, Field(ge=0, description="Median time of one step.")]
    step_seconds_p90: Annotated[float, Field(ge=0, description="90th percentile of the step time.")]
    compute_seconds: Annotated[float, Field(ge=0, description="Part of the step: computing on the slowest rank.")] = 0
    communication_seconds: Annotated[float, Field(ge=0, description="Part of the step: exposed communication.")] = 0
    total_seconds: Annotated[
        float,
        Field(
            ge=0,
            description="Time of the whole training: fetching its data, all steps, evaluations, checkpoints and "
            "interruptions.",
        ),
    ]
    fetch_seconds: Annotated[
        float,
        Field(
            ge=0,
            description="Part of totalSeconds: the nodes fetch the data of an http, https or s3 uri before the first "
            "step. 0 also if dataset.samples or dataset.sampleBytes is unset.",
        ),
    ] = 0
    evaluation_seconds: Annotated[
        float,
        Field(
            ge=0, description="Part of totalSeconds: evaluations of a built-in model, after each epoch and at the end."
        ),
    ] = 0
    checkpoint_seconds: Annotated[
        float,
        Field(
            ge=0,
            description="Part of totalSeconds: training time that checkpoints cost, also the last one. 0 if the script "
            "writes them itself (framework Torchrun or MPI).",
        ),
    ] = 0
    interruption_seconds: Annotated[
        float,
        Field(
            ge=0,
            description="Part of totalSeconds: restarts and repeated steps, because nodes of the plan are interrupted, "
            "such as spot nodes.",
        ),
    ] = 0
    samples_per_second: Annotated[float, Field(ge=0, description="Throughput of all ranks.")]
    energy_joules: Annotated[float | None, Field(ge=0, description="Energy of the whole training.")] = None
    cost: Annotated[float | None, Field(ge=0, description="Cost of the whole training, in US dollars.")] = None
    carbon_grams: Annotated[
        float | None,
        Field(
            ge=0,
            description="CO2 equivalent of the energy of the whole training, in grams. Unset if the administrator has "
            "set no carbon intensity and the job does not minimize carbon.",
        ),
    ] = None
    memory_bytes: Annotated[int, Field(ge=0, description="Memory of the largest rank.")] = 0
    bottleneck: Annotated[str, Field(description="The dominant part of the step time.")] = ""
    basis: Annotated[
        str,
        Field(
            description="Where the constants come from: catalogue (data sheets), probe (measured hardware) or "
            "profile (measured runs)."
        ),
    ] = ""

    def per_step_s(self, step_s: float, steps: int) -> float:
        """Return the seconds of the training for each of its ``steps`` steps, each of which takes ``step_s`` seconds.

        Beside the step, they are its part of evaluations and interruptions of nodes, which take longer if steps do, and
        of checkpoints, which do not. The data is fetched before the first step.
        """
        slowed_s = self.evaluation_seconds + self.interruption_seconds
        steps_s = self.total_seconds - self.fetch_seconds - self.checkpoint_seconds - slowed_s
        longer = 1 + slowed_s / steps_s if steps_s > 0 else 1.0
        return longer * step_s + self.checkpoint_seconds / max(1, steps)

    def expense(self, minimize: Minimize) -> float | None:
        """Return the energy (J), cost (US dollars) or carbon (g) that a job minimizes; None if it minimizes time.

        Return None also if this figure was not predicted.
        """
        return {
            Minimize.ENERGY: self.energy_joules,
            Minimize.COST: self.cost,
            Minimize.CARBON: self.carbon_grams,
        }.get(minimize)


class PlanGroup(ApiModel):
    """The nodes of the plan that have one device type."""

    name: Annotated[str, Field(description="Name of the group and suffix of its StatefulSet.")]
    device: Annotated[str, Field(description="Device type.")]
    nodes: Annotated[int, Field(ge=1)]
    ranks: Annotated[int, Field(ge=1, description="Ranks in the group.")]
    batch_per_rank: Annotated[
        tuple[int, ...],
        Field(
            description="Local batch size of each rank, in samples per step. The local batch sizes of all groups sum "
            "to the plan's global batch size."
        ),
    ]


class Candidate(ApiModel):
    """A plan that the planner considered."""

    summary: str
    chosen: bool = False
    nodes: Annotated[int | None, Field(ge=1, description="Number of nodes. Unset in plans of older releases.")] = None
    predicted: Predicted


class Rejected(ApiModel):
    """A kind of plan that was ruled out, and the reason."""

    summary: str
    reason: str


class BatchCandidate(ApiModel):
    """A global batch size that the planner considered, with its best plan."""

    global_batch_size: Annotated[int, Field(ge=1)]
    chosen: bool = False
    efficiency: Annotated[
        float,
        Field(gt=0, description="Progress per sample, divided by the progress per sample with spec.globalBatchSize."),
    ]
    steps: Annotated[
        int, Field(ge=1, description="Steps for the same progress as the training with spec.globalBatchSize.")
    ]
    step_seconds: Annotated[float | None, Field(ge=0, description="Median time of one step.")] = None
    total_seconds: Annotated[
        float | None, Field(ge=0, description="Median time of the training with this batch size.")
    ] = None
    energy_joules: Annotated[float | None, Field(ge=0, description="Energy of the training with this batch size.")] = (
        None
    )
    cost: Annotated[
        float | None, Field(ge=0, description="Cost of the training with this batch size, in US dollars.")
    ] = None
    reason: Annotated[str | None, Field(description="Why no plan is possible with this batch size.")] = None


class BatchChoice(ApiModel):
    """The chosen global batch size of a job with spec.batchSizeRange."""

    global_batch_size: Annotated[
        int, Field(ge=1, description="Samples per step over all ranks. This size does not change during the job.")
    ]
    steps: Annotated[int, Field(ge=1, description="Optimizer steps of the whole training.")]
    message: Annotated[str, Field(description="Why the planner chose this batch size.")]
    noise_scale: Annotated[
        float | None,
        Field(
            ge=0,
            description="Gradient noise scale in samples, from earlier runs. Unset if no run has measured the noise "
            "scale.",
        ),
    ] = None
    learning_rate_scaling: Annotated[
        str | None,
        Field(
            description="Rule that scales the learning rate to the batch size. Unset if the learning rate is not "
            "scaled."
        ),
    ] = None
    candidates: tuple[BatchCandidate, ...] = ()


class PlanStatus(ApiModel):
    """The plan in force."""

    number: Annotated[int, Field(ge=1, description="Number of the plan, counted from 1 for each job.")]
    digest: Annotated[str, Field(description="Digest of the plan for the trainer.")]
    summary: Annotated[str, Field(description="One line, such as '3 x cpu, Ring, 40+40+40'.")]
    groups: tuple[PlanGroup, ...] = ()
    nodes: Annotated[int, Field(ge=1)]
    ranks: Annotated[int, Field(ge=1)]
    collective: str
    parallelism: Annotated[
        str | None, Field(description="Parallelism strategy: Data, Optimizer, Sharded, Pipeline or Tensor.")
    ] = None
    micro_batches: Annotated[
        int | None,
        Field(
            ge=1,
            description="Number of micro-batches: those of strategy Pipeline, or those whose gradients each rank "
            "accumulates. Unset if batches are not divided.",
        ),
    ] = None
    replicas: Annotated[
        int | None,
        Field(ge=1, description="Number of replicas of a model that is split over ranks. Unset if there is only one."),
    ] = None
    precision: Annotated[
        str | None,
        Field(
            description="Precision of forward and backward pass: FP32, BF16 or FP16. Unset, which means FP32, if "
            "spec.precision asks for no other."
        ),
    ] = None
    precision_reason: Annotated[
        str | None,
        Field(description="Why the plan has this precision, such as the units of its GPUs."),
    ] = None
    activation_checkpointing: Annotated[
        bool | None,
        Field(
            description="True if blocks of the model keep only their inputs for the backward pass. Unset, which means "
            "false, if spec.activationCheckpointing does not ask for it."
        ),
    ] = None
    activation_checkpointing_reason: Annotated[
        str | None,
        Field(description="Why the plan uses activation checkpointing or does not."),
    ] = None
    batch_choice: BatchChoice | None = None
    predicted: Predicted
    candidates: tuple[Candidate, ...] = ()
    trade_offs: Annotated[
        tuple[Candidate, ...],
        Field(
            description="Pareto front of the considered plans: those that no other plan beats in time, energy and cost "
            "at once, fastest first. Empty if it holds only the chosen plan."
        ),
    ] = ()
    rejected: tuple[Rejected, ...] = ()
    next_measurement: Annotated[
        str | None,
        Field(
            description="The run that would improve predictions for this job most. Unset once the predictions need no "
            "further run."
        ),
    ] = None
    power_advice: Annotated[
        str | None,
        Field(
            max_length=1024,
            description="Power limits of the plan's GPUs that would save energy, cost or carbon, and their effect. An "
            "administrator sets them: dljob does not. Unset if the job minimizes time, or if other limits save less "
            "than 1 %.",
        ),
    ] = None
    placement: Annotated[
        str | None,
        Field(
            max_length=1024,
            description="The zone, rack or spot nodes for which the plan was priced and on which its pods run. Unset "
            "if they may run on any node.",
        ),
    ] = None
    links: Annotated[
        str | None,
        Field(
            max_length=512,
            description="The slowest links between the ranks that the prediction counts on: bandwidth, latency, and "
            "where they come from (measured, an annotation, a data sheet, or assumed). Unset for one rank, and if the "
            "model is split over ranks.",
        ),
    ] = None
    defaults: Annotated[
        tuple[str, ...] | None,
        Field(
            description="Values of the job that come from the administrator's defaults, such as "
            "'scheduling.priorityClassName: batch'. Unset if there are none."
        ),
    ] = None
    agent: Annotated[
        AgentSource | None,
        Field(
            description="Where the agent of the pods comes from. Injected: an init container copies it from the "
            "trainer image. Auto: from the image if it is built FROM the trainer image, else injected. Unset: from the "
            "image."
        ),
    ] = None
    missing_fields: Annotated[
        tuple[str, ...] | None,
        Field(
            description="Unset fields of the spec that a prediction needs, and what each field would enable. "
            "Values in status.plan.predicted that are 0 are unknown: all of them, unless an earlier run of the script "
            "was observed. Unset if no such field is missing."
        ),
    ] = None
    structure: Annotated[
        str | None,
        Field(
            max_length=1024,
            description="Costs of the job's script, observed in an earlier run of the same image and command in this "
            "namespace. The prediction uses them in place of spec.model. Unset if spec.model is set, or if no run was "
            "observed.",
        ),
    ] = None
    memory: Annotated[
        str | None,
        Field(
            max_length=256,
            description="What earlier runs of the job's script in this namespace have shown about the memory of a pod. "
            "Unset if the pods do not request their memory because of that.",
        ),
    ] = None
