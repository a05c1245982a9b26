"""Parameters that a backward pass does not reach, and their gradients from a later backward pass of the same step.

Reductions of buckets start in the same order on every rank, so one parameter without a gradient would hold up all
buckets after its own. autograd knows beforehand which parameters a pass will reach. At the first gradient of a pass, a
rank therefore *skips* the others: their buckets are reduced without them. Ranks may skip different parameters.

A script may call ``backward`` several times in a step, for different parameters. The gradient of a skipped parameter is
then *late*: its bucket was reduced already. It is kept apart and added by another reduction. Ranks must agree on late
gradients, so they exchange one number per parameter, but only in steps in which some rank did not reach some parameter.
Further exchanges follow until every rank has come to its optimizer step. If steps always have several backward passes,
a rank skips nothing before the last of them, so that no gradient is late.
"""

from collections import deque
from collections.abc import Callable, Collection

import torch
from torch import Tensor
from torch.autograd.graph import Node

from dltrain.comm.core.collective import Collective
from dltrain.parallel.bucket_reductions import BucketReductions
from dltrain.parallel.gradient_buffer import GradientBuffer

_REMEMBERED_STEPS = 16
"""Number of last steps whose backward passes are counted. The smallest count is expected for the next step."""


class UnusedParameters:
    """The parameters that backward passes of the current step did not reach (skipped), and their late gradients.

    A gradient is late if a later backward pass of the step computes it after the reduction of its bucket has started.
    """

    def __init__(
        self,
        buffer: GradientBuffer,
        reductions: BucketReductions,
        collective: Callable[[list[Tensor]], Collective],
    ) -> None:
        """Prepare the agreement on late gradients and find the autograd nodes of the parameters.

        ``collective``: returns the collective with which ranks agree, for a list of buffers on a CPU.
        """
        self._buffer, self._reductions = buffer, reductions
        self._votes = torch.zeros(len(buffer.parameters) + 1, dtype=torch.float64, device="cpu")
        self._agreement = collective([self._votes])
        self._nodes = [accumulator(parameter) for parameter in buffer.parameters]
        self._hooks: dict[int, torch.utils.hooks.RemovableHandle] = {}
        self._counts: deque[int] = deque(maxlen=_REMEMBERED_STEPS)
        self._passes = 0
        self._skipped: set[int] = set()
        self.late: set[int] = set()
        """Parameters whose late gradients are not reduced yet, as indices in ``GradientBuffer.parameters``."""

    def begin(self) -> None:
        """Begin a step."""
        if self._passes:
            self._counts.append(self._passes)
        self._passes = 0
        self._skipped.clear()
        self.late.clear()

    def begin_pass(self) -> None:
        """Begin a backward pass. If no other pass is expected in this step, skip the parameters that it will not reach.

        Call this method within the pass, when the first gradient has been computed.
        """
        self._passes += 1
        if not self._is_last_pass:
            return
        try:
            waiting = self._reductions.waiting
            skipped = [index for index in waiting if not torch._C._will_engine_execute_node(self._nodes[index])]
        except RuntimeError:  # autograd cannot tell, such as in a compiled backward pass
            return
        self._skip(skipped)

    def end_pass(self) -> None:
        """End a backward pass. If no other pass is expected in this step, start all remaining reductions.

        If autograd could not tell which parameters the pass would reach, skip those that it has not reached. Raise
        PeerLostError if a rank is lost.
        """
        if self._is_last_pass:
            self._skip([*self._reductions.waiting])
            self._reductions.start_complete()

    @property
    def _is_last_pass(self) -> bool:
        """True if no backward pass is expected in this step after the current backward pass."""
        return self._passes >= min(self._counts, default=1)

    def _skip(self, indices: Collection[int]) -> None:
        self._reductions.skip(indices)
        self._skipped.update(indices)
        for index in indices:
            if index not in self._hooks and self._buffer.parameters[index].requires_grad:
                parameter: Tensor = self._buffer.parameters[index]
                self._hooks[index] = parameter.register_hook(self._keeps_apart(index))  # type: ignore[no-untyped-call]

    def came(self, index: int, *, again: bool) -> bool:
        """Record that the skipped parameter ``index`` got a gradient. Return True if the gradient is late.

        It is late if the reduction of the parameter's bucket has started already. ``again``: True if a later backward
        pass of this step may add to the gradient.
        """
        if self._reductions.started(index):
            self.late.add(index)
        if not again:
            self._skipped.discard(index)
        return index in self.late

    def was_skipped(self, index: int) -> bool:
        """Return True if parameter ``index`` was skipped in this step and may still get a gradient."""
        return index in self._skipped

    def agree(self, *, final: bool) -> tuple[list[float], bool]:
        """Exchange with all ranks which parameters have late gradients, and whether more of them can follow.

        Return a pair: for each parameter, the number of ranks with a late gradient; and True if no rank can get more
        late gradients in this step. All ranks must call this method together. ``final``: True if no more late gradients
        can follow on this rank in this step. Raise PeerLostError if a rank is lost.
        """
        self._votes.zero_()
        self._votes[list(self.late)] = 1.0
        self._votes[-1] = 0.0 if final else 1.0
        self._agreement.allreduce(0)
        *late, others = self._votes.tolist()
        return late, not others

    def take(self, index: int) -> Tensor | None:
        """Return this rank's late gradient of parameter ``index``, and None if it has none.

        The gradient then counts as reduced: ``index`` is removed from ``late``.
        """
        if index not in self.late:
            return None
        self.late.discard(index)
        gradient = self._buffer.parameters[index].grad
        return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient

    def abandon(self) -> None:
        self._agreement.abandon()

    def retire(self) -> None:
        """Remove the hooks that keep late gradients apart, when this object is no longer used."""
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()

    def close(self) -> None:
        self._agreement.close()

    def _keeps_apart(self, index: int) -> Callable[[Tensor], None]:
        parameter = self._buffer.parameters[index]

        def before(gradient: Tensor) -> None:
            # autograd adds a gradient to ``p.grad``, which is a view of the reduced bucket.
            if index in self._skipped and index not in self.late and self._reductions.started(index):
                parameter.grad = None

        return before


def accumulator(parameter: torch.nn.Parameter) -> Node:
    """Return the autograd node that adds to ``parameter.grad``. The node exists only while a reference to it exists."""
    with torch.enable_grad():
        function = parameter.view_as(parameter).grad_fn
    assert function is not None, "the parameter is trainable"
    found = function.next_functions[0][0]
    assert found is not None
    return found
