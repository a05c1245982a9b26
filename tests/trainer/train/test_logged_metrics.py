"""A script may log any metrics; none of them ends the job, and all are bounded."""

from itertools import pairwise
from typing import Any, cast

import numpy
import pytest
from torch.distributed.tensor import Partial, Replicate, Shard

from dlcontract import MAX_METRICS, DatasetRef, ModelRef, Plan, Rank, Report, RunPhase
from dltrain.agent.member.running_rank import Running
from dltrain.host.output import Output
from dltrain.host.processes import Process
from dltrain.optim.grad_scaler import LossScale
from dltrain.optim.noise_scale import NoiseScale
from dltrain.protocol import logged_metrics
from dltrain.protocol.logged_metrics import LoggedMetrics
from dltrain.protocol.metric_values import is_divided
from dltrain.protocol.rank_messages import Busy, Evaluated, Logged, RankMessage
from dltrain.protocol.reporter import RankReporter
from dltrain.record.ledger import Ledger
from dltrain.record.run_report.document import CAPACITY, LoggedValues
from dltrain.record.run_report.history import History
from dltrain.record.run_report.logged_series import with_logged
from dltrain.record.run_report.page import page
from dltrain.reporting.reported_progress import detached
from dltrain.train.progress import Progress


class Recorder:
    rank = 0

    def __init__(self) -> None:
        self.messages: list[RankMessage] = []

    def send(self, message: RankMessage) -> None:
        self.messages.append(message)


def progress() -> tuple[Progress, list[RankMessage]]:
    recorder = Recorder()
    return Progress(cast(RankReporter, recorder), 0, "cpu", NoiseScale(8), LossScale()), recorder.messages


def test_an_accuracy_in_percent_is_a_metric_and_named_in_a_warning() -> None:
    training, sent = progress()
    with pytest.warns(UserWarning, match="accuracy: found 97.5; expected 0 to 1"):
        training.log(3, 97.5, {})
    assert sent == [Logged(rank=0, step=3, values={"accuracy": 97.5})]
    training.log(4, 0.5, {"bleu": 30})
    training.outcome(4, 1.0, None)
    assert sent[1:] == [Evaluated(rank=0, step=4, accuracy=0.5), Logged(rank=0, step=4, values={"bleu": 30.0})]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e301, "high", None, [1, 2]])
def test_what_is_no_finite_number_is_named_in_one_warning(value: Any) -> None:
    training, sent = progress()
    with pytest.warns(UserWarning, match="perplexity: found") as warned:
        training.log(1, None, {"perplexity": value})
        training.log(2, None, {"perplexity": value, "fine": 1.0})
    assert len(warned) == 1 and sent == [Logged(rank=0, step=2, values={"fine": 1.0})]


@pytest.mark.parametrize("placement", [Partial(), Shard(0)])
def test_a_part_of_a_sharded_tensor_is_no_metric(placement: Any) -> None:
    """Fixed bug: the job showed rank 0's part of the norm of a sharded parameter."""

    class Divided:
        placements = (Replicate(), placement)

        def __float__(self) -> float:
            return 1.0

        def detach(self) -> None:
            raise AssertionError("a collective, which other ranks may not call")

    training, sent = progress()
    with pytest.warns(UserWarning, match=r"norm: found a Divided that is divided among ranks; .*full_tensor\(\)"):
        training.log(1, None, {"norm": Divided(), "fine": 1.0})
    assert sent == [Logged(rank=0, step=1, values={"fine": 1.0})]
    assert isinstance(detached(Divided()), Divided)
    Divided.placements = (Replicate(), Replicate())
    assert not is_divided(Divided()) and not is_divided(1.0)


def test_an_accuracy_that_is_no_number_does_not_end_the_job() -> None:
    training, sent = progress()
    with pytest.warns(UserWarning, match="accuracy: found nan"):
        training.log(1, float("nan"), {})
    assert sent == []


def test_a_silence_that_is_no_number_is_not_announced_and_ends_nothing() -> None:
    training, sent = progress()
    with pytest.warns(UserWarning, match="t.busy: found 'long' seconds; expected a number"):
        training.busy("upload", cast(float, "long"))
    training.busy("upload", -1)
    training.busy(cast(str, 7), float("inf"))
    assert sent == [Busy(rank=0, what="upload", limit_s=1e-3), Busy(rank=0, what="7", limit_s=86_400)]


def test_names_are_bounded() -> None:
    recorder = Recorder()
    metrics = LoggedMetrics(cast(RankReporter, recorder))
    with pytest.warns(UserWarning, match=f"at most {MAX_METRICS}"):
        metrics.add(1, {f"m{n}": n for n in range(MAX_METRICS + 5)})
    with pytest.warns(UserWarning, match="found the name"):
        metrics.add(1, {"x" * 49: 1.0, "a b": 2.0})
    (message,) = recorder.messages
    assert isinstance(message, Logged) and len(message.values) == MAX_METRICS


def test_metrics_have_the_steps_at_which_they_were_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed bug: all metrics within 0.25 s had the newest step."""
    now_s = 100.0
    monkeypatch.setattr(logged_metrics.time, "monotonic", lambda: now_s)
    recorder = Recorder()
    metrics = LoggedMetrics(cast(RankReporter, recorder))
    metrics.add(10, {"rate": 0.1})
    metrics.add(11, {"val_loss": 0.5, "rate": 0.2})
    metrics.add(12, {"rate": 0.3})
    assert recorder.messages == [Logged(rank=0, step=10, values={"rate": 0.1})], "at most one message in 0.25 s"
    now_s += 1.0
    metrics.send()
    assert recorder.messages[1:] == [
        Logged(rank=0, step=11, values={"val_loss": 0.5}),
        Logged(rank=0, step=12, values={"rate": 0.3}),
    ]


def test_metrics_and_accuracies_may_be_arrays_with_one_element() -> None:
    training, sent = progress()
    training.log(1, numpy.array([0.5]), {"bleu": numpy.array([[30.0]])})
    assert sent == [Evaluated(rank=0, step=1, accuracy=0.5), Logged(rank=0, step=1, values={"bleu": 30.0})]
    with pytest.warns(UserWarning, match="accuracy: found a ndarray with 2 elements; expected one number"):
        training.log(2, numpy.zeros(2), {})


def test_last_value_of_each_metric_stays_in_the_metrics_of_the_pod() -> None:
    """Fixed bug: Prometheus lost a metric as soon as the script logged others only."""
    rank = Running(plan().ranks[0], cast(Process, None), cast(Output, None))
    rank.add(Logged(rank=0, step=1, values={"bleu": 30.0, "rate": 0.1}), 1.0)
    rank.add(Logged(rank=0, step=2, values={"rate": 0.2}), 2.0)
    assert rank.latest[Logged] == Logged(rank=0, step=2, values={"bleu": 30.0, "rate": 0.2})
    rank.add(Logged(rank=0, step=3, values={f"m{n}": 1.0 for n in range(MAX_METRICS)}), 3.0)
    assert len(cast(Logged, rank.latest[Logged]).values) == MAX_METRICS and rank.last_message_unix_s == 3.0


def plan() -> Plan:
    rank = Rank(rank=0, pod="p-0", host="h", group="g", device="cpu", local_rank=0, share=4)
    model, dataset = ModelRef(name="mlp"), DatasetRef(name="digits")
    return Plan(
        job="j", namespace="n", uid="u", number=1, ranks=(rank,), global_batch=4, model=model, dataset=dataset, epochs=1
    )


def test_metrics_are_in_the_report_and_survive_the_coordinator() -> None:
    ledger = Ledger(plan(), None)
    ledger.record(Logged(rank=0, step=1, values={"bleu": 30.0, "val/loss": 2.0}), 1.0)
    ledger.record(Logged(rank=0, step=2, values={"bleu": 31.0}), 2.0)
    report = Report.parse(ledger.report(3.0).to_json())
    assert report.metrics == {"bleu": 31.0, "val/loss": 2.0}
    assert Ledger(plan(), report).report(4.0).metrics == report.metrics


def test_metrics_are_in_the_run_report() -> None:
    history = History(plan(), 0.0)
    history.begin_attempt(plan(), plan(), 0.0)
    for step in range(2000):
        history.record(Logged(rank=0, step=step, values={"val/loss": 1.0 / (step + 1)}), 0, float(step))
    document = history.document(RunPhase.RUNNING, 1, 2000.0)
    assert len(document.metrics) <= 512 and document.metrics[-1].step == 1999
    assert "val/loss, logged by the script" in page(document)


def test_rare_metrics_stay_in_the_run_report_beside_frequent_ones() -> None:
    """Fixed bug: of a loss on held-out data beside a learning rate of each step, the report lost all values."""
    history = History(plan(), 0.0)
    history.begin_attempt(plan(), plan(), 0.0)

    def log(step: int, **values: float) -> None:
        history.record(Logged(rank=0, step=step, values=values), 0, float(step))

    for step in range(1, 5001):
        log(step, rate=1.0 / step, **({"norm": 1.0} if step % 2 else {}))
        if step % 100 == 0:
            log(step - 1, val_loss=0.5)  # It comes later than that of the next step.
    rates = [step for step, _ in history.values("rate")]
    assert [step for step, _ in history.values("val_loss")] == list(range(99, 5000, 100))
    assert rates == sorted(rates) and (rates[0], rates[-1]) == (1, 5000) and len(rates) > CAPACITY // 4
    assert max(later - earlier for earlier, later in pairwise(rates)) < 5000 // 50
    assert len(history.values("norm")) > CAPACITY // 8
    document = history.document(RunPhase.RUNNING, 1, 5000.0)
    assert len(document.metrics) <= CAPACITY


def test_many_names_of_metrics_do_not_enlarge_the_run_report() -> None:
    entries: list[LoggedValues] = []
    for step in range(100):
        entries = with_logged(entries, LoggedValues(step=step, unix_s=0.0, values={f"m{step}": 1.0}), capacity=8)
    assert len(entries) <= 8 and entries[-1].step == 99
    entries = with_logged(entries, LoggedValues(step=99, unix_s=1.0, values={f"m{n}": 1.0 for n in range(16)}))
    assert entries[-1].step == 99 and len(entries[-1].values) == MAX_METRICS
