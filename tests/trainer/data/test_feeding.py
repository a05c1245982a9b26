"""Tests of data loading in the rank, in a thread and in worker processes: batches, errors and arguments."""

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, default_collate

from dltrain.batch.sampling import Part, Sampler
from dltrain.data.feeding import feed as feeding
from dltrain.data.feeding.feed import DeviceLane, Feed
from dltrain.data.feeding.loader import MAX_BATCHES_AHEAD, Loader
from dltrain.data.feeding.source import Request, Source
from dltrain.data.feeding.worker_pool import Workers
from dltrain.host import cgroup
from dltrain.protocol.errors import SampleError, WorkerLostError
from dltrain.train.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_zygote")
CPU = torch.device("cpu")
WITHIN_S = 240.0
"""Much longer than workers need to start, because hack/test gives these tests little processor time."""


class Augmented(Dataset[tuple[torch.Tensor, int]]):
    """Samples with noise from every random generator that datasets use."""

    def __init__(self, fails_at: int = -1) -> None:
        self.images = torch.arange(40.0).view(40, 1)
        self.fails_at = fails_at

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == self.fails_at:
            raise KeyError("no label")
        return self.images[index] + torch.rand(3) + float(np.random.rand()) + random.random(), index


def batches_of_rank_1(loader: Loader, shares: Sequence[tuple[int, ...]], steps: Sequence[int]) -> list[Any]:
    """Return the batches of rank 1 for ``steps`` in order; each step uses the next of ``shares``."""
    sampler, now, found = Sampler(loader.samples, 8, 5), list(shares), []

    def part_of(step: int) -> Part:
        return sampler.part(step, now[0], 1)

    with Feed(loader, part_of, 5, 14) as feed:
        for step in steps:
            found.append(feed.take(step, part_of(step)))
            if len(now) > 1:
                now.pop(0)
    return found


SHARES = [(4, 4)] * 4 + [(2, 6)] * 3 + [(7, 1)] * 2 + [(4, 4)]
STEPS = [0, 1, 2, 3, 3, 4, 5, 5, 6, 7, 8, 9, 10, 11, 12, 13]
"""Three epochs. Two steps are repeated, one of them with other shares."""


@pytest.mark.parametrize(("workers", "prefetch"), [(1, None), (2, 5)])
def test_workers_make_the_same_batches_as_the_rank(workers: int, prefetch: int | None) -> None:
    """Batches are bit-identical, also after changed shares, repeated steps and a resume in the middle."""
    alone = batches_of_rank_1(Loader(Augmented(), CPU, workers=0), SHARES, STEPS)
    ahead = batches_of_rank_1(Loader(Augmented(), CPU, workers=workers, prefetch=prefetch), SHARES, STEPS)
    resumed = batches_of_rank_1(Loader(Augmented(), CPU, workers=workers), SHARES[8:], STEPS[8:])
    for found, expected in [*zip(ahead, alone, strict=True), *zip(resumed, alone[8:], strict=True)]:
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_augmentation_depends_on_epoch_but_not_on_rank() -> None:
    loader = Loader(Augmented(), CPU, workers=0)

    def augmented(indices: Sequence[int], epoch: int) -> dict[int, torch.Tensor]:
        x, y = loader.fetch(Request(np.array(indices), epoch, 5))
        return dict(zip(y.tolist(), x, strict=True))

    one, other, later = augmented([3, 7, 9], 0), augmented([9, 3], 0), augmented([3, 7, 9], 1)
    assert all(torch.equal(one[i], other[i]) for i in (3, 9))
    assert not any(torch.equal(one[i], later[i]) for i in one)
    assert len({float(x[0] - i) for i, x in one.items()}) == 3


def test_slow_tensor_fetches_move_to_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank fetches a fast dataset itself. Both ways give the same batches."""
    tensors = (torch.randn(40, 50), torch.arange(40))

    def fetches() -> Iterator[str]:
        return (thread.name for thread in threading.enumerate() if thread.name == "fetch")

    with monkeypatch.context() as patched:
        patched.setattr(feeding, "MIN_FETCH_S", 1e9)
        fetched_by_rank = batches_of_rank_1(Loader(tensors, CPU), SHARES, STEPS)
    started = []
    original = feeding.Thread
    monkeypatch.setattr(feeding, "Thread", lambda make: started.append(make) or original(make))
    monkeypatch.setattr(feeding, "MIN_FETCH_S", 0.0)
    monkeypatch.setattr(feeding, "MIN_FETCH_FRACTION", 0.0)
    ahead = batches_of_rank_1(Loader(tensors, CPU), SHARES, STEPS)
    assert len(started) == 1, "one thread, started after the measured steps"
    assert all(
        torch.equal(a, b) for m, o in zip(ahead, fetched_by_rank, strict=True) for a, b in zip(m, o, strict=True)
    )
    assert not list(fetches()), "the thread ends with the training"


def test_rank_loads_a_dataset_that_cannot_be_pickled(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It reports the reason once. If the user asked for workers, it raises an error."""
    dataset = Augmented()
    dataset.lock = threading.Lock()  # type: ignore[attr-defined]
    monkeypatch.setattr(feeding, "MIN_FETCH_S", 0.0)
    monkeypatch.setattr(feeding, "MIN_FETCH_FRACTION", 0.0)
    assert len(batches_of_rank_1(Loader(dataset, CPU, max_workers=2), SHARES, STEPS)) == len(STEPS)
    assert capfd.readouterr().err.count("cannot be sent to worker processes") == 1
    with pytest.raises(ValueError, match="dataset: cannot be sent to worker processes: TypeError: cannot pickle"):
        batches_of_rank_1(Loader(dataset, CPU, workers=1), SHARES, STEPS)


class OnlyInRank(Augmented):
    """A dataset that works only in the rank's process, for example because it needs a module's variable."""

    def __init__(self, kills: bool = False) -> None:
        super().__init__()
        self.pid, self.kills = os.getpid(), kills

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if os.getpid() != self.pid:
            if self.kills:
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyError("no label")
        return super().__getitem__(index)


@pytest.mark.parametrize(("dataset", "collate_fn", "why"), [
    (OnlyInRank(), None, "of the dataset: KeyError: 'no label'"),
    (OnlyInRank(kills=True), None, "data worker 0 of 1 ended with signal 9"),
    (Augmented(), lambda samples: [*default_collate(samples), threading.Lock()], "found a batch that a data worker cannot send"),
])  # fmt: skip
def test_failure_of_automatic_workers_does_not_end_training(
    dataset: Any, collate_fn: Any, why: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The rank makes the batches instead. If the user asked for workers, it raises an error."""
    monkeypatch.setattr(feeding, "MIN_FETCH_S", 0.0)
    monkeypatch.setattr(feeding, "MIN_FETCH_FRACTION", 0.0)
    alone = Loader(Augmented(), CPU, workers=0)
    with Feed(Loader(dataset, CPU, max_workers=1, collate_fn=collate_fn), part_of, 3, 10**9) as feed:
        step, deadline, errors, after = 0, time.monotonic() + WITHIN_S, "", 0
        while after < 3:
            assert time.monotonic() < deadline, "the failure was not reported"
            assert torch.equal(feed.take(step, part_of(step))[0], alone.fetch(request_of(step))[0])
            after += why in (errors := errors + capfd.readouterr().err)
            step += 1
    assert errors.count("the rank cannot use data workers") == 1
    with pytest.raises((SampleError, WorkerLostError), match=why):
        batches_of_rank_1(Loader(dataset, CPU, workers=1, collate_fn=collate_fn), SHARES, STEPS)


def test_automatic_workers_are_not_started_without_memory_for_copies(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(feeding, "MIN_FETCH_S", 0.0)
    monkeypatch.setattr(feeding, "MIN_FETCH_FRACTION", 0.0)
    monkeypatch.setattr(cgroup, "free_nbytes", lambda: 1000)
    assert len(batches_of_rank_1(Loader(Augmented(), CPU, max_workers=2), SHARES, STEPS)) == len(STEPS)
    assert (
        capfd.readouterr().err.count("the dataset's copies for data-loading workers do not fit into memory: found ")
        == 1
    )


def test_maximum_number_of_outstanding_batches_does_not_deadlock() -> None:
    """This also holds after a drop. Otherwise, the rank and a worker would each wait for the other to read."""
    with contextlib.closing(Workers(Loader(Augmented(), CPU).source, 1)) as workers:
        for _ in range(2):
            workers.drop()
            tickets = [workers.ask(request_of(step)) for step in range(MAX_BATCHES_AHEAD)]
        assert workers.get(tickets[-1])[0][1].tolist() == request_of(MAX_BATCHES_AHEAD - 1).indices.tolist()


class WithMakerPid(Augmented):
    """Samples whose label is the process that made them."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return super().__getitem__(index)[0], os.getpid()


def test_workers_take_over_slow_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the workers are ready, the rank makes the same batches."""
    monkeypatch.setattr(feeding, "MIN_FETCH_S", 0.0)
    monkeypatch.setattr(feeding, "MIN_FETCH_FRACTION", 0.0)
    alone, loader, makers = (
        Loader(WithMakerPid(), CPU, workers=0),
        Loader(WithMakerPid(), CPU, max_workers=1),
        set[int](),
    )
    with Feed(loader, part_of, 3, 10**9) as feed:
        step, deadline = 0, time.monotonic() + WITHIN_S
        while len(makers) < 2:
            assert time.monotonic() < deadline, "no worker made a batch"
            x, pids = feed.take(step, part_of(step))
            assert torch.equal(x, alone.fetch(request_of(step))[0])
            makers |= set(pids.tolist())
            step += 1
    assert step > 7 and os.getpid() in makers


def part_of(step: int) -> Part:
    return Part(step, np.arange(4) + step % 30, 1.0, 4, False)


def request_of(step: int) -> Request:
    return Request(part_of(step).indices, step, 3)


def _only_in(pid: int) -> Augmented:
    if os.getpid() != pid:
        raise ModuleNotFoundError("No module named 'codec'")
    return Augmented()


class OnlyInThisProcess(Augmented):
    def __reduce__(self) -> Any:
        return _only_in, (os.getpid(),)


def test_dataset_that_workers_cannot_unpickle_is_reported(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(feeding, "MIN_FETCH_S", 0.0)
    monkeypatch.setattr(feeding, "MIN_FETCH_FRACTION", 0.0)
    with Feed(Loader(OnlyInThisProcess(), CPU, max_workers=1), part_of, 3, 10**9) as feed:
        step, deadline, errors = 0, time.monotonic() + WITHIN_S, ""
        while "No module named 'codec'" not in (errors := errors + capfd.readouterr().err):
            assert time.monotonic() < deadline, "the failure was not reported"
            feed.take(step, part_of(step))
            step += 1
    with pytest.raises(WorkerLostError, match="could not be transferred: ModuleNotFoundError: No module named"):
        batches_of_rank_1(Loader(OnlyInThisProcess(), CPU, workers=1), SHARES, STEPS)


def test_dropped_requests_behind_a_copy_thread_are_not_returned() -> None:
    """A dropped batch is not returned for a later request, and closing does not wait for it. GPUs use this thread."""
    loader = Loader(Augmented(), CPU, workers=0)
    with contextlib.closing(DeviceLane(Workers(loader.source, 2), lambda batch: [*batch, "moved"])) as lane:
        first = [lane.ask(request_of(step)) for step in range(4)]
        x, _, moved = lane.get(first[0])[0]
        assert moved == "moved" and torch.equal(x, loader.fetch(request_of(0))[0])
        lane.drop()
        again = [lane.ask(request_of(step)) for step in range(7, 13)]
        for ticket, step in zip(again[:4], range(7, 11), strict=True):
            assert torch.equal(lane.get(ticket)[0][0], loader.fetch(request_of(step))[0])


@pytest.mark.parametrize(
    ("dataset", "arguments", "message"),
    [
        (Augmented(), {"workers": -1}, "workers: found -1; expected 0 or more"),
        (Augmented(), {"workers": 3, "prefetch": 2}, "prefetch: found 2 batches for 3 workers; expected at least 3"),
        (Augmented(), {"workers": 0, "prefetch": 2}, "prefetch: found 2 with workers=0; expected workers"),
        ((torch.zeros(3),), {"workers": 2}, "workers: found 2 for a dataset that is in memory; expected no workers"),
        (
            (torch.zeros(3),),
            {"collate_fn": list},
            "collate_fn: found a function with a dataset of tensors; expected None for tensors",
        ),
        ((torch.zeros(3), torch.zeros(2)), {}, r"dataset: found tensors of \[2, 3\] samples; expected equal lengths"),
        (
            [torch.zeros(9, 2), torch.zeros(9, dtype=torch.int64)],
            {},
            r"dataset: found a list of tensors with the shapes \(9, 2\), \(9,\); expected a tuple .*\(\(x, y\)\)",
        ),
        ([np.zeros((9, 2))] * 2, {"collate_fn": list}, "dataset: found a list of tensors .*; expected a tuple"),
        ([torch.zeros(9, 2)], {}, "dataset: found a list of tensors .*; expected a tuple"),
        ((torch.zeros(9, 2), [0] * 9), {}, r"found a tuple of Tensor, list; expected a tuple of tensors or arrays"),
        (((torch.zeros(2), 0), (torch.zeros(2), 1)), {}, r"found a tuple of tuple; .*call t.loader\(list\(samples\)\)"),
        ((np.zeros((9, 2)), [0] * 9), {}, "found a tuple of ndarray, list; expected a tuple of tensors"),
        (
            (torch.zeros(3), torch.tensor(1)),
            {},
            r"dataset: found a tensor of shape \(\); expected a row for each sample",
        ),
        (
            {"train": Augmented(), "test": Augmented()},
            {},
            r"dataset: found a dict with the keys 'train', 'test'; expected a dataset of samples 0, 1",
        ),
        (iter([1]), {}, "dataset: found list_iterator; expected a map-style dataset"),
        (Augmented(), {"workers": 2, "prefetch": 1000}, "prefetch: found 1000; expected at most 128"),
    ],
)
def test_loader_rejects_invalid_arguments(dataset: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Loader(dataset, CPU, **arguments)


def test_list_of_samples_is_a_dataset() -> None:
    """Only a short list of tensors with many rows is refused, because its user means ``(x, y)``."""
    for samples in (
        [(torch.zeros(9), 1), (torch.zeros(9), 0)],
        [torch.zeros(9)] * 5,
        [torch.zeros(2), torch.zeros(2)],
        [torch.zeros(9), torch.zeros(8)],
        [torch.zeros(()), torch.zeros(())],
    ):
        assert Loader(samples, CPU).samples == len(samples)


def test_steps_reject_a_loader_of_torch() -> None:
    with pytest.raises(ValueError, match=r"loader: found DataLoader; expected the result of t.loader\(dataset\)"):
        next(Trainer.steps(cast(Trainer, None), cast(Loader, DataLoader(Augmented()))))


def test_user_dataset_may_have_attributes_named_as_in_dltrain() -> None:
    dataset = Augmented()
    dataset.train_samples = "images"  # type: ignore[attr-defined]
    assert Loader(dataset, CPU).samples == 40


def test_error_names_the_sample_with_and_without_workers() -> None:
    message = "sample 13 of the dataset: KeyError: 'no label'"
    for workers in (0, 2):
        with pytest.raises(SampleError, match=message) as caught:
            batches_of_rank_1(Loader(Augmented(13), CPU, workers=workers), [(0, 8)], range(14))
        text = str(caught.value.__cause__)
        assert ("in a data worker" in text and "in __getitem__" in text) if workers else text == "'no label'"


def test_error_in_a_batch_that_is_no_longer_needed_is_ignored() -> None:
    """Another rank or a later step may load the sample again, and then the error is raised."""
    source = Loader(Augmented(2), CPU).source
    with contextlib.closing(Workers(source, 1)) as workers:
        workers.ask(request_of(0))
        x, y = workers.get(workers.ask(request_of(3)))[0]
        assert y.tolist() == [3, 4, 5, 6] and torch.equal(x, Loader(Augmented(), CPU).fetch(request_of(3))[0])


class KilledBySignal9(Augmented):
    """Kills its process with the signal that the kernel sends when memory is exhausted."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def test_worker_killed_by_the_oom_killer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test replaces the kernel's count of OOM kills, which only exists in a container."""
    counts = iter([3, 4])
    monkeypatch.setattr(cgroup, "oom_kills", lambda: next(counts))
    workers = Workers(Loader(KilledBySignal9(), CPU).source, 1)
    with contextlib.closing(workers), pytest.raises(MemoryError, match="data worker 0 of 1 was killed by the kernel"):
        workers.get(workers.ask(Request(np.arange(2), 0, 0)))


class Noise(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(2)


def test_augmentation_of_a_subset_does_not_depend_on_the_split() -> None:
    source = Source(Subset(Subset(Noise(), range(9)), range(2, 8)))
    whole, part = (source.make(Request(np.arange(first, 6), 0, 0)) for first in (0, 3))
    assert torch.equal(whole[3:], part) and len(set(whole.flatten().tolist())) == 12


def test_numpy_arrays_are_accepted_as_a_dataset(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(12.0).reshape(6, 2))
    source = Source((np.load(tmp_path / "x.npy", mmap_mode="r"), np.arange(6)))
    assert source.samples == 6
    x, y = source.make(Request(np.array([4, 1]), 0, 0))
    assert (x.tolist(), y.tolist()) == ([[8, 9], [2, 3]], [4, 1])
    with pytest.raises(ValueError, match=r"dataset: found .*; expected a tuple of tensors or arrays of numbers"):
        Source((np.array(["a", "b"]), np.arange(2)))
