"""Tests of the state of optimizers that is not a tensor for each parameter: it is saved, or rejected after a step."""

import collections
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from dltrain.checkpoint.state import capture, check_optimizer_state, restore
from dltrain.checkpoint.store import Checkpoints, Snapshot, identity
from dltrain.parallel.placement import Placement
from dltrain.protocol.errors import MisuseError
from dltrain.protocol.rank_messages import EXIT_BAD_INPUT, EXIT_OK, EXIT_STOPPED
from dltrain.train.saving import LoadingTarget
from support.trainer.ranks import alone, command, run

SHAMPOO = '''
class Shampoo(torch.optim.Optimizer):
    """Keep one statistic for each dimension of a parameter in a list, as Shampoo and SOAP do."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "norm": torch.linalg.vector_norm, "dtype": torch.float32})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, sums=[torch.zeros(n, n) for n in p.shape], last={"norms": (0.0, None)}, EXTRA)
                state["step"] += 1
                for d, total in enumerate(state["sums"]):
                    rows = p.grad.transpose(0, d).reshape(p.shape[d], -1)
                    total += rows @ rows.T
                size = group["norm"](p.grad, dtype=group["dtype"])
                state["last"] = {"norms": (float(size), state["last"]["norms"][0])}
                p -= group["lr"] * p.grad / (1 + state["sums"][0].trace()) / (1 + state["last"]["norms"][1])
'''
SCRIPT = (
    """
import sys, torch, dltrain
FOLDER, STOP = sys.argv[1], int(sys.argv[2])
t = dltrain.init(batch=10, epochs=2, checkpoints=FOLDER)
"""
    + SHAMPOO
    + """
x, y = torch.randn(100, 4), torch.randn(100, 3)
model = torch.nn.Linear(4, 3)
model, opt = t.wrap(model, Shampoo(model.parameters(), 0.1))
for a, b in t.steps(t.loader((x, y))):
    ((model(a) - b) ** 2).mean().backward()
    opt.step()
    if t.step == STOP:
        t.reporter.stop.set()
if t.rank == t.size - 1:  # rank 0 reads the checkpoint and sends it to this rank
    state = " ".join(str([opt.state[p] for p in model.parameters()]).split())  # another rank may write between lines
    print("trained", model.weight.tolist(), state)
"""
)


@pytest.mark.mpi
def test_optimizer_with_lists_of_tensors_resumes_exactly(tmp_path: Path) -> None:
    """Fixed bug: the state failed in the thread that writes checkpoints, at the first checkpoint."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace(", EXTRA", ""))

    def train(folder: str, stop: int, code: int) -> list[str]:
        ended = run(command(2, script, str(tmp_path / folder), str(stop)), OMP_NUM_THREADS="1")
        assert ended.code == code, ended.output
        return re.findall(r"^trained.*", ended.output, re.MULTILINE)

    whole = train("whole", 0, EXIT_OK)
    assert len(whole) == 1 and "norms" in whole[0]
    assert train("stopped", 7, EXIT_STOPPED) == []
    assert train("stopped", 0, EXIT_OK) == whole


@pytest.mark.mpi
def test_optimizer_state_that_no_checkpoint_can_hold_ends_the_run_after_its_first_step(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("EXTRA", "history=[torch.Generator()]"))
    ended = run(alone(script, str(tmp_path / "saved"), "0"))
    assert ended.code == EXIT_BAD_INPUT, ended.output
    assert re.search(
        r"Shampoo: found Generator in its state of parameter weight\['history'\]\[0\]; expected tensors", ended.output
    ), ended.output
    assert "step 2/20" not in ended.output and not list((tmp_path / "saved").rglob("step-*"))


def optimizer(state: dict[str, Any], **options: Any) -> SGD:
    """Return an optimizer of one parameter with additional state and options."""
    parameter = nn.Parameter(torch.ones(2))
    opt = SGD([parameter], lr=0.1)
    opt.param_groups[0].update(options)
    opt.state[parameter] = state
    return opt


STATES: dict[str, dict[str, Any]] = {
    "list of tensors": {"sums": [torch.ones(2), torch.zeros(3)]},
    "names with dots": {"a": {"b": torch.ones(2)}, "a.b": torch.zeros(2), "a.c": [torch.ones(1)]},
    "dictionary": {"of": {"sum": torch.ones(2), 3: [(1, 2.5, None, True)]}, "step": 5},
    "tuple": {"pair": (1, torch.ones(2))},
    "strings": {"phase": "warm-up", "of": {"a": ["b", ("c", "")]}},
    "plain": {"step": 7, "buffer": None, "rate": 0.5, "momentum_buffer": torch.ones(2)},
    "numpy number": {"scale": 0.5},
}


@pytest.mark.parametrize("name", STATES)
def test_state_round_trip(name: str, tmp_path: Path) -> None:
    state = {"scale": np.float32(0.5)} if name == "numpy number" else STATES[name]
    opt = optimizer(state)
    store = Checkpoints(tmp_path, identity("m", {}), keep=1)
    check_optimizer_state(opt, nn.Linear(1, 1), divided=False)
    store.save(capture(1, {}, opt.state_dict(), {}))
    found = store.load()
    assert found is not None
    loaded: dict[str, Any] = {}
    restore(found.snapshot(), lambda weights: None, loaded.update)
    assert flat(loaded["state"][0]) == flat(STATES[name])
    Placement().load_optimizer(opt, loaded)
    (own,) = opt.state.values()
    assert flat(own) == flat(STATES[name])


def flat(value: Any) -> Any:
    """Return ``value`` with lists in place of tensors, to compare it regardless of the order of keys."""
    if isinstance(value, dict):
        return {key: flat(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(flat, value))
    return ["tensor", value.tolist()] if isinstance(value, Tensor) else value


def test_state_that_belongs_to_no_parameter_is_restored() -> None:
    opt = optimizer({"step": 1})
    opt.state["global"] = {"count": 3, "sum": [torch.ones(2)]}
    taken = capture(1, {}, opt.state_dict(), {})
    loaded: dict[str, Any] = {}
    restore(Snapshot(1, {}, taken.optimizer, json.loads(json.dumps(taken.state))), lambda _: None, loaded.update)
    assert flat(loaded["state"]) == flat({0: {"step": 1}, "global": {"count": 3, "sum": [torch.ones(2)]}})


def test_later_steps_do_not_change_the_captured_lists() -> None:
    total = torch.zeros(2)
    taken = capture(1, {}, optimizer({"sums": [total]}).state_dict(), {})
    total += 1
    assert [tensor.tolist() for tensor in taken.optimizer.values()] == [[0.0, 0.0]]


def test_checkpoint_of_an_older_version_is_restored() -> None:
    saved = {"groups": [{"lr": 0.1, "params": [0]}], "scalars": {"0": {"step": 3, "pair": [1, 2], "d": {"a": 1}}}}
    loaded: dict[str, Any] = {}
    restore(Snapshot(1, {}, {"0.sum": torch.ones(2)}, {"optimizer": saved}), lambda _: None, loaded.update)
    assert flat(loaded["state"][0]) == flat({"sum": torch.ones(2), "step": 3, "pair": [1, 2], "d": {"a": 1}})


@pytest.mark.parametrize(
    ("state", "options", "found"),
    [
        ({"a": np.ones(2)}, {}, r"found ndarray in its state of parameter weight\['a'\]; expected tensors"),
        ({"a": {"b": [1j]}}, {}, r"found complex in its state of parameter weight\['a'\]\['b'\]\[0\]"),
        ({"h": collections.deque([1.0])}, {}, r"found deque in its state of parameter weight\['h'\]"),
        ({3: torch.ones(1)}, {}, r"found a key of int in its state of parameter weight"),
        ({"a": {(1, 2): 3}}, {}, r"found a key of tuple in its state of parameter weight\['a'\]"),
        ({"q": torch.zeros(2, dtype=torch.float8_e4m3fnuz)}, {}, r"found a tensor of dtype torch\.float8_e4m3fnuz"),
        ({}, {"names": {"a"}}, r"found set in its parameter group 0\['names'\]; expected numbers, strings"),
        ({}, {"a": [{"b": 1j}]}, r"found complex in its parameter group 0\['a'\]\[0\]\['b'\]"),
    ],
)
def test_state_that_no_checkpoint_can_hold_is_a_one_line_error(
    state: dict[str, Any], options: dict[str, Any], found: str
) -> None:
    model = nn.Linear(2, 2, bias=False)
    opt = SGD(model.parameters(), lr=0.1)
    opt.param_groups[0].update(options)
    opt.state[model.weight] = state
    with pytest.raises(MisuseError, match=f"^SGD: {found}"):
        check_optimizer_state(opt, model, divided=False)
    with pytest.raises(MisuseError, match=r"^optimizer: found .*; expected"):
        capture(1, {}, opt.state_dict(), {})


def test_ranks_that_divide_the_state_save_no_tensors_inside_lists() -> None:
    opt = optimizer({"sums": [torch.ones(2)], "step": 3, "norms": [1.0, 2.0]})
    check_optimizer_state(opt, nn.Linear(1, 1), divided=False)
    with pytest.raises(MisuseError, match=r"^SGD: found tensors inside a list .* state of parameter 0\['sums'\]; exp"):
        check_optimizer_state(opt, nn.Linear(1, 1), divided=True)


def square(rate: float) -> float:
    return rate * rate


@pytest.mark.parametrize("option", [square, len, nn.Linear, torch.bfloat16, torch.device("cpu")])
def test_options_that_never_change_are_those_of_the_script(option: Callable[..., Any] | torch.dtype) -> None:
    opt = optimizer({}, kind=option, betas=(0.5, 0.6))
    check_optimizer_state(opt, nn.Linear(1, 1), divided=False)
    saved = json.loads(json.dumps(capture(1, {}, opt.state_dict(), {}).state["optimizer"]))
    again = optimizer({}, kind=option, betas=(0.1, 0.2))
    target = LoadingTarget(Placement(), nn.Linear(1, 1), again)
    target.check({"optimizer": saved})
    target.load_optimizer({"state": {}, "param_groups": saved["groups"]})
    assert again.param_groups[0]["kind"] == option and again.param_groups[0]["betas"] == (0.5, 0.6)
