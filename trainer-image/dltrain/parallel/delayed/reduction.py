"""Data parallelism that reduces gradients in the step of each optimizer, instead of during the backward pass.

A script with several optimizers, such as a GAN, decides only in ``opt.step()`` which gradients count: the loss of the
generator also reaches the parameters of the discriminator, and ``zero_grad`` later discards what it adds there. Until
then, ``p.grad`` therefore behaves as in one process, and each update costs one reduction of the gradients that it
applies. In return, no reduction overlaps with a backward pass.

Parameters of several dtypes also need this strategy, because a bucket of ``data_parallel`` has one dtype.
"""

import time
from collections.abc import Callable, Sequence
from math import sqrt

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.nn import Parameter
from torch.optim import Optimizer

from dltrain.comm.core.collective import Collective
from dltrain.device.rank_device import finish
from dltrain.optim.combined import parts_of
from dltrain.parallel import gradient_checks
from dltrain.parallel.delayed.gradients import OptimizerGradients, align
from dltrain.parallel.gradient_buffer import fill
from dltrain.parallel.placement import Strategy
from dltrain.protocol.errors import MisuseError, PeerLostError
from dltrain.timing.stopwatch import Lap, reading


class DelayedReduction(Strategy):
    """Reduce the gradients of each optimizer's parameters in its step. ``select`` names the optimizer."""

    shares_square = False

    def __init__(
        self,
        parameters: Sequence[Parameter],
        optimizer: Optimizer,
        collective: Callable[[list[Tensor]], Collective],
        tail: int,
        zeros: Callable[[int, torch.dtype, torch.device], Tensor],
    ) -> None:
        """Allocate the buffers and register the hooks. All ranks must call this together.

        ``parameters``: those of the model. ``optimizer``: its only optimizer, or a combined one. ``collective``:
        returns the collective that reduces the buffers. ``tail``: number of values that ranks share at every step.
        ``zeros``: allocates memory for (number of elements, dtype, device). Raise MisuseError if trainable parameters
        are on several devices, or if an optimizer has none or shares one with another optimizer.
        """
        trained = [p for p in parameters if p.requires_grad]
        self._frozen = [p for p in parameters if not p.requires_grad]
        devices = {parameter.device for parameter in trained}
        if len(devices) != 1:
            found = ", ".join(sorted(map(str, devices))) or "no trainable parameter"
            raise MisuseError(f"model: found {found}; expected trainable parameters on one device")
        super().__init__(device := trained[0].device)
        self._device = device
        groups = [trained] if len(parts_of(optimizer)) == 1 else [_trained(part) for part in parts_of(optimizer)]
        self._gradients = [OptimizerGradients(group, tail) for group in groups]
        sizes = [size for gradients in self._gradients for size in gradients.sizes]
        memory = zeros(sum(align(dtype.itemsize * count) for dtype, count in sizes), torch.uint8, device)
        buffers, position = list[Tensor](), 0
        for dtype, count in sizes:
            # ``data`` has a version counter of its own, with which changes by the script are detected.
            buffers.append(memory[position : position + dtype.itemsize * count].view(dtype).data)
            position += align(dtype.itemsize * count)
        self._first, taken = list[int](), 0
        """Index in the collective of the first buffer of each optimizer."""
        for gradients in self._gradients:
            self._first.append(taken)
            gradients.allocate(buffers[taken : taken + len(gradients.sizes)])
            taken += len(gradients.sizes)
        self.collective = collective(buffers)
        self._shared = torch.zeros(tail, dtype=torch.float64, device=device)
        self._now = 0
        self._totals: list[list[float]] = [[] for _ in self._gradients]
        self._norms: list[float | None] = [None for _ in self._gradients]
        """By optimizer: norm of the gradient in this step, before clipping and without loss scale, once it is known."""
        self._left = 1.0
        self._open = self._queued = self._partial = self._sent = False
        self._weight, self._micro_batches = 1.0, 0
        self._lost: PeerLostError | None = None
        self._handles = [
            p.register_post_accumulate_grad_hook(self._hook(gradients, i))  # type: ignore[no-untyped-call]
            for gradients in self._gradients
            for i, p in enumerate(gradients.parameters)
        ]

    @property
    def gradient_nbytes(self) -> int:
        return sum(flat.nbytes for gradients in self._gradients for flat in gradients.flats)

    @property
    def tail_length(self) -> int:
        return self._shared.numel()

    @property
    def waited(self) -> Lap:
        lap, self._waited = self._waited, Lap()  # each update of a step asks for the time since the one before
        return lap

    def select(self, number: int) -> None:
        self._now = number

    def begin(self, weight: float, shared: list[float], *, accumulates: bool = False) -> None:
        if any(parameter.requires_grad for parameter in self._frozen):
            raise gradient_checks.thawed([tuple(p.shape) for p in self._frozen if p.requires_grad])
        for gradients in self._gradients:
            gradients.begin(accumulates=accumulates)
        fill(self._shared, shared)
        self._weight, self._micro_batches = weight, 0
        self.exposed_s, self.sum_s, self._waited = 0.0, 0.0, Lap()
        self.passes.begin()
        self._norms = [None for _ in self._gradients]
        self._open, self._queued, self._partial, self._sent = True, False, False, False

    def begin_micro_batch(self, weight: float, *, last: bool) -> None:
        for gradients in self._gradients:
            gradients.release()
        self._micro_batches += 1
        self._weight, self._partial = weight, not last

    def skip_update(self, number: int) -> None:
        self._gradients[number].bank(self._weight, self._micro_batches)

    def share(self, position: int, values: Sequence[Tensor | float]) -> bool:
        if not self._open:
            return False
        for offset, value in enumerate(values):
            self._shared[position + offset] = value
        return not self._sent

    def weigh(self, weight: float) -> None:
        self._weight = weight

    def unscaled(self, scale: float, left: float) -> None:
        self._left = left

    def gradient_norm(self) -> float:
        """Return the norm of the gradients of all optimizers of which this step has asked for the norm."""
        if self._norms[self._now] is None:
            self._norms[self._now] = self._norm()
        return sqrt(sum(norm**2 for norm in self._norms if norm is not None))

    def _norm(self) -> float:
        return sqrt(self._gradients[self._now].square()) / self._left

    def clip(self, max_norm: float) -> float:
        gradients = self._gradients[self._now]
        if not (self._open or gradients.ready) or self._lost is not None or self._partial:
            return 0.0
        finish(self._device)  # otherwise the backward pass would count as waiting
        began = reading()
        try:
            self.whole()
        except PeerLostError as error:
            self._lost = error
            self.abandon()
            return 0.0
        self._waited += reading() - began
        norm = self._norms[self._now] = self._norm()
        if norm > max_norm:
            gradients.scale(max_norm / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_
        return norm

    def finish(self) -> list[float]:
        if self._lost is not None:
            raise self._lost
        self.whole()
        self._gradients[self._now].check_ready()
        return self._totals[self._now]

    def whole(self) -> None:
        gradients = self._gradients[self._now]
        if gradients.ready:
            gradients.check_ready()
            return
        finish(self._device)
        began = time.perf_counter()

        def allreduce() -> None:
            first = self._first[self._now]
            for work in [self.collective.start(first + index) for index in range(len(gradients.buffers))]:
                work.wait()
            finish(self._device)

        total = gradients.reduce(self._weight, self._micro_batches, self._shared, allreduce, self.weight_at)
        self._totals[self._now], self._sent = total, True
        self._norms[self._now], self._left = None, 1.0
        self.exposed_s += time.perf_counter() - began
        self.sum_s = self.exposed_s

    def updated(self) -> None:
        self._gradients[self._now].ready = False

    def _hook(self, gradients: OptimizerGradients, index: int) -> Callable[[Tensor], None]:
        def came(_: Tensor) -> None:
            if not self._open:
                return
            if not self._queued:
                Variable._execution_engine.queue_callback(self._backward_ended)
                self._queued = True
                self.passes.start()
            gradients.came(index)

        return came

    def _backward_ended(self) -> None:
        """Record the end of a backward pass. The autograd engine also calls this after a nested pass."""
        self._queued = False
        self.passes.end()

    def abandon(self) -> None:
        self.collective.abandon()

    def retire(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def close(self) -> None:
        self.retire()
        self.collective.close()


def _trained(optimizer: Optimizer) -> list[Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
