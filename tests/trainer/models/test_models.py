"""Tests of built-in models, datasets and optimizers, and of the learning rate."""

import sys
import sysconfig
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import make_datasets
from dlcontract import DatasetRef, OptimizerRef
from dljob.perf.workload.datasets import DATASETS
from dltrain.data.datasets import NAMES, SYNTHETIC, load
from dltrain.models import InputShape, build
from dltrain.optim.learning_rate import WARM_UP, rate
from dltrain.optim.optimizers import make_optimizer
from dltrain.protocol.errors import BadInputError

IMAGE32, TOKENS = InputShape((3, 32, 32), 10), InputShape((128,), 256, tokens=True)


@pytest.mark.parametrize(
    ("name", "data", "parameters"),
    [
        ("mlp", InputShape((64,), 10), 50_826),
        ("digits-cnn", InputShape((1, 8, 8), 10), 58_314),
        ("lenet", IMAGE32, 62_006),
        ("resnet18", InputShape((3, 224, 224), 1000), 11_689_512),
        ("resnet50", InputShape((3, 224, 224), 1000), 25_557_032),
        ("gpt-mini", TOKENS, 842_496),
    ],
)
def test_models_have_the_published_number_of_parameters(name: str, data: InputShape, parameters: int) -> None:
    with torch.device("meta"):
        model = build(name, data)
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize(
    ("name", "data", "logits"),
    [
        ("lenet", InputShape((1, 28, 28), 10), (2, 10)),
        ("lenet", IMAGE32, (2, 10)),
        ("resnet18", IMAGE32, (2, 10)),
        ("gpt-mini", TOKENS, (2, 128, 256)),
    ],
)
def test_models_return_logits(name: str, data: InputShape, logits: tuple[int, ...]) -> None:
    x = torch.zeros(2, *data.shape, dtype=torch.long if data.tokens else torch.float)
    assert build(name, data)(x).shape == logits


def test_attention_is_causal() -> None:
    torch.manual_seed(0)
    model = build("gpt-mini", TOKENS)
    tokens = torch.randint(256, (1, 128))
    changed = tokens.clone()
    changed[0, 100] += 1
    before, after = model(tokens), model(changed % 256)
    torch.testing.assert_close(before[:, :100], after[:, :100])
    assert not torch.allclose(before[:, 100:], after[:, 100:])


@pytest.mark.parametrize("name", NAMES)
def test_datasets_match_those_of_the_planner(name: str) -> None:
    data, planned = load(DatasetRef(name=name)), DATASETS[name]
    assert (data.train_samples, data.test_samples) == (planned.train_samples, planned.test_samples)
    assert (data.shape.shape, data.shape.classes) == (planned.shape, planned.classes)
    for x, y in (data.train(np.array([0, 5])), data.test(np.array([0, 5]))):
        assert tuple(x.shape[1:]) == planned.shape and len(y) == 2


def test_bundled_files_match_the_output_of_make_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["make_datasets.py", "--check"])
    assert make_datasets.main() == 0


def test_digits_are_scaled_exactly() -> None:
    data = load(DatasetRef(name="digits"))
    x, _ = data.train(np.arange(data.train_samples))
    assert (float(x.min()), float(x.max())) == (0.0, 1.0) and bool((x * 16 == (x * 16).round()).all())


@pytest.mark.parametrize("name", SYNTHETIC)
def test_synthetic_sample_depends_on_seed_and_index(name: str) -> None:
    one, again, other = (load(DatasetRef(name=name), seed) for seed in (1, 1, 2))
    x, y = one.train(np.array([3, 9]))
    assert torch.equal(x[1:], again.train(np.array([9]))[0]) and torch.equal(y[1:], again.train(np.array([9]))[1])
    assert not torch.equal(x, other.train(np.array([3, 9]))[0])


def test_npz_bytes_are_scaled_and_tokens_are_unchanged(tmp_path: Path) -> None:
    images = {"x": np.full((2, 1, 8, 8), 255, np.uint8), "y": np.array([0, 1])}
    tokens = {"x": np.array([[1, 2, 3]]), "y": np.array([[2, 3, 9]])}
    for name, arrays in (("images", images), ("tokens", tokens)):
        np.savez(tmp_path / f"{name}.npz", **arrays, x_test=arrays["x"], y_test=arrays["y"])
    data = load(DatasetRef(path=str(tmp_path / "images.npz")))
    assert float(data.train(np.array([0]))[0].max()) == 1.0 and data.shape == InputShape((1, 8, 8), 2)
    assert load(DatasetRef(path=str(tmp_path / "tokens.npz"))).shape == InputShape((3,), 10, tokens=True)


def test_python_source_contains_the_standard_library() -> None:
    data = load(DatasetRef(name="python-source"))
    x, y = data.train(np.array([0, 1]))
    assert torch.equal(x[0, 1:], y[0, :-1]) and y[0, -1] == x[1, 0]
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    assert bytes(x.flatten().tolist()) == b"".join(path.read_bytes() for path in modules[:9])[:256]
    assert torch.equal(data.test(np.array([0]))[0][:, 0], data.train(np.array([data.train_samples - 1]))[1][:, -1])


TOKENS_1000 = np.arange(1000) % 300


@pytest.mark.parametrize("name", ["t.npy", "t.bin", "t.uint32.bin"])
def test_token_file_is_split_into_sequences(name: str, tmp_path: Path) -> None:
    tokens = TOKENS_1000.astype(np.uint32 if "32" in name else np.uint16)
    if name.endswith(".npy"):
        np.save(tmp_path / name, tokens)
    else:
        tokens.tofile(tmp_path / name)
    data = load(DatasetRef(path=str(tmp_path / name)))
    assert (data.train_samples, data.test_samples, data.shape) == (6, 1, InputShape((128,), 300, tokens=True))
    (x, y), (held_out, _) = data.train(np.array([1])), data.test(np.array([0]))
    assert (int(x[0, 0]), int(y[0, -1]), int(held_out[0, 0])) == (128, 256, 768 % 300)


@pytest.mark.parametrize(
    "tokens",
    [TOKENS_1000.astype(np.int64), TOKENS_1000.astype(np.uint16)[:256], np.zeros((9, 999), np.uint16)],
    ids=["signed", "short", "table"],
)
def test_error_names_file_without_tokens(tokens: np.ndarray, tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", tokens)
    with pytest.raises(BadInputError, match=r"spec\.dataset\.uri: found .*t\.npy with .*; expected a one-dimensional"):
        load(DatasetRef(path=str(tmp_path / "t.npy")))


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_optimizers_match_those_of_torch(name: str) -> None:
    ref = OptimizerRef(name=name, learning_rate=0.1, weight_decay=0.01)
    models = [torch.nn.Linear(3, 2) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    extra = {"momentum": 0.9} if name == "SGD" else {}
    theirs = getattr(torch.optim, name)(models[1].parameters(), lr=0.1, weight_decay=0.01, **extra)
    for model, optimizer in zip(models, (make_optimizer(ref, models[0]), theirs), strict=True):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 3)).square().sum().backward()
            optimizer.step()
    assert torch.equal(models[0].weight, models[1].weight)


@given(base=st.floats(1e-5, 10), steps=st.integers(1, 500))
def test_learning_rate_rises_then_falls_and_is_never_zero(base: float, steps: int) -> None:
    rates = [rate(base, step, steps) for step in range(steps)]
    assert all(0 < r <= base * (1 + 1e-12) for r in rates)
    warm = max(1, round(WARM_UP * steps))
    assert all(a < b for a, b in pairwise(rates[:warm])) and all(a > b for a, b in pairwise(rates[warm:]))
