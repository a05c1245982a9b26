"""Tests of the counts of a whole step: calls of functions and operators, which must leave the script's own modes alone."""

import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from support.trainer.observed_scripts import loop, observed, python

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack  # noqa: E402

from dltrain.observation.host_counting import FunctionCounts, host_calls, operator_counts  # noqa: E402

MODE = """
from torch.utils._python_dispatch import TorchDispatchMode
class Mode(TorchDispatchMode):
    seen = 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        Mode.seen += 1
        return func(*args, **(kwargs or {}))
"""
PERCEPTRON = "model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))"


class Own(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode of a script."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


def test_operators_of_all_passes_are_counted_by_kind() -> None:
    weight = torch.nn.Parameter(torch.ones(3, 4))
    counts = operator_counts()
    (torch.ones(2, 3) @ weight).t().relu().sum().backward()
    with torch.no_grad():
        weight.add_(weight.grad, alpha=-0.1)
    assert counts.end() and not _get_current_dispatch_mode_stack()
    found = host_calls((9, 4), counts.counts, 1)
    assert found is not None and (found["updates"], found["functions"], found["different"]) == (1, 9, 4)
    assert found["products"] == 2, "one in the forward pass, and one for the gradient of the weights"
    assert found["views"] >= 2 and found["operators"] >= 5 and found["convolutions"] == found["messages"] == 0
    torch.ones(2).relu()
    assert host_calls((9, 4), counts.counts, 1) == found, "nothing is counted after the end"


def test_modes_of_the_script_stay_as_they_are() -> None:
    counts = operator_counts()
    with Own() as outlives:
        assert counts.end(), "the last mode is the script's"
        torch.ones(2).relu()
        assert _get_current_dispatch_mode_stack() == [outlives] and outlives.seen == 2
    assert not _get_current_dispatch_mode_stack()
    with Own() as first:
        unknown = operator_counts()
    assert not _get_current_dispatch_mode_stack() and first.seen == 0
    assert unknown.counts is None and unknown.end() and host_calls((1, 1), unknown.counts, 1) is None


def test_counts_neither_begin_nor_end_in_a_backward_pass() -> None:
    """Autograd restores the modes that it began with: a mode that was removed would come back."""
    weight, within = torch.nn.Parameter(torch.ones(2)), list[Any]()
    before = operator_counts()
    weight.register_post_accumulate_grad_hook(lambda _: within.extend((operator_counts(), before.end())))
    weight.sum().backward()
    assert within[0].counts is None and within[1] is False
    assert before.end() and before.counts is None and not _get_current_dispatch_mode_stack()


def test_counts_end_in_the_thread_in_which_they_began() -> None:
    found: list[object] = []
    functions, operators = FunctionCounts(), operator_counts()
    other = threading.Thread(target=lambda: found.extend((functions.end(), operators.end())))
    other.start()
    other.join()
    assert found == [None, False] and sys.getprofile() is None, "the next call has ended it"
    assert operators.end() and operators.counts is None and not _get_current_dispatch_mode_stack()


def test_functions_are_counted_once_each_and_the_profile_of_a_script_stays() -> None:
    def inner() -> int:
        return len("word")

    counts = FunctionCounts()
    for _ in range(5):
        inner()
    found = counts.end()
    assert found is not None and found[0] >= 10 and found[1] >= 1 and sys.getprofile() is None

    def own(*_: object) -> None:
        pass

    sys.setprofile(own)
    try:
        assert FunctionCounts().end() is None and sys.getprofile() is own
    finally:
        sys.setprofile(None)
    late = FunctionCounts()
    sys.setprofile(own)
    try:
        assert late.end() is None and sys.getprofile() is own
    finally:
        sys.setprofile(None)


def test_a_fork_counts_nothing() -> None:
    functions, operators = FunctionCounts(), operator_counts()
    child = os.fork()
    if child == 0:
        os._exit(sys.getprofile() is not None or bool(_get_current_dispatch_mode_stack()))
    _, status = os.waitpid(child, 0)
    assert functions.end() is not None and operators.end()
    assert os.waitstatus_to_exitcode(status) == 0


def test_structure_has_the_calls_of_the_whole_step(tmp_path: Path) -> None:
    found, _ = observed(tmp_path, loop())
    host = found[0].host
    assert host is not None and host.updates == 1 and host.messages == 0
    assert host.products == 5, "two in the forward pass, and three in the backward pass"
    assert host.functions > host.different > 20
    twice, _ = observed(tmp_path, loop(after="for _ in range(20): torch.ones(3).mul_(2)"))
    more = twice[0].host
    assert more is not None and more.operators == host.operators + 40 and more.functions >= host.functions + 40


@pytest.mark.parametrize("part", ["loss", "step"])
def test_script_with_modes_of_its_own_computes_the_same(tmp_path: Path, part: str) -> None:
    """A mode in each step is above that of the counts. One around the updates is not counted, but works as before."""
    if part == "loss":
        script = loop(
            model=PERCEPTRON + MODE,
            after="with Mode(): nn.functional.cross_entropy(model(x), y)\n    print(Mode.seen)",
        )
    else:
        script = loop(model=PERCEPTRON + MODE, after="mode.__exit__(None, None, None); print(Mode.seen)")
        script = script.replace("    opt.zero_grad()", "    mode = Mode(); mode.__enter__()\n    opt.zero_grad()")
    found, ended = observed(tmp_path, script)
    assert ended.stdout == python(script, None).stdout
    assert (found[0].host is not None) == (part == "loss")
