"""Calls with which a training script runs under every parallelism strategy, also if ranks split the model.

With model parallelism, no rank has the whole model: ``create`` gives it no memory, and ``run`` and ``predict`` compute
with the parts of all ranks. With other strategies, they do what a script would write itself.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from dltrain.elastic.ranks import Ranks
from dltrain.models.deferred import deferred
from dltrain.models.layers import Describe, set_cuts
from dltrain.parallel.model_split.model_parallel import ModelParallel
from dltrain.parallel.model_split.pipeline import LossOf, Pipeline
from dltrain.protocol.errors import MisuseError
from dltrain.train import usage_checks
from dltrain.train.as_planned import AsPlanned
from dltrain.train.steps import several

Model = TypeVar("Model", bound=nn.Module)


class ModelCalls(AsPlanned, Ranks):
    """The part of ``Trainer`` that creates and calls the model, or this rank's part of it, and clips gradients."""

    rank: int

    def create(
        self, make: Callable[[], Model], *, layers: Describe | None = None, pairs: Describe | None = None
    ) -> Model:
        """Return the model that ``make`` creates. If ranks divide its parameters, they have no memory yet.

        This is so with strategies Pipeline and Tensor, and with Sharded if the plan has ``deferredInit``. ``wrap`` then
        gives each rank the initial values of its part, the same as in one process. ``make`` must compute parameters by
        operations of torch, without reading their values. ``layers``: for strategy Pipeline, a function
        that takes the model and returns the list of its modules in the order in which they run. By default, these are
        the children of a ``Sequential``, or what the model's method ``layers()`` returns. An entry may also be a tuple:
        a function, and the modules and parameters that it uses. ``pairs``: for strategy Tensor, a function that takes
        the model and returns tuples (first, second) of linear layers, or (first, second, heads) for attention. By
        default, these are the layers around each ReLU of a ``Sequential``, or what the model's method ``pairs()``
        returns. Raise MisuseError if the model cannot be created in this way.
        """
        usage_checks.check_function("t.create: make", make)
        if self._team.defers_model:
            return deferred(make, allows_buffers=True)
        if not self._team.splits_model:
            return make()
        model = deferred(make)
        set_cuts(model, layers, pairs)
        return model

    def run(
        self, model: nn.Module, x: Tensor, y: Any, loss_of: LossOf, *, scaler: GradScaler | None = None
    ) -> Tensor | None:
        """Run the forward pass, the loss and the backward pass of a batch that ``steps`` returns, and log the loss.

        ``loss_of``: function that returns the mean loss over the samples for (outputs, targets). In a pipeline, it gets
        the micro-batches. ``scaler``: result of ``grad_scaler``. Forward pass and loss are computed in the precision of
        the plan. Return the mean loss, without gradient, on the ranks that compute it, and None on others: in a
        pipeline, only the last stage computes it. Call it on every rank, once for each batch. Raise MisuseError for
        arguments with which the strategy does not work.
        """
        parallel = self.parallel
        usage_checks.check_function("t.run: loss_of", loss_of)
        if isinstance(parallel, ModelParallel) and self._step.logged_by_run:
            raise MisuseError(
                f"t.run: found a second call in a step with parallelism.strategy {self.plan.parallelism}; expected "
                "one, for the whole batch that t.steps returns"
            )
        if isinstance(parallel, Pipeline):
            self._check_model("t.run", model)
            loss = parallel.run(x, y, loss_of, self._step.log)
        else:
            with self.autocast():
                loss = loss_of(model(x), y)
            self._step.log(loss)
            (loss if scaler is None else scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]
            loss = loss.detach()
        self._step.logged_by_run = True
        if isinstance(parallel, ModelParallel):
            parallel.seal()
        return loss

    def predict(self, model: nn.Module, x: Tensor) -> Tensor | None:
        """Return the model's outputs for the inputs ``x``, without gradients, or None if another rank returns them.

        If ranks split the model, those of a replica must call it together, with the same inputs, as ``held_out`` yields
        them. One of them gets the outputs, so that each sample counts once in sums over ranks.
        """
        parallel = self.parallel
        if isinstance(parallel, Pipeline):
            self._check_model("t.predict", model)
        with torch.no_grad(), self.autocast():
            outputs = parallel.predict(model, x)
        if isinstance(parallel, ModelParallel) and not isinstance(parallel, Pipeline) and parallel.replicas.part:
            return None
        return outputs

    def clip_gradients(self, max_norm: float, optimizer: Optimizer | None = None) -> float:
        """Clip the global batch's gradient to a norm of at most ``max_norm``. Return the norm before clipping.

        This works with every parallelism strategy. Call it on every rank, between ``backward()`` and ``opt.step()``.
        ``optimizer``: that of the parameters, if there are several; otherwise, raise MisuseError.
        """
        limit, parallel = usage_checks.check_max_norm(max_norm), self.parallel
        self._step.select(several.number_of(optimizer, self.optimizer))
        return parallel.clip(limit)

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients over micro-batches without reducing them over ranks.

        Use this context manager around every backward pass of a step except the last one, which reduces the accumulated
        gradient.
        """
        return self.parallel.accumulating()

    def _check_model(self, call: str, model: nn.Module) -> None:
        if getattr(model, "_orig_mod", model) is not self.model:
            raise MisuseError(
                f"{call}: model: found {type(model).__name__}, which is not the model of t.wrap; expected that model, "
                "because its layers are pipeline stages"
            )
