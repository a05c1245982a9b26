"""Tests of learning-rate schedulers: a resumed run has the same rates as an uninterrupted one."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim import lr_scheduler as torchs

from dltrain.optim.lr_schedulers import Schedules
from dltrain.optim.options import like, numbers

STEPS, PER_EPOCH = 24, 4
Make = Callable[[SGD], torchs.LRScheduler]
CASES: dict[str, tuple[Make, bool]] = {
    "cosine": (lambda opt: torchs.CosineAnnealingLR(opt, STEPS), False),
    "steps": (lambda opt: torchs.MultiStepLR(opt, [3, 11, 17], 0.5), False),
    "function": (lambda opt: torchs.LambdaLR(opt, lambda step: 1 / (1 + step)), False),
    "one cycle": (lambda opt: torchs.OneCycleLR(opt, 0.5, total_steps=STEPS + 1), False),
    "function after a warm-up": (
        lambda opt: torchs.SequentialLR(
            opt, [torchs.ConstantLR(opt, 0.1), torchs.LambdaLR(opt, lambda step: 1 / (1 + step))], milestones=[5]
        ),
        False,
    ),
    "cycles": (lambda opt: torchs.CyclicLR(opt, 0.01, 0.5, step_size_up=4), False),
    "per epoch": (lambda opt: torchs.ExponentialLR(opt, 0.7), True),
    "warm-up": (
        lambda opt: torchs.SequentialLR(
            opt,
            [torchs.LinearLR(opt, 0.1, total_iters=5), torchs.MultiStepLR(opt, [4, 9], 0.3)],
            milestones=[5],
        ),
        False,
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("stopped_after", [1, 10, 20])
@pytest.mark.parametrize("in_tensor", [False, True])
def test_restart_does_not_change_learning_rates(name: str, stopped_after: int, in_tensor: bool) -> None:
    make, each_epoch = CASES[name]
    saved: dict[str, Any] = {}

    def run(first: int, last: int) -> list[list[tuple[float, float]]]:
        """Create all objects and load their saved state, as a restarted script does."""
        layer = nn.Linear(2, 2)
        rate: Any = torch.tensor(0.1, dtype=torch.float64) if in_tensor else 0.1
        opt = SGD([{"params": [layer.weight]}, {"params": [layer.bias], "lr": 0.01}], rate, momentum=0.9)
        schedules, rates = Schedules(), list[list[tuple[float, float]]]()
        if saved:
            groups = json.loads(saved["groups"])
            groups = [like(*each) for each in zip(opt.param_groups, groups, strict=True)]
            opt.load_state_dict(saved["optimizer"] | {"param_groups": groups})
            schedules.load(json.loads(saved["schedules"]))
        schedules.add(make(opt), each_epoch)
        for step in range(first, last):
            # Fixed bug: the first step after a restart had the momentum with which OneCycleLR begins.
            rates.append([(float(group["lr"]), group["momentum"]) for group in opt.param_groups])
            opt.step()
            schedules.step(end_of_epoch=step % PER_EPOCH == PER_EPOCH - 1)
        saved.update(optimizer=opt.state_dict(), schedules=json.dumps(schedules.state()))
        saved.update(groups=json.dumps(numbers(saved["optimizer"]["param_groups"])))
        assert isinstance(opt.param_groups[0]["lr"], torch.Tensor) is in_tensor
        return rates

    whole = run(0, STEPS)
    saved.clear()
    assert run(0, stopped_after) + run(stopped_after, STEPS) == whole
    assert len({rate for rate, _ in whole}) > 2


@pytest.mark.parametrize("stopped_after", range(1, 20))
@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_restart_keeps_the_rate_between_the_ends_of_epochs(stopped_after: int, by_hand: bool, first: bool) -> None:
    """Fixed bug: the rate of the last added scheduler replaced the rate to which all of them had led."""
    saved: dict[str, Any] = {}

    def run(begin: int, end: int) -> list[float]:
        opt, schedules, rates = SGD(nn.Linear(2, 2).parameters(), 0.1, momentum=0.9), Schedules(), list[float]()
        if saved:
            opt.load_state_dict(saved["optimizer"])
            schedules.load(json.loads(saved["schedules"]))
        made: list[tuple[torchs.LRScheduler, bool]] = [
            (torchs.LinearLR(opt, 0.1, total_iters=9), False),
            (torchs.MultiStepLR(opt, [1, 3], 0.3), True),
        ]
        for scheduler, each_epoch in made if first else reversed(made):
            schedules.add(scheduler, each_epoch)
        for step in range(begin, end):
            rates.append(opt.param_groups[0]["lr"])
            opt.step()
            schedules.step(end_of_epoch=step % PER_EPOCH == PER_EPOCH - 1)
            if by_hand and step == 4:
                opt.param_groups[0]["lr"] /= 2
        saved.update(optimizer=opt.state_dict(), schedules=json.dumps(schedules.state()))
        return rates

    whole = run(0, STEPS)
    saved.clear()
    assert run(0, stopped_after) + run(stopped_after, STEPS) == whole


LENGTHS: dict[str, Callable[[SGD, int], torchs.LRScheduler]] = {
    "one cycle": lambda opt, steps: torchs.OneCycleLR(opt, 0.5, total_steps=steps),
    "cosine": lambda opt, steps: torchs.CosineAnnealingLR(opt, steps, eta_min=1e-4),
    "linear": lambda opt, steps: torchs.LinearLR(opt, 1.0, 0.0, total_iters=steps),
    "polynomial": lambda opt, steps: torchs.PolynomialLR(opt, steps, power=2.0),
    "constant": lambda opt, steps: torchs.ConstantLR(opt, 0.5, total_iters=steps // 2),
    "steps": lambda opt, steps: torchs.StepLR(opt, steps // 3, 0.1),
    "milestones": lambda opt, steps: torchs.MultiStepLR(opt, [steps // 3, 2 * steps // 3], 0.1),
    "warm restarts": lambda opt, steps: torchs.CosineAnnealingWarmRestarts(opt, steps // 4, 2),
    "cycles": lambda opt, steps: torchs.CyclicLR(opt, 0.01, 0.5, step_size_up=steps // 4, step_size_down=steps // 2),
    "function": lambda opt, steps: torchs.LambdaLR(opt, lambda step: 1 - step / steps),
    "function after a warm-up": lambda opt, steps: torchs.SequentialLR(
        opt,
        [torchs.ConstantLR(opt, 0.1), torchs.LambdaLR(opt, lambda step: 1 - step / steps)],
        milestones=[3],
    ),
    "warm-up": lambda opt, steps: torchs.SequentialLR(
        opt,
        [
            torchs.LinearLR(opt, 0.1, total_iters=steps // 4),
            torchs.CosineAnnealingLR(opt, steps - steps // 4),
            torchs.ConstantLR(opt, 0.01),
        ],
        milestones=[steps // 4, steps - 2],
    ),
    "chain": lambda opt, steps: torchs.ChainedScheduler(
        [
            torchs.LinearLR(opt, 0.1, total_iters=steps // 4),
            torchs.PolynomialLR(opt, steps),
            torchs.ExponentialLR(opt, 0.9),
        ]
    ),
    "end after a chain": lambda opt, steps: torchs.SequentialLR(
        opt,
        [
            torchs.ChainedScheduler([torchs.StepLR(opt, steps // 3), torchs.StepLR(opt, steps // 5, 0.5)]),
            torchs.ConstantLR(opt, 0.01),
        ],
        milestones=[steps - 2],
    ),
}


def rates_of(
    makes: list[Callable[[SGD, int], torchs.LRScheduler]], steps: int, last: int, first: int = 0, saved: Any = None
) -> tuple[list[tuple[float, ...]], Any]:
    """Return the learning rates and momenta from step ``first`` to ``last`` of a training of ``steps``, and its state."""
    layer = nn.Linear(2, 2)
    opt = SGD([{"params": [layer.weight]}, {"params": [layer.bias], "lr": 0.01}], 0.1, momentum=0.9)
    schedules, rates = Schedules(), list[tuple[float, ...]]()
    if saved:
        opt.load_state_dict(saved["optimizer"])
        schedules.load(json.loads(saved["schedules"]))
    for make in makes:
        schedules.add(make(opt, steps), each_epoch=False)
    for _ in range(first, last):
        rates.append(tuple(group[name] for group in opt.param_groups for name in ("lr", "momentum")))
        opt.step()
        schedules.step(end_of_epoch=False)
    return rates, {"optimizer": opt.state_dict(), "schedules": json.dumps(schedules.state())}


def assert_near(found: list[tuple[float, ...]], expected: list[tuple[float, ...]]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a == pytest.approx(b, rel=1e-9, abs=1e-12)


@pytest.mark.filterwarnings("ignore:Detected call of")  # by torch itself, for a chain inside of another scheduler
@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("stopped_after", [1, 10, STEPS])
def test_schedulers_get_the_length_of_a_training_that_is_longer_after_a_restart(name: str, stopped_after: int) -> None:
    """Fixed bug: the old length stayed. A cosine at its end stayed at 0, or rose again; OneCycleLR raised an error."""
    _, saved = rates_of([LENGTHS[name]], STEPS, stopped_after)
    found, _ = rates_of([LENGTHS[name]], 2 * STEPS, 2 * STEPS, stopped_after, saved)
    assert_near(found, rates_of([LENGTHS[name]], 2 * STEPS, 2 * STEPS)[0][stopped_after:])


@pytest.mark.filterwarnings("ignore:Detected call of")  # by torch itself, for a chain inside of another scheduler
@pytest.mark.parametrize("name", LENGTHS)
def test_a_shorter_training_that_is_complete_already_resumes_without_an_error(name: str) -> None:
    _, saved = rates_of([LENGTHS[name]], 2 * STEPS, 2 * STEPS)
    assert rates_of([LENGTHS[name]], STEPS, STEPS, 2 * STEPS, saved)[0] == []


def test_several_schedulers_get_new_lengths_together() -> None:
    makes = [LENGTHS["cosine"], lambda opt, _: torchs.ExponentialLR(opt, 0.95), LENGTHS["milestones"]]
    makes[0] = lambda opt, steps: torchs.CosineAnnealingLR(opt, steps)
    _, saved = rates_of(makes, STEPS, 10)
    assert_near(rates_of(makes, 2 * STEPS, 2 * STEPS, 10, saved)[0], rates_of(makes, 2 * STEPS, 2 * STEPS)[0][10:])


def test_a_scheduler_without_a_formula_continues_from_the_rate_of_the_checkpoint() -> None:
    makes = [lambda opt, _: torchs.MultiplicativeLR(opt, lambda step: 0.95), LENGTHS["milestones"]]
    before, saved = rates_of(makes, STEPS, 10)
    found, _ = rates_of(makes, 2 * STEPS, 2 * STEPS, 10, saved)
    assert found[0][0] == pytest.approx(before[-1][0] * 0.95)
    assert found[-1][0] < found[0][0]


def test_lengths_of_a_checkpoint_of_an_older_version_are_unknown() -> None:
    """Milestones were not saved. The rates continue then, and the milestones of the script count from now on."""
    _, saved = rates_of([LENGTHS["milestones"]], STEPS, 10)
    (state,) = json.loads(saved["schedules"])
    older = saved | {"schedules": json.dumps([state | {"milestones": {}}])}
    found, _ = rates_of([LENGTHS["milestones"]], 2 * STEPS, 2 * STEPS, 10, older)
    assert [round(rate[0], 9) for rate in found] == [0.01] * 6 + [0.001] * 16 + [0.0001] * 16


def test_checkpoint_of_an_older_version_has_no_rates() -> None:
    opt, schedules = SGD(nn.Linear(2, 2).parameters(), 0.1, momentum=0.9), Schedules()
    schedules.add(torchs.ExponentialLR(opt, 0.5), each_epoch=False)
    opt.step()
    schedules.step(end_of_epoch=False)
    (state,) = schedules.state()
    state["optimizer options"] = [{"momentum": 0.9}]
    again = SGD(nn.Linear(2, 2).parameters(), 0.1, momentum=0.9)
    resumed = Schedules()
    resumed.load([state])
    resumed.add(torchs.ExponentialLR(again, 0.5), each_epoch=False)
    assert again.param_groups[0]["lr"] == opt.param_groups[0]["lr"] == 0.05
