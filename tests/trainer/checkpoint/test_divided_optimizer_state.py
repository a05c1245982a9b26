"""Tests of optimizer state that ranks divide: checkpoints contain all of it, or it is rejected after the first step."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from dltrain.checkpoint.state import capture, check_optimizer_state
from dltrain.protocol.errors import MisuseError
from dltrain.protocol.rank_messages import EXIT_BAD_INPUT, EXIT_OK, EXIT_STOPPED
from support.trainer.ranks import command, run

SCRIPT = '''
import sys, torch, dltrain
from torch.optim import Adam, SGD
FOLDER, STRATEGY, KIND, STOP = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])


class Counting(torch.optim.Optimizer):
    """Decide the size of an update by numbers and strings in its state."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, phase="first", sum=torch.zeros_like(p), last={"norms": [(1.0, None)]})
                state["step"] += 1
                state["sum"] += p.grad
                rate = group["lr"] / state["step"] / (1 + state["last"]["norms"][0][0])
                p -= state["sum"] * (2 * rate if state["phase"] == "even" else rate)
                state["last"] = {"norms": [(0.5 / state["step"], None)]}
                state["phase"] = "odd" if state["step"] % 2 else "even"


class Common(SGD):
    def step(self, closure=None):
        super().step()
        self.state.setdefault("common", {"steps": []})["steps"].append(t.step)


class Slow(Adam):
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["slow"] = p.detach().clone()


def net():
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3))


def loss_of(outputs, targets):
    return ((outputs - targets) ** 2).mean()


t = dltrain.init(batch=10, epochs=2, checkpoints=FOLDER, strategy=STRATEGY)
torch.manual_seed(0)
x, y = torch.randn(100, 4), torch.randn(100, 3)
model = t.create(net)
KINDS = {"Counting": Counting, "Common": Common, "Slow": Slow, "Adafactor": torch.optim.Adafactor}
model, opt = t.wrap(model, KINDS[KIND](model.parameters(), 0.1), sample=x[:2])
for a, b in t.steps(t.loader((x, y))):
    t.run(model, a, b, loss_of)
    opt.step()
    if t.step == STOP:
        t.reporter.stop.set()
weights = t.parallel.weights(model)
if t.rank == 0:
    print("trained", *(tensor.tolist() for tensor in weights.values()))
print("common", t.step, opt.state.get("common"))
'''


def train(script: Path, folder: Path, strategy: str, kind: str, stop: int, code: int) -> str:
    ended = run(command(2, script, str(folder), strategy, kind, str(stop)), OMP_NUM_THREADS="1")
    assert ended.code == code, ended.output
    return ended.output


@pytest.mark.mpi
@pytest.mark.parametrize("strategy", ["Pipeline", "Tensor"])
def test_numbers_and_strings_of_a_split_model_resume_exactly(strategy: str, tmp_path: Path) -> None:
    """Fixed bug: checkpoints contained only the tensors of the optimizer's state."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)

    def trained(folder: str, stop: int, code: int) -> list[str]:
        return re.findall("^trained.*", train(script, tmp_path / folder, strategy, "Counting", stop, code), re.M)

    whole = trained("whole", 0, EXIT_OK)
    assert len(whole) == 1
    trained("stopped", 7, EXIT_STOPPED)
    assert trained("stopped", 0, EXIT_OK) == whole


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("strategy", "kind", "found"),
    [
        (
            "Tensor",
            "Adafactor",
            r"Adafactor: found a tensor of shape .* in its state of parameter 0\.weight\['row_var'\]",
        ),
        ("Pipeline", "Common", r"Common: found state without a parameter, 'common'; expected only state of parameters"),
        (
            "Optimizer",
            "Common",
            r"Common: found state without a parameter, 'common'; expected only state of parameters",
        ),
        ("Optimizer", "Slow", r"Slow: found 'slow' in its state of a parameter; expected only step, momentum_buffer"),
    ],
)
def test_state_that_ranks_cannot_save_ends_the_run_after_its_first_step(
    strategy: str, kind: str, found: str, tmp_path: Path
) -> None:
    """Fixed bug: such state was missing after a resume, or the first checkpoint failed."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    output = train(script, tmp_path / "saved", strategy, kind, 0, EXIT_BAD_INPUT)
    assert re.search(found, output), output
    assert "step 2/20" not in output and not list((tmp_path / "saved").rglob("step-*"))


@pytest.mark.mpi
def test_state_without_a_parameter_resumes_with_sharded_parameters(tmp_path: Path) -> None:
    """Fixed bug: the first checkpoint failed if such state was no dictionary."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace('{"steps": []})["steps"]', "[])"))
    train(script, tmp_path / "saved", "Sharded", "Common", 7, EXIT_STOPPED)
    output = train(script, tmp_path / "saved", "Sharded", "Common", 0, EXIT_OK)
    assert output.count(f"common 20 {list(range(20))}") == 2, output


@pytest.mark.mpi
def test_state_without_a_parameter_of_another_strategy_is_named(tmp_path: Path) -> None:
    """Fixed bug: a resume from such a checkpoint failed with a TypeError."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    train(script, tmp_path / "saved", "Data", "Common", 7, EXIT_STOPPED)
    for strategy in ("Pipeline", "Optimizer"):
        output = train(script, tmp_path / "saved", strategy, "Common", 0, EXIT_BAD_INPUT)
        assert "Common: found state without a parameter, 'common'; expected" in output, output


def test_ranks_that_divide_the_model_save_no_tensors_without_a_parameter() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.state["common"] = {"sum": torch.ones(2)}  # type: ignore[index]
    check_optimizer_state(optimizer, model, divided=False)
    with pytest.raises(MisuseError, match=r"^SGD: found tensors in its state without a parameter; expected"):
        check_optimizer_state(optimizer, model, divided=True)


def test_gathered_state_is_copied_except_for_the_tensors_that_are_copies() -> None:
    """Fixed bug: later steps could change tensors in lists while a checkpoint was written."""
    single, inner, common = torch.zeros(2), torch.zeros(2), torch.zeros(2)
    state = {0: {"sum": single, "sums": [inner]}, "common": {"sum": common}}
    taken = capture(1, {"w": single}, {"state": state, "param_groups": []}, {}, copied=True)
    inner += 1
    common += 1
    assert {name: tensor.tolist() for name, tensor in taken.optimizer.items()} == {
        key: [0.0, 0.0] for key in ["0.sum", "0.sums.0", "others.common.sum"]
    }
    assert taken.optimizer["0.sum"].data_ptr() == taken.model["w"].data_ptr() == single.data_ptr()


def test_state_of_a_parameter_that_is_no_dictionary_is_a_one_line_error() -> None:
    model = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.state[model.weight] = 3
    with pytest.raises(MisuseError, match=r"^SGD: found int in its state of parameter weight; expected"):
        check_optimizer_state(optimizer, model, divided=False)
