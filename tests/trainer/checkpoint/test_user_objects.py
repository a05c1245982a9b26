"""Tests of objects passed to ``t.keep``: they are restored after a restart and when a step is repeated."""

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.optim.swa_utils import AveragedModel

from dltrain.checkpoint import user_objects
from dltrain.checkpoint.user_objects import UserObjects, decode, encode
from support.trainer.data.states import states
from support.trainer.ranks import BODIES, command, run, run_ranks


@given(states())
def test_state_round_trip(state: Any) -> None:
    tensors: dict[str, torch.Tensor] = {}
    found = decode(json.loads(json.dumps(encode(state, ("x",), tensors))), tensors.__getitem__)
    assert found == state and repr(found) == repr(state), "types and order must match too"


def test_checkpoints_of_earlier_releases_are_readable() -> None:
    text = '{"dict": [["a", {"tensor": "x.a"}], [2, {"tuple": [1, null]}], ["b", [1.5, {"dict": []}]]]}'
    tensors = {"x.a": torch.ones(2)}
    found = decode(json.loads(text), tensors.__getitem__)
    assert found == {"a": tensors["x.a"], 2: (1, None), "b": [1.5, {}]}
    named: dict[str, torch.Tensor] = {}
    assert json.dumps(encode(found, ("x",), named)) == text and list(named) == ["x.a"]


def test_tensors_of_a_state_have_unique_names() -> None:
    state = {1: torch.ones(2), "1": [torch.zeros(3), (torch.full((), 2.0), np.float32(0.5))], "1.0": torch.arange(2)}
    tensors: dict[str, torch.Tensor] = {}
    found = decode(json.loads(json.dumps(encode(state, ("x",), tensors))), tensors.__getitem__)
    assert list(tensors) == ["x.1", "x.1.0", "x.1.1.0", "x.1.0'"] and list(found) == list(state)
    assert found["1"][1][1] == 0.5 and found["1"][1][0] == 2
    assert all(torch.equal(found[key], state[key]) for key in (1, "1.0"))


class Average:
    """A typical user class whose state is its attributes."""

    def __init__(self) -> None:
        self.shadow = {"w": torch.ones(2)}

    def update(self, value: float) -> None:
        self.shadow["w"].data.mul_(0.5).add_(value)

    def state_dict(self) -> dict[str, Any]:
        return self.shadow

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state


def stored(**objects: Any) -> UserObjects:
    """Return the registry of a restarted run that resumes from a checkpoint of the given objects."""
    first, second = UserObjects(), UserObjects()
    for name, made in objects.items():
        first.add(name, made)
    state, tensors = first.state()
    second.load(7, json.loads(json.dumps(state)), {name: tensor.clone() for name, tensor in tensors.items()})
    return second


def test_objects_lists_and_dictionaries_are_restored_in_place() -> None:
    average, other = Average(), Average()
    average.update(3.0)
    objects = stored(average=average, history=[1.0, (2, "b")], best=OrderedDict(loss=0.5))
    history, best = [0.0], {"loss": 9.0, "old": 1}
    for name, made in {"history": history, "average": other, "best": best}.items():
        objects.add(name, made)
    objects.close()
    assert other.shadow["w"].tolist() == [3.5, 3.5] and history == [1.0, (2, "b")] and best == {"loss": 0.5}


def test_scheduler_of_a_plateau_continues_after_a_restart() -> None:
    """Fixed bug: ``t.keep`` refused it and named ``t.schedule``, which refuses it, too."""
    losses = [3.0, 2.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0]

    def run(opt: SGD, plateau: ReduceLROnPlateau, values: list[float]) -> list[float]:
        rates = []
        for value in values:
            plateau.step(value)
            rates.append(opt.param_groups[0]["lr"])
        return rates

    def made(rate: float) -> tuple[SGD, ReduceLROnPlateau]:
        opt = SGD([nn.Parameter(torch.zeros(1))], rate)
        return opt, ReduceLROnPlateau(opt, factor=0.5, patience=1, cooldown=1)

    expected = run(*made(0.1), losses)
    assert len(set(expected)) == 3
    for stopped in range(1, len(losses)):
        opt, plateau = made(0.1)
        before = run(opt, plateau, losses[:stopped])
        objects, (again, other) = stored(plateau=plateau), made(opt.param_groups[0]["lr"])
        objects.add("plateau", other)
        objects.close()
        assert before + run(again, other, losses[stopped:]) == expected


def test_repeated_step_changes_kept_objects_once() -> None:
    objects, average, history = UserObjects(), Average(), [1]
    objects.add("average", average)
    objects.add("history", history)
    objects.close()
    for repeated in (False, True, True, False):
        objects.begin(undoable=True)
        history.append(2)
        if repeated:
            objects.freeze()
        average.update(3.0)  # after opt.step()
        history.append(3)
        if repeated:
            objects.restore()
    assert average.shadow["w"].tolist() == [4.75, 4.75] and history == [1, 2, 3, 2, 3]


def test_repeated_step_undoes_changes_inside_lists_and_dictionaries_in_place() -> None:
    """Fixed bug: lists in dictionaries and tensors kept the changes of an abandoned step that preceded its loss."""
    seen, row, losses = torch.zeros(3), [1.0], [0.5]
    history: dict[str, Any] = {"loss": losses, "seen": seen, "rows": [(0, row)], "best": {"epoch": 0, "of": seen}}
    flat: list[Any] = [seen]
    objects = UserObjects()
    objects.add("history", history)
    objects.add("flat", flat)
    objects.close()
    before = repr(history), repr(flat)
    for _ in range(2):
        objects.begin(undoable=True)
        for again in (False, True):
            losses.append(2.0)
            seen.add_(1)
            row[0] = 3.0
            history["rows"].append((1, []))
            history["best"]["epoch"] = 7
            history["new"] = {"a": []}
            flat.append(seen)
            if not again:
                objects.freeze()
        objects.restore()
        assert (repr(history), repr(flat)) == before
        assert history["loss"] is losses and history["seen"] is seen and history["rows"][0][1] is row
        assert history["best"]["of"] is seen and flat[0] is seen


def test_large_tensors_are_copied_when_a_step_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copying them at each step would take too long, so only changes after the update are undone."""
    monkeypatch.setattr(user_objects, "UNDO_NBYTES", 2 * 4 * 3 - 1)
    history, other = {"sum": torch.zeros(3)}, [torch.zeros(3)]
    objects = UserObjects()
    objects.add("history", history)
    objects.add("other", other)
    objects.begin(undoable=True)
    history["sum"] += 1
    objects.freeze()
    history["sum"] += 1
    other[0] += 1
    objects.restore()
    assert history["sum"].tolist() == [1.0] * 3 and other[0].tolist() == [0.0] * 3


def test_containers_that_a_script_refers_to_are_restored_in_place() -> None:
    """Fixed bug: after a restart, a script that had a name for an inner list changed a list that was not saved."""
    losses, epochs, shared = [9.0], {"last": 9, "old": 1}, [0]
    history = {"loss": losses, "pair": (epochs, 1), "stages": [[], shared, shared], "late": None}
    objects = stored(
        history={"loss": [1.0, 2.0], "pair": ({"last": 3}, 2), "stages": [[4], [5], [6], [7]], "late": {"x": []}}
    )
    objects.add("history", history)
    objects.close()
    losses.append(3.0)
    epochs["last"] += 1
    saved = decode(objects.state()[0]["history"], {}.__getitem__)
    assert saved == {
        "loss": [1.0, 2.0, 3.0],
        "pair": ({"last": 4}, 2),
        "stages": [[4], [5], [6], [7]],
        "late": {"x": []},
    }, "a list in two places gets the contents of only one of them"


@pytest.mark.parametrize(
    ("name", "made", "why"),
    [
        (
            "ema",
            3.5,
            r"t\.keep: ema: found float; expected an object with state_dict\(\) and load_state_dict\(\), a list",
        ),
        ("ema", nn.Linear, "t.keep: ema: found type; expected"),
        ("rate", StepLR(SGD(nn.Linear(1, 1).parameters(), 0.1), 3), r"\(StepLR\); expected it in t\.schedule"),
        ("ema", {"of": [set()]}, r"t\.keep: ema: found set in its state\['of'\]\[0\]; expected tensors, numbers"),
        ("ema", {(1, 2): 3}, r"found a key of tuple in its state"),
        ("ema", [torch.zeros(2, dtype=torch.float8_e4m3fnuz)], r"found a tensor of dtype torch\.float8_e4m3fnuz"),
        ("history", [1], r"t\.keep: history: found a second object with this name"),
        ("new", [1], r"t\.keep: new: found a checkpoint of step 7 that holds ema, history; expected new in it"),
        (
            "ema",
            nn.Linear(4, 2),
            r"t\.keep: ema: found a Linear that cannot load its state from the checkpoint of step 7",
        ),
    ],
)
def test_object_that_cannot_be_kept_is_a_one_line_error(name: str, made: Any, why: str) -> None:
    objects = stored(ema=nn.Linear(2, 2), history=[])
    objects.add("history", [])
    with pytest.raises(ValueError, match=why):
        objects.add(name, made)


def test_checkpoint_with_unknown_objects_is_rejected() -> None:
    objects = stored(ema=AveragedModel(nn.Linear(2, 2)), history=[], best={})
    objects.add("history", [])
    with pytest.raises(
        ValueError, match=r"t\.steps: found a checkpoint of step 7 that holds best, ema; expected only objects"
    ):
        objects.close()
    fresh = UserObjects()
    fresh.load(7, {}, {})  # a checkpoint of a version without kept objects
    fresh.close()
    with pytest.raises(ValueError, match=r"t\.keep: late: found a call after t\.steps has begun"):
        fresh.add("late", [])


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 3])
def test_script_with_grad_scaler_resumes_bit_for_bit(ranks: int, tmp_path: Path) -> None:
    ended = run_ranks(ranks, BODIES / "training/user_objects.py", str(ranks), tmp_path, "resume")
    assert ended.output.count("resumed: off by 0.0e+00") == 2, ended.output
    assert "in the memory of rank 0's pod" in ended.output


@pytest.mark.mpi
def test_kept_objects_survive_a_killed_rank_exactly(tmp_path: Path) -> None:
    ended = run(command(3, BODIES / "training/user_objects.py", "3", tmp_path, "kill", ulfm=True))
    assert "ranks (0, 2) continue from step 13" in ended.output and "killed: off by" in ended.output, ended.output
