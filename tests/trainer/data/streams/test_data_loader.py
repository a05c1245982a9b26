"""A script may pass its torch DataLoader to ``t.loader``, which takes over the dataset and the options."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from dltrain.comm.process_group import ProcessGroup
from dltrain.data.feeding.loader import Loader
from dltrain.data.feeding.source import Request
from dltrain.data.loaders import make_loader
from dltrain.data.streams.loader import StreamLoader
from dltrain.protocol.errors import MisuseError
from dltrain.protocol.reporter import RankReporter
from dltrain.train import usage_checks
from dltrain.train.trainer import Trainer
from support.trainer.data.samples import SAMPLES, WEIGHTS, Augmented
from support.trainer.plans import make_plan, saving

pytestmark = [
    pytest.mark.usefixtures("one_zygote"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # on machines with few cores
]
CPU, SHARES = torch.device("cpu"), (3, 5)
PLAN = make_plan(shares=SHARES, global_batch=8, epochs=2)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SAMPLES))


class Pairs(Sampler[list[int]]):
    def __len__(self) -> int:
        return SAMPLES // 2

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[i, i + 1] for i in range(0, SAMPLES, 2)])


class OwnLoop(DataLoader[Any]):
    def __iter__(self) -> Any:
        return map(list, super().__iter__())


def made(given: Any, **options: Any) -> Loader:
    loader = make_loader(given, CPU, PLAN, **options)
    assert isinstance(loader, Loader)
    return loader


def batches(loader: Loader) -> list[Any]:
    """Return all batches of the training, of both ranks."""
    sampler, found = loader.sampler(PLAN), []
    for step in range(loader.total_steps):
        for rank in range(len(SHARES)):
            request = Request.of(sampler.part(step, SHARES, rank), PLAN.seed)
            assert request is not None
            found.append(loader.fetch(request))
    return found


def reversed_collate(samples: list[Any]) -> Any:
    return default_collate(samples[::-1])


def weighted(generator: torch.Generator | None = None) -> Sampler[int]:
    return WeightedRandomSampler(WEIGHTS, 30, generator=generator)


DATA = Augmented()
EQUAL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "shuffled": ({"shuffle": True}, {}),
    "shuffled by a generator": ({"shuffle": True, "generator": torch.Generator().manual_seed(5)}, {}),
    "in order": ({}, {"sampler": SequentialSampler(DATA)}),
    "drop_last": ({"shuffle": True, "drop_last": True, "batch_size": 8}, {"drop_last": True}),
    "collate_fn": ({"shuffle": True, "collate_fn": reversed_collate}, {"collate_fn": reversed_collate}),
    "sampler": ({"sampler": weighted()}, {"sampler": weighted()}),
    "with replacement": (
        {"sampler": RandomSampler(DATA, replacement=True)},
        {"sampler": RandomSampler(DATA, replacement=True)},
    ),
    "distributed": ({"sampler": DistributedSampler(DATA, 2, 1)}, {}),
    "distributed, in order": (
        {"sampler": DistributedSampler(DATA, 2, 1, shuffle=False)},
        {"sampler": SequentialSampler(DATA)},
    ),
    "batch sampler of torch": (
        {"batch_sampler": BatchSampler(weighted(), 8, drop_last=True)},
        {"sampler": weighted(), "drop_last": True},
    ),
    "speed": ({"shuffle": True, "pin_memory": True, "num_workers": 2, "persistent_workers": True, "timeout": 9}, {}),
}


@pytest.mark.parametrize("name", EQUAL)
def test_batches_are_those_of_the_same_options_of_the_loader(name: str) -> None:
    options, expected = EQUAL[name]
    found, same = made(DataLoader(DATA, **options)), made(DATA, **expected)
    assert (len(found), found.samples) == (len(same), same.samples)
    for a, b in zip(batches(found), batches(same), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_order_is_that_of_the_data_loader() -> None:
    """``shuffle=False``, the default of a DataLoader, stays in order, and ``drop_last`` leaves out the same samples."""
    loader = DataLoader(range(SAMPLES - 3), batch_size=8, drop_last=True)  # type: ignore[arg-type]
    found = batches(made(loader))
    whole = [torch.cat(found[i : i + 2]).tolist() for i in range(0, len(found), 2)]
    assert whole == [batch.tolist() for _ in range(2) for batch in loader]


def test_workers_are_those_of_the_data_loader() -> None:
    assert (made(DataLoader(DATA)).workers, made(DataLoader(DATA)).prefetch) == (None, None), "decided by dltrain"
    loader = DataLoader(DATA, num_workers=3, prefetch_factor=4)
    assert (made(loader).workers, made(loader).prefetch) == (3, 12)
    assert (made(loader, workers=0).workers, made(loader, workers=0).prefetch) == (0, None), "arguments come first"
    assert made(DataLoader(DATA, num_workers=20, prefetch_factor=10)).prefetch == 128
    tensors = made(DataLoader(TensorDataset(torch.arange(9)), num_workers=3, shuffle=True))
    assert tensors.workers is None and not tensors.source.foreign, "tensors in memory need no workers"


def test_arguments_come_before_the_options_of_the_data_loader() -> None:
    loader = DataLoader(DATA, shuffle=True, collate_fn=list)
    found = made(loader, sampler=[3, 1], collate_fn=reversed_collate, drop_last=True)
    assert found.samples == 2 and found.source.collate is reversed_collate and len(found) == 1


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (
            lambda: DataLoader(DATA, batch_sampler=Pairs()),
            "a DataLoader with the batch sampler Pairs; expected a sampl",
        ),
        (lambda: DataLoader(DATA, batch_size=None), "a DataLoader with batch_size None, whose dataset makes batches"),
        (lambda: DataLoader(Stream(), batch_size=None), "a DataLoader with batch_size None"),
        (lambda: OwnLoop(DATA), "found OwnLoop, a DataLoader with an __iter__ of its own"),
        (
            lambda: DataLoader(DATA, num_workers=2, worker_init_fn=print),
            "a DataLoader with a worker_init_fn; expected none",
        ),
    ],
)
def test_options_that_cannot_be_taken_over_are_errors(loader: Any, message: str) -> None:
    with pytest.raises(MisuseError, match=f"^dataset: found .*{message.removeprefix('found ')}"):
        make_loader(loader(), CPU, PLAN)


@pytest.mark.parametrize("options", [{}, {"batch_size": 1}, {"batch_size": 8}])
def test_global_batch_size_and_the_default_are_accepted(options: dict[str, Any]) -> None:
    usage_checks.check_batch_size(make_loader(DataLoader(DATA, **options), CPU, PLAN).batch_size, PLAN)
    usage_checks.check_batch_size(make_loader(DataLoader(Stream(), **options), CPU, PLAN).batch_size, PLAN)


def trainer_of(folder: Path, epochs: int) -> Trainer:
    plan = make_plan(1, global_batch=8, epochs=epochs, checkpoint=saving(folder))
    return Trainer(plan, ProcessGroup(), RankReporter(None), CPU, "cpu")


def train(folder: Path, epochs: int, **options: Any) -> list[float]:
    t = trainer_of(folder, epochs)
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    model, opt = t.wrap(model, torch.optim.SGD(model.parameters(), 1e-3))
    for x, y in t.steps(t.loader(DataLoader(DATA, **options))):
        (model(x)[:, 0] - y).square().mean().backward()
        opt.step()
        opt.zero_grad()
    held = [y.tolist() for _, y in t.held_out(t.loader(DataLoader(DATA, batch_size=7)))]
    assert [i for batch in held for i in batch] == list(range(SAMPLES)), "any batch size suits held-out samples"
    t.close()
    return [*model.weight[0].tolist(), t.step]


@pytest.mark.parametrize("options", [{"shuffle": True}, {"sampler": weighted(), "batch_size": 8}])
def test_training_with_a_data_loader_resumes_bit_for_bit(options: dict[str, Any], tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 5, **options)
    train(tmp_path / "parts", 2, **options)
    assert train(tmp_path / "parts", 5, **options) == whole


@pytest.mark.parametrize("dataset", [DATA, Stream()])
def test_another_batch_size_is_an_error_that_names_both(dataset: Any, tmp_path: Path) -> None:
    t = trainer_of(tmp_path, 1)
    model = nn.Linear(3, 1)
    t.wrap(model, torch.optim.SGD(model.parameters(), 1e-3))
    with pytest.raises(MisuseError, match=r"^t\.steps: found a DataLoader with batch_size 32; expected 8, the job's"):
        next(t.steps(t.loader(DataLoader(dataset, batch_size=32))))
    t.close()


def test_a_data_loader_of_a_stream_keeps_its_options() -> None:
    loader = make_loader(DataLoader(Stream(), num_workers=2, prefetch_factor=3, drop_last=True), CPU, PLAN)
    assert isinstance(loader, StreamLoader) and (loader.workers, loader._ahead) == (2, 3)
