"""Tests of the types of batches: a batch has the containers that collate_fn returned, on every way to the script."""

import contextlib
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from dltrain.batch.sampling import Part
from dltrain.data.datasets import load_by_name
from dltrain.data.feeding import feed as feeding
from dltrain.data.feeding.feed import DeviceLane, Feed
from dltrain.data.feeding.loader import Loader
from dltrain.data.feeding.source import Request
from dltrain.data.feeding.worker_pool import Workers

pytestmark = pytest.mark.usefixtures("one_zygote")
CPU, OTHER = torch.device("cpu"), torch.device("meta")
"""Devices. Copies to the second one are new tensors, as copies to a GPU are."""
SAMPLES = [torch.full((2,), float(index)) for index in range(6)]


class Pair(NamedTuple):
    x: Any
    y: Any


class Columns(list[Any]):
    """A list with an attribute, which is not in its items."""

    names = ("none",)


class Encoding(UserDict[str, Any]):
    """Moves its own tensors, as Hugging Face's BatchEncoding does."""

    def to(self, device: Any) -> "Encoding":
        self.data = {key: value.to(device) for key, value in self.data.items()}
        return self


class Row(tuple[Any, ...]):
    """A tuple of another class."""


@dataclass
class Record:
    x: Tensor
    name: str


def x_of(samples: list[Tensor]) -> Tensor:
    return torch.stack(samples)


def columns(samples: list[Tensor]) -> Columns:
    found = Columns([x_of(samples), 7])
    found.names = ("x", "seven")
    return found


def with_default(samples: list[Tensor]) -> defaultdict[str, Any]:
    return defaultdict(list, x=x_of(samples))


CONTAINERS: dict[str, Callable[[list[Tensor]], Any]] = {
    "tuple": lambda samples: (x_of(samples), "text"),
    "list": lambda samples: [x_of(samples), None],
    "named tuple": lambda samples: Pair(x_of(samples), 1),
    "class of lists": columns,
    "class of tuples": lambda samples: Row([x_of(samples), 2]),
    "deque": lambda samples: deque([x_of(samples)], maxlen=3),
    "dict": lambda samples: {"x": x_of(samples)},
    "ordered dict": lambda samples: OrderedDict(b=x_of(samples), a=(x_of(samples),)),
    "dict with default": with_default,
    "user dict": lambda samples: UserDict(x=x_of(samples)),
    "encoding": lambda samples: Encoding(x=x_of(samples)),
    "packed sequence": pack_sequence,
    "dataclass": lambda samples: Record(x_of(samples), "a"),
    "nested": lambda samples: ({"x": (x_of(samples),)}, Pair([x_of(samples)], ())),
    "without tensors": lambda samples: (range(3), b"bytes", bytearray(b"more"), {"n": (1, 2)}),
}


def part_of(step: int) -> Part:
    return Part(0, np.arange(3) + step % 3, 1.0, 3, False)


def in_rank(loader: Loader) -> Any:
    return loader.fetch(Request(np.arange(3), 0, 0))


def by_worker(loader: Loader) -> Any:
    loader.workers = 1
    with Feed(loader, part_of, 0, 1) as feed:
        return feed.take(0, part_of(0))


def by_worker_and_copy(loader: Loader) -> Any:
    with contextlib.closing(DeviceLane(Workers(loader.source, 1), loader.mover.ahead)) as lane:
        return loader.mover.arrived(lane.get(lane.ask(Request(np.arange(3), 0, 0)))[0])


WAYS = {
    "rank": (in_rank, CPU),
    "rank and copy": (in_rank, OTHER),
    "worker": (by_worker, CPU),
    "worker and copy": (by_worker_and_copy, OTHER),
}


def check_same(found: Any, expected: Any, device: torch.device) -> None:
    """Assert that a batch has the same types and values, and that its tensors are on the device."""
    assert type(found) is type(expected)
    if isinstance(expected, Tensor):
        assert found.device == device and found.shape == expected.shape
        assert device is not CPU or torch.equal(found, expected)
    elif isinstance(expected, PackedSequence):
        check_same(found.data, expected.data, device)
    elif isinstance(expected, Record):
        check_same(found.x, expected.x, CPU)  # has no method ``to``
    elif isinstance(expected, dict | UserDict):
        assert list(found) == list(expected)
        for key in expected:
            check_same(found[key], expected[key], device)
    elif isinstance(expected, list | tuple | deque):
        assert len(found) == len(expected)
        for mine, other in zip(found, expected, strict=True):
            check_same(mine, other, device)
    else:
        assert found == expected


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("way", WAYS)
def test_batch_has_the_containers_of_collate_fn(way: str, container: str) -> None:
    take, device = WAYS[way]
    found = take(Loader(SAMPLES, device, collate_fn=CONTAINERS[container]))
    expected = CONTAINERS[container](SAMPLES[:3])
    check_same(found, expected, device)
    if isinstance(expected, Columns):
        assert found.names == ("x", "seven")
    if isinstance(expected, defaultdict):
        assert found.default_factory is list
    if isinstance(expected, deque):
        assert found.maxlen == 3


def test_containers_of_the_dataset_are_not_changed() -> None:
    samples = [{"x": torch.ones(2)}, {"x": torch.zeros(2)}]
    loader = Loader(samples, OTHER, collate_fn=lambda found: found[0])
    assert loader.fetch(Request(np.arange(1), 0, 0))["x"].device == OTHER
    assert samples[0]["x"].device == CPU


class Numbers:
    """Samples of torch's default dtype."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> list[Tensor]:
        return [torch.rand(2), torch.tensor(0.5)]


@pytest.mark.parametrize("way", ["rank", "worker"])
def test_workers_use_the_default_dtype_of_the_script(way: str) -> None:
    """Otherwise a script in float64 would get float32 as soon as workers take over."""
    take, device = WAYS[way]
    torch.set_default_dtype(torch.float64)
    try:
        assert [part.dtype for part in take(Loader(Numbers(), device))] == [torch.float64] * 2
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "dataset", [(torch.stack(SAMPLES), torch.arange(6)), load_by_name("wine")], ids=["tensors", "ours"]
)
def test_batches_of_tensors_are_lists(dataset: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank makes the first batches, and a thread makes the others."""
    monkeypatch.setattr(feeding, "MIN_FETCH_S", 0.0)
    monkeypatch.setattr(feeding, "MIN_FETCH_FRACTION", 0.0)
    steps = 2 + feeding.MEASURED + 3
    with Feed(Loader(dataset, CPU), part_of, 0, steps) as feed:
        assert {type(feed.take(step, part_of(step))) for step in range(steps)} == {list}
        assert isinstance(feed._lane, feeding.Thread)
