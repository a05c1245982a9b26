"""The parts of a plan: its ranks, and what the trainer needs to know about model, data, optimizer and checkpoints."""

from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from dlcontract.checkpoint.interval import FIRST_S
from dlcontract.pods import CHECKPOINT_DIR
from dlcontract.record import Name, Record

Precision = Literal["FP32", "BF16", "FP16"]
"""Number format of forward and backward pass, by autocast: float32, bfloat16, or float16 with loss scaling.

Parameters, gradients that ranks exchange, and optimizer state are float32 in all of them.
"""


class Role(StrEnum):
    WORKER = "worker"
    SERVER = "server"


class Rank(Record):
    """One rank (process) of the training: the pod and the device on which it runs, and its local batch size."""

    rank: Annotated[int, Field(ge=0)]
    pod: Name
    host: Annotated[Name, Field(description="DNS name of the pod, reachable before the pod is ready.")]
    group: Name
    device: Name
    local_rank: Annotated[
        int, Field(ge=0, description="Index of the rank among the ranks of its pod, and of its GPU if it uses one.")
    ] = 0
    gpu: Annotated[
        bool, Field(description="True if device is a GPU's product name; otherwise it is a class of CPU nodes.")
    ] = False
    share: Annotated[
        int,
        Field(
            ge=0,
            description="Local batch size in samples. With model parallelism it is the global batch size. 0 for a "
            "parameter server.",
        ),
    ]
    role: Role = Role.WORKER


class ModelRef(Record):
    name: str | None = None
    command: tuple[str, ...] = ()
    framework: Literal["DLTrain", "Torchrun", "MPI"] = "DLTrain"
    sync_batch_norm: bool = False
    elastic: Annotated[
        bool,
        Field(description="True: a script for torchrun that can be started again with fewer ranks, down to min_ranks."),
    ] = False
    deferred: Annotated[
        bool,
        Field(
            description="True: with Sharded, t.create gives the model no memory, and t.wrap gives each rank its part. "
            "A trainer that lacks this field rejects a plan with True."
        ),
    ] = False

    @property
    def may_shrink(self) -> bool:
        """Return True if the ranks may start again, or continue, with fewer ranks than planned."""
        return self.framework == "DLTrain" or self.elastic

    @property
    def resumes(self) -> bool:
        """Return True if the training continues from its checkpoint after a restart with another number of ranks.

        This is the case with framework DLTrain. A script for torchrun or an MPI program might start again from step 0,
        so the operator does not move such a job to a better plan.
        """
        return self.framework == "DLTrain"


class DatasetRef(Record):
    """The training data: either the name of a built-in dataset, or the path of the data in the pod."""

    name: str | None = None
    path: str | None = None
    samples: int | None = None
    distribution: Annotated[
        Literal["Full", "Sharded"],
        Field(description="Sharded: ranks fetch the shards of their pod from uri. Full: path has all data."),
    ] = "Full"
    uri: Annotated[str | None, Field(description="Location of the data, with distribution Sharded.")] = None
    sha256: Annotated[str | None, Field(description="SHA-256 of the file with the checksums of blocks beside uri.")] = (
        None
    )
    size_nbytes: Annotated[int | None, Field(ge=1, description="Space in each pod for shards, in bytes.")] = None

    @property
    def sharded(self) -> bool:
        return self.distribution == "Sharded"

    @model_validator(mode="after")
    def _shards_have_a_source(self) -> Self:
        if self.sharded and (self.uri is None or self.path is None):
            raise ValueError(
                f"dataset: found distribution Sharded with uri {self.uri} and path {self.path}; expected values for "
                "both"
            )
        return self


class OptimizerRef(Record):
    name: Literal["SGD", "Adam", "AdamW"] = "SGD"
    learning_rate: Annotated[float, Field(gt=0)] = 0.05
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    find_rate: Annotated[bool, Field(description="True: a learning-rate range test replaces learning_rate.")] = False
    rate_curve: Annotated[
        Literal["Loss", "Accuracy"], Field(description="With find_rate: the curve from which the rate is read.")
    ] = "Loss"
    scaling: Literal["Linear", "SquareRoot", "AdaScale"] | None = None
    base_batch: Annotated[
        int | None, Field(ge=1, description="With scaling: the batch size for which learning_rate is meant.")
    ] = None

    @model_validator(mode="after")
    def _scaling_has_a_base(self) -> Self:
        if (self.scaling is None) != (self.base_batch is None):
            raise ValueError(
                f"optimizer: found scaling {self.scaling} and base_batch {self.base_batch}; expected values for both, "
                "or None for both"
            )
        return self


class CheckpointRef(Record):
    enabled: bool = True
    directory: str = CHECKPOINT_DIR
    uri: Annotated[
        str | None,
        Field(
            pattern="^s3://.+",
            description="Location of the checkpoints in an object store. directory is then on the disk of each node.",
        ),
    ] = None
    interval_s: Annotated[float, Field(gt=0)] = FIRST_S
    choose_interval: Annotated[
        bool,
        Field(description="True: ranks choose the interval once the cost of a checkpoint is measured."),
    ] = False
    keep: Annotated[int, Field(ge=1)] = 3
    interrupted_s: Annotated[
        float | None,
        Field(
            gt=0,
            description="Mean seconds between interruptions of one pod's node, such as of a spot node. Ranks use it if "
            "choose_interval is true. None: no interruptions are expected.",
        ),
    ] = None

    @property
    def on_volume(self) -> bool:
        """Return True if the checkpoints are on a volume that all pods share and that outlives them."""
        return self.enabled and self.uri is None


class Expectation(Record):
    """The times in seconds that the operator predicted: median and p90 of a step, and the whole training.

    The time in which init containers fetch the data is not included.

    The trainer shows the predicted times of a step and of the training in its run report, and exports the predicted
    step time as a metric.
    """

    step_s: Annotated[float, Field(ge=0)] = 0.0
    step_p90_s: Annotated[float, Field(ge=0)] = 0.0
    total_s: Annotated[float, Field(ge=0)] = 0.0
