"""One contiguous buffer that holds all gradients, and its buckets.

Parameters lie in reverse order, since backward reaches the last ones first: the first bucket is full while most of
the backward pass is still to come. ``p.grad`` is a view, so that nothing is copied. The last bucket ends with *marks*,
a number for each parameter that counts the ranks whose backward reached it, and with a *tail* of numbers that ranks
share at every step (loss, stop flag, timings), summed along at no extra message.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dltrain.protocol.errors import MisuseError

ALIGNED_NBYTES = 64
"""Buckets begin at multiples of it: NCCL copies 16 bytes at once where both sides allow it, else one number after the
other; CPUs have vectors and cache lines of 64."""


@dataclass(frozen=True)
class Bucket:
    start: int
    stop: int
    """Elements of the buffer."""
    parameters: tuple[int, ...]
    """Indices of the parameters inside, in the order of ``GradientBuffer.parameters``."""


def plan_buckets(sizes: Iterable[int], longest: int, align: int = 1) -> list[Bucket]:
    """Consecutive parameters of ``sizes`` elements in buckets of at most ``longest``, or of one larger parameter. Each
    begins at a multiple of ``align``.
    """
    buckets: list[Bucket] = []
    start = stop = 0
    members: list[int] = []
    for index, size in enumerate(sizes):
        if members and stop + size - start > longest:
            buckets.append(Bucket(start, stop, tuple(members)))
            start = stop = -(-stop // align) * align
            members = []
        stop += size
        members.append(index)
    if members:
        buckets.append(Bucket(start, stop, tuple(members)))
    return buckets


class GradientBuffer:
    """The gradients of ``parameters``, their marks and ``tail`` shared numbers, contiguous."""

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        bucket_nbytes: int,
        tail: int,
        zeros: Callable[[int, torch.dtype, torch.device], Tensor] | None = None,
        *,
        marked: bool = False,
    ) -> None:
        """``zeros``: where the buffer comes from; default: torch. ``marked``: with marks.

        Raises MisuseError when nothing is trainable, or parameters differ in dtype or device.
        """
        self.parameters = [p for p in parameters if p.requires_grad][::-1]
        kinds = {(p.dtype, p.device) for p in self.parameters}
        if len(kinds) != 1:
            found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds)) or "no trainable parameter"
            raise MisuseError(f"model: found {found}, expected trainable parameters of one dtype on one device")
        dtype, device = kinds.pop()
        sizes = [p.numel() for p in self.parameters]
        # Sharded buffers have no gaps: what they hold beside gradients is laid out by the parameters' sizes alone.
        align = ALIGNED_NBYTES // dtype.itemsize if marked else 1
        self.buckets = plan_buckets(sizes, max(1, bucket_nbytes // dtype.itemsize), align)
        gradients = self.buckets[-1].stop
        marks = len(sizes) if marked else 0
        count = gradients + marks + tail
        self.flat = zeros(count, dtype, device) if zeros else torch.zeros(count, dtype=dtype, device=device)
        self.gradient = self.flat[:gradients]
        self.marks = self.flat[gradients : gradients + marks]
        self.tail = self.flat[gradients + marks :]
        self.exchanged = self.flat[gradients:]
        """Marks and tail."""
        self.views: list[Tensor] = []
        for bucket in self.buckets:
            offset = bucket.start
            for parameter in (self.parameters[index] for index in bucket.parameters):
                part = self.flat[offset : offset + parameter.numel()]
                self.views.append(_like(parameter, part) if marked else part.view(parameter.shape))
                offset += parameter.numel()
        self.slices = [self.flat[b.start : b.stop] for b in self.buckets]
        self.slices[-1] = self.flat[self.buckets[-1].start :]
        self.attach()

    def attach(self) -> None:
        """Make every ``p.grad`` its view, and zero."""
        self.flat.zero_()
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view

    def tell(self, numbers: Sequence[float]) -> None:
        """Fill the tail."""
        _fill(self.tail, numbers)

    def mark(self, reached: Collection[int]) -> None:
        """Mark the parameters of these indices, of each of which there is one."""
        if len(reached) == len(self.marks):
            self.marks.fill_(1)
        else:
            _fill(self.marks, [float(index in reached) for index in range(len(self.marks))])

    def adopt(self, index: int) -> bool:
        """Bring parameter ``index``'s gradient back into the buffer if something replaced ``p.grad``, or removed it.

        Whether there was another one. Raises MisuseError for one that is part of a graph.
        """
        parameter, view = self.parameters[index], self.views[index]
        gradient = parameter.grad
        if gradient is view:
            return False
        if gradient is None:
            parameter.grad = view  # other ranks may have one
            return False
        if gradient.requires_grad:
            raise MisuseError(
                "found backward(create_graph=True), expected gradients that end there, as they are summed over ranks: "
                "for a penalty on gradients call torch.autograd.grad(…, create_graph=True) and add it to the loss"
            )
        # An embedding with sparse=True gives a sparse one wherever there was none before.
        if gradient.is_sparse or gradient.data_ptr() != view.data_ptr():
            view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
            parameter.grad = view
            return True
        return False


def _like(parameter: Tensor, part: Tensor) -> Tensor:
    """A view of ``part`` with the parameter's order of elements (channels last), which optimizers ask of gradients: in
    another one torch's fused optimizers refuse them, and those of many tensors at once are slow.
    """
    dense = torch.empty_like(parameter, device="meta")  # keeps the order of what has no gaps
    return part.as_strided(parameter.shape, dense.stride()) if parameter.numel() else part.view(parameter.shape)


def _fill(numbers: Tensor, values: Sequence[float]) -> None:
    """To a GPU from pinned memory, which torch holds until the copy is made: else the rank would wait for the GPU."""
    numbers.copy_(torch.tensor(values, dtype=numbers.dtype, pin_memory=numbers.is_cuda), non_blocking=True)
