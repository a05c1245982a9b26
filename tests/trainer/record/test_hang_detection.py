"""A healthy rank is not treated as hung, and a hung one is found within a bound."""

import sys
import threading
from types import FrameType
from typing import Any

import pytest

from dlcontract import RankMeasure
from dltrain.protocol import activity as activities
from dltrain.protocol.rank_messages import Busy, RankMessage, Step, Working
from dltrain.record.hang_detection import (
    ACTIVITY_LIMITS_S,
    HANG_MAX_S,
    HANG_MIN_S,
    REPORTED,
    START_DEADLINE_S,
    HangDetector,
)


def step(rank: int, step_s: float = 0.1) -> Step:
    measure = RankMeasure(rank=rank, device="cpu", share=1)
    return Step(rank=rank, step=1, steps=9, step_s=step_s, samples_per_s=1, world_size=2, measure=measure)


def after(*messages: tuple[float, RankMessage], hangs: int = 0) -> HangDetector:
    detector = HangDetector()
    detector.begin_attempt(hangs, 0.0)
    for at_s, message in messages:
        detector.record(message, at_s)
    return detector


def found_s(detector: HangDetector) -> float:
    """Return the second at which the detector finds a hang."""
    return next(second for second in range(1, 20_000) if detector.hung(float(second)) is not None)


def test_a_pause_of_some_seconds_is_healthy_and_a_hang_is_found() -> None:
    detector = after((0.0, step(0)), (0.0, step(1)))
    assert detector.hung(HANG_MIN_S - 1) is None, "a pinned copy, or a stall of the storage"
    assert found_s(detector) == HANG_MIN_S + 1


@pytest.mark.parametrize("work", list(ACTIVITY_LIMITS_S))
def test_compilation_data_and_checkpoints_extend_the_limit_of_all_ranks(work: Any) -> None:
    detector = after((0.0, step(0)), (0.0, step(1)), (2.0, Working(rank=1, activity=work)))
    assert found_s(detector) == ACTIVITY_LIMITS_S[work] + 1, "rank 0 waits; the bound holds all the same"
    for second in range(3, 500):  # The thread that says so does not show that the rank proceeds.
        detector.record(Working(rank=1, activity=work), float(second))
    assert found_s(detector) == ACTIVITY_LIMITS_S[work] + 1
    detector.record(Working(rank=1), 500.0)
    assert detector.hung(501.0) != (0, 501.0), "rank 0 waited for rank 1 and may continue now"
    assert 500 < found_s(detector) <= 500 + HANG_MIN_S + 1


def test_ranks_that_wait_for_announced_work_are_healthy() -> None:
    detector = after((0.0, step(0)), (0.0, step(1)), (1.0, Busy(rank=0, what="evaluation", limit_s=200)))
    assert detector.hung(200.0) is None
    detector.record(step(0), 200.0)
    assert detector.hung(201.0) is None, "rank 1's own update is under way"
    assert found_s(detector) == 200 + HANG_MIN_S + 1


def test_a_limit_that_killed_is_raised_up_to_a_bound() -> None:
    limits = [found_s(after((0.0, step(0)), hangs=hangs)) - 1 for hangs in range(5)]
    assert limits == [HANG_MIN_S, 3 * HANG_MIN_S, 9 * HANG_MIN_S, 27 * HANG_MIN_S, HANG_MAX_S]
    assert found_s(after((0.0, step(0, 200.0)), hangs=4)) == 2001, "ten median steps remain the limit"


def test_limit_adapts_to_the_silences_seen() -> None:
    detector, now_s = after((0.0, step(0))), 0.0
    for n in range(200):
        now_s += 20.0 if n % 20 == 0 else 0.3
        detector.record(step(0), now_s)
    assert found_s(detector) - now_s == pytest.approx(60.0, abs=1.0), "three times the 99th percentile"


def reported(rank: int, interval_s: float | None, step_s: float = 0.1) -> Step:
    """Return an update of a script that only reports, about every ``interval_s`` seconds."""
    return Step(
        rank=rank, step=1, steps=9, step_s=step_s, samples_per_s=0, world_size=2, reported=True, interval_s=interval_s
    )  # fmt: skip


def test_a_script_that_reports_may_pause_longer_because_its_evaluations_are_unknown() -> None:
    assert found_s(after((0.0, reported(0, 0.1)))) == REPORTED * HANG_MIN_S + 1
    assert found_s(after((0.0, reported(0, None)))) == START_DEADLINE_S + 1, "the interval of its reports is unknown"
    assert found_s(after((0.0, reported(0, 120.0)))) == 1201, "it reports once in each epoch"
    assert found_s(after((0.0, reported(0, 0.1)), hangs=3)) == HANG_MAX_S + 1
    busy = Busy(rank=0, what="upload", limit_s=1000)
    assert found_s(after((0.0, reported(0, 0.1)), (1.0, busy))) == 1 + 1000 + REPORTED * HANG_MIN_S + 1


def test_a_script_that_reports_once_in_each_long_epoch_is_healthy() -> None:
    """Fixed bug: it was restarted 15 minutes after its first report, however long that took, and again each time."""
    epoch_s = 1800.0
    detector = after((epoch_s, reported(0, None)))
    assert detector.hung(2 * epoch_s) is None
    assert found_s(detector) == epoch_s + 3 * epoch_s + 1
    detector.record(reported(0, epoch_s), 2 * epoch_s)
    assert detector.hung(3.1 * epoch_s) is None
    # A first report at the start of the training says nothing about the epochs.
    limits = [found_s(after((1.0, reported(0, None)), hangs=hangs)) - 2 for hangs in range(3)]
    assert limits == [START_DEADLINE_S, 3 * START_DEADLINE_S, 9 * START_DEADLINE_S]


def test_a_rank_that_never_reports_is_never_hung() -> None:
    detector = after((0.0, reported(0, 0.1)))
    for second in range(1, 5000):
        detector.record(reported(0, 0.1), float(second))
    assert detector.hung(5000.0) is None, "rank 1 of this script makes no report"


def test_activity_is_read_from_the_stack() -> None:
    of = activities.of_stack
    assert of(iter(["/usr/numpy/x.py", "/x/dltrain/batch/sampling.py", "/x/train.py"])) == "data"
    assert of(iter(["/x/torch/utils/data/dataloader.py", "/x/train.py"])) == "data"
    assert of(iter(["/x/torchdata/stateful_dataloader/stateful_dataloader.py", "/x/train.py"])) == "data"
    assert of(iter(["/x/dltrain/checkpoint/store.py"])) == "checkpoint"
    assert of(iter(["/x/dltrain/comm/core/polling.py", "/x/dltrain/checkpoint/writer.py"])) is None, "it waits"
    assert of(iter(["/x/train.py", "/x/torch/nn/modules/module.py"])) is None
    assert activities.activity() is None


def test_compilation_counts_on_every_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    stacks: dict[int, FrameType] = {}
    release, ready = threading.Event(), threading.Event()
    source = "def compile_frame(ready, release):\n    ready.set()\n    release.wait()\n"
    names: dict[str, Any] = {}
    exec(compile(source, "/site/torch/_dynamo/convert_frame.py", "exec"), names)
    thread = threading.Thread(target=names["compile_frame"], args=(ready, release))
    thread.start()
    try:
        ready.wait()
        stacks.update(sys._current_frames())
        monkeypatch.setattr(sys, "_current_frames", lambda: stacks)
        assert activities.activity() == "compilation"
    finally:
        release.set()
        thread.join()
