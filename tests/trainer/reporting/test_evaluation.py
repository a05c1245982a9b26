"""Tests of ``dltrain.evaluate`` in scripts without ``dltrain.init``: what arrives at the agent, and what is printed."""

import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dltrain.protocol.rank_messages import SOCKET_ENV, Analyzed, Step
from dltrain.record.run_report.document import Document
from dltrain.reporting.evaluation import evaluate
from support.trainer.listener import Listener
from support.trainer.ranks import BODIES, environment, run_ranks

WITHIN_S = 240
SCRIPT = """import numpy as np, dltrain
{first}
found = dltrain.evaluate({predictions}, np.array([0, 1, 1]), labels=["cat", "dog"]{more})
assert found.classification.accuracy == 2 / 3 and "torch" not in __import__("sys").modules
"""


def ended(script: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script]
    variables = environment(**{"RANK": "0"} | environ)
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=WITHIN_S, check=False)


def script(first: str = "", predictions: str = "np.array([[2.0, 1], [3, 0], [0, 1]])", more: str = "") -> str:
    return SCRIPT.format(first=first, predictions=predictions, more=more)


def test_without_an_agent_rank_0_prints_the_figures() -> None:
    run = ended(script())
    assert run.returncode == 0, run.stderr
    assert run.stderr.startswith("dltrain: accuracy 0.6667 on 3 held-out samples, without inputs 0.6667, worst class ")
    assert ended(script("dltrain.report(step=1)"), RANK="1", WORLD_SIZE="2").stderr == ""


@pytest.mark.parametrize(("first", "more", "step"), [("dltrain.report(step=7)", "", 7), ("", ", step=9", 9)])
def test_analysis_arrives_at_the_agent_after_the_step(first: str, more: str, step: int, tmp_path: Path) -> None:
    with Listener(tmp_path) as agent:
        run = ended(script(first, more=more), **{SOCKET_ENV: agent.path})
        assert (run.returncode, run.stderr) == (0, "")
        agent.wait_for(Analyzed, 1)
        (message,) = agent.of(Analyzed)
        assert isinstance(agent.messages[0], Step), "an agent learns from a step that the script reports"
    assert (message.rank, message.step, message.analysis.samples) == (0, step, 3)
    assert message.analysis.classification is not None
    assert message.analysis.classification.names == ("cat", "dog")


@pytest.mark.mpi
def test_ranks_of_mpi_and_of_torch_distributed_analyse_together(tmp_path: Path) -> None:
    run = run_ranks(2, BODIES / "training/scripts/analysed_ranks.py", tmp_path / "store", OMP_NUM_THREADS="1")
    assert run.code == 0, run.output
    assert run.output.count("dltrain: accuracy 1 on 3 held-out samples") == 2, run.output


@pytest.mark.mpi
def test_ranks_of_a_script_with_init_analyse_together(tmp_path: Path) -> None:
    run = run_ranks(2, BODIES / "training/scripts/evaluated_script.py", tmp_path, OMP_NUM_THREADS="1")
    assert run.code == 0 and "accuracy" in run.output, run.output
    document = Document.parse((tmp_path / "report.json").read_bytes())
    assert document.analysis is not None and document.analysis.step == document.step == 40
    classes = document.analysis.analysis.classification
    assert classes is not None and classes.names == ("setosa", "versicolor", "virginica")
    assert document.outcome is not None and document.outcome.accuracy == classes.accuracy > 0.5


def test_predictions_of_a_batch_are_freed_before_the_next_batch() -> None:
    """Predictions with a graph hold the activations of a batch. Two of them would need more memory than training."""
    earlier: list[weakref.ref[torch.Tensor]] = []

    def logits() -> torch.Tensor:
        assert not any(reference() is not None for reference in earlier), "predictions of an earlier batch exist"
        made = torch.eye(3, requires_grad=True) * 2
        earlier.append(weakref.ref(made))
        return made

    found = evaluate((logits(), torch.arange(3)) for _ in range(3))
    assert found is not None and found.samples == 9 and len(earlier) == 3


def test_other_models_are_printed_beside_the_model() -> None:
    run = ended(script(more=", other_models={'linear model': 0.75, 'trees': np.float64(0.5)}"))
    assert run.returncode == 0, run.stderr
    assert ", linear model 0.75, trees 0.5, worst class " in run.stderr


@pytest.mark.parametrize(
    ("other_models", "expected"),
    [
        ("{'trees': float('nan')}", "other_models: found nan for trees"),
        ("{str(i): 0.5 for i in range(6)}", "other_models: found 6"),
    ],
)
def test_other_models_that_cannot_be_shown_are_rejected(other_models: str, expected: str) -> None:
    assert expected in ended(script(more=f", other_models={other_models}")).stderr


def test_other_models_are_left_out_if_there_is_no_r2_to_compare() -> None:
    code = "import dltrain; f = dltrain.evaluate([1.0, 2.0], [3.0, 3.0], other_models={'trees': 0.5})\n"
    run = ended(f"{code}assert f.regression.r2 is None and f.other_models == (), f")
    assert run.returncode == 0, run.stderr


def test_labels_may_be_a_mapping_from_class_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    """Fixed bug: the keys became the names, such as those of ``model.config.id2label`` of Hugging Face."""
    found = evaluate([0, 1, 2, 2], [0, 1, 2, 0], labels={"0": "cat", 2: "dog"})  # type: ignore[dict-item]
    assert found is not None and found.classification is not None
    assert found.classification.names == ("cat", "1", "dog") and "class cat" in capsys.readouterr().err
    with pytest.raises(ValueError, match="labels: found the class 'cat' in a mapping; expected names by class number"):
        evaluate([0], [0], labels={"cat": 0})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((torch.zeros(4, 2),), "predictions: found a batch of type Tensor, and no targets"),
        (([torch.zeros(4, 2)],), "predictions: found a batch of type Tensor, and no targets"),
        (([{"logits": torch.zeros(4, 2), "labels": torch.zeros(4)}],), "predictions: found a batch of type dict"),
        (([(torch.zeros(4, 2),) * 4],), "predictions: found a batch of type tuple of 4"),
        ((SimpleNamespace(logits=torch.zeros(4, 2)), torch.zeros(4, dtype=torch.int64)), "found SimpleNamespace"),
        ((1.5, 2.5), "predictions: found float; expected an array"),
    ],
)
def test_what_is_no_batch_is_named(arguments: tuple[Any, ...], expected: str) -> None:
    """Fixed bug: errors such as ``len() of a 0-d tensor`` if the script forgot the targets."""
    with pytest.raises(ValueError, match=expected):
        evaluate(*arguments)


def test_float_targets_of_two_classes_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """``BCEWithLogitsLoss`` takes them. Fixed bug: the report had an R² of -8, without a word about the task."""
    logits, truth = torch.tensor([[2.0], [-1.0], [0.5]]), torch.tensor([[1.0], [0.0], [1.0]])
    with pytest.warns(UserWarning, match="task: found floating-point targets .* Pass task='classification'"):
        evaluate(logits, truth)
    for targets, task in ((truth, "classification"), (truth, "regression"), (truth / 2, None)):
        evaluate(logits, targets, task=task)  # type: ignore[arg-type]
    assert "accuracy 1 on 3" in capsys.readouterr().err


def test_an_index_of_names_is_rejected_as_such() -> None:
    with pytest.raises(ValueError, match="index: found values of type <U5; expected numbers"):
        evaluate([0, 1], [0, 1], index=["a.png", "b.png"])


def test_no_samples_no_analysis() -> None:
    run = ended("import dltrain; assert dltrain.evaluate(iter(())) is None")
    assert (run.returncode, run.stderr) == (0, "")
