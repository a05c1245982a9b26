"""Tests of the run report: its content, bounds, continuation by other coordinators, and its page."""

import asyncio
import gzip
import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dlcontract import CheckpointMark, CheckpointRef, Expectation, Failure, Noise, Outcome, Plan, RankMeasure, RunPhase
from dltrain.protocol.rank_messages import Checkpointed, Energy, Evaluated, Resharded, Shrunk, Step
from dltrain.protocol.volume_layout import TERM, job_directory
from dltrain.record.ledger import Ledger
from dltrain.record.run_report import files
from dltrain.record.run_report.document import CAPACITY, Document, Evaluation, place, thinned
from dltrain.record.run_report.history import History
from dltrain.record.run_report.page import duration, page
from dltrain.record.run_report.plots import Curve, Mark, bars, lines, ticks
from support.trainer.plans import make_plan, saving

RANK_KILLED = Failure(
    reason="RankKilled", message="rank 1 was killed <by> signal 9\x00", rank=1, host="node-b", counts=False
)


def step(number: int, rank: int = 0, *, share: int = 60, step_s: float = 0.1, size: int = 2) -> Step:
    measure = RankMeasure(rank=rank, device="cpu", share=share, compute_s=0.06, wait_s=0.01 * rank, comm_s=0.03)
    return Step(
        rank=rank, step=number, steps=1000, epoch=0, loss=1 / number, learning_rate=0.05, gradient_norm=2.0,
        step_s=step_s, samples_per_s=1200, world_size=size, measure=measure,
    )  # fmt: skip


def begun(plan: Plan, previous: Document | None = None, unix_s: float = 100.0) -> History:
    history = History(plan, unix_s, previous)
    history.begin_attempt(plan, plan, unix_s)
    return history


def current_document(history: History) -> Document:
    return history.document(RunPhase.RUNNING, 1, 200.0)


def ledger(plan: Plan, term: int) -> Ledger:
    made = Ledger(plan, None)
    made.term = term
    return made


def test_report_of_a_run_with_faults_and_restart() -> None:
    """Launch, steps, new local batch sizes, a killed rank that the others survive, a restart from a checkpoint, end."""
    plan = make_plan(2, expected=Expectation(step_s=0.08, total_s=80))
    history = begun(plan)
    for number, unix_s in ((1, 101.0), (10, 102.0), (20, 103.0)):
        history.record(step(number), 0, unix_s)
        history.record(step(number, 1), 0, unix_s)
    history.record(Resharded(rank=0, step=20, shares=(70, 50), reason="measured while training"), 0, 103.1)
    history.record(Resharded(rank=1, step=20, shares=(70, 50), reason="measured while training"), 0, 103.1)
    history.record(Evaluated(rank=0, step=20, accuracy=0.9, loss=0.2), 0, 103.2)
    mark = CheckpointMark(step=15, unix_s=103.3, path="/x/step-15")
    history.record(Checkpointed(rank=0, mark=mark, duration_s=0.2, nbytes=1000), 0, 103.3)
    history.record(Shrunk(rank=0, step=20, alive=(0,), shrink_s=0.1), 0, 104.0)
    history.record(Resharded(rank=0, step=20, shares=(120, 0), reason="lost ranks [1]"), 0, 104.0)
    history.fault(RANK_KILLED, 104.1)
    history.record(step(21, share=120, size=1), 0, 104.6)
    history.halted(110.0)
    history.begin_attempt(plan, plan, 111.0)
    history.record(step(16), 0, 112.0)
    history.record(step(16, 1), 0, 112.0)
    document = history.document(RunPhase.SUCCEEDED, 1, 120.0, Outcome(steps=16, seconds=5, accuracy=0.95))

    assert [(p.step, p.steps) for p in document.points] == [(1, 1), (10, 9), (16, 1)], (
        "repeated steps replace the first ones"
    )
    assert document.totals.steps_repeated == 21 - 15 and document.evaluations == ()
    assert [(attempt.size, attempt.unix_s) for attempt in document.attempts] == [
        (2, 101.0),
        (1, 104.6),
        (0, 110.0),
        (2, 112.0),
    ]
    assert [list(split.shares.values()) for split in document.splits] == [[60, 60], [70, 50], [120, 0], [60, 60]]
    assert [split.reason for split in document.splits][1:] == ["measured while training", "lost ranks [1]", "launched"]
    (fault,) = document.faults
    assert fault.resumed_unix_s == 104.6 and document.totals.faults == {"RankKilled": 1}
    assert document.totals.down_s == pytest.approx(0.5)
    assert document.totals.checkpoints == 1 and document.checkpoints[0].duration_s == 0.2
    assert [total.steps for total in document.ranks] == [22, 21]
    assert document.ranks[1].wait_s == pytest.approx(0.21) and document.ranks[0].wait_s == 0
    assert document.prediction_error == pytest.approx(-0.2)
    assert document.samples_per_s == pytest.approx(document.points[0].samples_per_s)
    assert "throughput / step time" in page(document)
    assert Document.parse(document.to_json()) == document


def test_steps_done_twice_are_counted_across_coordinators_without_a_volume() -> None:
    """The report to the operator has the last step. The run report is in memory only, or up to 30 s older."""
    plan = make_plan(2)
    first = Ledger(plan, None)
    first.record(step(50), 1.0)
    first.steps_repeated = 4
    second = Ledger(plan, first.report(2.0))
    history = files.RunReportWriter(second, 3.0).history
    history.begin_attempt(plan, plan, 4.0)
    history.record(step(41), 0, 5.0)
    assert history.steps_repeated == current_document(history).totals.steps_repeated == 4 + 10


def test_lower_rank_that_reports_later_repeats_no_steps() -> None:
    """Ranks of a script need not wait for each other. The lowest one that has reported represents the job."""
    history = begun(make_plan(2))
    history.record(step(9, 1), 1, 101.0)
    history.record(step(11, 1), 1, 102.0)
    history.record(step(10), 0, 103.0)
    assert history.steps_repeated == 0
    assert [point.step for point in current_document(history).points] == [9, 10]


def test_renumbered_ranks_keep_their_places() -> None:
    whole = make_plan(3)
    left = whole.model_copy(update={"ranks": make_plan(2).ranks[:1] + whole.ranks[2:]})
    ranks = tuple(rank.model_copy(update={"rank": n, "share": 60}) for n, rank in enumerate(left.ranks))
    history = History(whole, 0.0)
    history.begin_attempt(whole, left.model_copy(update={"ranks": ranks}), 0.0)
    for rank in (0, 1):
        history.record(step(1, rank), 0, 1.0)
    assert [total.place for total in current_document(history).ranks] == ["digits-cpu-0/0", "digits-cpu-2/0"]
    assert current_document(history).splits[0].shares == {"digits-cpu-0/0": 60, "digits-cpu-2/0": 60}


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=3000))
def test_long_run_is_bounded_and_keeps_its_means(gaps: list[int]) -> None:
    history = begun(make_plan(1))
    number, total_s = 1, 0.1
    history.record(step(1, share=120, size=1), 0, 100.0)
    for count, gap in enumerate(gaps):
        number, total_s = number + gap, total_s + gap * (0.1 + count / 1e4)
        history.record(step(number, share=120, step_s=0.1 + count / 1e4, size=1), 0, 100.0 + count)
    document = current_document(history)
    assert len(document.points) <= CAPACITY
    assert sum(point.steps for point in document.points) == document.points[-1].step == number
    assert sum(point.steps * point.step_s for point in document.points) == pytest.approx(total_s)
    assert document.totals.training_s == pytest.approx(total_s)


def test_lists_of_events_are_bounded() -> None:
    entries = evaluations(range(5 * CAPACITY))
    assert thinned(entries[:CAPACITY]) == entries[:CAPACITY]
    thin = thinned(entries)
    assert len(thin) <= CAPACITY and (thin[0], thin[-1]) == (entries[0], entries[-1])


def evaluations(steps: Iterable[int]) -> list[Evaluation]:
    return [Evaluation(step=step, unix_s=100.0 + i, accuracy=0.5) for i, step in enumerate(steps)]


@pytest.mark.parametrize("apart", [1, 0], ids=["steps", "one step"])
def test_entries_that_stay_are_spread_over_the_whole_run(apart: int) -> None:
    """Fixed bug: of 5000 evaluations, none between the first one and number 2790 stayed. Faults may all be at one step."""
    kept = list[Evaluation]()
    for entry in evaluations(range(5000)):
        kept = thinned([*kept, entry.model_copy(update={"step": apart * entry.step})])
    times = [entry.unix_s for entry in kept]
    assert CAPACITY // 2 < len(kept) <= CAPACITY and times == sorted(times)
    assert max(after - before for before, after in pairwise(times)) <= 4 * 5000 / len(kept)


def test_many_entries_in_a_short_time_do_not_displace_the_others() -> None:
    """Such as faults of a job that restarts in vain for an hour, before and after months of training."""
    rare = evaluations(range(0, 100_000, 1000))
    kept = list[Evaluation]()
    for entry in [*rare[:50], *evaluations([49_500] * 3000), *rare[50:]]:
        kept = thinned([*kept, entry])
    assert {entry.step for entry in rare} <= {entry.step for entry in kept}


@pytest.fixture
def saving_plan(tmp_path: Path) -> Iterator[Plan]:
    yield make_plan(2, checkpoint=saving(tmp_path))


def test_next_coordinator_continues_and_fenced_one_writes_nothing(saving_plan: Plan) -> None:
    folder = job_directory(saving_plan)

    async def run_two_coordinators() -> None:
        first = files.RunReportWriter(ledger(saving_plan, 1), 100.0)
        first.history.begin_attempt(saving_plan, saving_plan, 100.0)
        first.history.record(step(1), 0, 101.0)
        first.history.fault(RANK_KILLED, 102.0)
        assert await first.write(RunPhase.STOPPED, 103.0) == str(folder / files.HTML)
        second = files.RunReportWriter(ledger(saving_plan, 2), 110.0)
        second.history.begin_attempt(saving_plan, saving_plan, 110.0)
        second.history.record(step(2), 0, 112.0)
        await second.write(RunPhase.SUCCEEDED, 113.0, Outcome(steps=2, seconds=3))
        (folder / TERM).write_text("2")
        first.history.fault(RANK_KILLED, 114.0)
        await first.write(RunPhase.FAILED, 115.0)

    asyncio.run(run_two_coordinators())
    document = files.read(saving_plan)
    assert document is not None and document.phase is RunPhase.SUCCEEDED and document.term == 2
    assert [point.step for point in document.points] == [1, 2] and document.totals.faults == {"RankKilled": 1}
    assert document.started_unix_s == 100 and document.totals.down_s == 10 and len(document.plans) == 1
    assert files.read(saving_plan.model_copy(update={"uid": "another"})) is None
    (folder / files.JSON).write_text("{broken")
    assert files.read(saving_plan) is None
    assert sorted(path.name for path in folder.iterdir()) == [files.HTML, files.JSON, TERM]


def test_report_is_written_periodically_and_at_once_after_a_fault(saving_plan: Plan) -> None:
    async def written(writer: files.RunReportWriter, unix_s: float) -> float | None:
        """Return the time of the report on the volume after a tick at ``unix_s``."""
        writer.tick(unix_s)
        await writer.idle()
        document = files.read(saving_plan)
        return document.updated_unix_s if document is not None else None

    async def run_two_coordinators() -> None:
        writer = files.RunReportWriter(ledger(saving_plan, 1), 100.0)
        assert await written(writer, 100.5) is None
        assert await written(writer, 131.0) == 131.0
        assert await written(writer, 132.0) == 131.0
        writer.history.fault(RANK_KILLED, 133.0)
        assert await written(writer, 133.5) == 133.5
        assert await written(writer, 134.0) == 133.5

    asyncio.run(run_two_coordinators())


def test_page_is_rendered_once_at_the_end_of_a_run(saving_plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    pages: list[Document] = []

    def counted(document: Document) -> str:
        pages.append(document)
        return page(document)

    async def end(plan: Plan) -> dict[str, bytes]:
        writer, outcome = files.RunReportWriter(ledger(plan, 1), 100.0), Outcome(steps=2, seconds=3)
        await writer.write(RunPhase.SUCCEEDED, 101.0, outcome)
        return await writer.packed(RunPhase.SUCCEEDED, 102.0, outcome)

    monkeypatch.setattr(files, "page", counted)
    stored = asyncio.run(end(saving_plan))
    assert len(pages) == 1 and sorted(stored) == [f"{files.HTML}.gz", f"{files.JSON}.gz"]
    for name, data in stored.items():
        assert gzip.decompress(data) == (job_directory(saving_plan) / name.removesuffix(".gz")).read_bytes()
    without = asyncio.run(end(saving_plan.model_copy(update={"checkpoint": CheckpointRef(enabled=False)})))
    assert len(pages) == 2 and without.keys() == stored.keys()


def test_unwritable_volume_does_not_fail_the_job(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    plan = make_plan(1, checkpoint=saving(tmp_path / "file"))
    for unwritable in (plan, make_plan(1)):
        assert asyncio.run(files.RunReportWriter(ledger(unwritable, 1), 0.0).write(RunPhase.FAILED, 1.0)) is None


def test_page_is_well_formed_and_escaped_and_holds_the_values() -> None:
    plan = make_plan(2, job="digits", expected=Expectation(step_s=0.08))
    history = begun(plan)
    for number in range(1, 30):
        for rank in (0, 1):
            history.record(step(number, rank), 0, 100.0 + number)
    history.record(Evaluated(rank=0, step=29, accuracy=0.875), 0, 130.0)
    history.fault(RANK_KILLED.model_copy(update={"log_tail": "</pre><script>alert(1)</script>"}), 131.0)
    text = page(current_document(history))
    root = ElementTree.fromstring(text)  # Fails on an unescaped < or a control character.
    rows = root.findall(".//table[@id='series']/tbody/tr")
    assert [(row[0].text, row[2].text) for row in rows] == [(str(n), f"{1 / n:.6g}") for n in range(1, 30)]
    assert [cell.text for cell in root.findall(".//table[@id='evaluations']/tbody/tr/td")][:2] == ["29", "0.875"]
    captions = {caption.text for caption in root.iter("figcaption")}
    assert {"Loss over steps", "Time of a step: predicted and measured", "Local batch sizes"} <= captions
    assert not list(root.iter("script")) and "http" not in text.replace("http-equiv", "")
    curve = root.find(".//svg[@aria-label='Loss over steps']/polyline")
    assert curve is not None and len(curve.attrib["points"].split()) == 29
    heights = [float(pair.split(",")[1]) for pair in curve.attrib["points"].split()]
    assert heights == sorted(heights), "a falling loss goes down the page"


def test_energy_and_noise_scale_accumulate_over_restarts() -> None:
    plan = make_plan(2)
    history = begun(plan)

    def record_energy(number: int, rank: int, joules: float) -> None:
        energy, noise = Energy(joules=joules, source="NVML"), Noise(samples=100.0 * number, steps=50)
        history.record(step(number, rank).model_copy(update={"energy": energy, "noise": noise}), 0, 100.0 + number)

    for number, joules in ((1, 10.0), (2, 700.0)):
        for rank in (0, 1):
            record_energy(number, rank, joules)
    history.begin_attempt(plan, plan, 110.0)  # The counters of the ranks start from 0 again.
    record_energy(2, 0, 50.0)
    document = current_document(history)
    assert (document.totals.energy_J, document.totals.energy_sources) == (1450.0, ("NVML",))
    assert {rank.place: rank.energy_J for rank in document.ranks} == {
        place(plan.ranks[0]): 750,
        place(plan.ranks[1]): 700,
    }
    assert [point.noise_samples for point in document.points] == [100, 200]
    figures = "".join(ElementTree.fromstring(page(document)).find(".//dl").itertext())  # type: ignore[union-attr]
    assert "200 samples" in figures and "1.45 kJ by NVML" in figures
    assert "of 2 pods" not in figures, "every pod was read"


def test_updates_skipped_by_grad_scaler_are_shown() -> None:
    history = begun(make_plan(1))
    for number, skipped in ((1, 1), (9, 4)):
        history.record(step(number).model_copy(update={"loss_scale": 2.0**12, "skipped_updates": skipped}), 0, 101.0)
    assert current_document(history).totals.skipped_updates == 4
    assert "skipped by the GradScaler</dt><dd>4 updates" in page(current_document(history))
    assert "GradScaler" not in page(current_document(begun(make_plan(1)))), "the script has no GradScaler"


def test_page_says_that_energy_and_noise_are_unknown() -> None:
    history = begun(make_plan(1))
    history.record(step(1), 0, 101.0)
    text = page(current_document(history))
    assert "not readable: the pods cannot read a counter of NVML or RAPL" in text and "not measured" in text


def test_empty_run_has_a_page() -> None:
    ElementTree.fromstring(page(current_document(History(make_plan(1), 0.0))))


def test_report_of_a_thousand_ranks_is_bounded() -> None:
    plan = make_plan(1000, global_batch=4000)
    history = begun(plan)
    for rank in range(1000):
        history.record(step(1, rank, share=4, size=1000), 0, 101.0)
    for number in range(2, 200):
        shares = (4 + number % 2, 4 - number % 2, *[4] * 998)
        history.record(Resharded(rank=0, step=number, shares=shares, reason="measured while training"), 0, 101.0)
    document = current_document(history)
    assert len(document.splits) <= 20 and document.totals.splits == 198
    root = ElementTree.fromstring(page(document))
    chart = root.find(".//svg[@aria-label='Local batch sizes, the 8 of 1000 ranks that changed most']")
    assert chart is not None and len(chart.findall("polyline")) == 8
    assert "digits-cpu-1/0" in "".join(title.text or "" for title in chart.iter("title"))
    assert len(document.to_json()) < 2e6


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(-1e9, 1e9), st.floats(-1e9, 1e9)), max_size=30))
@example([(0.0, 5e-324)])  # Fixed bug: a tenth of the smallest number is 0, so that both ends of the axis were equal.
@example([(5e-324, 0.0)])
def test_curve_stays_within_its_frame(points: list[tuple[float, float]]) -> None:
    drawn = lines("t", "x", "y", [Curve("a", sorted(points))], [Mark(0, "m")])
    if not points:
        assert drawn == ""
        return
    for line in ElementTree.fromstring(drawn).iter("polyline"):
        for pair in line.attrib["points"].split():
            x, y = map(float, pair.split(","))
            assert 0 <= x <= 640 and 0 <= y <= 280


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 10, [0, 2, 4, 6, 8, 10]), (0.3, 1.1, [0.4, 0.6, 0.8, 1.0]), (5, 5, [5]), (-1, 1, [-1, -0.5, 0, 0.5, 1])],
)
def test_ticks_are_round_numbers(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == expected


def test_an_axis_of_steps_has_whole_numbers() -> None:
    """Fixed bug: the axis of a short run had labels such as 2.5 steps."""
    assert ticks(0, 2.2, whole=True) == [0, 1, 2] and 0.5 in ticks(0, 2.2)
    drawn = lines("loss", "step", "loss", [Curve("loss", [(1, 0.3), (2, 0.2), (3, 0.1)])])
    labels = [float(text.text or "") for text in ElementTree.fromstring(drawn).iter("text") if text.get("y") == "256"]
    assert labels and all(label.is_integer() for label in labels)


def test_an_axis_of_zeros_has_readable_numbers() -> None:
    """Fixed bug: the axis of an accuracy of 0 went from -1e-10 to 1e-10."""
    plot = lines("accuracy", "step", "%", [Curve("accuracy", [(4, 0.0), (8, 0.0)])])
    assert re.findall(r'text-anchor="end">([^<]*)<', plot) == ["0", "0.2", "0.4", "0.6", "0.8", "1"]


def test_bars_without_a_value_are_omitted() -> None:
    assert bars("t", "x", ["a"], []) == bars("t", "x", ["a"], [("r", [0.0])]) == ""


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0032, "3.2 ms"), (12.1, "12.1 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")]
)
def test_duration_format(seconds: float, text: str) -> None:
    assert duration(seconds) == text
