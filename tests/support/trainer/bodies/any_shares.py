"""On every rank: whatever the shares, the gradient is that of one process; so it is when tokens are counted."""

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

from dltrain.models import InputShape, build
from dltrain.train.trainer import Trainer
from support.trainer.bodies.harness import (
    BOUND,
    alone,
    distance,
    equal_on_all,
    flat,
    ranks,
    say,
    together,
    with_hypothesis,
)

LENGTH, VOCABULARY, IGNORED = 6, 11, -100


def images(dtype: torch.dtype, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(samples)
    return torch.rand(samples, 1, 8, 8, generator=generator, dtype=dtype), torch.arange(samples) % 10


def image_step(model: nn.Module, batch: Any, trainer: Trainer | None) -> torch.Tensor:
    x, y = batch
    return cross_entropy(model(x), y)


def texts(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences of 0 to ``LENGTH`` tokens, padded; at least one is not empty."""
    generator = torch.Generator().manual_seed(samples)
    tokens = torch.randint(VOCABULARY, (samples, LENGTH), generator=generator)
    lengths = torch.randint(LENGTH + 1, (samples, 1), generator=generator)
    lengths[0] = LENGTH
    targets = (tokens + 1) % VOCABULARY
    return tokens, targets.where(torch.arange(LENGTH) < lengths, IGNORED)


def text_model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, VOCABULARY)).to(dtype)


def text_step(model: nn.Module, batch: Any, trainer: Trainer | None) -> torch.Tensor:
    x, y = batch
    loss = cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=IGNORED)
    if trainer is not None:
        trainer.weigh(int((y != IGNORED).sum()))
        trainer.log(loss=loss)
    return loss


def main() -> None:
    world = ranks()
    worst = dict.fromkeys(BOUND, 0.0)

    def samples_count(shares: list[int]) -> None:
        batch = sum(shares)
        for dtype, bound in BOUND.items():
            for name in ("mlp", "digits-cnn"):
                nets = []
                for _ in range(2):
                    torch.manual_seed(0)
                    nets.append(build(name, InputShape((1, 8, 8), 10)).to(dtype))
                data = images(dtype, batch + batch // 2)  # the second batch is short
                exact = alone(nets[0], data, image_step, batch, 2)
                found, _ = together(world, nets[1], data, image_step, 2, shares=shares)
                off = distance(found, exact)
                assert off <= bound, f"{name} {dtype} {shares}: gradient off by {off:.1e}"
                drift = distance(flat(nets[1]), flat(nets[0]))
                assert drift <= bound, f"{name} {dtype} {shares}: parameters off by {drift:.1e}"
                equal_on_all(world, nets[1])
                worst[dtype] = max(worst[dtype], off)

    def tokens_count(shares: list[int]) -> None:
        batch = sum(shares)
        for dtype, bound in BOUND.items():
            nets, data = [text_model(dtype), text_model(dtype)], texts(batch)
            exact = alone(nets[0], data, text_step, batch, 1)
            found, trainer = together(world, nets[1], data, text_step, 1, shares=shares)
            off = distance(found, exact)
            assert off <= bound, f"tokens {dtype} {shares}: gradient off by {off:.1e}"
            with torch.no_grad():
                first = float(text_step(text_model(dtype), data, None))
            logged = trainer.outcome().loss
            assert logged is not None and abs(logged - first) <= 1e-6 * first, (logged, first)

    shares = st.lists(st.integers(1, 40), min_size=world.size, max_size=world.size)
    some = settings(max_examples=5, deadline=None, database=None, derandomize=True)
    count = with_hypothesis(world, samples_count, lambda lead: some(given(shares)(lead)))
    few = st.lists(st.integers(1, 4), min_size=world.size, max_size=world.size)
    count += with_hypothesis(world, tokens_count, lambda lead: some(given(few)(lead)))
    say(world, f"{count} examples, off by at most {', '.join(f'{off:.0e} in {dtype}' for dtype, off in worst.items())}")
    world.close()


main()
