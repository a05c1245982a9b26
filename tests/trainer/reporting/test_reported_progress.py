"""Tests of the progress updates that the reports of a script become (``ReportedProgress``)."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from dltrain.integrations.logged_values import report_arguments
from dltrain.protocol.rank_messages import Busy, Evaluated, Logged, RankMessage, Step, rank_message_adapter
from dltrain.reporting.reported_progress import ReportedProgress, line


def progress(**fields: Any) -> tuple[ReportedProgress, list[str]]:
    warnings: list[str] = []
    arguments: dict[str, Any] = {"rank": 0, "world_size": 2, "samples": None, "warn": warnings.append}
    return ReportedProgress(**arguments | fields), warnings


def add(to: ReportedProgress, now_s: float, step: int, **fields: Any) -> None:
    given = {"steps": None, "loss": None, "epoch": None, "accuracy": None, "samples": None, "metrics": {}} | fields
    to.add(now_s, step, **given)


def messages(of: ReportedProgress, *, tensors: bool = True) -> list[RankMessage]:
    """Return the updates as the agent parses them."""
    return [rank_message_adapter.validate_python(update) for update in of.updates(tensors=tensors)]


class Tensor:
    """A tensor on a GPU, which counts how often its value is read."""

    def __init__(self, value: float, read: Callable[[], None]) -> None:
        self.value, self.read = value, read

    def detach(self) -> "Tensor":
        return self

    def clone(self) -> "Tensor":
        return self

    def __float__(self) -> float:
        self.read()
        return self.value


def test_tensors_are_read_for_an_update_only_and_not_by_the_thread() -> None:
    reads: list[int] = []
    training, _ = progress()
    for number in range(100):
        add(training, 0.1 * number, number, loss=Tensor(float(number), lambda: reads.append(1)), metrics={"a": 1.0})
    [step, logged] = messages(training, tensors=False)
    assert isinstance(step, Step) and (step.step, step.loss) == (99, None) and reads == []
    assert logged == Logged(rank=0, step=99, values={"a": 1.0})
    add(training, 20.0, 100)
    [step] = messages(training)
    assert isinstance(step, Step) and step.loss == 99.0 and reads == [1]


def test_metrics_have_the_steps_at_which_they_were_reported() -> None:
    """Fixed bug: all metrics within 0.25 s had the newest step, such as a loss on held-out data of step 1000."""
    training, _ = progress()
    add(training, 0.0, 1000, metrics={"val_loss": 0.5, "rate": 0.1, "bleu": Tensor(30.0, list)}, accuracy=50)
    for step in (1001, 1002):
        add(training, 0.1, step, metrics={"rate": 0.1 * step})
    [newest, *logged] = messages(training, tensors=False)
    assert isinstance(newest, Step) and newest.step == 1002
    assert logged == [
        Logged(rank=0, step=1000, values={"val_loss": 0.5, "accuracy": 50.0}),
        Logged(rank=0, step=1002, values={"rate": 0.1 * 1002}),
    ]
    add(training, 0.2, 1003, metrics={"rate": 1.0})
    [_, *logged] = messages(training)
    assert logged == [Logged(rank=0, step=1000, values={"bleu": 30.0}), Logged(rank=0, step=1003, values={"rate": 1.0})]


class Array:
    """An array like those of NumPy: several elements are no number, and one element is one only by ``item``."""

    def __init__(self, *values: float) -> None:
        self.values, self.size = list(values), len(values)

    def item(self) -> float:
        [value] = self.values
        return value

    def copy(self) -> "Array":
        return Array(*self.values)

    def __float__(self) -> float:
        raise TypeError("only 0-dimensional arrays can be converted to Python scalars")

    __int__ = __float__


def test_arrays_and_tensors_with_one_element_are_numbers() -> None:
    """Fixed bug: numpy.array([0.5]) was no number. An array that the script changed later was reported as it became."""
    torch, numpy = pytest.importorskip("torch"), pytest.importorskip("numpy")
    ones = [Array(0.5), numpy.array([0.5]), numpy.array(0.5), numpy.float32(0.5), torch.tensor([[0.5]]),
            torch.tensor(0.5, requires_grad=True), torch.tensor([0.5], dtype=torch.bfloat16)]  # fmt: skip
    for value in ones:
        training, warnings = progress(samples=1)
        add(training, 0.0, Array(7), loss=value, accuracy=value, metrics={"mine": value}, steps=numpy.array([9]))
        if isinstance(value, Array):
            value.values[0] = 7.0
        [step, evaluated, logged] = messages(training)
        assert isinstance(step, Step) and (step.step, step.steps, step.loss, warnings) == (7, 9, 0.5, [])
        assert isinstance(evaluated, Evaluated) and evaluated.accuracy == 0.5
        assert logged == Logged(rank=0, step=7, values={"mine": 0.5})
        assert report_arguments({"mine": value}) == {"mine": value}


def test_arrays_and_tensors_with_several_elements_are_named_once() -> None:
    torch, numpy = pytest.importorskip("torch"), pytest.importorskip("numpy")
    several = [(2, Array(1, 2)), (2, numpy.zeros(2)), (2, torch.zeros(2)), (0, Array()), (0, torch.zeros(2, 0))]
    for count, value in several:
        training, warnings = progress()
        for number in (1, 2):
            add(training, number, number, loss=value, metrics={"mine": value})
            assert [message.type for message in messages(training)] == ["step"]
        found = f"found a {type(value).__name__} with {count} elements"
        assert [text.partition(";")[0] for text in warnings] == [f"loss: {found}", f"mine: {found}"]


def test_last_tensors_arrive_although_the_thread_has_sent_their_step() -> None:
    """Fixed bug: a last accuracy on a GPU was lost if the script did other work before its end."""
    training, _ = progress()
    add(training, 0.0, 1, loss=Tensor(0.5, list), accuracy=Tensor(0.75, list), metrics={"bleu": Tensor(30.0, list)})
    assert [message.type for message in messages(training, tensors=False)] == ["step"]
    assert messages(training, tensors=False) == []
    found = {message.type: message.model_dump() for message in messages(training)}
    assert (found["step"]["loss"], found["evaluated"]["accuracy"]) == (0.5, 0.75)
    assert found["logged"]["values"] == {"bleu": 30.0}
    assert messages(training) == []


def test_tensor_that_the_script_changes_after_a_report_is_reported_as_it_was() -> None:
    """Fixed bug: a running sum on the device that the script reported and then set to zero was reported as 0."""
    torch = pytest.importorskip("torch")
    training, _ = progress()
    total = torch.tensor(3.0)
    add(training, 0.0, 1, loss=total, accuracy=total / 6, metrics={"total": total})
    total.zero_()
    found = {message.type: message.model_dump() for message in messages(training)}
    assert (found["step"]["loss"], found["evaluated"]["accuracy"]) == (3.0, 0.5)
    assert found["logged"]["values"] == {"total": 3.0}


def test_step_times_leave_out_pauses_and_the_interval_is_that_of_the_reports() -> None:
    training, _ = progress(samples=64)
    now_s = 0.0
    for number in range(1, 40):
        now_s += 300.0 if number == 20 else 0.5  # an evaluation
        add(training, now_s, 10 * number)
    [step] = messages(training)
    assert isinstance(step, Step)
    assert step.step_s == pytest.approx(0.05) and step.typical_s == pytest.approx(0.05)
    assert step.interval_s == pytest.approx(0.5) and step.samples_per_s == pytest.approx(64 / 0.05)


def test_invalid_values_are_named_once_and_end_nothing() -> None:
    training, warnings = progress()
    for number in (5, 6):
        add(training, number, number, loss=float("nan"), accuracy=97.5, metrics={"bad name": 1, "text": "high"})
    found = messages(training)
    assert [message.type for message in found] == ["step", "logged"]
    assert found[1] == Logged(rank=0, step=6, values={"accuracy": 97.5})
    assert [re.split(r"[:;]", text)[0] for text in warnings] == [
        "loss", "accuracy", "found the name 'bad name'", "text",
    ]  # fmt: skip
    add(training, 7.0, 2, steps=-3, epoch=-1, samples=10**30)
    add(training, 8.0, 3)
    [step] = messages(training)
    assert isinstance(step, Step) and (step.step, step.steps, step.epoch) == (3, 0, 0)
    assert step.samples_per_s <= 1e15 and warnings[-1].startswith("step: found 2 after 6")


@pytest.mark.parametrize("value", [float("inf"), float("nan"), "many", [1, 2], object()])
def test_invalid_counts_are_named_once_and_end_nothing(value: Any) -> None:
    """Fixed bug: ``steps=inf`` ended the script with an OverflowError."""
    training, warnings = progress(samples=8)
    add(training, 0.0, value, steps=10)
    training.heed_stop()
    assert not messages(training), "there is no step to report"
    add(training, 1.0, 1, steps=10, epoch=3)
    for number in (2, 3):
        add(training, number, number, steps=value, epoch=value, samples=value)
    [step] = messages(training)
    assert isinstance(step, Step)
    assert (step.step, step.steps, step.epoch, step.samples_per_s) == (3, 10, 3, 8.0)
    assert [text.partition(": found ")[0] for text in warnings] == ["step", "steps", "epoch", "samples"]


def test_object_that_fails_as_a_number_ends_nothing() -> None:
    """Fixed bug: its exception ended the script, or the thread that sends reports, so that the rank counted as hung."""

    class Metric:
        def __float__(self) -> float:
            raise KeyError("not computed yet")

        def __int__(self) -> int:
            raise KeyError("not computed yet")

        def detach(self) -> None:
            raise KeyError("not computed yet")

    training, warnings = progress()
    add(training, 0.0, 1, steps=Metric(), loss=Metric(), accuracy=Metric(), metrics={"f1": Metric(), "bleu": 3})
    found = messages(training)
    assert [message.type for message in found] == ["step", "logged"] and len(warnings) == 4
    assert found[1] == Logged(rank=0, step=1, values={"bleu": 3.0})


@pytest.mark.parametrize("seconds", [float("nan"), "long", None, [1, 2]])
def test_invalid_silence_is_named_once_and_ends_nothing(seconds: Any) -> None:
    training, warnings = progress()
    assert [training.silence_s(seconds) for _ in range(2)] == [None, None]
    assert len(warnings) == 1 and warnings[0].startswith("busy: found ")


def test_silences_have_bounds() -> None:
    training, warnings = progress()
    for given, announced in ((-5, 0.001), (60, 60), ("7", 7), (float("inf"), 86_400)):
        assert Busy(rank=0, what="x", limit_s=training.silence_s(given) or 0).limit_s == announced
    assert not warnings


def test_line_of_a_report() -> None:
    training, _ = progress(samples=64)
    add(training, 0.0, 1)
    add(training, 0.5, 11, steps=100, epoch=2.7, loss=0.25, accuracy=0.5, metrics={"bleu": 30})
    shown = "dltrain: step 11/100 epoch 2 loss 0.2500, 50.0 ms/step, 1280 samples/s, accuracy 0.5000, bleu 30"
    assert line(training.updates(tensors=True)) == shown
    add(training, 0.6, 12, accuracy=0.5, metrics={"bleu": 30})
    add(training, 0.7, 13, metrics={"rate": 1})
    assert line(training.updates(tensors=True)).endswith(", accuracy 0.5000 at step 12, bleu 30 at step 12, rate 1")
