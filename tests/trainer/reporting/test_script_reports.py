"""Tests of ``dltrain.report``: what arrives at the agent, what a run without an agent prints, and what it needs."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dlcontract
from dltrain.integrations.logged_values import report_arguments
from dltrain.protocol import metric_values
from dltrain.protocol.errors import MisuseError
from dltrain.protocol.rank_messages import SOCKET_ENV, Busy, Evaluated, Logged, RankMessage, Step, rank_message_adapter
from dltrain.reporting import script_reports
from dltrain.reporting.reported_progress import ReportedProgress, line
from support.trainer.listener import Listener

TRAINER = Path(__file__).resolve().parents[3] / "trainer-image"
WITHIN_S = 240


def bare(script: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a script in an interpreter without any installed package: it finds the standard library and dltrain."""
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(TRAINER)!r})\n{script}"]
    variables = {
        k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "DLTRAIN_", "RANK", "WORLD"))
    }
    return subprocess.run(
        command, env=variables | environ, capture_output=True, text=True, timeout=WITHIN_S, check=False
    )


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


def test_reports_need_the_standard_library_only() -> None:
    ended = bare("import dltrain\nfor n in range(3): dltrain.report(step=n + 1, steps=3, loss=0.5, perplexity=2)")
    assert ended.returncode == 0, ended.stderr
    lines = ended.stderr.splitlines()
    assert lines[0] == "dltrain: step 1/3 loss 0.5000, perplexity 2"
    assert lines[-1].startswith("dltrain: step 3/3 loss 0.5000, "), "the last report is printed at the end"
    for name in ("torch", "pydantic", "numpy", "dlcontract"):
        assert bare(f"import dltrain; dltrain.report(step=1); assert {name!r} not in sys.modules").returncode == 0


def test_other_ranks_print_nothing() -> None:
    ended = bare("import dltrain; dltrain.report(step=1, loss=1)", RANK="1", WORLD_SIZE="2")
    assert (ended.returncode, ended.stderr) == (0, "")


def test_updates_arrive_at_the_agent_as_messages(tmp_path: Path) -> None:
    script = """import dltrain
for step in range(1, 5001):
    dltrain.report(step=step, steps=5000, loss=1 / step, epoch=step // 1000, samples=8)
dltrain.report(step=5000, accuracy=0.75, bleu=30)
dltrain.busy("upload", 600)
"""
    with Listener(tmp_path) as agent:
        ended = bare(script, **{SOCKET_ENV: agent.path, "RANK": "1", "WORLD_SIZE": "4"})
        assert (ended.returncode, ended.stderr) == (0, "")
        agent.wait_for(Busy, 1)
        agent.wait_for(Logged, 1)
        first, *_, last = agent.of(Step)
    assert (first.step, first.step_s, first.typical_s, first.interval_s) == (1, 0.0, None, None)
    assert (last.rank, last.step, last.steps, last.epoch, last.world_size) == (1, 5000, 5000, 5, 4)
    assert last.reported and last.measure is None and last.loss == 1 / 5000
    assert last.step_s > 0 and last.samples_per_s == pytest.approx(8 / last.step_s)
    assert len(agent.of(Step)) < 1000, "a report in every step is not a message in every step"
    assert agent.of(Evaluated) == [Evaluated(rank=1, step=5000, accuracy=0.75, loss=1 / 5000)]
    assert agent.of(Logged) == [Logged(rank=1, step=5000, values={"bleu": 30.0})]
    assert agent.of(Busy) == [Busy(rank=1, what="upload", limit_s=600)]


def test_a_lost_agent_does_not_end_the_script(tmp_path: Path) -> None:
    script = "import dltrain, time\nfor n in range(8): dltrain.report(step=n, loss=n); time.sleep(0.1)\nprint('done')"
    nowhere = bare(script, **{SOCKET_ENV: str(tmp_path / "nowhere")})
    assert (nowhere.returncode, nowhere.stdout) == (0, "done\n"), nowhere.stderr
    with Listener(tmp_path) as agent:
        path = agent.path
        arguments = [sys.executable, "-c", script.replace("range(8)", "range(20)")]
        process = subprocess.Popen(
            arguments,
            env=os.environ | {SOCKET_ENV: path, "PYTHONPATH": str(TRAINER)},
            stdout=subprocess.PIPE,
            text=True,
        )
        agent.wait_for(Step, 1)
    assert process.communicate(timeout=WITHIN_S)[0] == "done\n" and process.returncode == 0


def test_a_fork_is_not_the_rank(tmp_path: Path) -> None:
    script = """import dltrain, os
dltrain.report(step=1)
if os.fork() == 0:
    dltrain.report(step=2); dltrain.busy("x", 1)
    sys.exit()
os.wait()
dltrain.report(step=3)
"""
    with Listener(tmp_path) as agent:
        assert bare(script, **{SOCKET_ENV: agent.path}).returncode == 0
        agent.wait_for(Step, 2)
    assert [message.step for message in agent.of(Step)] == [1, 3] and not agent.of(Busy)


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


def test_report_of_a_signal_handler_may_interrupt_another_one(tmp_path: Path) -> None:
    """Fixed bug: the script waited without end for its own lock if the signal came while a tensor was read."""
    script = """import dltrain, signal
signal.alarm(60)
signal.signal(signal.SIGUSR1, lambda *_: dltrain.report(step=2, loss=0.25, note=7))
class Loss:
    def __float__(self):
        signal.raise_signal(signal.SIGUSR1)
        return 0.5
dltrain.report(step=1, loss=Loss(), other=1)
"""
    with Listener(tmp_path) as agent:
        ended = bare(script, **{SOCKET_ENV: agent.path})
        assert ended.returncode == 0, ended
        agent.wait_for_ends()
    assert (agent.of(Step)[-1].step, agent.of(Step)[-1].loss) == (2, 0.25)
    assert {name: value for logged in agent.of(Logged) for name, value in logged.values.items()} == {
        "other": 1,
        "note": 7,
    }


def test_first_reports_of_several_threads_are_those_of_one_rank(tmp_path: Path) -> None:
    """Fixed bug: each of the threads made a connection to the agent, whose request to stop came to one of them."""
    script = """import dltrain, sys, threading
sys.setswitchinterval(1e-6)
barrier = threading.Barrier(8)
def first(step):
    barrier.wait()
    dltrain.report(step=step)
threads = [threading.Thread(target=first, args=(step,)) for step in range(1, 9)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
    with Listener(tmp_path) as agent:
        assert bare(script, **{SOCKET_ENV: agent.path}).returncode == 0
        agent.wait_for_ends()
        assert agent.connections == 1 and agent.of(Step)


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


def test_invalid_values_end_no_script(tmp_path: Path) -> None:
    script = """import dltrain
for _ in range(2):
    dltrain.report(step=1, steps=float("inf"), epoch="first", samples=float("nan"))
    dltrain.busy("upload", "long")
dltrain.report(step=None)
dltrain.busy(3, 600)
"""
    with Listener(tmp_path) as agent:
        ended = bare(script, **{SOCKET_ENV: agent.path})
        assert ended.returncode == 0, ended.stderr
        agent.wait_for(Busy, 1)
        assert agent.of(Busy) == [Busy(rank=0, what="3", limit_s=600)]
    fields = [line.split(":")[1].strip() for line in ended.stderr.splitlines()]
    assert fields == ["steps", "epoch", "samples", "busy", "step"]


def test_a_script_that_asks_whether_to_stop_stops_at_the_step_of_the_request(tmp_path: Path) -> None:
    script = """import dltrain, sys, time
for step in range(1, 10**6):
    dltrain.report(step=step)
    if dltrain.stop_requested():
        print("stopped at", step)
        break
    time.sleep(0.01)
"""
    with Listener(tmp_path) as agent:
        command = [sys.executable, "-c", script]
        variables = os.environ | {SOCKET_ENV: agent.path, "PYTHONPATH": str(TRAINER)}
        process = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True)
        agent.wait_for(Step, 2)
        assert agent.of(Step)[1].heeds_stop
        ahead = agent.of(Step)[-1].step + 500
        agent.stop(at_step=ahead)
        assert process.communicate(timeout=WITHIN_S)[0] == f"stopped at {ahead}\n"
    assert bare("import dltrain; dltrain.report(step=1); assert not dltrain.stop_requested()").returncode == 0


@pytest.mark.parametrize(("agent", "reports", "lines"), [(True, False, 1), (True, True, 0), (False, False, 0)])
def test_a_rank_that_asks_whether_to_stop_but_never_reports_is_named(
    tmp_path: Path, agent: bool, reports: bool, lines: int
) -> None:
    """Fixed bug: it could not stop after the same step as ranks that report, and nothing said so."""
    script = f"""import dltrain
for step in range(1, 5):
    assert not dltrain.stop_requested()
    if {reports}:
        dltrain.report(step=step)
"""
    with Listener(tmp_path) as listener:
        ended = bare(script, RANK="1", WORLD_SIZE="2", **({SOCKET_ENV: listener.path} if agent else {}))
    assert ended.returncode == 0 and len(ended.stderr.splitlines()) == lines
    assert not lines or "found no dltrain.report on rank 1; expected one" in ended.stderr


def test_line_of_a_report() -> None:
    training, _ = progress(samples=64)
    add(training, 0.0, 1)
    add(training, 0.5, 11, steps=100, epoch=2.7, loss=0.25, accuracy=0.5, metrics={"bleu": 30})
    shown = "dltrain: step 11/100 epoch 2 loss 0.2500, 50.0 ms/step, 1280 samples/s, accuracy 0.5000, bleu 30"
    assert line(training.updates(tensors=True)) == shown
    add(training, 0.6, 12, accuracy=0.5, metrics={"bleu": 30})
    add(training, 0.7, 13, metrics={"rate": 1})
    assert line(training.updates(tensors=True)).endswith(", accuracy 0.5000 at step 12, bleu 30 at step 12, rate 1")


def test_a_script_with_the_dltrain_api_logs_through_its_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[Any] = []

    class Trainer:
        def log(self, **values: Any) -> None:
            logged.append(values)

        def busy(self, what: str, limit_s: float) -> None:
            logged.append((what, limit_s))

    monkeypatch.setattr(script_reports, "_trainer", None)
    script_reports.set_trainer(Trainer())
    script_reports.report(step=1, steps=9, loss=0.5, bleu=3)
    script_reports.busy("upload", 60)
    assert logged == [{"loss": 0.5, "accuracy": None, "bleu": 3}, ("upload", 60)]


def test_an_invalid_loss_ends_no_script_with_the_dltrain_api(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed bug: the trainer's exception for ``t.log`` ended the script."""
    logged: list[Any] = []

    class Trainer:
        def log(self, *, loss: Any = None, **values: Any) -> None:
            if isinstance(loss, str):
                raise MisuseError("t.log: loss: found str; expected a number")
            logged.append(values)

    monkeypatch.setattr(script_reports, "_trainer", Trainer())
    with pytest.warns(UserWarning, match="t.log: loss: found str"):
        script_reports.report(step=1, loss="high", bleu=3)
    assert logged == [{"accuracy": None, "bleu": 3}]


def test_bounds_are_those_of_the_contract() -> None:
    found = (metric_values.MAX_METRICS, metric_values.MAX_METRIC_NAME)
    assert found == (dlcontract.MAX_METRICS, dlcontract.MAX_METRIC_NAME)
