"""The moments before and after an optimizer's update, whatever ``step`` is made of.

torch calls the hooks of ``step`` for each class that has a ``step`` of its own: twice where a script's optimizer calls
that of the one it is derived from. What counts is the outer one, which may change parameters before and after.
"""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from dltrain.parallel.optimizer_checks import check_late


class UpdateHooks:
    """Calls ``before`` and ``after`` each update of ``optimizer``, which has the parameters that it is to have."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        before: Callable[[], object],
        after: Callable[[], object],
        stands_in: Callable[[nn.Parameter], bool],
    ) -> None:
        """``stands_in``: whether the optimizer has it in the place of a part of the model's."""
        self._tracked = {
            *model.parameters(),
            *_parameters(optimizer),
        }  # so that no other one gets the number of one of them
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
            self._depth = 0  # there will be no end
            raise

    def _end(self, *_: Any) -> None:
        self._depth -= 1
        if not self._depth:
            self._after()

    def _check(self, optimizer: Optimizer) -> None:
        late = [p for p in _parameters(optimizer) if id(p) not in self._known]  # numbers: tensors are slow to hash
        if late:
            check_late([p for p in late if not self._stands_in(p)])
            self._tracked.update(late)
            self._known.update(map(id, late))


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
