"""Report the progress of a Lightning ``Trainer``: ``Trainer(…, callbacks=[ReportCallback()])``.

The callback is one of the package ``pytorch_lightning`` if the script has imported that package only.
"""

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

    Validation and checkpoints of the ``Trainer`` are announced, so that they do not count as hangs. If the job asks
    the script to stop, the callback saves the checkpoint ``stopped.ckpt`` in $DLJOB_CHECKPOINT_DIR or the trainer's
    folder, and ``fit`` returns.
    """

    def __init__(self) -> None:
        self._evaluation = EvaluationBatches()
        self._steps: int | None = None
        self._step = 0
        self._validated: tuple[int, frozenset[str]] = (0, frozenset())
        """The step of the last validation, and the names of the values that were reported then."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        steps = trainer.estimated_stepping_batches
        if _updates_by_itself(pl_module) and trainer.max_steps > 0:
            steps = 0  # max_steps limits updates. How many of them a batch makes is unknown.
        self._steps = int(steps) if 0 < steps < float("inf") else None
        self._step = _completed(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = _completed(trainer, pl_module)
        if step == self._step:
            return  # The batch was one of several whose gradients are accumulated.
        self._step = step
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if loss is not None and not _updates_by_itself(pl_module):
            loss = loss * trainer.accumulate_grad_batches  # Lightning has divided it by this number.
        self._report(trainer, loss=loss)
        if stop_requested():
            folder = os.environ.get("DLJOB_CHECKPOINT_DIR") or trainer.default_root_dir
            trainer.save_checkpoint(os.path.join(folder, STOPPED))  # noqa: PTH118 - it may be a URL.
            trainer.should_stop = True

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        step, names = self._validated
        self._log(trainer, without=names if step == self._step else frozenset())

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._announce(trainer)

    def on_validation_batch_end(self, trainer: Any, *arguments: Any, **kwargs: Any) -> None:
        self._announce(trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self._validated = self._step, self._log(trainer)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        busy("checkpoint", CHECKPOINT_S)

    def _announce(self, trainer: Any) -> None:
        if not trainer.sanity_checking:
            self._evaluation.announce()

    def _log(self, trainer: Any, without: frozenset[str] = frozenset()) -> frozenset[str]:
        """Report the metrics that the module has logged, except the loss of a step and the names in ``without``.

        Return the names of the metrics that were reported.
        """
        values = report_arguments(trainer.callback_metrics)
        # The loss of the last step has been reported.
        values = {name: value for name, value in values.items() if name != "loss" and name not in without}
        if values and self._step:
            self._report(trainer, **values)
        return frozenset(values)

    def _report(self, trainer: Any, **values: Any) -> None:
        report(step=self._step, steps=self._steps, epoch=trainer.current_epoch, **values)


def _updates_by_itself(module: Any) -> bool:
    """Return True if the module calls its optimizers itself, such as one with two of them."""
    return not getattr(module, "automatic_optimization", True)


def _completed(trainer: Any, module: Any) -> int:
    """Return the number of completed steps. Lightning counts the updates of all optimizers; a batch is one step."""
    if _updates_by_itself(module):
        return int(trainer.fit_loop.total_batch_idx) + 1
    return int(trainer.global_step)
