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


@pytest.mark.parametrize("stopped_after", [10, STEPS])
def test_one_cycle_gets_the_length_of_a_training_that_is_longer_after_a_restart(stopped_after: int) -> None:
    """Fixed bug: after a change of the epochs, the script failed with torch's error at the end of the old length."""

    def run(steps: int, last: int, first: int = 0, saved: dict[str, Any] | None = None) -> tuple[list[float], Any]:
        opt, schedules, rates = SGD(nn.Linear(2, 2).parameters(), 0.1, momentum=0.9), Schedules(), list[float]()
        if saved:
            opt.load_state_dict(saved["optimizer"])
            schedules.load(json.loads(saved["schedules"]))
        schedules.add(torchs.OneCycleLR(opt, 0.5, total_steps=steps), each_epoch=False)
        for _ in range(first, last):
            opt.step()
            schedules.step(end_of_epoch=False)
            rates.append(opt.param_groups[0]["lr"])
        return rates, {"optimizer": opt.state_dict(), "schedules": json.dumps(schedules.state())}

    _, saved = run(STEPS, stopped_after)
    found, _ = run(2 * STEPS, 2 * STEPS, stopped_after, saved)
    assert found == run(2 * STEPS, 2 * STEPS)[0][stopped_after:]


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
