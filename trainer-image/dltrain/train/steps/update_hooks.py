"""Hooks that run once before and once after each update of an optimizer.

torch runs the hooks of an optimizer for each class that defines ``step``. If the ``step`` of a subclass calls
``super().step()``, they run twice. The module then ignores the inner call, because the outer call may change parameters
before and after the inner call.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from dltrain.optim.combined import parts_of
from dltrain.parallel.optimizer_checks import check_late
from dltrain.train.usage_checks import warn_of_another_optimizer


class UpdateHooks:
    """Call ``before`` and ``after`` around each update of ``optimizer``.

    Before an update, also raise MisuseError if the script has added parameters to the optimizer that do not belong to
    the model.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        optimizer: Optimizer,
        before: Callable[[], object],
        after: Callable[[], object],
        stands_in: Callable[[nn.Parameter], bool],
    ) -> None:
        """Register the hooks with ``optimizer``. ``parameters``: those whose gradients ranks reduce.

        ``before``, ``after``: functions to call before and after an update. ``stands_in``: returns True for a parameter
        of a sharded optimizer that is a rank's part of a model parameter.
        """
        # The set refers to the parameters, so that they exist and no other object can get the same id.
        self._tracked = {*parameters, *_parameters(optimizer)}
        self._known = {id(parameter) for parameter in self._tracked}
        self._depth = 0
        self._stands_in = stands_in
        self._before, self._after = before, after
        optimizer.register_step_pre_hook(self._begin)
        optimizer.register_step_post_hook(self._end)

    def _begin(self, optimizer: Optimizer, *_: Any) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        try:
            self._check(optimizer)
            self._before()
        except BaseException:
            self._depth = 0  # torch does not call the post hook after an exception
            raise

    def _end(self, *_: Any) -> None:
        self._depth -= 1
        if not self._depth:
            self._after()

    def _check(self, optimizer: Optimizer) -> None:
        late = [p for p in _parameters(optimizer) if id(p) not in self._known]  # tensors are slow to hash
        if late:
            check_late([p for p in late if not self._stands_in(p)])
            self._tracked.update(late)
            self._known.update(map(id, late))


@contextmanager
def others_noticed(model: nn.Module, optimizer: Optimizer, rank: int) -> Iterator[None]:
    """Warn once, on rank 0, if another optimizer than ``optimizer`` updates parameters that ``model`` does not have."""
    warned = rank > 0

    def updated(other: Optimizer, *_: Any) -> None:
        nonlocal warned
        if warned or other in parts_of(optimizer):
            return
        known = {id(parameter) for parameter in [*model.parameters(), *_parameters(optimizer)]}
        # Tensors that are no nn.Parameter, such as changed inputs, belong to one batch.
        trained = [each for each in _parameters(other) if isinstance(each, nn.Parameter) and each.grad is not None]
        if unknown := [parameter for parameter in trained if id(parameter) not in known]:
            warned = True
            warn_of_another_optimizer(type(other).__name__, len(unknown))

    hook = register_optimizer_step_post_hook(updated)
    try:
        yield
    finally:
        hook.remove()


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
