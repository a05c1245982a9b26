"""Collect samples from all ranks, for a loss or a layer that needs the global batch.

For example, a contrastive loss compares each sample with all others. Every rank gets the rows (one per sample) of all
ranks, in the order of the global batch. From these rows, rank r computes L_r, which is either the loss of the global
batch or the loss of its own samples against all others. The reduction over ranks weights gradients of rank r by w_r,
its fraction of the batch. The gradient for the rows of rank s is therefore Σ_r w_r dL_r/d(rows of s), divided by w_s,
because the reduction multiplies by w_s later.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dltrain.comm.process_group import ProcessGroup
from dltrain.elastic.team import Team
from dltrain.protocol.errors import MisuseError
from dltrain.train import usage_checks
from dltrain.train.steps.step import Step


@dataclass(frozen=True)
class Participants:
    """Functions with which this rank communicates with the workers (ranks that compute gradients), and its weight."""

    together: Callable[[Callable[[ProcessGroup], Any]], Any]
    """Function that runs a collective operation on the process group of the workers and returns its result."""
    weight: Callable[[], float]
    """Function that returns the weight of this rank's loss in a sum over ranks. Only the ratios of weights matter."""
    counts: bool
    """False if this rank has no samples. It then computes samples of another rank, and the result is discarded."""
    lost: Callable[[], int | None]
    """Function that returns the global batch size if ranks were lost in this step and it was abandoned, otherwise None.

    In an abandoned step, callers continue with this number of arbitrary rows, because results are discarded.
    """


def participants(team: Team, step: Step, number: int, call: str = "") -> Participants:
    """Return the functions with which this rank communicates with the workers, and the weight of its loss.

    The workers are the ranks that compute gradients. ``step``: the training step in progress. ``number``: number of
    completed steps. ``call``: the script's call that needs them, such as "t.gather"; raise MisuseError if the ranks do
    not divide the samples of a batch. During a step, the weight of a rank is that of its loss in this step. Between
    steps, all ranks have equal weights.
    """

    if call:
        usage_checks.check_divides_samples(call, team.plan)

    def together(operation: Callable[[ProcessGroup], Any]) -> Any:
        return team.together(number, lambda: operation(team.worker_group))

    def lost() -> int | None:
        return step.samples if step.open and step.given_up else None

    return Participants(
        together, lambda: step.weight if step.open else 1.0, not step.open or step.weight_by_samples > 0, lost
    )


def gathered(rows: Tensor, participants: Participants) -> Tensor:
    """Return the rows of all ranks on each rank, with shape (N, …), in the order of the ranks.

    ``rows``: this rank's n rows, one per sample, with shape (n, …). N is the sum of n over all ranks. ``participants``:
    the functions that communicate with the other ranks. Gradients flow through the result.

    Raise MisuseError if ``rows`` is no tensor, or a single number. If ranks are lost and the others can continue, the
    step is abandoned, and this function returns arbitrary rows. If they cannot continue, raise PeerLostError.
    """
    usage_checks.check_tensor("t.gather", rows, " with a row for each sample")
    if not rows.dim():
        raise MisuseError("t.gather: found one number; expected a row per sample. Use t.sum or t.mean for numbers")
    if participants.lost() is None:
        every = cast(Tensor, _Gather.apply(rows, participants))  # type: ignore[no-untyped-call]
    if (count := participants.lost()) is not None:  # return the expected shape without waiting for a rank
        return rows[torch.arange(count, device=rows.device) % len(rows)]
    return every


def averaged(value: Tensor, participants: Participants) -> Tensor:
    """Return the mean of ``value`` over ranks, weighted by the ranks' weights in ``participants``, without gradient.

    The result has the dtype of ``value``, or float32 for integers. Raise MisuseError if ``value`` is no tensor, and
    PeerLostError if ranks are lost and the others cannot continue.
    """
    usage_checks.check_tensor("t.mean", value)
    if value.is_complex():
        return torch.view_as_complex(averaged(torch.view_as_real(value.detach().resolve_conj()), participants))
    weight = participants.weight() if participants.counts else 0.0
    content = value.detach().to("cpu", torch.float64)
    weighed = content * weight if weight else torch.zeros_like(content)  # the mean over no samples may be NaN
    total = _sum(torch.cat([weighed.reshape(-1), content.new_tensor([weight])]), participants)
    mean = (total[:-1] / total[-1]).reshape(value.shape)
    return mean.to(value.device, value.dtype if value.is_floating_point() else torch.float32)


def _sum(values: Tensor, participants: Participants) -> Tensor:
    array = values.numpy()
    return torch.from_numpy(participants.together(lambda process_group: process_group.add(array)))


def _bytes(tensor: Tensor) -> bytes:
    plain = tensor.detach().to("cpu").contiguous().resolve_conj().resolve_neg()
    content: bytes = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    return content


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, participants: Participants) -> Tensor:
        content = (rows if participants.counts else rows[:0]).detach().to("cpu")
        data = _bytes(content)
        parts, rank = participants.together(lambda process_group: (process_group.collect(data), process_group.rank))
        every = [
            torch.frombuffer(bytearray(part), dtype=rows.dtype).reshape(-1, *rows.shape[1:]) for part in parts if part
        ]
        nbytes = sum(map(len, parts[:rank]))
        row_nbytes = rows[:1].nbytes or 1
        ctx.participants, ctx.shape = participants, rows.shape
        ctx.own = slice(nbytes // row_nbytes, (nbytes + len(data)) // row_nbytes)
        return torch.cat(every or [content]).to(rows.device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        participants = ctx.participants
        if participants.lost() is not None:
            return gradient.new_zeros(ctx.shape), None
        weight = participants.weight() if participants.counts else 0.0
        wide = torch.complex128 if gradient.is_complex() else torch.float64
        content = gradient.detach().to("cpu", wide).resolve_conj().contiguous()
        weighed = (content * weight if weight else torch.zeros_like(content)).reshape(-1)
        if weighed.is_complex():
            total = torch.view_as_complex(_sum(torch.view_as_real(weighed), participants))
        else:
            total = _sum(weighed, participants)
        if not participants.counts:
            return gradient.new_zeros(ctx.shape), None
        if not weight:
            raise MisuseError("t.gather: found t.weigh(0) in the same step; expected a weight above 0 on each rank")
        return (total.reshape(gradient.shape)[ctx.own] / weight).to(gradient), None


def differing_buffers(model: nn.Module, participants: Participants) -> list[str]:
    """Return the names of the model's buffers whose values differ between ranks. All workers must call it together.

    Buffers of BatchNorm layers are not checked, because ``Trainer.wrap`` warns about these layers.
    """
    known = {id(b) for m in model.modules() if isinstance(m, _BatchNorm) for b in m.buffers(recurse=False)}
    buffers = {name: buffer for name, buffer in model.named_buffers() if id(buffer) not in known}
    sums = [crc32(_bytes(buffer)) for buffer in buffers.values()]
    rows = participants.together(lambda process_group: process_group.gather(sums)) if sums else [[]]
    return [name for name, column in zip(buffers, zip(*rows, strict=True), strict=True) if len(set(column)) > 1]
