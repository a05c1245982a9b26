"""Tests of the means of step times, and of the CPU fraction of a rank, derived from its wall and CPU times."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, Optimizer

from dltrain.builtin import probe
from dltrain.builtin.probe import compute_points
from dltrain.timing.step_times import BLOCK_S, MIN_WINDOW, WINDOW_S, Times, Window
from dltrain.timing.stopwatch import BUDGET_WINDOW_S, Budget, Lap
from support.trainer.ranks import environment, run_apart


def steps(budget: Budget, seconds: float, computed: Lap, waited: Lap) -> float:
    """Simulate ``seconds`` of training. Return the time in which the rank's CPU fraction yields the last step's CPU time."""
    demanded_s = 0.0
    for _ in range(round(seconds / (computed + waited).wall_s)):
        demanded_s = budget.add(computed, computed + waited)
    return demanded_s


@pytest.mark.parametrize("count", range(1000, 1050, 7))
def test_mean_of_short_steps_spans_several_periods_of_a_quota(count: int) -> None:
    """Fixed bug: the mean of 50 steps of a millisecond was that of half a period, with or without its pause."""
    window = Window()
    for i in range(count):
        window.add(Times(0.0, 0.001 if i % 50 else 0.051, 0.0), 8, 8)
    assert window.step_s == pytest.approx(0.002, rel=0.1)
    assert window.measure(0, "cpu", 8).compute_s == pytest.approx(window.step_s)


@pytest.mark.parametrize("ends_s", [20.0, 20.5, 21.0, 22.0, 23.5])
def test_mean_of_short_steps_spans_a_load_that_comes_and_goes_within_seconds(ends_s: float) -> None:
    """Fixed bug: the mean was that of a second. It had all or nothing of a load that takes one of four seconds."""
    window, now_s = Window(), 0.0
    while now_s < ends_s:
        step_s = 0.008 if now_s % 4 < 1 else 0.004
        window.add(Times(0.0, step_s, 0.0), 8, 8)
        now_s += step_s
    assert window.step_s == pytest.approx(4 / (1 / 0.008 + 3 / 0.004), rel=0.1)


@pytest.mark.parametrize("step_s", [1.0, 0.01, 1e-3])
def test_mean_follows_a_change_of_the_step_time(step_s: float) -> None:
    window = Window()
    for _ in range(200):
        window.add(Times(0.0, 7.0, 0.0), 8, 8)
        window.add_exposed([0.0])
    for _ in range(max(MIN_WINDOW, round((WINDOW_S + BLOCK_S) / step_s)) + 1):
        window.add(Times(0.0, 0.0, step_s), 8, 8)
        window.add_exposed([step_s])
    assert window.step_s == pytest.approx(step_s)
    assert window.measure(0, "cpu", 8).comm_s == pytest.approx(step_s)
    assert window.typical_s == step_s
    assert window.samples_per_s == pytest.approx(8 / step_s)


def test_steps_of_another_local_batch_size_do_not_count() -> None:
    """Fixed bug: after a change of the split, a report had the time of both sizes as that of the new one."""
    window = Window()
    for _ in range(100):
        window.add(Times(0.0, 0.02, 0.0), 96, 64)
        window.add_exposed([0.01])
    window.add(Times(0.0, 0.01, 0.003), 96, 32)
    window.add_exposed([0.01])  # of the last step with 64 samples
    found = window.measure(0, "cpu", 32)
    assert (found.compute_s, found.comm_s) == (0.01, 0.003)


@given(st.lists(st.floats(1e-4, 5.0), min_size=1, max_size=400))
def test_mean_is_that_of_the_last_steps(steps_s: list[float]) -> None:
    """The steps in the window are the last ones, with at least ``MIN_WINDOW`` and ``WINDOW_S``, unless all are fewer."""
    window = Window()
    for step_s in steps_s:
        window.add(Times(0.0, step_s, 0.0), 1, 1)
    counts = [n for n in range(1, len(steps_s) + 1) if sum(steps_s[-n:]) / n == pytest.approx(window.step_s)]
    assert any(n == len(steps_s) or (n >= MIN_WINDOW and sum(steps_s[-n:]) >= WINDOW_S * (1 - 1e-9)) for n in counts)
    assert window.samples_per_s == pytest.approx(1 / window.step_s)


def test_rank_without_quota_has_a_cpu_fraction_of_1() -> None:
    budget = Budget()
    assert steps(budget, 10, Lap(0.03, 0.03, 0.09), Lap(0.01)) == pytest.approx(0.03)
    assert budget.rate == 1


def test_detected_quota_is_remembered_while_the_rank_waits() -> None:
    """80 samples take 0.2 CPUs. Then 40 samples leave a wait, in which unused quota accumulates."""
    budget = Budget()
    assert steps(budget, 3, Lap(0.05, 0.01, 0.01), Lap(0.001)) == pytest.approx(0.05, rel=0.05)
    computed, waited = Lap(0.008, 0.005, 0.005), Lap(0.017)
    assert steps(budget, 3, computed, waited) == pytest.approx(0.025, rel=0.05)


def test_cpu_fraction_is_not_below_the_used_fraction() -> None:
    budget = Budget()
    budget.rate = 0.1
    assert steps(budget, 2 * BUDGET_WINDOW_S, Lap(0.02, 0.02, 0.02), Lap(0.02)) <= 0.04


def test_cpu_fraction_recovers_after_a_slow_phase() -> None:
    budget = Budget()
    steps(budget, 5, Lap(0.05, 0.01, 0.01), Lap(0.001))
    assert budget.rate < 0.25
    steps(budget, 300, Lap(0.005, 0.005, 0.005), Lap(0.045))
    assert budget.rate == 1


@pytest.mark.parametrize(("cpu_s", "stopped_s", "sizes"), [
    (0.02, 0.08, [4, 8, 16]),  # a quota of 0.2, which the first step uses up for a period
    (0.02, 0.2, [8]),
])  # fmt: skip
def test_probe_ignores_its_slow_first_step(
    cpu_s: float, stopped_s: float, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step sets up kernels and memory and takes 20 times the CPU time of others. The clock is simulated."""
    now = Lap()
    clocks = SimpleNamespace(perf_counter=lambda: now.wall_s, process_time=lambda: now.process_s)
    monkeypatch.setattr(probe, "time", clocks)
    cold = [Lap(cpu_s + stopped_s, cpu_s, cpu_s)]

    def step(model: nn.Module, optimizer: Optimizer, samples: int) -> None:
        nonlocal now
        now += cold.pop() if cold else Lap(0.011, 0.001, 0.001)

    model = nn.Linear(1, 1)
    points, rate = compute_points(model, SGD(model.parameters()), step, 8, 32)
    assert [batch for batch, _ in points] == sizes
    assert all(seconds * rate < cpu_s / 4 for _, seconds in points)


FRACTION = """
import json, time
from torch import nn
from torch.optim import SGD
from dltrain.builtin.probe import compute_points

def step(model, optimizer, samples):
    busy_until_s = time.thread_time() + 0.001
    while time.thread_time() < busy_until_s:
        pass
    time.sleep(0.01)

model = nn.Linear(1, 1)
print(json.dumps(compute_points(model, SGD(model.parameters()), step, 8, 32)))
"""


def test_probe_measures_its_cpu_fraction() -> None:
    """A step sleeps for most of its time, as under a quota. Other processes only lower the fraction.

    It runs in a process of its own, because threads that other tests have left would count.
    """
    ended = run_apart("-c", FRACTION, env=environment())
    assert ended.returncode == 0, ended.stderr
    points, rate = json.loads(ended.stdout)
    assert rate < 0.2
    assert [batch for batch, _ in points] == [4, 8, 16]
    assert all(seconds == pytest.approx(0.001 / rate, rel=0.5) for _, seconds in points)
