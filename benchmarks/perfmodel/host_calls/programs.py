"""Small training programs whose calls are measured: each function returns a function that makes a training step.

Tensors are tiny, so that a step spends its time in Python, in the overhead of operators, and in the update. None of the
programs is one of ``examples``, for which the constants must hold without having been fitted to them.
"""

import io
import json
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from benchmarks.perfmodel.host_calls.distributed import data_parallel, reduced_metrics, sharded
from benchmarks.perfmodel.host_calls.loop import CLASSES, SAMPLES, Optimizer, Step, loop
from torch import Tensor, nn
from torch.distributions import Categorical, Normal
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset


def perceptron(depth: int, width: int, make: Optimizer) -> Step:
    layers = [each for _ in range(depth) for each in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(width, CLASSES))
    return loop(model, make(model.parameters()), width)


def clipped() -> Step:
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.1), nn.LayerNorm(32), nn.Linear(32, CLASSES))
    optimizer = torch.optim.NAdam(model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10**6)
    optimizer.step()

    def then(loss: Tensor) -> float:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        schedule.step()
        return loss.item()

    return loop(model, optimizer, 32, then=then)


def convolutions(count: int, channels: int) -> Step:
    layers = [each for _ in range(count) for each in (nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * channels, CLASSES))
    return loop(model, torch.optim.SGD(model.parameters(), 0.01, momentum=0.9), channels, 4, 4)


def normed_convolutions() -> Step:
    parts: tuple[nn.Module, ...] = (nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
    model = nn.Sequential(*parts, nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4, CLASSES))
    return loop(model, torch.optim.Adam(model.parameters()), 1, 8, 8)


class _Attention(nn.Module):
    """A block of a language model, written as in nanoGPT."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        q, k, v = (
            each.view(samples, length, 2, width // 2).transpose(1, 2)
            for each in self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        )
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(samples, length, width))
        mixed: Tensor = x + self.down(functional.gelu(self.up(self.norms[1](x))))
        return mixed


def language_model() -> Step:
    model = nn.Sequential(nn.Embedding(32, 16), _Attention(16), _Attention(16), nn.Linear(16, 32))
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(32, (64, 9))

    def step() -> None:
        batch = tokens[torch.randint(64, (4,))]
        loss = functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step


def encoder() -> Step:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(64, CLASSES))
    return loop(model, torch.optim.Adam(model.parameters()), 4, 16)


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTMCell(8, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        state = (torch.zeros(len(x), 8), torch.zeros(len(x), 8))
        for i in range(x.shape[1]):
            state = self.cell(x[:, i], state)
        scores: Tensor = self.out(state[0])
        return scores


def recurrent() -> Step:
    model = _Recurrent()
    return loop(model, torch.optim.Adagrad(model.parameters()), 6, 8)


class _Records(Dataset[dict[str, Any]]):
    """Samples that Python decodes."""

    def __init__(self) -> None:
        self.lines = [json.dumps({"text": [(i * k) % 97 for k in range(16)], "label": i % 10}) for i in range(800)]

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> dict[str, Any]:
        record = json.loads(self.lines[index])
        return {"x": torch.tensor([each / 97 for each in record["text"]]), "y": record["label"]}


def _loaded(data: Dataset[Any], batch: int) -> Iterator[Any]:
    loader = DataLoader(data, batch_size=batch, shuffle=True, drop_last=True)
    while True:
        yield from loader


def records() -> Step:
    model, batches = nn.Linear(16, CLASSES), _loaded(_Records(), 16)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step() -> None:
        batch = next(batches)
        functional.cross_entropy(model(batch["x"]), batch["y"]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step


def tensors(batch: int) -> Step:
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, CLASSES))
    optimizer = torch.optim.Adam(model.parameters())
    batches = _loaded(TensorDataset(torch.randn(1600, 16), torch.randint(CLASSES, (1600,))), batch)

    def step() -> None:
        x, y = next(batches)
        functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step


def element_wise() -> Step:
    weight = nn.Parameter(torch.randn(16))
    x, optimizer = torch.randn(8, 16), torch.optim.SGD([weight], 0.01)

    def step() -> None:
        y = x
        for _ in range(8):
            y = torch.sin(y * weight + 0.1) / (1 + y.abs())
        (y**2).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step


def two_optimizers() -> Step:
    encode, decode = nn.Linear(32, 8), nn.Linear(8, 32)
    optimizers = [torch.optim.AdamW(each.parameters()) for each in (encode, decode)]
    x = torch.randn(SAMPLES, 32)

    def step() -> None:
        batch = x[torch.randint(SAMPLES, (16,))]
        for optimizer in optimizers:
            loss = functional.mse_loss(decode(functional.softplus(encode(batch))), batch)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    return step


class _Event:
    """A callback that looks for a method of the event's name, as frameworks for training do."""

    def __init__(self) -> None:
        self.sums: dict[str, list[float]] = {}

    def on(self, name: str, **values: Any) -> None:
        method = getattr(self, f"on_{name}", None)
        if method is not None:
            method(**values)

    def on_step_end(self, loss: Tensor) -> None:
        self.sums.setdefault("loss", []).append(float(loss))
        self.mean = {key: round(sum(values[-20:]) / len(values[-20:]), 4) for key, values in self.sums.items()}

    def on_batch(self, batch: tuple[Tensor, ...]) -> None:
        if not all(isinstance(each, Tensor) and each.shape[0] == len(batch[0]) for each in batch):
            raise TypeError(batch)


def callbacks() -> Step:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, CLASSES))
    optimizer, events = torch.optim.AdamW(model.parameters()), [_Event() for _ in range(12)]
    x, y = torch.randn(SAMPLES, 16), torch.randint(CLASSES, (SAMPLES,))
    log = logging.Logger("program")
    log.addHandler(logging.StreamHandler(io.StringIO()))

    def call(name: str, **values: Any) -> None:
        for event in events:
            event.on(name, **values)

    def step() -> None:
        chosen = torch.randint(SAMPLES, (16,))
        batch = (x[chosen], y[chosen])
        call("batch", batch=batch)
        loss = functional.cross_entropy(model(batch[0]), batch[1])
        for name in ("loss", "backward", "update"):
            call(name)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        call("step_end", loss=loss.detach())
        log.info("loss %.3f", loss.item())

    return step


class _Scale(nn.Module):
    """A module with little to compute, and much of Python around it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_forward_pre_hook(lambda module, args: None)
        self.register_forward_hook(lambda module, args, output: None)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x)
        return found


def nested_modules() -> Step:
    model: nn.Module = nn.Linear(16, CLASSES)
    for _ in range(30):
        model = _Scale(model)

    def then(_: Tensor) -> object:
        return [(name, tuple(p.shape)) for name, p in model.named_parameters()], list(model.modules())

    return loop(model, torch.optim.SGD(model.parameters(), 0.01), 16, then=then)


def dropout() -> Step:
    model, values = nn.Linear(16, CLASSES), torch.ones(100_000)
    return loop(model, torch.optim.SGD(model.parameters(), 0.01), 16, then=lambda _: functional.dropout(values, 0.1))


def noise() -> Step:
    model = nn.Linear(16, CLASSES)

    def then(_: Tensor) -> float:
        return float((torch.rand(100_000) < torch.randn(100_000)).sum())

    return loop(model, torch.optim.SGD(model.parameters(), 0.01), 16, then=then)


def policy_gradient() -> Step:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    scale, optimizer = nn.Parameter(torch.zeros(1)), torch.optim.Adam(model.parameters())
    states = torch.randn(SAMPLES, 8)

    def step() -> None:
        state = states[torch.randint(SAMPLES, (16,))]
        policy: Any = Categorical(logits=model(state))
        action = policy.sample()
        around: Any = Normal(state.mean(1), torch.exp(scale))
        value = around.log_prob(action.float())
        loss = -(policy.log_prob(action) * value.detach()).mean() - 0.01 * policy.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def parametrized() -> Step:
    parts = [each for _ in range(4) for each in (weight_norm(nn.Linear(16, 16)), nn.SiLU())]
    model = nn.Sequential(*parts, spectral_norm(nn.Linear(16, CLASSES)))
    return loop(model, torch.optim.AdamW(model.parameters()), 16)


class _Recomputed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return found


def recomputed_average() -> Step:
    parts = [_Recomputed(nn.Sequential(nn.Linear(16, 16), nn.Mish())) for _ in range(3)]
    model = nn.Sequential(nn.Linear(16, 16), *parts, nn.Linear(16, CLASSES))
    average = AveragedModel(model)
    return loop(model, torch.optim.Adamax(model.parameters()), 16, then=lambda _: average.update_parameters(model))


def marked() -> Step:
    """Return a step with marks for a profiler, as libraries for training set them."""
    model = nn.Linear(16, CLASSES)

    def then(_: Tensor) -> None:
        for i in range(12):
            with torch.profiler.record_function(f"part {i}"):
                pass

    return loop(model, torch.optim.SGD(model.parameters(), 0.01), 16, then=then)


PROGRAMS: dict[str, Callable[[], Step]] = {
    "1 layer, SGD": partial(perceptron, 1, 16, partial(torch.optim.SGD, lr=0.01)),
    "4 layers, AdamW": partial(perceptron, 4, 16, torch.optim.AdamW),
    "8 layers, momentum": partial(perceptron, 8, 32, partial(torch.optim.SGD, lr=0.01, momentum=0.9)),
    "2 layers, RMSprop": partial(perceptron, 2, 16, torch.optim.RMSprop),
    "clipped gradients": clipped,
    "4 convolutions": partial(convolutions, 4, 8),
    "2 convolutions": partial(convolutions, 2, 16),
    "normed convolutions": normed_convolutions,
    "language model": language_model,
    "encoder": encoder,
    "recurrent": recurrent,
    "records": records,
    "50 tensors": partial(tensors, 50),
    "16 tensors": partial(tensors, 16),
    "element-wise": element_wise,
    "two optimizers": two_optimizers,
    "callbacks": callbacks,
    "nested modules": nested_modules,
    "data parallel, SGD": partial(data_parallel, 2, partial(torch.optim.SGD, lr=0.01)),
    "data parallel, Adam": partial(data_parallel, 6, torch.optim.Adam),
    "sharded, SGD": partial(sharded, 4, partial(torch.optim.SGD, lr=0.01), by_layer=False),
    "sharded, Adam": partial(sharded, 2, torch.optim.Adam, by_layer=False),
    "sharded layers": partial(sharded, 3, torch.optim.AdamW, by_layer=True),
    "reduced metrics": reduced_metrics,
    "dropout": dropout,
    "noise": noise,
    "policy gradient": policy_gradient,
    "parametrized": parametrized,
    "recomputed, averaged": recomputed_average,
    "marked": marked,
}
"""Name → function that makes the program."""
