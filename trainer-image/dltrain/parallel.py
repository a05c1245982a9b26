"""Data parallel training: gradients of all ranks are summed while backward is still running. Users: ``loop``.

Rank r computes the mean loss of its b_r samples; its gradient times b_r / B, summed over ranks, is the gradient of the
mean over the B samples of the batch, as one process would have it, whatever the split. The same holds for a mean over
tokens, with tokens in the place of samples; their total is known only after the sum, and divides it then.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch.optim import Optimizer

from dltrain.buffers import GradientBuffer
from dltrain.comm.base import Collective, Work
from dltrain.errors import PeerLostError
from dltrain.sampling import Part, Sampler

_DRIVE_S, _DRIVEN = 0.5e-3, 3
"""During backward, sums are driven so often at most, and so many of them."""


class DataParallel:
    """Sums gradients over ranks, bucket by bucket, started by hooks as backward completes them.

    Buckets start in the same order on every rank, whatever order backward finishes them in; every hook also drives
    the messages under way, because MPI moves them only inside calls.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        collective: Callable[[list[torch.Tensor]], Collective],
        bucket_nbytes: int,
        tail: int,
        zeros: Callable[[int, torch.dtype, torch.device], torch.Tensor] | None = None,
    ) -> None:
        """``collective`` makes the strategy for the buckets; ``tail``: numbers shared at every step; ``zeros``: where
        the memory of the buckets comes from, default torch.
        """
        self.buffer = GradientBuffer(parameters, bucket_nbytes, tail, zeros)
        self.collective = collective(self.buffer.slices)
        self.exposed_s = 0.0
        """Time of the last step spent waiting for the sum, not hidden behind backward."""
        self.waited_s = 0.0
        """Of the step under way, time within forward and backward that was spent on other ranks."""
        self.square = 0.0
        """Squared norm of this rank's part of the last gradient, where it holds but a part of it."""
        self.square_at: int | None = None
        """Position in the tail where this rank's weight times the square of its gradient goes; None: nowhere."""
        self._own_square = 0.0
        self._bucket_of = {p: i for i, bucket in enumerate(self.buffer.buckets) for p in bucket.parameters}
        self._missing: list[int] = []
        self._works: list[Work] = []
        self._under_way: deque[Work] = deque()
        self._driven = 0.0
        self._weight = 1.0
        self._open = False
        self._lost: PeerLostError | None = None
        self._handles = [
            p.register_post_accumulate_grad_hook(self._hook(i))  # type: ignore[no-untyped-call]
            for i, p in enumerate(self.buffer.parameters)
        ]

    def part(self, sampler: Sampler, step: int, shares: Sequence[int], rank: int) -> Part:
        """What of a step's batch ``rank`` sees when ranks hold ``shares``."""
        return sampler.part(step, shares, rank)

    def predict(self, model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor | None:
        """The model's outputs; None on a rank that has not got them."""
        outputs: torch.Tensor = model(x)
        return outputs

    def replicated(self, model: torch.nn.Module) -> list[torch.Tensor]:
        """The parameters that must be equal on all ranks."""
        return list(model.parameters())

    def begin(self, weight: float, shared: list[float]) -> None:
        """Zero the gradients and open a step; ``weight``: b_r / B. ``shared``: this rank's part of the tail."""
        self.buffer.attach()
        self.buffer.tail[:] = torch.tensor(shared, dtype=self.buffer.tail.dtype)
        self._missing = [len(bucket.parameters) for bucket in self.buffer.buckets]
        self._works = []
        self._under_way.clear()
        self._weight = weight
        self._own_square = 0.0
        self._open = True

    def share(self, position: int, values: Sequence[torch.Tensor | float]) -> bool:
        """Put ``values`` into the tail from ``position`` on; False when it is too late for this step.

        Tensors are not read: on a GPU that would wait for the forward pass.
        """
        if not self._open or len(self._works) == len(self.buffer.buckets):
            return False
        for offset, value in enumerate(values):
            self.buffer.tail[position + offset] = value
        return True

    def weigh(self, weight: float) -> None:
        """Another weight than ``begin``'s for this step, before its backward pass. Raises RuntimeError later on."""
        if not self._open or self._works:
            raise RuntimeError("found a weight in the middle of backward, expected it between the batch and backward()")
        self._weight = weight

    def spread(self) -> None:
        """After the update: give every rank what it lacks of it. Here each has updated everything itself."""

    def gradient_norm(self) -> float:
        """Euclidean norm of the gradient that this rank holds."""
        return float(torch.linalg.vector_norm(self.buffer.gradient))

    def shape_of(self, model: torch.nn.Module) -> Mapping[str, torch.Tensor]:
        """Names, shapes and dtypes of the whole model's tensors."""
        return model.state_dict()

    def weights(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """The whole model's tensors, at least on rank 0; all ranks call it together."""
        return model.state_dict()

    def load_weights(self, model: torch.nn.Module, whole: dict[str, torch.Tensor]) -> None:
        """Take from the whole model's tensors what this rank holds."""
        model.load_state_dict(whole)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole ``optimizer.state_dict()``; all ranks call it together."""
        return optimizer.state_dict()

    def load_optimizer(self, optimizer: Optimizer, whole: dict[str, Any]) -> None:
        """Take from a whole state what this rank holds."""
        optimizer.load_state_dict(whole)

    def finish(self) -> list[float]:
        """Wait for the sum of all gradients; returns the summed tail. Raises PeerLostError.

        Parameters that took no part in the step contribute zero.
        """
        assert self._open, "begin comes before finish"
        began = time.perf_counter()
        self._open = False
        if self._lost is not None:
            raise self._lost
        for bucket in range(len(self._works), len(self.buffer.buckets)):
            for parameter in self.buffer.buckets[bucket].parameters:
                self.buffer.adopt(parameter)
            self._start(bucket)
        for work in self._works:
            work.wait()
        shared: list[float] = self.buffer.tail.tolist()
        self.exposed_s = time.perf_counter() - began
        return shared

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        bucket = self._bucket_of[index]

        def ready(parameter: torch.Tensor) -> None:
            if not self._open or self._lost is not None:
                return
            self.buffer.adopt(index)
            self._missing[bucket] -= 1
            if self._missing[bucket] < 0:
                raise RuntimeError(
                    "found a second backward pass in one step, expected one: call opt.step() after each backward(), "
                    "or add the losses up and call backward() once"
                )
            try:
                while len(self._works) < len(self._missing) and not self._missing[len(self._works)]:
                    self._start(len(self._works))
                self._drive()
            except PeerLostError as error:  # backward goes on to its end; ``finish`` tells
                self._lost = error
                self.abandon()

        return ready

    def _drive(self) -> None:
        """Move the oldest sums under way; the links are full with theirs. Not at every hook of a deep model.

        A test in vain gives the CPU up for a moment, as what waits should, but backward is not waiting.
        """
        now = time.perf_counter()
        if now - self._driven < _DRIVE_S:
            return
        self._driven = now
        while self._under_way and self._under_way[0].test():
            self._under_way.popleft()
        for work in islice(self._under_way, 1, _DRIVEN):
            work.test()

    def _start(self, bucket: int) -> None:
        gradient = self.buffer.flat[self.buffer.buckets[bucket].start : self.buffer.buckets[bucket].stop]
        if self.square_at is not None and self._weight:
            self._own_square += self._weight * float(torch.linalg.vector_norm(gradient)) ** 2
            if bucket == len(self.buffer.buckets) - 1:
                self.buffer.tail[self.square_at] = self._own_square
        if not self._weight:
            gradient.zero_()  # a mean over nothing is NaN, which 0 times it would stay
        elif self._weight != 1.0:
            gradient.mul_(self._weight)
        self._works.append(self.collective.start(bucket))
        self._under_way.append(self._works[-1])

    def abandon(self) -> None:
        """Wake the ranks that wait for this one's gradients."""
        self.collective.abandon()

    def retire(self) -> None:
        """Remove the hooks after a loss. The collective's memory must live on: messages may still arrive in it."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def close(self) -> None:
        """Remove the hooks and free the collective."""
        self.retire()
        self.collective.close()
