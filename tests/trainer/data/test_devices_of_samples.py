"""Samples are made in main memory, whatever torch's default device is in the script."""

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from dltrain.batch.sampling import Part
from dltrain.data.feeding import feed as feeding
from dltrain.data.feeding import serialization
from dltrain.data.feeding.device_copy import DeviceCopier
from dltrain.data.feeding.feed import Feed
from dltrain.data.feeding.loader import Loader
from dltrain.data.feeding.source import Request
from dltrain.data.feeding.worker_pool import Workers
from dltrain.protocol.errors import SampleError

pytestmark = pytest.mark.usefixtures("one_zygote")
CPU = torch.device("cpu")


def part_of(step: int) -> Part:
    return Part(0, np.arange(4) + step % 30, 1.0, 4, False)


class Noisy(Dataset[tuple[torch.Tensor, int]]):
    """Samples with noise and a number, from which torch's ``collate_fn`` makes a tensor."""

    def __init__(self) -> None:
        self.images = torch.arange(40.0).view(40, 1)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index] + torch.rand(3), index


def test_default_device_of_the_script_does_not_change_samples() -> None:
    """Fixed bug: with ``torch.set_default_device("cuda")``, the rank drew random numbers on the GPU, and workers on the
    CPU: training changed when workers took over."""
    request, loader = Request(np.arange(3, 9), 1, 5), Loader(Noisy(), CPU, workers=0)
    expected = loader.fetch(request)
    with torch.device("meta"):
        alone = loader.fetch(request)
        with contextlib.closing(Workers(loader.source, 1)) as workers:
            ahead = workers.get(workers.ask(request))[0]
    for batch in (alone, ahead):
        assert all(torch.equal(a, b) for a, b in zip(batch, expected, strict=True))


def test_arrays_stay_in_main_memory() -> None:
    """Fixed bug: the whole dataset was copied to the default device."""
    arrays = np.arange(8.0).reshape(4, 2), np.arange(4)
    with torch.device("meta"):
        x, y = Loader(arrays, CPU).source.dataset
    assert x.tolist() == arrays[0].tolist() and y.tolist() == arrays[1].tolist()


class OnDevice(Noisy):
    """A dataset with a tensor on another device."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(3, device="meta")


class MadeOnDevice(Noisy):
    """A dataset whose samples have a tensor on another device."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)[0], index, [torch.zeros(3, device="meta")]


def test_workers_that_are_asked_for_must_make_samples_in_main_memory() -> None:
    """Fixed bug: each worker took memory of the GPU, and always of the first one, without a word."""
    loader = Loader(MadeOnDevice(), CPU, workers=1)
    with contextlib.closing(Workers(loader.source, 1)) as workers:
        ticket = workers.ask(Request(np.arange(3), 0, 5))
        with pytest.raises(SampleError, match=r"^batch of samples 0, 1, 2: found a tensor on meta in a data worker;"):
            workers.get(ticket)


@pytest.mark.parametrize("workers", [None, 0])
def test_the_rank_loads_samples_that_are_made_on_a_device(
    workers: int | None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(feeding, "MIN_FETCH_S", 0.0)
    monkeypatch.setattr(feeding, "MIN_FETCH_FRACTION", 0.0)
    monkeypatch.setattr(DeviceCopier, "_moved", lambda self, part: part)
    with Feed(Loader(MadeOnDevice(), CPU, workers=workers, max_workers=1), part_of, 3, 60) as feed:
        found = []
        for step in range(60):
            if feed._starting is not None:
                serialization.wait_for(*(worker.connection for worker in feed._starting._workers))
            found.append(feed.take(step, part_of(step))[1].tolist())
    assert found == [[step % 30 + i for i in range(4)] for step in range(60)]
    expected = int(workers is None)
    assert capfd.readouterr().err.count("found a tensor on meta in a data worker") == expected


def test_automatic_workers_do_not_open_the_device_of_a_dataset(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each worker would take some 500 MB of a GPU, for which no plan has room. The rank loads the batches itself."""
    monkeypatch.setattr(feeding, "MIN_FETCH_S", 0.0)
    monkeypatch.setattr(feeding, "MIN_FETCH_FRACTION", 0.0)

    found: list[Any] = []
    with Feed(Loader(OnDevice(), CPU, max_workers=1), part_of, 3, 20) as feed:
        found = [feed.take(step, part_of(step))[1].tolist() for step in range(20)]
    assert found == [[step + i for i in range(4)] for step in range(20)]
    assert capfd.readouterr().err.count("found a tensor on meta, which each worker would open too") == 1
