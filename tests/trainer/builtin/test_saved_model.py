"""Tests of the files with which a trained built-in model is used: predict.py gives what the model itself gives."""

import json
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from dlcontract import CheckpointRef, DatasetRef, ModelRef
from dltrain.builtin import saved_model
from dltrain.data.datasets import Dataset, load_by_name
from dltrain.models import build
from dltrain.protocol.volume_layout import job_directory
from support.trainer.plans import make_plan

Script = dict[str, Any]
CASES = [
    ("mlp", "iris"),
    ("digits-cnn", "digits"),
    ("lenet", "digits-32"),
    ("resnet18", "synthetic-images"),
    ("gpt-mini", "synthetic-tokens"),
]


def saved(model: str, dataset: str, folder: Path) -> tuple[Path, torch.nn.Module, Dataset]:
    """Save a new model with its files as a job does. Return its folder, the model and its data."""
    plan = make_plan(
        1, model=ModelRef(name=model), dataset=DatasetRef(name=dataset),
        checkpoint=CheckpointRef(enabled=True, directory=str(folder)),
    )  # fmt: skip
    data = load_by_name(dataset)
    torch.manual_seed(1)
    network = build(model, data.shape).eval()
    saved_model.write(plan, data)
    found = job_directory(plan)
    for step in ("step-0000000001", "step-0000000002"):
        (found / step).mkdir()
        scale = 0.0 if step.endswith("1") else 1.0
        save_file({k: v * scale for k, v in network.state_dict().items()}, found / step / "model.safetensors")
    return found, network, data


def script(folder: Path) -> Script:
    return runpy.run_path(str(folder / "predict.py"))


def run_main(folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["predict.py", *arguments])
    runpy.run_path(str(folder / "predict.py"), run_name="__main__")


@pytest.mark.parametrize(("model", "dataset"), CASES[:2])
def test_script_loads_the_newest_checkpoint(model: str, dataset: str, tmp_path: Path) -> None:
    folder, network, data = saved(model, dataset, tmp_path)
    x, _ = data.test(np.arange(5))
    with torch.no_grad():
        assert torch.equal(script(folder)["load"]()(x), network(x))


@pytest.mark.long  # torch.export takes seconds.
@pytest.mark.parametrize(("model", "dataset"), CASES)
def test_exported_model_gives_the_logits_of_the_trained_one(model: str, dataset: str, tmp_path: Path) -> None:
    folder, network, data = saved(model, dataset, tmp_path)
    x, _ = data.test(np.arange(5))
    with torch.no_grad():
        expected = network(x)
    assert script(folder)["export"]() == folder / "model.pt2"
    exported: Callable[[torch.Tensor], torch.Tensor] = torch.export.load(folder / "model.pt2").module()
    for count in (1, 5):
        assert torch.allclose(exported(x[:count]), expected[:count], atol=1e-4)
    shutil.rmtree(folder / "step-0000000002")
    shutil.rmtree(folder / "step-0000000001")
    with torch.no_grad():
        assert torch.allclose(script(folder)["load"]()(x), expected, atol=1e-4), "the exported model, without weights"


def test_classes_of_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, network, data = saved("mlp", "iris", tmp_path)
    x, _ = data.test(np.arange(3))
    np.savez(tmp_path / "inputs.npz", x=x.numpy())
    run_main(folder, monkeypatch, str(tmp_path / "inputs.npz"))
    with torch.no_grad():
        probabilities = network(x).softmax(-1)
    names = ("setosa", "versicolor", "virginica")
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path}/inputs.npz\t{n}\t{names[int(row.argmax())]}\t{float(row.max()):.4f}"
        for n, row in enumerate(probabilities)
    ]
    assert script(folder)["predict"](x[0].numpy())[0][0] == names[int(probabilities[0].argmax())], "one sample"
    for wrong in (["inputs.npz"], ["--text", "a"], []):
        with pytest.raises((SystemExit, FileNotFoundError)):
            run_main(folder, monkeypatch, *wrong)
    with pytest.raises(SystemExit, match=r"inputs: found samples of shape \(3,\); expected \(4,\)"):
        script(folder)["predict"](np.zeros((2, 3)))
    with pytest.raises(SystemExit, match=r"expected \.npy or \.npz"):
        script(folder)["read_inputs"](Path("a.png"), {"shape": [4]})


def test_whole_numbers_are_scaled_as_in_the_training(tmp_path: Path) -> None:
    folder, _, data = saved("digits-cnn", "digits", tmp_path)
    found = json.loads((folder / "model.json").read_text())
    assert (found["shape"], found["classes"], found["labels"], found["scale"]) == ([1, 8, 8], 10, [], 1 / 16)
    x, _ = data.test(np.arange(4))
    raw = (x.numpy() * 16).astype(np.uint8)
    assert torch.equal(script(folder)["prepared"](raw, found), x)
    assert torch.equal(script(folder)["prepared"](x.numpy(), found), x)


def test_image_file(tmp_path: Path) -> None:
    from PIL import Image

    folder, _, _ = saved("digits-cnn", "digits", tmp_path)
    Image.new("RGB", (40, 30), (255, 255, 255)).save(tmp_path / "white.png")
    pixels = script(folder)["read_inputs"](tmp_path / "white.png", script(folder)["about"]())
    assert pixels.shape == (1, 8, 8) and pixels.min() == pixels.max() == 1


@pytest.mark.long  # Twenty passes of a language model; the exported models above include one.
def test_text_of_a_language_model(tmp_path: Path) -> None:
    folder, _, _ = saved("gpt-mini", "python-source", tmp_path)
    text = script(folder)["write_text"]("def main(", 20)
    assert text.startswith("def main(") and len(text) > 9


def test_nothing_is_written_without_checkpoints_or_to_a_folder_that_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = load_by_name("iris")
    saved_model.write(make_plan(1, checkpoint=CheckpointRef(enabled=False, directory=str(tmp_path))), data)
    assert not list(tmp_path.iterdir()) and not caplog.records
    (tmp_path / "file").touch()
    saved_model.write(make_plan(1, checkpoint=CheckpointRef(enabled=True, directory=str(tmp_path / "file"))), data)
    assert "cannot write model.json and predict.py" in caplog.text


def test_without_weights_the_script_says_what_it_needs(tmp_path: Path) -> None:
    folder, _, _ = saved("mlp", "iris", tmp_path)
    for step in folder.glob("step-*"):
        shutil.rmtree(step)
    with pytest.raises(SystemExit, match=r"found no model\.safetensors; expected one here or in step-\*"):
        script(folder)["load"]()
