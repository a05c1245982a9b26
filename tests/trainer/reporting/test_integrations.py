"""Tests of the callbacks for training libraries, in the call order that the libraries document.

The libraries are not part of the test environment. Small classes stand in for their base classes, and the tests call the
callbacks as the libraries do. The callbacks were also run by hand with transformers 5.23, lightning 2.6 and accelerate 1.15.
"""

import importlib
import sys
import types
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dltrain.integrations.logged_values import report_arguments

BASES = {
    "transformers": "TrainerCallback",
    "lightning.pytorch.callbacks": "Callback",
    "pytorch_lightning.callbacks": "Callback",
    "accelerate.tracking": "GeneralTracker",
}
Calls = list[tuple[str, dict[str, Any]]]


def stand_in(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a module with an empty base class in the place of a library."""
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:depth]), types.ModuleType(parts[depth - 1]))
    setattr(sys.modules[name], BASES[name], type(BASES[name], (), {}))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    """Record calls of ``report``, and of ``busy`` as ("checkpoint", {}) or ("evaluation", {})."""
    found: Calls = []
    stand_in("transformers", monkeypatch)
    stand_in("lightning.pytorch.callbacks", monkeypatch)
    stand_in("accelerate.tracking", monkeypatch)
    for module in ("logged_values", "huggingface", "lightning", "accelerate"):
        monkeypatch.delitem(sys.modules, f"dltrain.integrations.{module}", raising=False)
    for name in ("logged_values", "huggingface", "lightning", "accelerate"):
        module = importlib.import_module(f"dltrain.integrations.{name}")
        monkeypatch.setattr(module, "report", lambda **values: found.append(("report", values)), raising=False)
        monkeypatch.setattr(module, "stop_requested", lambda: False, raising=False)
        monkeypatch.setattr(module, "busy", lambda what, _: found.append((what, {})), raising=False)
    yield found
    for name in ("logged_values", "huggingface", "lightning", "accelerate"):
        sys.modules.pop(f"dltrain.integrations.{name}", None)


def test_logged_values_are_sorted_into_arguments() -> None:
    loss = torch.tensor(0.5, requires_grad=True)
    found = report_arguments(
        {"train_loss": loss, "val_acc": torch.tensor(0.75), "val loss": 1.5, "eval_runtime": 3.0, "epoch": 2, "text": "x",
         "weights": torch.ones(3), "steps": 4, "done": True, "9": 1.0}
    )  # fmt: skip
    assert found == {"loss": loss, "accuracy": torch.tensor(0.75), "val_loss": 1.5, "_steps": 4, "_9": 1.0}
    assert report_arguments({"val_acc": 0.5, "accuracy": 0.6}) == {"accuracy": 0.5, "_accuracy": 0.6}
    # Fixed bug: the accuracy of training batches, which Lightning has first, was that of the job.
    assert report_arguments({"accuracy": 0.6, "val_acc": 0.5}) == {"accuracy": 0.5, "_accuracy": 0.6}


def test_logged_values_that_are_no_numbers_end_no_training() -> None:
    """Fixed bug: an integer beyond the range of float, or a name that is no string, ended the script."""
    assert report_arguments({"huge": 10**400, "nested": {"a": 1}, 3: 4, "none": None, "mine": 2}) == {
        "_3": 4,
        "mine": 2,
    }


def test_hugging_face_trainer_in_its_order_of_calls(calls: Calls) -> None:
    from dltrain.integrations.huggingface import ReportCallback

    callback = ReportCallback()
    args = SimpleNamespace(train_batch_size=8, gradient_accumulation_steps=2, world_size=4)
    state = SimpleNamespace(global_step=1, max_steps=10, epoch=0.5)
    control = SimpleNamespace(should_save=False, should_evaluate=False)
    callback.on_step_end(args, state, control)
    callback.on_log(args, state, control, logs={"loss": 0.5, "grad_norm": 2.0, "learning_rate": 0.1, "epoch": 0.5})
    control.should_save = control.should_evaluate = True
    state.global_step = 2
    callback.on_step_end(args, state, control)
    callback.on_prediction_step(args, state, control)
    callback.on_log(args, state, control, logs={"eval_loss": 0.75, "eval_accuracy": 0.5, "eval_runtime": 1.0})
    callback.on_save(args, state, control)
    callback.on_epoch_end(args, state, control)
    callback.on_log(args, state, control, logs={"train_loss": 0.9, "train_runtime": 5.0, "total_flos": 1.0})
    same = {"steps": 10, "epoch": 0.5, "samples": 64}
    assert calls == [
        ("report", {"step": 1, **same}),
        ("report", {"step": 1, **same, "loss": 0.5, "grad_norm": 2.0, "learning_rate": 0.1}),
        ("report", {"step": 2, **same}),
        ("checkpoint", {}),
        ("evaluation", {}),
        ("report", {"step": 2, **same, "eval_loss": 0.75, "accuracy": 0.5}),
        ("report", {"step": 2, **same}),
        ("checkpoint", {}),
    ]


@pytest.mark.parametrize("is_best", [False, True])
@pytest.mark.parametrize("evaluates", ["step", "epoch", "never"])
def test_hugging_face_trainer_that_stops_saves_with_the_strategy_best(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, evaluates: str, is_best: bool
) -> None:
    """Fixed bug: if it evaluated at the step of the stop, and that was not the best one, it saved no checkpoint."""
    from dltrain.integrations import huggingface

    found = []

    def maybe_save() -> None:
        """Do what ``Trainer._maybe_log_save_evaluate`` of transformers 5.24 does with the save_strategy ``best``."""
        if control.should_evaluate:
            found.append("evaluation")
            control.should_save = is_best
        if control.should_save:
            found.append("checkpoint")
        control.should_save = control.should_evaluate = False

    callback = huggingface.ReportCallback()
    args = SimpleNamespace(train_batch_size=8, gradient_accumulation_steps=1, world_size=1)
    state = SimpleNamespace(global_step=4, max_steps=10, epoch=0.4)
    control = SimpleNamespace(should_save=False, should_evaluate=evaluates == "step", should_training_stop=False)
    monkeypatch.setattr(huggingface, "stop_requested", lambda: True)
    callback.on_step_end(args, state, control)
    maybe_save()
    assert control.should_training_stop
    control.should_evaluate = evaluates == "epoch"
    callback.on_epoch_end(args, state, control)
    maybe_save()
    assert found == ["checkpoint"]
    callback.on_train_begin(args, state, control)
    control.should_evaluate = True
    callback.on_epoch_end(args, state, control)
    assert control.should_evaluate, "another training by the same callback evaluates"


def test_logged_values_may_have_the_names_of_the_callbacks_arguments(calls: Calls) -> None:
    """Fixed bug: a metric with the name state, trainer or self ended the training with a TypeError."""
    from dltrain.integrations import huggingface, lightning

    named = dict.fromkeys(("self", "args", "state", "trainer"), 1.0)
    args = SimpleNamespace(train_batch_size=8, gradient_accumulation_steps=2, world_size=4)
    state = SimpleNamespace(global_step=1, max_steps=10, epoch=0.5)
    huggingface.ReportCallback().on_log(args, state, SimpleNamespace(), logs=named)
    callback = lightning.ReportCallback()
    callback._step = 1
    callback.on_train_epoch_end(SimpleNamespace(current_epoch=0, callback_metrics=named), None)
    assert [values | named == values for _, values in calls] == [True, True]


def lightning_trainer(**attributes: Any) -> SimpleNamespace:
    """Return what the callback reads of a ``Trainer`` with two epochs of three batches and no limit of steps."""
    defaults: dict[str, Any] = {
        "global_step": 0, "current_epoch": 0, "max_epochs": 2, "max_steps": -1, "num_training_batches": 3,
        "accumulate_grad_batches": 1, "callbacks": [], "callback_metrics": {}, "sanity_checking": False,
    }  # fmt: skip
    return SimpleNamespace(**defaults | attributes)


def test_lightning_trainer_in_its_order_of_calls(calls: Calls) -> None:
    from dltrain.integrations.lightning import ReportCallback

    callback = ReportCallback()
    trainer = lightning_trainer(sanity_checking=True, callback_metrics={"val_acc": 0.1}, accumulate_grad_batches=2)
    callback.on_validation_start(trainer, None)
    callback.on_validation_end(trainer, None)
    trainer.sanity_checking = False
    callback.on_train_start(trainer, None)
    for step in (0, 1):  # The first batch accumulates gradients only.
        callback.on_train_batch_start(trainer, None, None, step)
        trainer.global_step = step
        # Fixed bug: the reported loss was divided by the number of accumulated batches, as Lightning passes it.
        callback.on_train_batch_end(trainer, None, {"loss": 0.25}, None, step)
    trainer.callback_metrics = {"train_loss": 0.6, "val_acc": 0.5, "val_loss": 0.75}
    callback.on_validation_start(trainer, None)
    callback.on_validation_batch_end(trainer, None, None, None, 0)
    callback.on_validation_end(trainer, None)
    callback.on_save_checkpoint(trainer, None, {})
    trainer.callback_metrics["train_acc"] = 0.9
    callback.on_train_epoch_end(trainer, None)
    same = {"step": 1, "steps": 4, "epoch": 0}
    assert calls == [
        ("report", {**same, "loss": 0.5}),
        ("evaluation", {}),
        ("report", {**same, "accuracy": 0.5, "val_loss": 0.75}),
        ("checkpoint", {}),
        ("report", {**same, "train_acc": 0.9}),
    ]


def train_lightning_epochs(
    callback: Any, trainer: SimpleNamespace, first_epoch: int = 0, first_batch: int = 0
) -> list[int]:
    """Make the callback's calls of a ``fit``: an epoch ends with a step. Return the batches accumulated per epoch."""
    callback.on_train_start(trainer, None)
    numbers = []
    for epoch in range(first_epoch, trainer.max_epochs):
        trainer.current_epoch = epoch
        for each in trainer.callbacks:
            trainer.accumulate_grad_batches = each.get_accumulate_grad_batches(epoch)
        number = trainer.accumulate_grad_batches
        numbers.append(number)
        for batch in range(first_batch, trainer.num_training_batches):
            callback.on_train_batch_start(trainer, None, None, batch)
            if (batch + 1) % number == 0 or batch + 1 == trainer.num_training_batches:
                trainer.global_step += 1
            callback.on_train_batch_end(trainer, None, None, None, batch)
            if trainer.global_step == trainer.max_steps:
                return numbers
        first_batch = 0
    return numbers


@pytest.mark.parametrize(
    ("later", "max_steps", "done", "epoch", "batch"),
    [(4, -1, 0, 0, 0), (4, 12, 0, 0, 0), (1, -1, 0, 0, 0), (4, -1, 12, 1, 8), (4, -1, 12, 1, 9)],
    ids=["fewer later", "limit", "the same", "resumed", "resumed elsewhere in the epoch"],
)
def test_lightning_progress_ends_at_its_total_if_accumulation_changes_by_epoch(
    calls: Calls, later: int, max_steps: int, done: int, epoch: int, batch: int
) -> None:
    """Fixed bug: with a GradientAccumulationScheduler, the progress of the job ended at 50 % or so."""
    from dltrain.integrations.lightning import ReportCallback

    scheduler = SimpleNamespace(get_accumulate_grad_batches=lambda epoch: 1 if epoch < 1 else later)
    trainer = lightning_trainer(
        global_step=done, max_epochs=3, max_steps=max_steps, num_training_batches=10, callbacks=[scheduler]
    )
    numbers = train_lightning_epochs(ReportCallback(), trainer, epoch, batch)
    assert numbers[-1] == later
    assert {values["steps"] for _, values in calls} == {calls[-1][1]["step"]} == {trainer.global_step}


def test_lightning_total_of_a_resumed_training_counts_the_batches_that_come(calls: Calls) -> None:
    """Fixed bug: resumed on twice as many ranks, with half as many batches, the progress ended at 150 %."""
    from dltrain.integrations.lightning import ReportCallback

    trainer = lightning_trainer(global_step=20, max_epochs=4, num_training_batches=5)
    train_lightning_epochs(ReportCallback(), trainer, first_epoch=2)
    assert calls[0][1]["steps"] == calls[-1][1]["step"] == 30


@pytest.mark.parametrize(
    ("limits", "steps"),
    [
        ({"max_epochs": -1}, None),
        ({"max_epochs": -1, "max_steps": 7}, 7),
        ({"num_training_batches": float("inf")}, None),
        ({"num_training_batches": float("inf"), "max_steps": 7}, 7),
        ({"max_steps": 4}, 4),
        ({"max_steps": 900}, 6),
    ],
)
def test_lightning_total_by_the_limits_of_the_trainer(calls: Calls, limits: dict[str, Any], steps: int | None) -> None:
    from dltrain.integrations.lightning import ReportCallback

    callback, trainer = ReportCallback(), lightning_trainer(**limits)
    callback.on_train_start(trainer, None)
    callback.on_train_batch_start(trainer, None, None, 0)
    trainer.global_step = 1
    callback.on_train_batch_end(trainer, None, None, None, 0)
    assert calls == [("report", {"step": 1, "steps": steps, "epoch": 0})]


def test_lightning_tests_and_predictions_are_announced_and_their_metrics_reported(calls: Calls) -> None:
    """Fixed bug: a test after the training, longer than the limit of a silence, counted as a hang."""
    from dltrain.integrations import lightning

    trainer = SimpleNamespace(current_epoch=3, sanity_checking=False, callback_metrics={"test_f1": 0.25})
    for names in (("test_start",), ("test_batch_end",), ("predict_start",), ("predict_batch_end",), ("test_end",)):
        callback = lightning.ReportCallback()
        callback._step = 7
        for name in names:
            getattr(callback, f"on_{name}")(trainer, None)
    assert calls == [
        *[("evaluation", {})] * 4,
        ("report", {"step": 7, "steps": None, "epoch": 3, "test_f1": 0.25}),
    ]


def test_lightning_metrics_of_training_steps_are_reported_at_these_steps(calls: Calls) -> None:
    """Fixed bug: they came after the epoch only, which of a language model is the whole training."""
    from dltrain.integrations.lightning import ReportCallback

    callback, logged = ReportCallback(), {"accuracy": torch.tensor(0.9), "rare": torch.tensor(7)}
    trainer = SimpleNamespace(
        global_step=0, current_epoch=0, sanity_checking=False, accumulate_grad_batches=1, callback_metrics=logged
    )
    for step in (1, 2):
        trainer.global_step = step
        logged |= {"train_loss": torch.tensor(0.5), "perplexity": torch.tensor(float(step))}
        callback.on_train_batch_end(trainer, None, {"loss": torch.tensor(1.0)}, None, step - 1)
    logged["val_acc"] = torch.tensor(0.25)
    callback.on_validation_end(trainer, None)
    callback.on_train_epoch_end(trainer, None)
    same = {"steps": None, "epoch": 0}
    assert calls == [
        ("report", {"step": 1, **same, "loss": 1, "perplexity": 1, "rare": 7}),
        ("report", {"step": 2, **same, "loss": 1, "perplexity": 2}),
        ("report", {"step": 2, **same, "accuracy": 0.25, "_accuracy": torch.tensor(0.9)}),
    ]


def test_a_lightning_module_with_two_optimizers_makes_one_step_of_a_batch(calls: Calls) -> None:
    """Fixed bug: a GAN reported two steps for each batch, so that its progress ended at 200 %."""
    from dltrain.integrations.lightning import ReportCallback

    callback, module = ReportCallback(), SimpleNamespace(automatic_optimization=False)
    trainer = lightning_trainer(
        max_epochs=1, num_training_batches=2, callback_metrics={"val_acc": 0.5},
        fit_loop=SimpleNamespace(total_batch_idx=-1),
    )  # fmt: skip
    callback.on_train_start(trainer, module)
    for batch in range(2):
        callback.on_train_batch_start(trainer, module, None, batch)
        trainer.global_step, trainer.fit_loop.total_batch_idx = 2 * batch + 2, batch
        callback.on_train_batch_end(trainer, module, None, None, batch)
    callback.on_validation_end(trainer, module)
    same = {"steps": 2, "epoch": 0}
    assert calls == [
        ("report", {"step": 1, **same}),
        ("report", {"step": 2, **same}),
        ("report", {"step": 2, **same, "accuracy": 0.5}),
    ]
    trainer.max_steps = 8
    callback.on_train_start(trainer, module)
    callback.on_train_batch_start(trainer, module, None, 0)
    trainer.fit_loop.total_batch_idx = 2
    callback.on_train_batch_end(trainer, module, None, None, 2)
    assert calls[-1][1]["steps"] is None, "the limit counts updates"


def test_trainers_stop_with_a_checkpoint_when_the_job_asks(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    from dltrain.integrations import huggingface, lightning

    for module in (huggingface, lightning):
        monkeypatch.setattr(module, "stop_requested", lambda: True)
    monkeypatch.setenv("DLJOB_CHECKPOINT_DIR", "/volume/job")
    args = SimpleNamespace(train_batch_size=8, gradient_accumulation_steps=2, world_size=4)
    control = SimpleNamespace(should_save=False, should_evaluate=False, should_training_stop=False)
    huggingface.ReportCallback().on_step_end(args, SimpleNamespace(global_step=1, max_steps=-1, epoch=0.5), control)
    assert control.should_save and control.should_training_stop and calls[-1] == ("checkpoint", {})
    saved: list[str] = []
    loop = SimpleNamespace(min_epochs=5, epoch_loop=SimpleNamespace(min_steps=900))
    trainer = SimpleNamespace(
        global_step=1, current_epoch=0, should_stop=False, save_checkpoint=saved.append, accumulate_grad_batches=1,
        fit_loop=loop, limit_val_batches=1.0, callback_metrics={},
    )  # fmt: skip
    callback = lightning.ReportCallback()
    callback.on_train_batch_end(trainer, None, {"loss": 0.5}, None, 0)
    assert trainer.should_stop and saved == ["/volume/job/stopped.ckpt"]
    # Fixed bug: Lightning trained on until min_epochs and min_steps, and saved a checkpoint after each step.
    assert not loop.min_epochs and not loop.epoch_loop.min_steps
    # Fixed bug: Lightning validated before it stopped, in the seconds until the ranks are killed.
    assert trainer.limit_val_batches == 0
    callback.on_train_end(trainer, None)
    assert trainer.limit_val_batches == 1.0, "for evaluations by the script"


def test_lightning_callback_is_of_the_package_that_the_script_uses(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("lightning", "lightning.pytorch", "lightning.pytorch.callbacks"):
        monkeypatch.delitem(sys.modules, name)
    stand_in("pytorch_lightning.callbacks", monkeypatch)
    monkeypatch.delitem(sys.modules, "dltrain.integrations.lightning")
    module = importlib.import_module("dltrain.integrations.lightning")
    assert module.ReportCallback.__mro__[1] is sys.modules["pytorch_lightning.callbacks"].Callback


def test_accelerate_tracker(calls: Calls) -> None:
    from dltrain.integrations.accelerate import ReportTracker

    tracker = ReportTracker(steps=20, samples=8)
    assert (tracker.name, tracker.requires_logging_directory, tracker.main_process_only) == ("dltrain", False, False)
    assert tracker.tracker is tracker
    tracker.store_init_configuration({"lr": 0.1})
    tracker.log({"train_loss": 0.5, "epoch": 1}, step=3)
    tracker.log({"eval_accuracy": 0.75})
    same = {"step": 3, "steps": 20, "samples": 8}
    assert calls == [
        ("report", {**same, "epoch": 1, "loss": 0.5}),
        ("report", {**same, "epoch": None, "accuracy": 0.75}),
    ]


def test_accelerate_values_without_a_step_are_named_once(calls: Calls) -> None:
    """Fixed bug: the job stayed at step 0, and nothing said why."""
    from dltrain.integrations.accelerate import ReportTracker

    with pytest.warns(UserWarning, match=r"accelerator\.log: found no step; expected step=N") as found:
        tracker = ReportTracker()
        tracker.log({"loss": 0.5})
        tracker.log({"loss": 0.25})
    assert len(found) == 1 and [values["step"] for _, values in calls] == [0, 0]
