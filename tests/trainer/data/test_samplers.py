"""Samplers of the script, such as torch's WeightedRandomSampler: ranks divide their draws, and a resume repeats them."""

import contextlib
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from dltrain.batch.micro_batches import divide
from dltrain.comm.process_group import ProcessGroup
from dltrain.data.feeding.loader import Loader
from dltrain.data.feeding.source import Request
from dltrain.data.feeding.worker_pool import Workers
from dltrain.protocol.errors import MisuseError
from dltrain.protocol.reporter import RankReporter
from dltrain.train import usage_checks
from dltrain.train.data_calls import held_out_batches
from dltrain.train.trainer import Trainer
from support.trainer.data.samples import SAMPLES, WEIGHTS, Augmented
from support.trainer.plans import make_plan, saving

pytestmark = pytest.mark.usefixtures("one_zygote")
CPU = torch.device("cpu")


class Shuffled(Sampler[int]):
    """A typical class of a script, with numpy's global generator or Python's."""

    def __init__(self, use_numpy: bool) -> None:
        self._use_numpy = use_numpy

    def __len__(self) -> int:
        return SAMPLES // 2

    def __iter__(self) -> Iterator[int]:
        if self._use_numpy:
            return iter(np.random.permutation(SAMPLES)[: len(self)])
        return iter(random.sample(range(SAMPLES), len(self)))


class Epochs(Shuffled):
    """A sampler with a generator of its own for each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.default_rng(self.epoch).permutation(SAMPLES)[: len(self)].tolist())


SAMPLERS: dict[str, Any] = {
    "weighted": lambda: WeightedRandomSampler(WEIGHTS, 50),
    "weighted, with a generator": lambda: WeightedRandomSampler(
        torch.tensor(WEIGHTS), 50, generator=torch.Generator().manual_seed(9)
    ),
    "weighted, without replacement": lambda: WeightedRandomSampler(WEIGHTS, 20, replacement=False),
    "with replacement": lambda: RandomSampler(range(SAMPLES), replacement=True, num_samples=30),
    "subset": lambda: SubsetRandomSampler(range(5, 17)),
    "in order": lambda: SequentialSampler(range(SAMPLES)),
    "numpy": lambda: Shuffled(True),
    "random": lambda: Shuffled(False),
    "epochs": lambda: Epochs(True),
    "list": lambda: [3, 3, 1, 2],
}


def loader_of(name: str, shares: tuple[int, ...] = (8,), **options: Any) -> Loader:
    plan = make_plan(shares=shares, epochs=3, global_batch=sum(shares))
    return Loader(Augmented(), CPU, sampler=SAMPLERS[name](), plan=plan, **options)


def drawn(loader: Loader, shares: tuple[int, ...], steps: range) -> list[list[int]]:
    """Return the samples of the whole batch of each step."""
    sampler = loader.sampler(make_plan(shares=shares, epochs=3, global_batch=sum(shares)))
    return [
        [i for rank in range(len(shares)) if (part := sampler.part(s, shares, rank)).weight for i in part.indices]
        for s in steps
    ]


@pytest.mark.parametrize("name", SAMPLERS)
def test_ranks_divide_the_draws_and_a_resume_continues_them(name: str) -> None:
    loader = loader_of(name)
    whole = drawn(loader, (8,), range(loader.total_steps))
    length = len(SAMPLERS[name]())
    assert len(loader) == -(-length // 8) and loader.samples == length
    for shares in ((3, 5), (1, 6, 1)):
        torch.manual_seed(7)
        random.seed(7)
        np.random.seed(7)
        middle = loader.total_steps // 2
        assert drawn(loader_of(name), shares, range(middle, loader.total_steps)) == whole[middle:]
    epochs = [[i for batch in whole[e * len(loader) : (e + 1) * len(loader)] for i in batch] for e in range(3)]
    assert [len(epoch) for epoch in epochs] == [length] * 3
    assert (epochs[0] == epochs[1]) == (name in ("in order", "list"))


def test_weights_decide_how_often_samples_are_drawn() -> None:
    plan = make_plan(1, epochs=1, global_batch=100)
    sampler = Loader(Augmented(), CPU, sampler=WeightedRandomSampler(WEIGHTS, 10000), plan=plan).sampler(plan)
    counts = Counter(i for step in range(100) for i in sampler.part(step, [100], 0).indices.tolist())
    heavy, light = (np.mean([counts[i] for i in ids]) for ids in (range(4), range(4, SAMPLES)))
    assert 7 < heavy / light < 9


def test_drawing_does_not_change_the_generators_of_the_script() -> None:
    loader = loader_of("weighted")
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    drawn(loader, (8,), range(9))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]


@given(st.integers(0, 20), st.integers(1, 4), st.lists(st.integers(1, 9), min_size=1, max_size=3))
def test_random_numbers_of_a_sample_differ_between_its_draws(step: int, count: int, shares: list[int]) -> None:
    """They do not depend on the split, or on micro-batches."""
    plan = make_plan(shares=shares, epochs=3, global_batch=sum(shares))
    loader = Loader(Augmented(), CPU, sampler=WeightedRandomSampler([1.0, 1.0], 60), plan=plan, workers=0)
    sampler = loader.sampler(plan)
    step %= sampler.steps(plan)
    (whole,) = [sampler.part(step, [sum(shares)], 0)]
    expected = loader.fetch(Request.of(whole, 1))[0]  # type: ignore[arg-type]
    assert len(expected.unique(dim=0)) == len(expected)
    found = []
    for rank in range(len(shares)):
        for part in divide(sampler.part(step, shares, rank), count):
            if part.weight:
                found.append(loader.fetch(Request.of(part, 1))[0])  # type: ignore[arg-type]
    assert torch.equal(torch.cat(found), expected)


def test_data_workers_make_the_same_batches() -> None:
    loader = loader_of("weighted")
    part = loader.sampler(make_plan(1, epochs=3, global_batch=8)).part(4, [8], 0)
    request = Request.of(part, 5)
    assert request is not None and part.draws is not None and part.draws.tolist() == list(range(32, 40))
    with contextlib.closing(Workers(loader.source, 1)) as workers:
        found = workers.get(workers.ask(request))[0]
    assert all(torch.equal(*each) for each in zip(found, loader.fetch(request), strict=True))
    other = Request(request.indices, request.epoch, 5, request.draws + 8)  # type: ignore[operator]
    assert request.same(Request.of(part, 5)) and not request.same(other)  # type: ignore[arg-type]


def test_held_out_samples_are_those_of_the_sampler() -> None:
    """``SubsetRandomSampler`` often holds out a part of a dataset."""
    shares, found = (3, 5), Counter[int]()
    for rank in range(2):
        loader = loader_of("subset", shares)
        for _, index in held_out_batches(loader, shares, rank, make_plan(shares=shares, global_batch=8)):
            found.update(index.tolist())
    assert found == Counter(range(5, 17))


def train(folder: Path, epochs: int) -> list[float]:
    """Train as a script does, from the last checkpoint on."""
    plan = make_plan(1, global_batch=10, epochs=epochs, checkpoint=saving(folder))
    t = Trainer(plan, ProcessGroup(), RankReporter(None), CPU, "cpu")
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    model, opt = t.wrap(model, torch.optim.SGD(model.parameters(), 1e-3))
    for x, y in t.steps(t.loader(Augmented(), sampler=WeightedRandomSampler(WEIGHTS, 35))):
        (model(x)[:, 0] - y).square().mean().backward()
        opt.step()
        opt.zero_grad()
    t.close()
    return [*model.weight[0].tolist(), t.step]


def test_training_with_a_sampler_resumes_with_the_same_samples(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 5)
    assert train(tmp_path / "parts", 2)[-1] == 8
    assert train(tmp_path / "parts", 5) == whole and whole[-1] == 20


class Sized(Sampler[int]):
    def __init__(self, *drawn: Any, length: int | None = None) -> None:
        self._drawn, self._length = drawn, len(drawn) if length is None else length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return iter(self._drawn)


class OwnGenerator(Shuffled):
    """A sampler whose order depends on how often it was asked."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)

    def __iter__(self) -> Iterator[int]:
        return iter(self._rng.permutation(SAMPLES)[: len(self)].tolist())


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (DistributedSampler(range(40), 2, 0), "found DistributedSampler; expected a sampler for the whole dataset"),
        (BatchSampler(range(40), 4, True), "found BatchSampler, which makes batches"),
        ((i for i in range(3)), "found generator; expected a torch sampler"),
        (Sized(), "found no samples from Sized"),
        (Sized([0, 1], [2, 3]), r"found an error of Sized: 'list' object cannot be interpreted as an integer"),
        (Sized(0, 1, length=3), "found 2 samples from Sized in epoch 0; expected 3"),
        (Sized(0, 40), "found the index 40 from Sized; expected one from 0 to 39"),
        (Sized(0, -1), "found the index -1 from Sized"),
        (OwnGenerator(), "found OwnGenerator, which draws other samples when it is asked for the same epoch again"),
    ],
)
def test_samplers_that_cannot_be_used_are_errors(sampler: Any, message: str) -> None:
    plan = make_plan(1, global_batch=8)
    with pytest.raises(MisuseError, match=f"^sampler: {message}"):
        Loader(Augmented(), CPU, sampler=sampler, plan=plan).identity(plan)


def test_no_more_samples_are_drawn_than_the_steps_need() -> None:
    """Fixed bug: 10^10 samples, with which minGPT replaces an endless loader, did not fit into memory."""
    endless = RandomSampler(range(SAMPLES), replacement=True, num_samples=10**10)
    for steps, batch in ((5, 8), (12, 3)):
        plan = make_plan(1, steps=steps, epochs=None, global_batch=batch)
        loader = Loader(Augmented(), CPU, sampler=endless, plan=plan)
        loader.identity(plan)
        found = np.concatenate([loader.sampler(plan).part(step, [batch], 0).indices for step in range(steps)])
        assert loader.total_steps == steps and len(set(found.tolist())) > SAMPLES // 3
        if steps == 5:
            first = found
        assert np.array_equal(found[:36], first[:36]), "more steps continue the same samples"
    plan = make_plan(1, epochs=1, global_batch=8)
    with pytest.raises(MisuseError, match=r"^sampler: found 10000000000 samples in an epoch of RandomSampler"):
        Loader(Augmented(), CPU, sampler=endless, plan=plan).identity(plan)


def test_an_evaluation_has_all_samples_of_the_sampler_after_few_steps() -> None:
    plan = make_plan(1, steps=1, epochs=None, global_batch=4)
    loader = Loader(Augmented(), CPU, sampler=SubsetRandomSampler(range(5, 17)), plan=plan)
    first = loader.sampler(plan).part(0, [4], 0).indices.tolist()
    found = [index for _, indices in held_out_batches(loader, [4], 0, plan) for index in indices.tolist()]
    assert Counter(found) == Counter(range(5, 17)) and found[:4] == first


def test_ranks_must_draw_the_same_samples() -> None:
    plan = make_plan(2, global_batch=8)
    rows = [
        Loader(Augmented(), CPU, sampler=Sized(*range(rank, SAMPLES, 2)), plan=plan).identity(plan) for rank in (0, 1)
    ]
    with pytest.raises(MisuseError, match="found a sampler that draws different samples on ranks"):
        usage_checks.check_samples(rows)
    usage_checks.check_samples([rows[0], rows[0]])
