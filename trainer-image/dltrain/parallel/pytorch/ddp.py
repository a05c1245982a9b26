"""Data parallelism by PyTorch's DistributedDataParallel (DDP), for any split of the global batch over ranks.

By default, DDP sums the gradients over ranks and divides them by the number of ranks. This is the gradient of the
global batch only if all local batches are equal. Here, the gradients of rank r are multiplied by b_r / B, its fraction
of the global batch, and summed (``reducer``). The fraction is known before the step, so no rank waits for it.

The reducer is attached to the parameters. The model is not replaced by a DDP module: a script may call any function of
it, and checkpoints have the same names and values as with other collectives. In each step, exactly one backward pass
reduces gradients. Others must be inside ``accumulating`` or in earlier micro-batches.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from dlcontract import Plan
from dltrain.comm.process_group import ProcessGroup
from dltrain.parallel import gradient_checks
from dltrain.parallel.gradient_buffer import check_graph
from dltrain.parallel.placement import Strategy
from dltrain.parallel.pytorch.reducer import WeightedReducer
from dltrain.parallel.unused_parameters import accumulator
from dltrain.protocol.errors import MisuseError, PeerLostError
from dltrain.timing.stopwatch import Lap, reading


class TorchDataParallel(Strategy):
    """Reduce gradients by DDP's reducer. Ranks may have local batches of different sizes."""

    def __init__(self, model: nn.Module, process_group: ProcessGroup, host: str, bucket_nbytes: int, tail: int) -> None:
        """Attach a reducer to the model's trainable parameters. All ranks must call this together.

        The arguments are those of ``WeightedReducer``. Raise PeerLostError if a rank is lost, and MisuseError if no
        parameter is trainable or if parameters are on several devices.
        """
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        devices = {parameter.device for parameter in self.parameters}
        if len(devices) != 1:
            found = ", ".join(sorted(map(str, devices))) or "no trainable parameter"
            raise MisuseError(f"model: found {found}; expected trainable parameters on one device")
        super().__init__(self.parameters[0].device)
        self._on_gpu = self.parameters[0].is_cuda
        self.reducer = WeightedReducer(self.parameters, process_group, host, bucket_nbytes, tail)
        self._nodes = [accumulator(parameter) for parameter in self.parameters]
        self._handles = [
            p.register_post_accumulate_grad_hook(self._hook(i))  # type: ignore[no-untyped-call]
            for i, p in enumerate(self.parameters)
        ]
        self._views: list[Tensor] = []
        """The part of a bucket for each parameter. Micro-batches add their weighted gradients to it."""
        self._waiting: set[int] = set()
        """Indices of the parameters that the reducer waits for in this step."""
        self._wait_began: Any = None
        self._wait_ended: Any = None
        self._arrange_buckets()

    def _arrange_buckets(self) -> None:
        """Divide the gradients into buckets, in the reverse order of the parameters, and find the parts of the buckets.

        By default, DDP reduces one bucket in its first step, and then arranges buckets in the order of the gradients.
        The sums of a resumed run would therefore be rounded in another way in its first step. A reduction of zeros
        before the first step makes the buckets of all steps equal. Another one shows the parts of the new buckets.
        """
        nothing = [0.0] * self.tail_length
        self.begin(0.0, nothing)
        self.whole()
        self._release()
        self._views = []
        self.reducer.rearrange()
        self.begin(0.0, nothing)
        self.whole()
        self._release()
        self._open = False

    @property
    def gradient_nbytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.parameters)

    @property
    def tail_length(self) -> int:
        return self.reducer.tail.numel()

    @property
    def waited(self) -> Lap:
        if not self._on_gpu or self._wait_ended is None:
            return self._waited
        return Lap(float(self._wait_began.elapsed_time(self._wait_ended)) / 1e3)

    @property
    def _accumulates(self) -> bool:
        """True if the current backward pass only adds to the accumulated gradients."""
        return self._no_sync or self._partial

    def begin(self, weight: float, shared: list[float], *, accumulates: bool = False) -> None:
        if any(parameter.requires_grad for parameter in self._frozen):
            raise gradient_checks.thawed([tuple(p.shape) for p in self._frozen if p.requires_grad])
        self._release()
        if accumulates:
            torch._foreach_zero_(self._views)
        self.reducer.begin(shared, weighted=accumulates)
        self.reducer.weight, self.reducer.square_at = 0.0 if accumulates else weight, self.square_at
        self.exposed_s, self._waited, self._wait_ended = 0.0, Lap(), None
        self.passes.begin()
        self._micro_batches, self._by_tokens, self._left = accumulates, False, 1.0
        self._queued = self._reducing = self._partial = self._has_gradients = False
        self._norm: float | None = None
        self._measured: Tensor | None = None
        self._open, self._finished = True, False

    def begin_micro_batch(self, weight: float, *, last: bool) -> None:
        for index in range(len(self.parameters)):  # gradients that the script has assigned
            self._add(index)
        self.reducer.earlier_weight += self.reducer.weight
        self.reducer.weight = weight
        self._partial, self._has_gradients = not last, False

    def share(self, position: int, values: Sequence[Tensor | float]) -> bool:
        if not self._open or self.reducer.sent:
            return False
        for offset, value in enumerate(values):
            self.reducer.tail[position + offset] = value
        return True

    def weigh(self, weight: float) -> None:
        if not self._open or self._reducing or self._has_gradients:
            raise MisuseError("t.weigh: found a call after backward() has begun; expected it before backward()")
        self.reducer.weight, self._by_tokens = weight, True

    def unscaled(self, scale: float, left: float) -> None:
        self.measured_norm /= scale
        self._left = left

    def gradient_norm(self) -> float:
        norm = float(_norm(self._gradients())) if self._norm is None else self._norm
        return norm / self._left

    def clip(self, max_norm: float) -> float:
        if not (self._open or self._finished) or self.reducer.lost is not None or self._partial:
            return 0.0
        try:
            self.whole()
        except PeerLostError:
            return 0.0  # ``finish`` raises it
        self._norm = self.gradient_norm()
        if self._norm > max_norm:
            torch._foreach_mul_(self._gradients(), max_norm / (self._norm + 1e-6))  # as clip_grad_norm_
        return self._norm

    def finish(self) -> list[float]:
        assert self._open, "begin comes before finish"
        self.whole()
        self._open = False
        summed: list[float] = self.reducer.shared.tolist()
        self._drop_unreached(summed)
        if self._on_gpu:
            self.exposed_s = self.waited.wall_s
        if self._measured is not None:
            self.measured_norm = float(self._measured)
        self._finished = True
        return summed[len(self.parameters) :]

    def whole(self) -> None:
        """Wait until ``p.grad`` contains the gradients of the global batch.

        They are reduced when a backward pass ends. Without such a pass on this rank, take part in the reduction of the
        other ranks' gradients now. Raise PeerLostError if a rank is lost.
        """
        if not self._reducing and self.reducer.lost is None:
            nothing = torch.zeros((), device=self.parameters[0].device, requires_grad=True)
            nothing.register_hook(lambda _: self._begin_pass())  # type: ignore[no-untyped-call]
            nothing.backward()  # type: ignore[no-untyped-call]
        if self.reducer.lost is not None:
            raise self.reducer.lost

    def abandon(self) -> None:
        self.reducer.collective.abandon()

    def retire(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def close(self) -> None:
        """Detach the reducer from the parameters and leave torch's process group, if this object has created it."""
        self.retire()
        self._release()  # gradients are views of the reducer's buckets
        self.reducer.close()

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def _release(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def _add(self, index: int) -> None:
        """Add the gradient in ``p.grad`` of parameter ``index`` times the micro-batch's weight to its bucket.

        With weight 0, the gradient is not added, because it may be NaN: the mean over no samples.
        """
        parameter, view = self.parameters[index], self._views[index]
        if parameter.grad is None or parameter.grad is view:
            return
        self.reducer.reached.add(index)
        if self.reducer.weight:
            view.add_(parameter.grad, alpha=self.reducer.weight)
        parameter.grad = None

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        def ready(parameter: Tensor) -> None:  # runs before the reducer's own hook
            if not self._open:
                return
            self._has_gradients = True
            if not self._queued:
                self._begin_pass()
            assert parameter.grad is not None, "autograd has just computed it"
            check_graph(parameter.grad)
            if parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
            self.reducer.reached.add(index)
            if self._micro_batches:
                self._add(index)
            if self._accumulates:
                return
            if index not in self._waiting:
                raise gradient_checks.second_pass()
            self._waiting.discard(index)
            if self._micro_batches:
                parameter.grad = self._views[index]  # the reducer then copies nothing

        return ready

    def _begin_pass(self) -> None:
        """Begin a backward pass. If it reduces gradients, prepare the reducer. Call this method within the pass."""
        if not self._accumulates and self._reducing:
            raise gradient_checks.second_pass()
        Variable._execution_engine.queue_callback(self._backward_ended)
        self._queued = True
        self.passes.start()
        if self._accumulates:
            return
        self._reducing = True
        self._waiting = set(range(len(self.parameters)))
        self.reducer.prepare()
        try:
            reaches = torch._C._will_engine_execute_node
            unused = [index for index in self._waiting if not reaches(self._nodes[index])]
        except RuntimeError:  # autograd cannot tell, such as in a compiled backward pass
            return
        self._skip(unused)

    def _skip(self, indices: Iterable[int]) -> None:
        """Let the reducer wait no longer for the parameters ``indices``, which the backward pass does not reach.

        It then reduces their gradients from earlier passes of the step, or zeros.
        """
        indices = list(indices)
        for index in indices:
            self._waiting.discard(index)
            if self._micro_batches:
                self._add(index)
                self.parameters[index].grad = self._views[index]
            elif self.parameters[index].grad is not None:
                self.reducer.reached.add(index)
        self.reducer.skip(indices)

    def _backward_ended(self) -> None:
        """Finish a backward pass. The autograd engine calls this before the reducer waits for its reductions."""
        self._queued = False
        self.passes.end()
        if not self._open or self._accumulates:
            return
        self._skip(self._waiting)
        self._wait_began = self._moment()
        Variable._execution_engine.queue_callback(self._reduced)  # after the reducer's callback, which waits

    def _reduced(self) -> None:
        """Finish the reduction: the reducer has waited for the buckets, so ``p.grad`` contains the sums over ranks."""
        reducer = self.reducer
        reducer.wait()
        if reducer.lost is not None:
            return  # ``finish`` raises the error
        if not self._views:
            self._views = self._gradients()
        if self._by_tokens and self.weight_at is not None:
            tokens = reducer.tail[self.weight_at]  # stays on the device
            torch._foreach_div_(self._gradients(), torch.where(tokens == 0, 1.0, tokens))
        if len(reducer.reached) < len(self.parameters):
            self._drop_unreached(reducer.marks.tolist())
        if self.square_at is not None:
            self._measured = _norm(self._gradients())
        self._wait_ended = self._moment()
        self.sum_s = time.perf_counter() - reducer.began
        if not self._on_gpu:
            self._waited = self._wait_ended - self._wait_began
            self.exposed_s = self._waited.wall_s

    def _drop_unreached(self, marks: Sequence[float]) -> None:
        """Remove the gradients of parameters that no rank's backward pass reached, so that optimizers skip them."""
        for parameter, mark in zip(self.parameters, marks, strict=False):
            if not mark:
                parameter.grad = None

    def _moment(self) -> Any:
        """Return the current time: on a CPU, a reading of its clocks; on a GPU, an event in its stream."""
        if not self._on_gpu:
            return reading()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def torch_data_parallel(plan: Plan, process_group: ProcessGroup, model: nn.Module, tail: int) -> TorchDataParallel:
    """Return the strategy of a plan with the collective DDP on several ranks.

    ``tail``: number of values that ranks share at every step. All ranks must call this together. Raise PeerLostError if
    a rank is lost.
    """
    return TorchDataParallel(model, process_group, plan.ranks[0].host, plan.bucket_nbytes, tail)


def _norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm of all gradients together, on their device."""
    norms = [norm.double() for norm in torch._foreach_norm(list(gradients))]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros((), device="cpu")
