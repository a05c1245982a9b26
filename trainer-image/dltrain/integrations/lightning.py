"""Report the progress of a Lightning ``Trainer``: ``Trainer(…, callbacks=[ReportCallback()])``.

The callback is one of the package ``pytorch_lightning`` if the script has imported that package only.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from typing import Any

from dltrain.integrations.logged_values import CHECKPOINT_S, EvaluationBatches, report_arguments
from dltrain.reporting.script_reports import busy, report, stop_requested

if "pytorch_lightning" in sys.modules and "lightning" not in sys.modules:
    from pytorch_lightning.callbacks import Callback
else:
    from lightning.pytorch.callbacks import Callback


STOPPED = "stopped.ckpt"
"""Name of the checkpoint that is saved when the job asks the script to stop."""


class ReportCallback(Callback):  # type: ignore[misc]  # The type checker does not see the library.
    """Report each step with its loss, and the metrics that the module logs, on every rank.

    Evaluations and checkpoints of the ``Trainer`` are announced, so that they do not count as hangs. If the job asks
    the script to stop, the callback saves the checkpoint ``stopped.ckpt`` in $DLJOB_CHECKPOINT_DIR or the trainer's
    folder, and ``fit`` returns.
    """

    def __init__(self) -> None:
        self._evaluation = EvaluationBatches()
        self._steps: int | None = None
        self._counted_epoch: int | None = None
        """The epoch whose first batch here has set ``_steps``; None: no batch of this training has."""
        self._step = 0
        self._reported: dict[str, Any] = {}
        """The last reported values, by argument of ``report``. Lightning makes a new tensor for each value."""
        self._limit: Any = None
        """The trainer's ``limit_val_batches`` before the job has asked the script to stop; None: it has not."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._counted_epoch = None
        self._step = _completed(trainer, pl_module)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        # In each epoch again: callbacks may change the number of accumulated batches, of batches, and of epochs.
        if self._counted_epoch != trainer.current_epoch:
            self._counted_epoch = trainer.current_epoch
            self._steps = _steps(trainer, pl_module, self._step, batch_idx)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = _completed(trainer, pl_module)
        if step == self._step:
            return  # The batch was one of several whose gradients are accumulated.
        self._step = step
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if loss is not None and not _updates_by_itself(pl_module):
            loss = loss * trainer.accumulate_grad_batches  # Lightning has divided it by this number.
        values = self._new(trainer) if loss is None else {**self._new(trainer), "loss": loss}
        values.pop("accuracy", None)  # That of a batch is not one on held-out data.
        self._report(trainer, **values)
        if stop_requested():
            self._stop(trainer)

    def _stop(self, trainer: Any) -> None:
        """Save a checkpoint and stop after this step, without a validation, for which the time may not suffice."""
        folder = os.environ.get("DLJOB_CHECKPOINT_DIR") or trainer.default_root_dir
        trainer.save_checkpoint(os.path.join(folder, STOPPED))  # noqa: PTH118 - it may be a URL.
        trainer.should_stop = True
        loop = trainer.fit_loop
        loop.min_epochs = loop.epoch_loop.min_steps = None  # Lightning would go on until these are reached.
        self._limit, trainer.limit_val_batches = trainer.limit_val_batches, 0

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._limit is not None:
            self._limit, trainer.limit_val_batches = None, self._limit

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._log(trainer)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._announce(trainer)

    def on_validation_batch_end(self, trainer: Any, *arguments: Any, **kwargs: Any) -> None:
        self._announce(trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self._log(trainer)

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        self._announce(trainer)

    def on_test_batch_end(self, trainer: Any, *arguments: Any, **kwargs: Any) -> None:
        self._announce(trainer)

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        self._log(trainer)

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        self._announce(trainer)

    def on_predict_batch_end(self, trainer: Any, *arguments: Any, **kwargs: Any) -> None:
        self._announce(trainer)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        busy("checkpoint", CHECKPOINT_S)

    def _announce(self, trainer: Any) -> None:
        if not trainer.sanity_checking:
            self._evaluation.announce()

    def _log(self, trainer: Any) -> None:
        """Report the values that the module has logged since the last report, except the loss of a step."""
        values = self._new(trainer)
        values.pop("loss", None)
        if values and self._step:
            self._report(trainer, **values)

    def _new(self, trainer: Any) -> dict[str, Any]:
        """Return what the module has logged, as arguments of ``report``, without the values reported already."""
        found = report_arguments(trainer.callback_metrics)
        return {name: value for name, value in found.items() if value is not self._reported.get(name)}

    def _report(self, trainer: Any, /, **values: Any) -> None:
        self._reported.update(values)
        report(step=self._step, steps=self._steps, epoch=trainer.current_epoch, **values)


def _steps(trainer: Any, module: Any, step: int, batch_idx: int) -> int | None:
    """Return the number of steps of the whole training, or None if it is unknown.

    ``step``: number of steps completed before the batch ``batch_idx`` of the present epoch. The batches that a resumed
    training had before it were perhaps others, so that only those that come are counted.
    """
    limit = trainer.max_steps if trainer.max_steps > 0 else math.inf
    if _updates_by_itself(module) and limit < math.inf:
        return None  # max_steps limits updates. How many of them a batch makes is unknown.
    epochs, batches = trainer.max_epochs, trainer.num_training_batches
    total = math.inf
    if epochs is not None and epochs > 0 and batches < math.inf:
        accumulated = [_accumulated(trainer, epoch) for epoch in range(trainer.current_epoch, epochs)]
        # The last batch of an epoch always ends a step.
        total = step + sum(math.ceil(batches / number) for number in accumulated) - batch_idx // accumulated[0]
    total = min(total, limit)
    return int(total) if total < math.inf else None


def _accumulated(trainer: Any, epoch: int) -> int:
    """Return the number of batches whose gradients are accumulated for a step in an epoch, the present or a later one.

    Lightning's GradientAccumulationScheduler changes it by epoch.
    """
    for callback in trainer.callbacks:
        if hasattr(callback, "get_accumulate_grad_batches"):
            return int(callback.get_accumulate_grad_batches(epoch))
    return int(trainer.accumulate_grad_batches)


def _updates_by_itself(module: Any) -> bool:
    """Return True if the module calls its optimizers itself, such as one with two of them."""
    return not getattr(module, "automatic_optimization", True)


def _completed(trainer: Any, module: Any) -> int:
    """Return the number of completed steps. Lightning counts the updates of all optimizers; a batch is one step."""
    if _updates_by_itself(module):
        return int(trainer.fit_loop.total_batch_idx) + 1
    return int(trainer.global_step)
