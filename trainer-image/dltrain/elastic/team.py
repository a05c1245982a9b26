"""The ranks that train together: their shares of the batch, buffers and strategy, through losses."""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from dlcontract import Plan, Role
from dltrain.comm.process_group import ProcessGroup
from dltrain.device.rank_device import most_samples
from dltrain.elastic.balance import Balance
from dltrain.elastic.parameter_agreement import compare
from dltrain.elastic.shrinking import Elastic, inherit
from dltrain.optim.noise_scale import stride
from dltrain.parallel import gradient_summing
from dltrain.parallel.buffer_tail import WEIGHT, WITHIN, Shared, length
from dltrain.parallel.data_parallel import DataParallel
from dltrain.parallel.optimizer_checks import check_trained, without_closure
from dltrain.parallel.pipeline import Pipeline
from dltrain.parallel.sharded_optimizer import optimizer_parallel
from dltrain.parallel.tensor_parallel import TensorParallel
from dltrain.protocol.errors import MisuseError, ParametersDivergedError, PeerLostError
from dltrain.protocol.rank_messages import Compared, Resharded, Shrunk
from dltrain.protocol.reporter import RankReporter

T = TypeVar("T")


class Team:
    """One for each rank, all alike. ``shares`` follow measurements and losses, and each change is told."""

    def __init__(
        self, plan: Plan, world: ProcessGroup, reporter: RankReporter, lost: Callable[[], None], *, on_cpu: bool
    ) -> None:
        """``lost``: called when the team goes on without ranks, once it can."""
        self.plan, self.world = plan, world
        self.shares = self.planned_shares
        computes = [rank.role is Role.WORKER for rank in plan.ranks]
        self.among_workers = world.split(computes)
        self.worker, self.workers = self.among_workers.rank, sum(computes)
        """This rank's number among the ranks that compute (a server's among the servers), and how many compute."""
        self.elastic = Elastic(plan, world, on_cpu=on_cpu)
        self.whole: tuple[int, ...] | None = None
        """Shares before ranks were lost, for when they are back."""
        self.rank, self.size = world.rank, world.size
        """In the plan, whoever was lost since."""
        self._reporter, self._lost = reporter, lost
        self._parallel: DataParallel | None = None
        self._retired: list[DataParallel] = []
        self._balance: Balance | None = None

    @property
    def planned_shares(self) -> tuple[int, ...]:
        return tuple(rank.share for rank in self.plan.ranks)

    @property
    def taken(self) -> bool:
        """Whether there is a model."""
        return self._parallel is not None

    @property
    def parallel(self) -> DataParallel:
        """Raises MisuseError before ``take``."""
        if self._parallel is None:
            raise MisuseError("found no model, expected t.wrap(model, optimizer) first")
        return self._parallel

    def take(self, model: nn.Module, optimizer: Optimizer, sample: Tensor | None) -> None:
        """Train this from now on. ``sample``: the input of a batch of one, where ranks split the model.

        Raises ValueError for another optimizer than of the model's parameters.
        """
        check_trained(model, optimizer)
        optimizer.register_step_pre_hook(without_closure)
        self.model, self._optimizer, self._sample = model, optimizer, sample
        self._rebuild()

    def measure(self, step: int, steps: int, *, always: bool) -> bool:
        """Whether ranks tell their own gradients' norms at this step of ``steps``; ``always``: wherever they can."""
        measures_square = self.plan.parallelism == "Data" and self.workers > 1
        measures_square = measures_square and (always or step % stride(steps) == 0)
        self.parallel.square_at = WITHIN if measures_square else None
        return measures_square

    def go_on(self, step: int) -> None:
        """Ranks were lost: make the others ready to go on from ``step``. Raises PeerLostError where that cannot be."""
        began = time.perf_counter()
        if self._parallel is None:
            raise PeerLostError("lost a peer before training began")
        rebuilt = None
        while rebuilt is None:  # again, when another one dies meanwhile
            self.elastic.regroup(step)
            rebuilt = self.elastic.attempt(self._rebuild, self.world.abandon)
        self.worker, self.workers = self.world.rank, self.world.size
        alive = self.elastic.alive
        spent_s = time.perf_counter() - began
        self._reporter.send(Shrunk(rank=self.rank, step=step, alive=alive, shrink_s=spent_s))
        self.whole = self.whole or self.shares
        lost = [rank for rank, share in enumerate(self.shares) if share and rank not in alive]
        self.reshard(step, inherit(self.shares, alive), f"lost ranks {lost}")
        self._lost()

    def together(self, step: int, operation: Callable[[], T]) -> T:
        """What the workers do together, between steps; without those that are lost meanwhile. Raises PeerLostError
        where that cannot be.
        """
        result = None
        while result is None:
            result = self.elastic.attempt(operation, self.among_workers.abandon)
            if result is None:
                self.go_on(step)
        return result

    def reshard(self, step: int, shares: Sequence[int], reason: str) -> None:
        """Other shares from the next step on, the same ones on every rank."""
        self.shares = tuple(shares)
        self._reporter.send(Resharded(rank=self.rank, step=step, shares=self.shares, reason=reason))

    def balance(
        self, step: int, computed_s: Sequence[float], exposed_s: Sequence[float], demanded_s: Sequence[float]
    ) -> None:
        """Move shares by the times of the step before, which came with this one's gradients.

        ``computed_s``, ``demanded_s``: by rank. ``exposed_s``: of those that compute.
        """
        if not self.plan.rebalance or self.workers == 1 or not exposed_s:
            return
        if self._balance is None or self._balance.shares != self.shares:
            self._balance = Balance(self.shares, self._limits())
        step_s = max(computed_s) + min(exposed_s)
        if (shares := self._balance.add(computed_s, demanded_s, step_s)) is not None:
            self.reshard(step, shares, "measured while training")

    def _limits(self) -> list[int]:
        """Most samples of each rank, what its GPU's memory holds; a CPU's is not what bounds it. All workers call it
        at the same step. Raises PeerLostError.
        """
        limits = [self.plan.global_batch] * len(self.plan.ranks)
        if any(rank.gpu for rank in self.plan.ranks):
            device = next(self.model.parameters()).device
            mine = most_samples(device, self.shares[self.rank], self.plan.global_batch)
            workers = [rank.rank for rank in self.plan.ranks if rank.role is Role.WORKER]
            for rank, (most,) in zip(workers, self.among_workers.gather([mine]), strict=True):
                limits[rank] = int(most)
        return limits

    def check_weights(self, agreed: Shared, step: int) -> None:
        """After a step in which ranks weighed their loss, so that the sum was divided by the total of it."""
        if agreed.weighed != self.workers:
            raise MisuseError(f"found t.weigh() on {agreed.weighed:g} of {self.workers} ranks, expected all or none")
        if not agreed.weight:
            raise RuntimeError(f"found no token in the whole batch at step {step}, expected some")

    def agree_on_parameters(self, step: int) -> bool:
        """True, on all ranks that compute, and the agent hears it. Raises ParametersDivergedError when theirs differ,
        PeerLostError.
        """
        parameters = self.parallel.replicated(self.model)
        if self.workers == 1 or not self.shares[self.rank] or not parameters:
            return True
        ranks = [self.plan.ranks[number] for number in self.elastic.alive]
        kinds = {rank.rank: rank.device for rank in ranks if rank.role is Role.WORKER}
        try:
            compare(self.among_workers, parameters, kinds, step)
        except ParametersDivergedError:
            self._reporter.send(Compared(rank=self.rank, step=step, agree=False))
            raise
        self._reporter.send(Compared(rank=self.rank, step=step, agree=True))
        return True

    def close(self) -> None:
        """Free the collective."""
        if self._parallel is not None:
            self._parallel.close()
            self._parallel = None

    def abandon(self) -> None:
        """Leave alone, so that no rank waits for this one. The process must exit next."""
        if self._parallel is not None:
            self._parallel.abandon()
        self.among_workers.abandon()
        self.world.abandon()

    def _rebuild(self) -> DataParallel:
        """Buffers and strategy for the ranks there are; what served others before is kept, but rests."""
        if self._parallel is not None:
            self._parallel.retire()
            self._retired.append(self._parallel)
        tail = length(self.size)
        made: DataParallel
        if self.plan.parallelism == "Optimizer" and self.size > 1:
            made = optimizer_parallel(self.plan, self.world, self.model, self._optimizer, tail)
        elif self.plan.parallelism == "Pipeline" and self.size > 1:
            assert self._sample is not None, "only the built-in trainer gets such a plan"
            made = Pipeline(self.plan, self.world, self.model, self._optimizer, self._sample, tail)
        elif self.plan.parallelism == "Tensor" and self.size > 1:
            made = TensorParallel(self.plan, self.world, self.model, self._optimizer, tail)
        else:
            parameters = list(self.model.parameters())
            made = gradient_summing.data_parallel(self.plan, self.world, parameters, tail, self._parallel)
        made.weight_at = WEIGHT
        self._parallel = made
        return made
