"""Tests of exit codes and messages to the agent, with one rank in this process (``dltrain.builtin.rank.main``)."""

import io
import re
import signal
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dlcontract import DatasetRef, ModelRef, OptimizerRef, Plan
from dltrain.builtin import rank
from dltrain.protocol import rank_messages
from dltrain.protocol.rank_messages import EXIT_BAD_INPUT, EXIT_DIVERGED, EXIT_OK, EXIT_STOPPED, EXIT_USER_ERROR
from support.trainer.listener import Listener
from support.trainer.plans import make_plan, saving, write

_ARRAYS = {"x": np.zeros((4, 1, 8, 8), np.float32), "y": np.arange(4)}
_ARRAYS |= {"x_test": _ARRAYS["x"], "y_test": _ARRAYS["y"]}


def damaged() -> bytes:
    """Return an ``.npz`` file whose first compressed array begins with a block of a type that does not exist."""
    file = io.BytesIO()
    np.savez_compressed(file, **_ARRAYS)
    content = bytearray(file.getvalue())
    name, extra = struct.unpack_from("<HH", content, 26)
    content[30 + name + extra] = 0xFF
    return bytes(content)


@pytest.fixture
def listener(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    with Listener(tmp_path) as listener:
        monkeypatch.setenv(rank_messages.SOCKET_ENV, listener.path)
        yield listener


def run(plan: Plan, folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv(rank_messages.PLAN_ENV, write(plan, folder))
    return rank.main()


def test_successful_run_reports_its_progress(
    listener: Listener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(checkpoint=saving(tmp_path / "volume"))
    assert run(plan, tmp_path, monkeypatch) == EXIT_OK
    listener.wait_for(rank_messages.Finished, 1)
    assert [type(message).__name__ for message in listener.messages[:4]] == ["Hello", "Mark", "Mark", "Probed"]
    assert [mark.what for mark in listener.of(rank_messages.Mark)] == ["imported", "rendezvous", "first_step"]
    points = listener.of(rank_messages.Probed)[0].points
    assert points[-1].batch == 120 and all(point.compute_s > 0 for point in points)
    steps = listener.of(rank_messages.Step)
    assert (steps[0].step, steps[-1].step, steps[-1].steps) == (1, 24, 24)
    assert steps[-1].step_s > 0 and steps[-1].samples_per_s > 0 and steps[-1].measure.compute_s > 0
    (finished,) = listener.of(rank_messages.Finished)
    assert finished.outcome.steps == 24 and finished.outcome.accuracy is not None
    assert finished.outcome.checkpoint == str(tmp_path / "volume" / "digits-0001" / "step-0000000024")
    assert [mark.mark.step for mark in listener.of(rank_messages.Checkpointed)] == [24]
    assert len(listener.of(rank_messages.Evaluated)) == 2


def test_checkpoints_follow_the_interval_and_the_newest_remain(
    listener: Listener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate, volume = rank.evaluate, tmp_path / "volume"

    def evaluate_once_saved(trainer: Any, *arguments: Any) -> float:
        listener.wait_for(rank_messages.Checkpointed, trainer.epoch + 1)
        return evaluate(trainer, *arguments)

    monkeypatch.setattr(rank, "evaluate", evaluate_once_saved)
    plan = make_plan(epochs=4, checkpoint=saving(volume, interval_s=0.001, keep=2))
    assert run(plan, tmp_path, monkeypatch) == EXIT_OK
    listener.wait_for(rank_messages.Finished, 1)
    saved = [mark.mark.step for mark in listener.of(rank_messages.Checkpointed)]
    assert len(saved) > 4 and saved == sorted(set(saved)) and saved[-1] == 48
    remaining = sorted(path.name for path in (volume / "digits-0001").glob("step-*"))
    assert remaining == [f"step-{step:010d}" for step in saved[-2:]]


def test_restart_of_a_finished_run_reports_the_same_result(
    listener: Listener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(checkpoint=saving(tmp_path / "volume"))
    for _ in range(2):
        assert run(plan, tmp_path, monkeypatch) == EXIT_OK
    listener.wait_for(rank_messages.Finished, 2)
    first, second = (message.outcome for message in listener.of(rank_messages.Finished))
    assert (second.steps, second.accuracy, second.loss, second.checkpoint) == (
        first.steps, first.accuracy, first.loss, first.checkpoint,
    )  # fmt: skip
    assert len(listener.of(rank_messages.Checkpointed)) == 1, "no checkpoint is written again"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": ModelRef(name="digits-cnn")}, r"spec\.checkpoint\.volume: found .*, a checkpoint of another model"),
        ({"global_batch": 60}, r"spec\.globalBatchSize: found 60; expected 120, as in the checkpoint"),
        ({"seed": 3}, r"spec\.seed: found 3; expected 0, as in the checkpoint"),
        (
            {"optimizer": OptimizerRef(name="Adam", learning_rate=0.01)},
            r"spec\.optimizer: found Adam; expected an optimizer with the options dampening, momentum, nesterov, as in the checkpoint",
        ),
    ],
    ids=["model", "batch", "seed", "optimizer"],
)  # fmt: skip
def test_checkpoint_of_another_training_is_rejected_and_not_deleted(
    changes: dict[str, Any], message: str, listener: Listener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume = tmp_path / "volume"
    assert run(make_plan(checkpoint=saving(volume)), tmp_path, monkeypatch) == EXIT_OK
    check_rejected(make_plan(checkpoint=saving(volume), **changes), message, listener, tmp_path, monkeypatch)
    assert [path.name for path in (volume / "digits-0001").glob("step-*")] == ["step-0000000024"]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (None, r"spec\.dataset\.uri: found no file .*/data\.npz; expected an \.npz file with arrays x, y, x_test, y_test"),
        ({"x": _ARRAYS["x"], "y": _ARRAYS["y"]}, r"with arrays x, y; expected .*Add x_test, y_test"),
        (_ARRAYS | {"y": np.arange(3)}, r"4 samples in the array x and 3 samples in the array y; expected as many targets as inputs"),
        (_ARRAYS | {"y": np.arange(4.0)}, r"y of float64; expected class numbers"),
        (b"not a zip file", r"data\.npz: .*Save it with numpy\.savez"),
        (b"", r"data\.npz: .*Save it with numpy\.savez"),
        (_ARRAYS | {"y": np.int64(3)}, r"4 samples in the array x and a single number in the array y; expected as many targets"),
        (_ARRAYS | {"y": np.zeros((4, 3), int)}, r"y of shape \(4, 3\); expected a class number per sample: shape \(4,\)"),
        (_ARRAYS | {"y": np.full(4, 10**9)}, r"class 1000000000 in y; expected class numbers below 1048576"),
        (_ARRAYS | {"x": np.array(["a"] * 4)}, r"x of <U1; expected numbers"),
        (_ARRAYS | {"x": np.full((4, 1, 8, 8), np.nan)}, r"values in x that are not finite"),
        (_ARRAYS | {"x": np.full((4, 1, 8, 8), 1e39)}, r"values from 1e\+39 to 1e\+39 in x; expected values up to 3\.40282e\+38"),
        (_ARRAYS | {"x": np.zeros((4, 1, 8, 8), np.uint8), "x_test": np.zeros((4, 1, 8, 8), np.float32)}, r"x of uint8 and x_test of float32; expected uint8 in both or in none"),
        (_ARRAYS | {"x": np.zeros((4, 0)), "x_test": np.zeros((4, 0))}, r"samples of shape \(0,\) in x; expected at least one value"),
        (_ARRAYS | {"labels": np.array("cat")}, r"labels of <U3 with shape \(\); expected a list of names"),
        (_ARRAYS | {"scale": np.array(["x"])}, r"scale of <U1 with shape \(1,\); expected a single finite number"),
        (damaged(), r"data\.npz: .*Save it with numpy\.savez"),
        (_ARRAYS | {"x_test": np.zeros((4, 1, 9, 9))}, r"shape \(1, 8, 8\) in x and \(1, 9, 9\) in x_test"),
    ],
    ids=[
        "missing", "keys", "lengths", "dtype", "format", "empty", "scalar", "shape", "class", "words", "nan", "float64", "scales",
        "no values", "labels", "scale", "damaged", "held out",
    ],
)  # fmt: skip
def test_invalid_dataset_is_reported(
    arrays: Any, message: str, listener: Listener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "data.npz"
    if isinstance(arrays, bytes):
        path.write_bytes(arrays)
    elif arrays is not None:
        np.savez(path, **arrays)
    check_rejected(make_plan(dataset=DatasetRef(path=str(path))), message, listener, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": ModelRef(name="vgg")}, r"spec\.model\.name: found 'vgg'; expected one of mlp, digits-cnn"),
        ({"model": ModelRef(name="lenet")}, r"shape \(1, 8, 8\); expected images .* with 32 x 32 or 28 x 28"),
        ({"model": ModelRef(name="gpt-mini")}, r"found images or tables of shape .*; expected tokens for model gpt-mini"),
        ({"dataset": DatasetRef(name="mnist")}, r"spec\.dataset\.name: found 'mnist'; expected one of digits"),
        ({"ranks": 2}, r"a process group of 1 ranks \(mpirun did not start this process\); expected 2 ranks. Start the program with mpirun -n 2"),
        ({"checkpoint": saving(Path("/proc/nowhere"))}, r"spec\.checkpoint\.volume: found /proc/nowhere/digits-0001"),
    ],
    ids=["model", "images", "tokens", "dataset", "world", "volume"],
)  # fmt: skip
def test_invalid_plan_is_reported(
    changes: dict[str, Any], message: str, listener: Listener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_rejected(make_plan(**changes), message, listener, tmp_path, monkeypatch)


def check_rejected(plan: Plan, message: str, listener: Listener, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(plan, folder, monkeypatch) == EXIT_BAD_INPUT
    listener.wait_for(rank_messages.Failed, 1)
    (failed,) = listener.of(rank_messages.Failed)
    assert (failed.failure.reason, failed.failure.retry, failed.failure.exit_code) == (
        "BadInput",
        False,
        EXIT_BAD_INPUT,
    )
    assert re.search(message, failed.failure.message), failed.failure.message


def test_missing_plan_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv(rank_messages.PLAN_ENV, raising=False)
    assert rank.main() == EXIT_BAD_INPUT
    assert "$DLTRAIN_PLAN: found nothing; expected the path of a plan" in capsys.readouterr().err


def test_unreadable_plan_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.json").write_text('{"schema": 2}')
    monkeypatch.setenv(rank_messages.PLAN_ENV, str(tmp_path / "plan.json"))
    assert rank.main() == EXIT_BAD_INPUT
    assert "expected a plan of schema 1" in capsys.readouterr().err


def test_non_finite_loss_ends_the_run(listener: Listener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(optimizer=OptimizerRef(learning_rate=1e30), checkpoint=saving(tmp_path / "volume"))
    assert run(plan, tmp_path, monkeypatch) == EXIT_DIVERGED
    listener.wait_for(rank_messages.Failed, 1)
    failure = listener.of(rank_messages.Failed)[0].failure
    assert failure.reason == "Diverged" and "lower the learning rate" in failure.message and failure.retry
    assert not list((tmp_path / "volume" / "digits-0001").glob("step-*")), "a diverged state is never saved"


def test_exception_is_reported_with_its_traceback(
    listener: Listener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> None:
        raise KeyError("weights")

    monkeypatch.setattr(rank, "evaluate", failing)
    assert run(make_plan(), tmp_path, monkeypatch) == EXIT_USER_ERROR
    listener.wait_for(rank_messages.Failed, 1)
    failure = listener.of(rank_messages.Failed)[0].failure
    assert (failure.reason, failure.message) == ("TrainingError", "KeyError: 'weights'")
    assert "in failing" in failure.log_tail and failure.retry and failure.counts


@pytest.mark.parametrize("how", ["message", "signal"])
def test_stop_request_saves_a_checkpoint_and_is_reported(
    how: str, listener: Listener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate = rank.evaluate

    def stop_then_evaluate(*arguments: Any) -> float:
        if how == "signal":
            signal.raise_signal(signal.SIGTERM)
        else:
            listener.wait_for(rank_messages.Step, 1)
            listener.stop()
            assert arguments[0].reporter.stop.wait(10)
        return evaluate(*arguments)

    monkeypatch.setattr(rank, "evaluate", stop_then_evaluate)
    plan = make_plan(checkpoint=saving(tmp_path / "volume"), epochs=100)
    assert run(plan, tmp_path, monkeypatch) == EXIT_STOPPED
    listener.wait_for(rank_messages.Checkpointed, 1)
    assert [mark.mark.step for mark in listener.of(rank_messages.Checkpointed)] == [13], "one step after the request"
    assert not listener.of(rank_messages.Finished) and not listener.of(rank_messages.Failed)


@pytest.mark.parametrize(("grace_s", "fits"), [(30, False), (600, True)])
def test_checkpoint_that_the_grace_period_would_cut_off_is_not_written(
    grace_s: float, fits: bool, listener: Listener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """The copy in memory is written, because other pods of the job may stay."""
    evaluate = rank.evaluate

    def stop_then_evaluate(trainer: Any, *arguments: Any) -> float:
        trainer.checkpoint_manager._writer._durations_s.append(60.0)
        listener.stop(grace_s)
        assert trainer.reporter.stop.wait(10)
        return evaluate(trainer, *arguments)

    monkeypatch.setattr(rank, "evaluate", stop_then_evaluate)
    monkeypatch.setenv(rank_messages.MEMORY_ENV, str(tmp_path / "memory"))
    plan = make_plan(checkpoint=saving(tmp_path / "volume"), epochs=100)
    assert run(plan, tmp_path, monkeypatch) == EXIT_STOPPED
    listener.wait_for(rank_messages.Checkpointed if fits else rank_messages.CheckpointSkipped, 1)
    assert [mark.mark.step for mark in listener.of(rank_messages.Checkpointed)] == ([13] if fits else [])
    skipped = [(each.step, each.needed_s) for each in listener.of(rank_messages.CheckpointSkipped)]
    assert skipped == ([] if fits else [(13, 60.0)])
    assert ("stopping after step 13 without a checkpoint" in capfd.readouterr().err) is not fits
    assert [path.name for path in (tmp_path / "memory").glob("step-*")] == ["step-0000000013"]


def test_missing_gpu_is_reported(listener: Listener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    plan = make_plan(device="NVIDIA-A100-SXM4-40GB", gpu=True)
    assert run(plan, tmp_path, monkeypatch) == EXIT_OK
    listener.wait_for(rank_messages.Finished, 1)
    assert listener.of(rank_messages.Hello)[0].device == "cpu"
    assert listener.of(rank_messages.Step)[0].measure.device == "cpu"
    assert not listener.of(rank_messages.Probed)[0].points, "probes on the wrong device are not reported"
