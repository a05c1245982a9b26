"""One contiguous buffer that holds all gradients, and its buckets.

A bucket is a part of the gradients that one all-reduce sums. Parameters are in reverse order, because the backward pass
reaches the last ones first, so that the first bucket is complete early. ``p.grad`` is a view of the buffer, so that
nothing is copied. The last bucket ends with *marks* and a *tail*. There is one mark for each parameter; summed, it is
the number of ranks whose backward pass reached the parameter. The tail contains numbers that ranks share at every step
(loss, stop flag, timings). Marks and tail are summed together with the gradients, without an extra message.

The tail of 16-bit gradients has 32-bit numbers and is summed separately. A number of tokens would otherwise be rounded
to 8 bits (bfloat16), or be infinite (float16).
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dltrain.protocol.errors import MisuseError

ALIGNED_NBYTES = 64
"""Alignment of buckets in bytes.

NCCL copies 16 bytes at a time only if source and target are aligned. Vectors and cache lines of CPUs have 64 bytes.
"""
_TAIL_DTYPE = torch.float32
"""Dtype of the tail if the gradients have fewer bits."""


def square_of(tensors: Iterable[torch.Tensor]) -> float:
    """Return the squared norm of all tensors together. From a GPU, all norms are copied at once, with a single wait."""
    norms = [torch.linalg.vector_norm(tensor) for tensor in tensors]
    return sum(norm**2 for norm in torch.stack(norms).tolist()) if norms else 0.0


@dataclass(frozen=True)
class Bucket:
    start: int
    stop: int
    """The bucket consists of the elements from ``start`` to ``stop`` (exclusive) of the buffer."""
    parameters: tuple[int, ...]
    """Indices of the bucket's parameters in ``GradientBuffer.parameters``."""


def plan_buckets(sizes: Iterable[int], max_size: int, align: int = 1) -> list[Bucket]:
    """Divide parameters into buckets, in order. ``sizes``: number of elements of each parameter.

    A bucket has at most ``max_size`` elements, or consists of one larger parameter. Buckets begin at multiples of
    ``align`` elements.
    """
    buckets: list[Bucket] = []
    start = stop = 0
    members: list[int] = []
    for index, size in enumerate(sizes):
        if members and stop + size - start > max_size:
            buckets.append(Bucket(start, stop, tuple(members)))
            start = stop = -(-stop // align) * align
            members = []
        stop += size
        members.append(index)
    if members:
        buckets.append(Bucket(start, stop, tuple(members)))
    return buckets


def _kind_of(parameters: Sequence[torch.nn.Parameter]) -> tuple[torch.dtype, torch.device]:
    """Return the dtype and the device of all parameters. Raise MisuseError if they differ, or without a parameter."""
    if not parameters:
        raise MisuseError(
            "model: found no trainable parameter; expected at least one. Set requires_grad of the parameters that the "
            "optimizer updates before t.wrap"
        )
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.nn.Parameter]] = {}
    for parameter in reversed(parameters):
        kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    if len(kinds) > 1:
        found = ", ".join(
            f"{len(members)} of {dtype} on {device} (the first has shape {tuple(members[0].shape)})"
            for (dtype, device), members in kinds.items()
        )
        raise MisuseError(
            f"model: found trainable parameters of several kinds: {found}; expected one dtype on one device, because "
            "ranks sum all gradients in one buffer. Convert the model before the optimizer is created, such as by "
            "model.float() with t.autocast() for 16-bit computing, or set spec.parallelism.strategy: Data and "
            "spec.collective: Auto, which sum each dtype by itself. Frozen parameters may have any dtype"
        )
    return next(iter(kinds))


class GradientBuffer:
    """A contiguous buffer with all gradients, then the marks and the tail. Ranks sum all of it.

    The mark of a parameter is 1 on a rank whose backward pass has reached the parameter. The tail consists of values
    that ranks share at every step, such as the loss.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        bucket_nbytes: int,
        tail: int,
        zeros: Callable[[int, torch.dtype, torch.device], Tensor] | None = None,
        *,
        marked: bool = False,
    ) -> None:
        """Allocate the buffer.

        ``bucket_nbytes``: maximum size of a bucket, the part of the buffer that one all-reduce sums. ``tail``: number
        of values that ranks share at every step. ``zeros``: allocates the buffer for (number of elements, dtype,
        device); by default torch does. ``marked``: add a mark for each parameter.

        Raise MisuseError if no parameter is trainable, or if parameters differ in dtype or device.
        """
        self.parameters = [p for p in parameters if p.requires_grad][::-1]
        dtype, device = _kind_of(self.parameters)
        sizes = [p.numel() for p in self.parameters]
        # The sharded optimizer (``marked`` is false) needs a buffer without gaps, because its buffer of parameters has
        # the same layout.
        align = ALIGNED_NBYTES // dtype.itemsize if marked else 1
        self.buckets = plan_buckets(sizes, max(1, bucket_nbytes // dtype.itemsize), align)
        gradients = self.buckets[-1].stop
        marks = len(sizes) if marked else 0
        end = gradients + marks
        self.wide_tail = dtype.itemsize < _TAIL_DTYPE.itemsize
        """True if the tail has another dtype than the gradients, and therefore its own reduction."""
        begin = -(-end * dtype.itemsize // ALIGNED_NBYTES) * ALIGNED_NBYTES // dtype.itemsize if self.wide_tail else end
        count = begin + tail * (_TAIL_DTYPE.itemsize // dtype.itemsize if self.wide_tail else 1)
        self.flat = zeros(count, dtype, device) if zeros else torch.zeros(count, dtype=dtype, device=device)
        self.gradient = self.flat[:gradients]
        self.marks = self.flat[gradients:end]
        self.tail = self.flat[begin:].view(_TAIL_DTYPE) if self.wide_tail else self.flat[begin:]
        self.views: list[Tensor] = []
        for bucket in self.buckets:
            offset = bucket.start
            for parameter in (self.parameters[index] for index in bucket.parameters):
                part = self.flat[offset : offset + parameter.numel()]
                self.views.append(memory_like(parameter, part) if marked else part.view(parameter.shape))
                offset += parameter.numel()
        self.slices = [self.flat[b.start : b.stop] for b in self.buckets]
        """The parts that are reduced: the buckets, the last one with marks and tail.

        If ``wide_tail`` is true, the tail is a part of its own after them.
        """
        self.slices[-1] = self.flat[self.buckets[-1].start : end if self.wide_tail else None]
        if self.wide_tail:
            self.slices.append(self.tail)
        self.attach()

    def attach(self) -> None:
        """Zero the buffer and make every ``p.grad`` a view of it."""
        self.flat.zero_()
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view

    def release(self) -> None:
        """Set every ``p.grad`` to None. Each backward pass then makes a new gradient, which ``add`` adds."""
        for parameter in self.parameters:
            parameter.grad = None

    def restore(self) -> None:
        """Make every ``p.grad`` that is None a view of the buffer again. Do not change the buffer's values."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is None:
                parameter.grad = view

    def detach(self, marks: Sequence[float]) -> None:
        """Remove the gradients of parameters that no rank's backward pass reached, so that optimizers skip them.

        ``marks``: for each parameter, its mark after the sum over ranks; 0 means that no rank reached it. Further
        values after these are ignored.
        """
        for parameter, mark in zip(self.parameters, marks[: len(self.marks)], strict=False):
            if not mark:
                parameter.grad = None

    def shared(self) -> list[float]:
        """Return the marks, then the tail, of the buffer as numbers. After the reduction, they are sums over ranks.

        From a GPU, this takes one copy.
        """
        if self.wide_tail:
            values: list[float] = torch.cat([self.marks.to(self.tail.dtype), self.tail]).tolist()
        else:
            values = self.flat[self.gradient.numel() :].tolist()
        return values

    def set_tail(self, numbers: Sequence[float]) -> None:
        """Write ``numbers``, the values that this rank shares in this step, into the tail of the buffer."""
        fill(self.tail, numbers)

    def mark(self, reached: Collection[int]) -> None:
        """Mark the parameters that this rank's backward pass has reached with 1, and all others with 0.

        ``reached``: indices of the reached parameters in ``parameters``.
        """
        if len(reached) == len(self.marks):
            self.marks.fill_(1)
        else:
            fill(self.marks, [float(index in reached) for index in range(len(self.marks))])

    def adopt(self, index: int) -> bool:
        """If another tensor replaced ``p.grad`` of parameter ``index``, copy it into the buffer and restore the view.

        Return True if a tensor was copied; False if ``p.grad`` was the view already, or None, which the view replaces.
        Raise MisuseError if the other tensor is part of an autograd graph.
        """
        parameter, view = self.parameters[index], self.views[index]
        gradient = parameter.grad
        if gradient is view:
            return False
        if gradient is None:
            parameter.grad = view  # other ranks may have a gradient for it
            return False
        check_graph(gradient)
        # An embedding with sparse=True makes a sparse gradient if there was none before.
        if gradient.is_sparse or gradient.data_ptr() != view.data_ptr():
            view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
            parameter.grad = view
            return True
        return False

    def add(self, index: int, weight: float) -> bool:
        """Add the gradient in ``p.grad`` of parameter ``index`` times ``weight`` to the buffer, and set it to None.

        With ``weight`` 0, the gradient may be NaN, because it is then the mean over no samples. Return False if there
        was no gradient. Raise MisuseError if the gradient is part of an autograd graph.
        """
        parameter, view = self.parameters[index], self.views[index]
        gradient = parameter.grad
        if gradient is None or gradient is view:
            return False
        check_graph(gradient)
        if weight:
            view.add_(gradient.to_dense() if gradient.is_sparse else gradient, alpha=weight)
        parameter.grad = None
        return True


def check_graph(gradient: Tensor) -> None:
    if gradient.requires_grad:
        raise MisuseError(
            "backward: found create_graph=True; expected gradients without a graph, which ranks can reduce. For a "
            "gradient penalty call torch.autograd.grad(…, create_graph=True) and add the penalty to the loss"
        )


def memory_like(parameter: Tensor, part: Tensor) -> Tensor:
    """Return a view of ``part`` in the parameter's memory format, such as channels_last.

    torch's fused optimizers reject gradients in another format, and its multi-tensor optimizers are slow with them.
    """
    dense = torch.empty_like(parameter, device="meta")  # has the memory format of a dense tensor
    return part.as_strided(parameter.shape, dense.stride()) if parameter.numel() else part.view(parameter.shape)


def fill(numbers: Tensor, values: Sequence[float]) -> None:
    """Copy ``values`` into ``numbers``. A copy to a GPU uses pinned memory, so that the rank does not wait for the GPU.

    torch keeps pinned memory alive until the copy has finished.
    """
    made = torch.tensor(values, dtype=numbers.dtype, device="cpu", pin_memory=numbers.is_cuda)
    numbers.copy_(made, non_blocking=True)
