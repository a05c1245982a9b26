"""Check on every rank that the gradient equals that of one process for any shares, with samples and with tokens.

The second argument is the collective (default: Ring).
"""

import sys
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
    distance,
    equal_on_all,
    flat,
    print_on_rank_0,
    start_process_group,
    train_in_one_process,
    train_on_all_ranks,
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
    """Return padded sequences of 0 to ``LENGTH`` tokens, at least one of which is not empty."""
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
    group = start_process_group()
    collective = sys.argv[2] if len(sys.argv) > 2 else "Ring"
    largest = dict.fromkeys(BOUND, 0.0)

    def check_images(shares: list[int]) -> None:
        batch = sum(shares)
        for dtype, bound in BOUND.items():
            for name in ("mlp", "digits-cnn"):
                models = []
                for _ in range(2):
                    torch.manual_seed(0)
                    models.append(build(name, InputShape((1, 8, 8), 10)).to(dtype))
                data = images(dtype, batch + batch // 2)  # the second batch is short
                exact = train_in_one_process(models[0], data, image_step, batch, 2)
                found, _ = train_on_all_ranks(
                    group, models[1], data, image_step, 2, shares=shares, collective=collective
                )
                off = distance(found, exact)
                assert off <= bound, f"{name} {dtype} {shares}: gradient off by {off:.1e}"
                drift = distance(flat(models[1]), flat(models[0]))
                assert drift <= bound, f"{name} {dtype} {shares}: parameters off by {drift:.1e}"
                equal_on_all(group, models[1])
                largest[dtype] = max(largest[dtype], off)

    def check_tokens(shares: list[int]) -> None:
        batch = sum(shares)
        for dtype, bound in BOUND.items():
            models, data = [text_model(dtype), text_model(dtype)], texts(batch)
            exact = train_in_one_process(models[0], data, text_step, batch, 1)
            found, trainer = train_on_all_ranks(
                group, models[1], data, text_step, 1, shares=shares, collective=collective
            )
            off = distance(found, exact)
            assert off <= bound, f"tokens {dtype} {shares}: gradient off by {off:.1e}"
            with torch.no_grad():
                first = float(text_step(text_model(dtype), data, None))
            logged = trainer.outcome().loss
            assert logged is not None and abs(logged - first) <= 1e-6 * first, (logged, first)

    shares = st.lists(st.integers(1, 40), min_size=group.size, max_size=group.size)
    few_examples = settings(max_examples=5, deadline=None, database=None, derandomize=True)
    count = with_hypothesis(group, check_images, lambda lead: few_examples(given(shares)(lead)))
    small_shares = st.lists(st.integers(1, 4), min_size=group.size, max_size=group.size)
    count += with_hypothesis(group, check_tokens, lambda lead: few_examples(given(small_shares)(lead)))
    print_on_rank_0(
        group,
        f"{count} examples, off by at most {', '.join(f'{off:.0e} in {dtype}' for dtype, off in largest.items())}",
    )
    group.close()


main()
