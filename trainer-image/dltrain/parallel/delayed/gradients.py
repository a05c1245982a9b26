"""The gradients of one optimizer's parameters, and the buffers in which ranks reduce them: one for each dtype.

Until the reduction, ``p.grad`` is what it is in one process: the gradient of this rank's loss, summed over all backward
passes since ``zero_grad``. If the buffer has the parameter's dtype, ``p.grad`` is a view of it, so that gradients need
no further memory. CPUs reduce gradients of 16 bits in float32, because MPI cannot sum bfloat16 there. Then ``p.grad``
is a tensor of its own. A small buffer, the *control*, has a mark for each parameter that this rank reached, and a tail
of numbers that ranks share.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from dltrain.parallel import gradient_checks
from dltrain.parallel.gradient_buffer import ALIGNED_NBYTES, check_graph, memory_like, square_of

_CONTROL = torch.float64
"""Dtype of marks and tail: numbers of tokens and ranks stay exact."""


def reduced_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype in which ranks sum the gradient of ``parameter``."""
    narrow = parameter.dtype.itemsize < torch.float32.itemsize
    return torch.float32 if narrow and parameter.device.type == "cpu" else parameter.dtype


class OptimizerGradients:
    """The gradients that one optimizer applies. ``buffers``: what ranks sum, the control last.

    ``ready``: True from the reduction of the gradients until the optimizer's update.
    """

    def __init__(self, parameters: Sequence[Parameter], tail: int) -> None:
        """Plan the buffers. ``tail``: number of values that ranks share. ``allocate`` must follow."""
        self.parameters = list(parameters)
        self._dtypes = list(dict.fromkeys(map(reduced_dtype, self.parameters)))
        self._tail = tail
        self.ready = False
        self._spoiled = False
        """True if a backward pass has added to reduced gradients before the optimizer's update."""
        self._banked = 0
        """Number of micro-batches of this step whose gradients the buffers contain."""
        self.accumulates = False
        self._seen: dict[int, tuple[Tensor, int]] = {}
        """By index of the parameter: its gradient after the last backward pass, and the version of its values."""
        self._flat_of = [self._dtypes.index(reduced_dtype(parameter)) for parameter in self.parameters]
        self._latest = [0] * len(self._dtypes)
        """Version of each buffer after the last backward pass that added to it."""

    @property
    def sizes(self) -> list[tuple[torch.dtype, int]]:
        """Return dtype and number of elements of each buffer."""
        counts = [sum(p.numel() for p in self.parameters if reduced_dtype(p) == dtype) for dtype in self._dtypes]
        return [*zip(self._dtypes, counts, strict=True), (_CONTROL, len(self.parameters) + self._tail)]

    def allocate(self, buffers: list[Tensor]) -> None:
        """Use ``buffers``, zeros of the planned ``sizes``."""
        *self.flats, control = self.buffers = buffers
        self._marks, self._shared = control[: len(self.parameters)], control[len(self.parameters) :]
        self._control = control
        offsets = [0] * len(self.flats)
        self.views: list[Tensor] = []
        for parameter, number in zip(self.parameters, self._flat_of, strict=True):
            start, stop = offsets[number], offsets[number] + parameter.numel()
            self.views.append(memory_like(parameter, self.flats[number][start:stop]))
            offsets[number] = stop

    def begin(self, *, accumulates: bool) -> None:
        """Begin a step without gradients. ``accumulates``: True if the step has several micro-batches."""
        self.accumulates, self._banked = accumulates, 0
        if accumulates:
            for buffer in self.buffers:
                buffer.zero_()
        self.release()

    def release(self) -> None:
        """Set every ``p.grad`` to None."""
        self.ready = self._spoiled = False
        self._seen.clear()
        for parameter in self.parameters:
            parameter.grad = None

    def came(self, index: int) -> None:
        """Record that a backward pass has added to the gradient of parameter ``index``."""
        parameter, view = self.parameters[index], self.views[index]
        gradient = parameter.grad
        assert gradient is not None, "autograd has just set it"
        check_graph(gradient)
        self._spoiled = self._spoiled or self.ready
        if not self.accumulates and view.dtype == parameter.dtype and gradient is not view:
            view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
            parameter.grad = gradient = view
        self._seen[index] = gradient, gradient._version
        if gradient is view:
            self._latest[self._flat_of[index]] = gradient._version  # the views of a buffer share one version

    def bank(self, weight: float, micro_batches: int) -> None:
        """Add the gradients of a micro-batch times ``weight`` to the buffers, and set each ``p.grad`` to None.

        ``micro_batches``: number of this step's micro-batches so far. Raise MisuseError unless the script has called
        the optimizer's step once for each, or if it has changed the gradients.
        """
        self._banked += 1
        if self._banked != micro_batches:
            raise gradient_checks.uneven_updates(self._banked, micro_batches)
        self._check_unchanged()
        for index, parameter in enumerate(self.parameters):
            gradient = parameter.grad
            if gradient is None:
                continue
            check_graph(gradient)
            if weight:  # the mean over no samples may be NaN
                self.views[index].add_(gradient.to_dense() if gradient.is_sparse else gradient, alpha=weight)
            self._marks[index] = 1.0
        self.release()

    def reduce(
        self, weight: float, micro_batches: int, shared: Tensor, allreduce: Callable[[], object], divisor_at: int | None
    ) -> list[float]:
        """Sum the gradients times ``weight`` over ranks, so that ``p.grad`` is that of the global batch.

        ``micro_batches``: number of this step's micro-batches; 0 if the batch is not divided. ``shared``: this rank's
        values for the tail. ``allreduce``: sums the buffers. ``divisor_at``: index in the tail of the number by which
        to divide the sums, unless it is 0; None: do not divide. Return the tail, summed over ranks. Parameters that no
        rank reached have no gradient. Raise PeerLostError if a rank is lost, and MisuseError if the script has changed
        the gradients.
        """
        if self.accumulates:
            self.bank(weight, micro_batches)
        else:
            self._collect(weight)
        self._shared.copy_(shared)
        allreduce()
        values: list[float] = self._control.tolist()
        marks, total = values[: len(self.parameters)], values[len(self.parameters) :]
        if divisor_at is not None and total[divisor_at]:
            for flat in self.flats:
                flat.div_(total[divisor_at])
        for parameter, view, mark in zip(self.parameters, self.views, marks, strict=True):
            parameter.grad = view.to(parameter.dtype) if mark else None  # the view itself if the dtypes are equal
        self.ready, self._spoiled = True, False
        self._seen.clear()
        return total

    def check_ready(self) -> None:
        """Raise MisuseError if a backward pass has added this rank's gradients to those of the global batch."""
        if self._spoiled:
            raise gradient_checks.changed(
                "a backward pass between t.clip_gradients (or scaler.unscale_) and opt.step() has added gradients of "
                "one rank to those of all ranks"
            )

    def scale(self, factor: float) -> None:
        """Multiply the reduced gradients by ``factor``."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def square(self) -> float:
        """Return the squared norm of the gradients."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        dtypes = {gradient.dtype for gradient in gradients}
        return sum(square_of(each for each in gradients if each.dtype == dtype) for dtype in dtypes)

    def _collect(self, weight: float) -> None:
        """Write the gradients times ``weight``, and marks, into the buffers."""
        self._check_unchanged()
        for index, parameter in enumerate(self.parameters):
            gradient, view = parameter.grad, self.views[index]
            self._marks[index] = float(gradient is not None)
            if gradient is None or not weight:  # the mean over no samples may be NaN
                view.zero_()
            elif gradient is not view:
                check_graph(gradient)
                view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
        if weight != 1.0:
            for flat in self.flats:
                flat.mul_(weight)

    def _check_unchanged(self) -> None:
        """Raise MisuseError if the script has changed a gradient since the last backward pass that added to it."""
        for index, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            gradient, seen = parameter.grad, self._seen.get(index)
            if seen is not None and seen[0] is gradient:
                latest = self._latest[self._flat_of[index]] if gradient is view else seen[1]
                if gradient._version != latest:
                    raise gradient_checks.changed("ranks sum the gradients only in opt.step()")


def align(nbytes: int) -> int:
    """Return ``nbytes`` rounded up, so that the next buffer begins at an aligned address."""
    return -(-nbytes // ALIGNED_NBYTES) * ALIGNED_NBYTES
