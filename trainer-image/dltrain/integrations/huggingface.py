"""Report the progress of a Hugging Face ``Trainer``: ``Trainer(…, callbacks=[ReportCallback()])``."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from dltrain.integrations.logged_values import CHECKPOINT_S, EvaluationBatches, report_arguments
from dltrain.reporting.script_reports import busy, report, stop_requested


class ReportCallback(TrainerCallback):  # type: ignore[misc]  # The type checker does not see the library.
    """Report each step, and the loss, accuracy and metrics that the ``Trainer`` logs, on every rank.

    Evaluations and checkpoints of the ``Trainer`` are announced, so that they do not count as hangs. If the job asks
    the script to stop, the ``Trainer`` saves a checkpoint, with any ``save_strategy``, and ``train`` returns.
    """

    def __init__(self) -> None:
        self._evaluation = EvaluationBatches()
        self._stops = False
        """True once the job has asked the script to stop."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._stops = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._report(args, state)
        if stop_requested():
            self._stops = control.should_save = control.should_training_stop = True
            # An evaluation would come before the checkpoint, and there may be no time for both. With the save_strategy
            # "best", the checkpoint would also be left out, unless this step were the best one.
            control.should_evaluate = False
        if control.should_save:
            busy("checkpoint", CHECKPOINT_S)
        if control.should_evaluate:
            self._evaluation.announce()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._stops:  # The Trainer also ends an epoch that it has not finished. Its checkpoint is saved already.
            control.should_save = control.should_evaluate = False
        if control.should_save:
            busy("checkpoint", CHECKPOINT_S)
        if control.should_evaluate:
            self._evaluation.announce()

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step:
            self._evaluation.announce()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        # The Trainer logs train_loss at its end. It is the mean over the run, and not the last loss.
        values = report_arguments({name: value for name, value in (logs or {}).items() if name != "train_loss"})
        if state.global_step and values:
            self._report(args, state, **values)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._report(args, state)

    def _report(self, args: Any, state: Any, /, **values: Any) -> None:
        samples = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        steps = state.max_steps if state.max_steps > 0 else None
        report(step=state.global_step, steps=steps, epoch=state.epoch, samples=samples, **values)
