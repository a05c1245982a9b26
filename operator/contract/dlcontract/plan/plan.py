"""The plan of a job, which the operator sends to the agents in the ConfigMap ``<job>-plan``."""

import hashlib
import json
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from dlcontract.accumulation import replica_batches
from dlcontract.collectives import MEASURABLE, SERVERS, CollectiveName
from dlcontract.failure_rules import FailureRule
from dlcontract.plan.rank_groups import DOMAIN, RANK_GROUPS, expanded, grouped
from dlcontract.plan_parts import CheckpointRef, DatasetRef, Expectation, ModelRef, OptimizerRef, Precision, Rank, Role
from dlcontract.record import Name, Record
from dlcontract.until import Until

MAX_FULL_NBYTES = 900 * 2**10
"""Size of a plan's JSON in bytes above which the JSON contains the ranks in their short form (``rank_groups``).

Agents before release 0.3 cannot read the short form, so smaller plans do not use it. The rest of the 1 MiB of a
ConfigMap is for the operator's part of the plan, with at most 64 KiB of spec.
"""


class Plan(Record):
    """The complete plan of a job. The trainer needs only the plan and the job's volumes.

    Invariants: The n ranks are numbered 0..n-1 in order. The shares (local batch sizes) of all ranks add up to
    ``global_batch``; with model parallelism, the shares of each replica's ranks equal the replica's part of it. Ranks
    with the role worker have a share of at least 1, and parameter servers have the share 0. Exactly one of ``epochs``
    and ``steps`` is set.
    """

    schema_: Annotated[Literal[1], Field(alias="schema")] = 1
    job: Name
    namespace: Name
    uid: Name
    number: Annotated[int, Field(ge=1)]
    term: Annotated[int, Field(ge=1, description="Term. The operator raises it when it fences a lost node.")] = 1
    ranks: Annotated[tuple[Rank, ...], Field(min_length=1)]
    global_batch: Annotated[int, Field(ge=1)]
    batch_known: Annotated[
        bool,
        Field(description="False: the script chooses its batch size. global_batch is then the number of ranks."),
    ] = True
    collective: CollectiveName = "Ring"
    measure_collective: Annotated[
        bool,
        Field(
            description="True: ranks measure the collectives at their start and use the fastest for each bucket size."
        ),
    ] = False
    """If ``measure_collective`` is True, ``collective`` is only the one that the operator expects to be the fastest."""
    compression: Annotated[
        Literal["BF16", "FP16"] | None,
        Field(description="Number format of compressed gradients, with error feedback. None: no compression."),
    ] = None
    parallelism: Literal["Data", "Optimizer", "Sharded", "Pipeline", "Tensor"] = "Data"
    synchronization: Literal["Synchronous", "Asynchronous", "StaleSynchronous"] = "Synchronous"
    staleness_bound: Annotated[
        int | None, Field(ge=1, description="Steps that workers may be apart, with StaleSynchronous.")
    ] = None
    micro_batches: Annotated[
        int,
        Field(
            ge=1,
            description="Number of micro-batches: those of a pipeline's batch, or those into which each rank divides "
            "its part of a batch (gradient accumulation).",
        ),
    ] = 1
    replicas: Annotated[
        int,
        Field(
            ge=1,
            description="Number of replicas of the model with Pipeline and Tensor. With p ranks per replica, rank r "
            "holds part r mod p of replica r // p. A trainer that lacks this field rejects a plan with several.",
        ),
    ] = 1
    precision: Annotated[
        Precision,
        Field(
            description="Number format of forward and backward pass. Plans of releases without this field mean FP32. A "
            "trainer that does not know this field rejects a plan with a value other than FP32."
        ),
    ] = "FP32"
    activation_checkpointing: Annotated[
        bool,
        Field(
            description="True if blocks of the model keep only their inputs for the backward pass, and compute their "
            "forward pass again. A trainer that lacks this field rejects a plan with True."
        ),
    ] = False
    bucket_nbytes: Annotated[int, Field(ge=4096)] = 4 * 2**20
    segment_nbytes: Annotated[int, Field(ge=1024)] = 128 * 2**10
    model: ModelRef
    dataset: DatasetRef
    optimizer: OptimizerRef = OptimizerRef()
    epochs: Annotated[int | None, Field(ge=1)] = None
    steps: Annotated[int | None, Field(ge=1)] = None
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    rebalance: Annotated[bool, Field(description="True: the trainer may change shares by measured speed.")] = True
    checkpoint: CheckpointRef = CheckpointRef()
    compare_steps: Annotated[
        int,
        Field(
            ge=0, description="Steps between comparisons of the parameters of all ranks. 0: only before checkpoints."
        ),
    ] = 100
    min_ranks: Annotated[int, Field(ge=1, description="Fewest ranks for training. A job with more is elastic.")] = 1
    refused_ranks: Annotated[
        tuple[Annotated[int, Field(ge=1, le=2**31)], ...],
        Field(description="Numbers of ranks with which an elastic script failed under earlier plans."),
    ] = ()
    backoff_limit: Annotated[int, Field(ge=0)] = 3
    failure_rules: tuple[FailureRule, ...] = ()
    grace_s: Annotated[float, Field(gt=0)] = 60.0
    until: Annotated[
        Until | None, Field(description="Target at which the training ends before its last step. None: no target.")
    ] = None
    expected: Expectation = Expectation()

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, populate_by_name=True)

    @model_validator(mode="before")
    @classmethod
    def _ranks_are_expanded(cls, given: Any) -> Any:
        if not isinstance(given, dict) or RANK_GROUPS not in given or "ranks" in given:
            return given
        try:
            ranks = expanded(given)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{RANK_GROUPS}: found an invalid entry ({type(error).__name__}: {error})") from None
        return {key: value for key, value in given.items() if key not in (RANK_GROUPS, DOMAIN)} | {"ranks": ranks}

    @model_validator(mode="after")
    def _laws_hold(self) -> Self:
        if [r.rank for r in self.ranks] != list(range(len(self.ranks))):
            raise ValueError(f"ranks: found {[r.rank for r in self.ranks]}; expected 0..{len(self.ranks) - 1} in order")
        if self.splits_model or self.replicas > 1:
            self._check_model_parallel()
        elif (total := sum(r.share for r in self.ranks)) != self.global_batch:
            raise ValueError(
                f"ranks: found shares (local batch sizes) that sum to {total}; expected global_batch "
                f"{self.global_batch}"
            )
        for r in self.ranks:
            if (r.share == 0) != (r.role is Role.SERVER):
                raise ValueError(
                    f"ranks: found {r.role} {r.rank} with share (local batch size) {r.share}; expected 0 for "
                    "parameter servers and at least 1 for workers"
                )
        servers = [r.rank for r in self.ranks if r.role is Role.SERVER]
        layered = self.collective == "LayeredServer"
        if servers and (self.collective not in SERVERS or (0 in servers) != layered):
            raise ValueError(
                f"ranks: found parameter servers {servers} with collective {self.collective}; expected "
                "ParameterServer with a worker as rank 0, or LayeredServer with rank 0 as the server"
            )
        if self.collective in SERVERS and len(self.ranks) > 1 and not servers:
            raise ValueError(
                f"ranks: found no parameter server; expected at least one, because the collective is {self.collective}"
            )
        if layered:
            self._check_layered(servers)
        if self.compression and (self.collective != "Ring" or self.parallelism != "Data" or self.measure_collective):
            raise ValueError(
                f"compression: found {self.compression} with collective {self.collective}, parallelism "
                f"{self.parallelism} and measure_collective {self.measure_collective}; expected collective Ring, "
                "parallelism Data and measure_collective False"
            )
        if self.measure_collective and (self.collective not in MEASURABLE or self.parallelism != "Data"):
            raise ValueError(
                f"measure_collective: found True with collective {self.collective} and parallelism "
                f"{self.parallelism}; expected one of the collectives {', '.join(MEASURABLE)}, and parallelism Data"
            )
        if self.parallelism == "Optimizer" and self.collective not in ("Ring", "Torch") and len(self.ranks) > 1:
            raise ValueError(
                f"collective: found {self.collective} with parallelism Optimizer (sharded optimizer); expected Ring "
                "or Torch"
            )
        if self.parallelism != "Data" and self.collective == "DDP":
            raise ValueError(f"collective: found DDP with parallelism {self.parallelism}; expected parallelism Data")
        if self.shards_model:
            self._check_shards_model()
        if self.parallelism != "Data" and self.optimizer.scaling == "AdaScale":
            raise ValueError(f"optimizer.scaling: found AdaScale with parallelism {self.parallelism}; expected Data")
        accumulates = self.parallelism in ("Data", "Optimizer") and self.synchronization == "Synchronous"
        divides = accumulates or self.parallelism == "Pipeline" or self.shards_model
        if self.micro_batches > (self.global_batch if divides else 1):
            raise ValueError(
                f"micro_batches: found {self.micro_batches} with parallelism {self.parallelism} and synchronization "
                f"{self.synchronization}; expected 1, or from 1 to global_batch {self.global_batch} with parallelism "
                "Pipeline or Sharded, or with Data or Optimizer and synchronization Synchronous"
            )
        if self.precision != "FP32":
            self._check_precision(whole=accumulates or self.shards_model)
        if self.activation_checkpointing:
            self._check_recomputes(whole=accumulates or self.shards_model)
        if (self.staleness_bound is not None) != (self.synchronization == "StaleSynchronous"):
            raise ValueError(
                f"staleness_bound: found {self.staleness_bound} with synchronization {self.synchronization}; expected "
                "a number of steps with StaleSynchronous, and None otherwise"
            )
        if self.synchronization != "Synchronous":
            self._check_asynchronous()
        if self.dataset.sharded:
            self._check_sharded()
        if (self.epochs is None) == (self.steps is None):
            raise ValueError(
                f"epochs, steps: found {self.epochs} and {self.steps}; expected a number for exactly one of them, and "
                "None for the other"
            )
        if self.min_ranks > len(self.ranks):
            raise ValueError(
                f"min_ranks: found {self.min_ranks}; expected at most {len(self.ranks)}, the number of ranks in the "
                "plan"
            )
        return self

    def _check_layered(self, servers: list[int]) -> None:
        """Raise ValueError if other fields of the plan do not allow the collective LayeredServer.

        ``servers``: the ranks that are parameter servers.
        """
        if len(servers) > 1 or self.synchronization != "Synchronous" or self.parallelism != "Data":
            raise ValueError(
                f"collective: found LayeredServer with parameter servers {servers}, synchronization "
                f"{self.synchronization} and parallelism {self.parallelism}; expected rank 0 as the only server, "
                "Synchronous and Data"
            )
        if self.model.command or self.optimizer.find_rate or self.optimizer.scaling == "AdaScale":
            raise ValueError(
                f"collective: found LayeredServer with command {self.model.command}, find_rate "
                f"{self.optimizer.find_rate} and scaling {self.optimizer.scaling}; expected no command (a built-in "
                "model), find_rate False and no AdaScale, because workers have no gradient of the whole batch"
            )

    def _check_precision(self, *, whole: bool) -> None:
        """Raise ValueError if other fields of the plan do not allow a precision of 16 bits.

        ``whole``: True if ranks sum the gradient of a whole batch, with parallelism Data, Optimizer or Sharded.
        """
        framework, find_rate = self.model.framework, self.optimizer.find_rate
        scales_search = self.precision == "FP16" and find_rate
        if not whole or self.collective == "LayeredServer" or framework != "DLTrain" or scales_search:
            raise ValueError(
                f"precision: found {self.precision} with parallelism {self.parallelism}, synchronization "
                f"{self.synchronization}, collective {self.collective}, framework {framework} and find_rate "
                f"{find_rate}; expected FP32, or all of these: parallelism Data, Optimizer or Sharded; "
                "synchronization Synchronous; a collective other than LayeredServer; framework DLTrain; with FP16, "
                "find_rate False"
            )

    def _check_recomputes(self, *, whole: bool) -> None:
        """Raise ValueError if other fields of the plan do not allow activation checkpointing.

        ``whole``: True if ranks sum the gradient of a whole batch, with parallelism Data, Optimizer or Sharded.
        """
        if not whole or self.collective == "LayeredServer" or self.model.framework != "DLTrain":
            raise ValueError(
                f"activation_checkpointing: found True with parallelism {self.parallelism}, synchronization "
                f"{self.synchronization}, collective {self.collective} and framework {self.model.framework}; expected "
                "False, or all of these: parallelism Data, Optimizer or Sharded; synchronization Synchronous; a "
                "collective other than LayeredServer; framework DLTrain"
            )

    def _check_asynchronous(self) -> None:
        """Raise ValueError if other fields of the plan do not allow asynchronous or stale-synchronous training."""
        servers = sum(r.role is Role.SERVER for r in self.ranks)
        if servers != 1:
            raise ValueError(
                f"ranks: found {servers} parameter servers with synchronization {self.synchronization}; expected "
                "exactly 1"
            )
        if self.parallelism != "Data" or self.model.command or self.optimizer.find_rate or self.rebalance:
            raise ValueError(
                f"synchronization: found {self.synchronization} with parallelism {self.parallelism}, command "
                f"{self.model.command}, find_rate {self.optimizer.find_rate} and rebalance {self.rebalance}; expected "
                "parallelism Data, no command (a built-in model), find_rate False and rebalance False"
            )
        if self.optimizer.scaling == "AdaScale":
            raise ValueError(
                f"optimizer.scaling: found AdaScale with synchronization {self.synchronization}; expected Synchronous"
            )

    def _check_sharded(self) -> None:
        """Raise ValueError if other fields of the plan do not allow distribution Sharded of the dataset."""
        framework = self.model.framework
        whole = self.parallelism in ("Data", "Optimizer")
        if not whole or self.synchronization != "Synchronous" or framework != "DLTrain":
            raise ValueError(
                f"dataset.distribution: found Sharded with parallelism {self.parallelism}, synchronization "
                f"{self.synchronization} and framework {framework}; expected Full, or parallelism Data or Optimizer, "
                "Synchronous, and framework DLTrain"
            )

    def _check_shards_model(self) -> None:
        """Raise ValueError if other fields of the plan do not allow parallelism Sharded."""
        script = bool(self.model.command) and self.model.framework == "DLTrain"
        synchronous = self.synchronization == "Synchronous"
        if self.collective != "Torch" or not script or not synchronous or self.min_ranks < len(self.ranks):
            raise ValueError(
                f"parallelism: found Sharded with collective {self.collective}, command {self.model.command}, "
                f"framework {self.model.framework}, synchronization {self.synchronization} and min_ranks "
                f"{self.min_ranks}; expected Torch, a command (a training script), DLTrain, Synchronous and "
                f"{len(self.ranks)}"
            )

    def _check_model_parallel(self) -> None:
        """Raise ValueError if other fields of the plan do not allow its model parallelism."""
        if not self.splits_model or len(self.ranks) % self.replicas or self.replicas > self.global_batch:
            raise ValueError(
                f"replicas: found {self.replicas} with parallelism {self.parallelism}, {len(self.ranks)} ranks and "
                f"global_batch {self.global_batch}; expected 1, or with Pipeline and Tensor a divisor of the number of "
                "ranks that is at most global_batch"
            )
        batches = replica_batches(self.global_batch, self.replicas)
        if any(r.share != batches[r.rank // self.split_over] for r in self.ranks):
            found = sorted({r.share for r in self.ranks})
            raise ValueError(
                f"ranks: found shares (local batch sizes) {found} with parallelism {self.parallelism}; expected "
                f"{batches} for the {self.split_over} ranks of each replica, because each of them processes all "
                "samples of its replica"
            )
        framework, find_rate = self.model.framework, self.optimizer.find_rate
        if framework != "DLTrain" or find_rate or self.rebalance or self.min_ranks < len(self.ranks):
            raise ValueError(
                f"parallelism: found {self.parallelism} with {framework}, find_rate {find_rate}, rebalance "
                f"{self.rebalance} and min_ranks {self.min_ranks}; expected DLTrain, False, False and {len(self.ranks)}"
            )
        if self.collective in SERVERS:
            raise ValueError(
                f"collective: found {self.collective} with parallelism {self.parallelism}; expected a collective "
                "without servers"
            )

    @property
    def splits_model(self) -> bool:
        """Return True with model parallelism: each rank holds a part of a replica, and processes its whole batch."""
        return self.parallelism in ("Pipeline", "Tensor")

    @property
    def split_over(self) -> int:
        """Return the number of ranks of each replica of the model with model parallelism."""
        return len(self.ranks) // self.replicas

    @property
    def shards_model(self) -> bool:
        """Return True if each rank stores a part of the parameters, the gradients and the optimizer state (ZeRO-3)."""
        return self.parallelism == "Sharded"

    @property
    def pods(self) -> tuple[str, ...]:
        """Return the distinct pod names in rank order."""
        return tuple(dict.fromkeys(r.pod for r in self.ranks))

    def to_json(self) -> str:
        """Return the plan as canonical JSON, so that equal plans have equal text.

        Fields with their default values are omitted. The trainer's agent (a process in each pod that starts the ranks)
        rejects unknown fields. Because of the omission, an agent of an earlier release accepts a plan that uses no new
        field. Therefore, the default of a field must never change. If the text would have more than
        ``MAX_FULL_NBYTES`` bytes, the ranks are written in their short form (``rank_groups``), unless the short form
        cannot express them.
        """
        text = self._full_json()
        if len(text) <= MAX_FULL_NBYTES:
            return text
        if (short := grouped([rank.model_dump(mode="json") for rank in self.ranks])) is None:
            return text
        return self._json(short | self._fields(exclude={"ranks"}))

    def _full_json(self) -> str:
        return self._json(self._fields())

    def _fields(self, exclude: set[str] | None = None) -> dict[str, Any]:
        return self.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude=exclude)

    def _json(self, fields: dict[str, Any]) -> str:
        return json.dumps({"schema": self.schema_, **fields}, separators=(",", ":"))

    @classmethod
    def parse(cls, text: str | bytes, *, ignore_unknown: bool = False) -> Self:
        """Parse a plan from JSON. If it is invalid, raise pydantic's ValidationError (a ValueError) with the field.

        ``ignore_unknown``: True to ignore unknown fields, which a later release may have written. Only the operator
        ignores them, because it may be rolled back while agents run the plan.
        """
        return cls.model_validate_json(text, extra="ignore" if ignore_unknown else None)

    def digest(self) -> str:
        """Return a digest of the plan, with 12 hex digits. Plans with equal digests train in the same way.

        The digest does not depend on ``number`` (which counts the job's plans), ``term`` (which the operator raises to
        exclude the agents on a lost node), ``expected`` (the predicted times) and ``refused_ranks``. Reports contain
        the digest of the plan that the ranks run.
        """
        body = self.model_copy(update={"number": 1, "term": 1, "expected": Expectation(), "refused_ranks": ()})
        return hashlib.sha256(body._full_json().encode()).hexdigest()[:12]
