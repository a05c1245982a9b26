"""The ranks that train together: their local batch sizes (shares), gradient buffers and parallelism strategy."""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dlcontract import Plan, Role
from dltrain.batch.micro_batches import MicroBatches
from dltrain.comm.process_group import ProcessGroup
from dltrain.device.rank_device import max_samples
from dltrain.elastic.balance import Balance
from dltrain.elastic.parameter_agreement import compare
from dltrain.elastic.shrinking import Elastic, inherit
from dltrain.models.deferred import initial_values
from dltrain.optim.combined import parts_of
from dltrain.optim.noise_scale import stride
from dltrain.parallel import gradient_summing
from dltrain.parallel.buffer_tail import WEIGHT, WITHIN, Shared, length
from dltrain.parallel.layered_server import layered_server
from dltrain.parallel.model_split.pipeline import Pipeline
from dltrain.parallel.model_split.tensor_parallel import TensorParallel
from dltrain.parallel.optimizer_checks import check_trained, without_closure
from dltrain.parallel.placement import Copies, Strategy
from dltrain.parallel.sharded_optimizer import optimizer_parallel
from dltrain.protocol.errors import MisuseError, ParametersDivergedError, PeerLostError
from dltrain.protocol.rank_messages import Compared, Resharded, Shrunk
from dltrain.protocol.reporter import RankReporter

T = TypeVar("T")

NOT_WRAPPED = "t.wrap: found no call yet; expected t.wrap(model, optimizer) first"


class Team:
    """The ranks that train together, as this rank sees them. All ranks have the same view.

    ``shares``: the local batch sizes by rank. They change with measured speeds and after losses of ranks.
    """

    def __init__(
        self, plan: Plan, process_group: ProcessGroup, reporter: RankReporter, lost: Callable[[], None], *, on_cpu: bool
    ) -> None:
        """Create the process group of the workers, which are the ranks that compute gradients.

        ``lost``: called each time the process group has shrunk after a loss of ranks. ``on_cpu``: True if this rank
        computes on a CPU. Only then can the process group shrink.
        """
        self.plan, self.process_group = plan, process_group
        self.shares = self.planned_shares
        computes = [rank.role is Role.WORKER for rank in plan.ranks]
        self.worker_group = process_group.split(computes)
        self.worker, self.workers = self.worker_group.rank, sum(computes)
        """This rank's number among the workers (or among the servers, for a server), and the number of workers."""
        self.elastic = Elastic(plan, process_group, on_cpu=on_cpu)
        self.whole: tuple[int, ...] | None = None
        """Local batch sizes before the first loss of ranks, or None if no rank was lost.

        Checkpoints store these sizes, so that a restart with all ranks uses them again.
        """
        self.rank, self.size = process_group.rank, process_group.size
        """This rank's number in the plan and the plan's number of ranks. Both stay the same if ranks are lost."""
        self._reporter, self._lost = reporter, lost
        self._parallel: Strategy | None = None
        self._retired: list[Strategy] = []
        self._balance: Balance | None = None
        self._keeps_shares = False

    @property
    def planned_shares(self) -> tuple[int, ...]:
        return tuple(rank.share for rank in self.plan.ranks)

    @property
    def taken(self) -> bool:
        """Return True if ``take`` was called, so that the model and the optimizer are set."""
        return self._parallel is not None

    @property
    def parallel(self) -> Strategy:
        """Return the object that implements the plan's parallelism strategy. Raise MisuseError before ``take``."""
        if self._parallel is None:
            raise MisuseError(NOT_WRAPPED)
        return self._parallel

    @property
    def shards_model(self) -> bool:
        """Return True if ranks shard the model. The parallelism strategy then moves the parameters to the devices."""
        return self.plan.shards_model and self.size > 1

    @property
    def defers_model(self) -> bool:
        """Return True if the model has no memory until the strategy Sharded gives each rank its part."""
        return self.shards_model and self.plan.model.deferred

    @property
    def splits_model(self) -> bool:
        """Return True if ranks split the model, so that no rank has all of it."""
        return self.plan.splits_model and self.size > 1

    @property
    def random_rank(self) -> int:
        """Return the number with which this rank seeds the random numbers of a step.

        Tensor-parallel ranks of a replica compute the same whole layers, so they need the same numbers (dropout).
        """
        return self.rank // self.plan.split_over if self.plan.parallelism == "Tensor" else self.rank

    def places(self, model: nn.Module) -> bool:
        """Return True if the parallelism strategy moves ``model`` to the devices, because ranks get parts of it.

        If ranks split a model, the strategy does so only for a deferred one, whose parameters have no memory.
        """
        return self.shards_model or (self.plan.splits_model and initial_values(model) is not None)

    def take(
        self, model: nn.Module, optimizer: Optimizer, sample: Tensor | None, device: torch.device | None = None
    ) -> None:
        """Set the model and the optimizer to train, and create the gradient buffers and the parallelism strategy.

        ``sample``: an input with batch size 1, which only a pipeline needs. ``device``: this rank's torch device; by
        default, the device of the model's parameters. Raise ValueError if the optimizer has parameters outside the
        model.
        """
        check_trained(model, optimizer)
        for one in parts_of(optimizer):
            one.register_step_pre_hook(without_closure)
        if len(parts_of(optimizer)) > 1:
            # If a rank were lost in the second update of a step, nothing could undo the first, and the step could not
            # be computed again.
            self.elastic.active = False
        self.model, self._optimizer, self._sample = model, optimizer, sample
        self._device = device or next(model.parameters()).device
        self._rebuild()

    def measure(self, step: int, steps: int, *, always: bool) -> bool:
        """Decide if ranks exchange the norms of their local gradients in a step. Return True if they do.

        The gradient noise scale is computed from these norms. This method configures the parallelism strategy
        accordingly. ``step``: number of the step. ``steps``: number of all steps. ``always``: True to exchange the
        norms at every step instead of only at some steps. They are never exchanged with a single worker or with a
        parallelism strategy other than "Data".
        """
        measures_square = self.plan.parallelism == "Data" and self.workers > 1 and not self.parallel.sharded
        measures_square = measures_square and self.parallel.shares_square
        measures_square = measures_square and (always or step % stride(steps) == 0)
        self.parallel.square_at = WITHIN if measures_square else None
        return measures_square

    def continue_after_loss(self, step: int) -> None:
        """Shrink the process group after a loss of ranks, so that the remaining ranks can compute ``step`` again.

        Divide the local batch sizes of the lost ranks among the remaining ranks, and report the change to the agent.
        Raise PeerLostError if the remaining ranks cannot continue.
        """
        began = time.perf_counter()
        if self._parallel is None:
            raise PeerLostError("another rank was lost before training began")
        rebuilt = None
        while rebuilt is None:  # repeat if another rank is lost meanwhile
            self.elastic.regroup(step)
            rebuilt = self.elastic.run_or_abort(self._rebuild, self.process_group.abandon)
        self.worker, self.workers = self.process_group.rank, self.process_group.size
        alive = self.elastic.alive
        spent_s = time.perf_counter() - began
        self._reporter.send(Shrunk(rank=self.rank, step=step, alive=alive, shrink_s=spent_s))
        self.whole = self.whole or self.shares
        lost = [rank for rank, share in enumerate(self.shares) if share and rank not in alive]
        self.reshard(step, inherit(self.shares, alive), f"lost ranks {lost}")
        self._lost()

    def together(self, step: int, operation: Callable[[], T]) -> T:
        """Run a collective operation of the workers and return its result.

        ``step``: number of completed steps. If ranks are lost during the operation, repeat it without them.
        ``operation`` must not return None. Raise PeerLostError if the run cannot continue without the lost ranks.
        """
        result = None
        while result is None:
            result = self.elastic.run_or_abort(operation, self.worker_group.abandon)
            if result is None:
                self.continue_after_loss(step)
        return result

    def keep_ranks_and_shares(self) -> None:
        """Neither continue without lost ranks nor adapt local batch sizes from now on. All ranks must call it.

        This is necessary if each rank reads its own stream of samples: nobody could read that of a lost rank further,
        and a rank must know in advance if its stream has another complete batch. A loss raises PeerLostError.
        """
        self.elastic.active, self._keeps_shares = False, True

    def reshard(self, step: int, shares: Sequence[int], reason: str) -> None:
        """Set the local batch sizes from the next step on and report them with ``reason``.

        All ranks pass the same values.
        """
        self.shares = tuple(shares)
        self._reporter.send(Resharded(rank=self.rank, step=step, shares=self.shares, reason=reason))

    def balance(
        self, step: int, computed_s: Sequence[float], exposed_s: Sequence[float], demanded_s: Sequence[float]
    ) -> None:
        """Adapt the local batch sizes to the measured times of the previous step, if the plan allows it.

        Ranks have exchanged these times together with this step's gradients. All times are in seconds. ``computed_s``:
        computing time of each rank. ``exposed_s``: communication of each worker that did not overlap with computing.
        ``demanded_s``: for each rank, the estimated time of the step if the rank computed without waiting, which is its
        CPU time divided by the fraction of a CPU that it gets (see ``stopwatch.Budget``); 0 if unknown.
        """
        if not self.plan.rebalance or self._keeps_shares or self.workers == 1 or not exposed_s:
            return
        if self._balance is None or self._balance.shares != self.shares:
            self._balance = Balance(self.shares, self._limits())
        step_s = max(computed_s) + min(exposed_s)
        if (shares := self._balance.add(computed_s, demanded_s, step_s)) is not None:
            self.reshard(step, shares, "measured while training")

    def _limits(self) -> list[int]:
        """Return the maximum local batch size of each rank, by its GPU's memory. On CPUs, it is the global batch size.

        All workers must call this method at the same step. Raise PeerLostError if a rank is lost.
        """
        limits = [self.plan.global_batch] * len(self.plan.ranks)
        if any(rank.gpu for rank in self.plan.ranks):
            device = next(self.model.parameters()).device
            micro_batches = MicroBatches(self.plan)
            largest = micro_batches.largest(self.shares, self.rank)
            mine = micro_batches.most(self.shares) * max_samples(device, largest, self.plan.global_batch)
            workers = [rank.rank for rank in self.plan.ranks if rank.role is Role.WORKER]
            for rank, (most,) in zip(workers, self.worker_group.gather([mine]), strict=True):
                limits[rank] = int(most)
        return limits

    def check_weights(self, agreed: Shared, step: int) -> None:
        """Check the weights that ranks passed to ``t.weigh`` in this step. The gradient is divided by their sum.

        ``agreed``: the values that ranks exchanged in this step, summed over ranks. Raise MisuseError if only some of
        the ranks that compute gradients called ``t.weigh``, and RuntimeError if the sum of the weights is 0.
        """
        if agreed.weighed != self.workers:
            raise MisuseError(
                f"t.weigh: found calls on {agreed.weighed:g} of {self.workers} ranks in the same step; expected calls "
                "on all ranks or on none"
            )
        if not agreed.weight:
            raise RuntimeError(
                f"t.weigh: found a sum of 0 tokens over all ranks at step {step}; expected at least one token in the "
                "global batch"
            )

    def agree_on_parameters(self, step: int) -> bool:
        """Check that all workers have equal parameters, and report the result to the agent.

        Always return True, because ``together`` interprets the result None as a loss of ranks. Raise
        ParametersDivergedError if parameters differ, and PeerLostError if a rank is lost.
        """
        if self.workers == 1 or not self.shares[self.rank]:
            return True
        alive = [number for number in self.elastic.alive if self.plan.ranks[number].role is Role.WORKER]
        equal = Copies(self.worker_group, tuple(alive), self.parallel.replicated(self.model))
        compared = [each for each in (equal, self.parallel.copies()) if each is not None and each.parameters]
        if not compared:
            return True
        try:
            for each in compared:
                compare(each.group, each.parameters, {rank: self.plan.ranks[rank].device for rank in each.ranks}, step)
        except ParametersDivergedError:
            self._reporter.send(Compared(rank=self.rank, step=step, agree=False))
            raise
        self._reporter.send(Compared(rank=self.rank, step=step, agree=True))
        return True

    def close(self) -> None:
        """Free the collective that reduces the gradients, if there is one. Training cannot continue afterwards."""
        if self._parallel is not None:
            self._parallel.close()
            self._parallel = None

    def abandon(self) -> None:
        """Abort the operations in which other ranks wait for this rank, which is about to end. Do not wait for them.

        The process must exit next.
        """
        if self._parallel is not None:
            self._parallel.abandon()
        self.worker_group.abandon()
        self.process_group.abandon()

    def _rebuild(self) -> Strategy:
        """Create the gradient buffers and the parallelism strategy for the current ranks, and return the strategy.

        After a loss of ranks, the buffers of the previous strategy stay allocated, because messages may still arrive.
        """
        if self._parallel is not None:
            self._parallel.retire()
            self._retired.append(self._parallel)
        tail = length(self.size)
        made: Strategy
        if self.plan.parallelism == "Optimizer" and self.size > 1:
            made = optimizer_parallel(self.plan, self.process_group, self.model, self._optimizer, tail)
        elif self.plan.parallelism == "Pipeline" and self.size > 1:
            assert self._sample is not None, "t.wrap checks it"
            group, sample, device = self.process_group, self._sample[:1], self._device
            made = Pipeline(self.plan, group, self.model, self._optimizer, sample, tail, device)
        elif self.plan.parallelism == "Tensor" and self.size > 1:
            group, device = self.process_group, self._device
            made = TensorParallel(self.plan, group, self.model, self._optimizer, tail, device)
        elif self.shards_model:
            from dltrain.parallel.pytorch.fsdp import fully_sharded  # imports torch.distributed

            made = fully_sharded(self.plan, self.process_group, self.model, self._optimizer, self._device, tail)
        elif self.plan.collective == "LayeredServer" and self.size > 1:
            made = layered_server(self.plan, self.process_group, self.model, self._optimizer, tail)
        elif self.plan.collective == "DDP" and self.size > 1 and len(parts_of(self._optimizer)) == 1:
            from dltrain.parallel.pytorch.ddp import torch_data_parallel  # imports torch.distributed

            made = torch_data_parallel(self.plan, self.process_group, self.model, tail)
        else:
            parameters = list(self.model.parameters())
            made = gradient_summing.data_parallel(
                self.plan, self.process_group, parameters, self._optimizer, tail, self._parallel
            )
        made.weight_at = WEIGHT
        self._parallel = made
        return made
