"""The order of a rank's stream and the positions in it, from which a resumed run continues."""

import json
import random
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from dltrain.data.loaders import make_loader
from dltrain.data.streams.loader import StreamLoader
from dltrain.data.streams.reader import Chunk, Place, Start, StreamReader, Take
from dltrain.data.streams.sequence import Position, Readers, Sequence
from dltrain.data.streams.state import decode, encode
from dltrain.protocol.errors import MisuseError, SampleError
from support.trainer.data.states import states
from support.trainer.plans import make_plan

pytestmark = pytest.mark.usefixtures("one_zygote")
CPU = torch.device("cpu")


class Lengths(IterableDataset[Any]):
    """Each worker has a stream of another length. Samples have noise, and files come in random order."""

    def __init__(self, lengths: list[int], worker: int | None = None) -> None:
        self.lengths, self.worker, self.epoch, self.reads = lengths, worker, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker = self.worker if info is None else info.id
        files = random.sample(range(100), 100)
        for index in range(self.lengths[worker or 0]):
            self.reads += 1
            noise = torch.rand(2).tolist() + np.random.rand(1).tolist() + [random.random()]
            yield self.epoch, worker, files[index], noise


class Stateful(Lengths):
    """The dataset has the state, and does not go back to its begin by itself, as many do not."""

    index = 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker = self.worker if info is None else info.id
        order = np.random.default_rng(self.epoch).permutation(100)
        for index in range(self.index, self.lengths[worker or 0]):
            self.index = index + 1
            self.reads += 1
            yield self.epoch, worker, int(order[index]), torch.rand(2).tolist()

    def state_dict(self) -> dict[str, Any]:
        return {"index": self.index}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.index = state["index"]


class OwnIterator(Lengths):
    """The iterator has the state: numbers from a generator of its own."""

    def __iter__(self) -> Iterator[Any]:
        return _Numbers(self)


class _Numbers:
    def __init__(self, of: Lengths) -> None:
        info = get_worker_info()
        worker = of.worker if info is None else info.id
        self.of, self.left, self.worker = of, of.lengths[worker or 0], worker
        self.generator = torch.Generator().manual_seed(of.epoch)

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        if not self.left:
            raise StopIteration
        self.left -= 1
        self.of.reads += 1
        return self.of.epoch, self.worker, torch.rand(2, generator=self.generator).tolist()

    def state_dict(self) -> dict[str, Any]:
        return {"left": self.left, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left = state["left"]
        self.generator.set_state(state["generator"])


class Itself(Stateful):
    """The dataset is its own iterator, and goes back to its begin when a loop over it begins."""

    def __iter__(self) -> Any:
        self.index = 0
        return self

    def __next__(self) -> Any:
        if self.index >= self.lengths[self.worker or 0]:
            raise StopIteration
        self.index += 1
        self.reads += 1
        return self.epoch, self.worker, self.index


KINDS = [Lengths, Stateful, OwnIterator, Itself]


class InProcess(Readers):
    """Several workers without processes."""

    def __init__(self, datasets: list[Any]) -> None:
        self.workers = self.count = len(datasets)
        self.spent_s = 0.0
        self.made = [_Plain(dataset, 7) for dataset in datasets]
        self._asked = [deque() for _ in datasets]
        self._workers = None

    def ask(self, number: int, request: Any) -> None:
        self._asked[number].append(request)

    def get(self, number: int) -> Any:
        return self.made[number].make(self._asked[number].popleft())


class _Plain(StreamReader):
    def _announce_worker(self, start: Start) -> None:
        pass  # this process is no worker


def readers_of(kind: type[Lengths], lengths: list[int]) -> InProcess:
    return InProcess([kind(lengths, worker) for worker in range(len(lengths))])


def in_turn(lengths: list[int], chunk: int) -> list[int]:
    """Return the worker of each sample, as torch's DataLoader orders them."""
    left, found = list(lengths), list[int]()
    while any(left):
        for worker, count in enumerate(left):
            found += [worker] * min(chunk, count)
            left[worker] -= min(chunk, count)
    return found


def whole_epoch(readers: Readers, chunk: int, epoch: int) -> list[Any]:
    sequence = Sequence(readers, 0, Position(epoch), chunk, 2)
    return sequence.take(sequence.available(1000))


@given(
    kind=st.sampled_from(KINDS),
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    chunk=st.integers(1, 4),
    takes=st.lists(st.integers(1, 5), max_size=8),
    ahead=st.integers(0, 9),
    depth=st.integers(1, 3),
)
def test_a_stream_continues_from_any_position(
    kind: type[Lengths], lengths: list[int], chunk: int, takes: list[int], ahead: int, depth: int
) -> None:
    expected = whole_epoch(readers_of(kind, lengths), chunk, 3)
    assert [sample[1] for sample in expected] == in_turn(lengths, chunk)
    sequence, found = Sequence(readers_of(kind, lengths), 0, Position(3), chunk, depth), list[Any]()
    for count in takes:
        sequence.available(count + ahead)
        found += sequence.take(sequence.available(count))
        position = Position.parse(json.loads(json.dumps(sequence.position.to_json())))
        assert position == sequence.position
        readers = readers_of(kind, lengths)
        again = Sequence(readers, 0, position, 99, 1)
        assert found + again.take(again.available(1000)) == expected
        reads = sum(each._dataset.reads for each in readers.made)
        if kind is not Lengths:
            assert reads <= len(expected) - len(found) + chunk * len(lengths), "what was read is not read again"


@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_that_ends_early_does_not_change_the_next(kind: type[Lengths]) -> None:
    """Another rank may run out of samples first, and workers have read in advance by then."""
    readers = readers_of(kind, [9, 5])
    sequence = Sequence(readers, 0, Position(0), 2, 3)
    sequence.take(sequence.available(5))
    readers.drop()
    assert whole_epoch(readers, 2, 1) == whole_epoch(readers_of(kind, [9, 5]), 2, 1)


@pytest.mark.parametrize("kind", [Lengths, Stateful, OwnIterator])
def test_worker_processes_read_the_same_streams(kind: type[Lengths]) -> None:
    lengths = [5, 9]
    with closing(Readers(StreamReader(kind(lengths), 7), 2)) as readers:
        for epoch in (0, 1):
            expected = whole_epoch(readers_of(kind, lengths), 3, epoch)
            sequence = Sequence(readers, 0, Position(epoch), 3, 2)
            first = sequence.take(sequence.available(8))
            assert first == expected[:8]
            position = sequence.position
            sequence.available(11)
            readers.drop()
            again = Sequence(readers, 0, position, 3, 2)
            assert first + again.take(again.available(99)) == expected
            readers.drop()


def test_order_is_that_of_a_data_loader_of_torch() -> None:
    class Plain(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(11))

    loader = make_loader(Plain(), CPU, make_plan(1))
    assert isinstance(loader, StreamLoader)
    expected = [batch.tolist() for batch in DataLoader(Plain(), batch_size=4)]
    assert [batch.tolist() for batch in loader.once(0, 4)] == expected
    assert [batch.tolist() for batch in loader.once(0, 4)] == expected, "an evaluation can be repeated"


def test_worker_init_fn_runs_in_each_worker() -> None:
    """The documentation of torch divides a stream in this way."""

    class Range(IterableDataset[int]):
        start, end = 0, 12

        def __iter__(self) -> Iterator[int]:
            return iter(range(self.start, self.end))

    def divide(number: int) -> None:
        info = get_worker_info()
        assert info is not None and info.id == number
        dataset: Any = info.dataset
        dataset.start, dataset.end = 6 * number, 6 * number + 6

    loader = make_loader(DataLoader(Range(), num_workers=2, worker_init_fn=divide), CPU, make_plan(1))
    assert isinstance(loader, StreamLoader)
    assert [batch.tolist() for batch in loader.once(0, 4)] == [[0, 1, 2, 3], [6, 7, 8, 9], [4, 5, 10, 11]]


def test_random_numbers_differ_between_samples_and_leave_the_script_its_own() -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    found = set()
    for rank in range(2):
        readers = Readers(StreamReader(Lengths([6]), 7), 0)
        sequence = Sequence(readers, rank, Position(0), 3, 1)
        found |= {tuple(noise) for *_, noise in sequence.take(sequence.available(6))[1:]}
    assert len(found) == 10
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]


def test_all_ranks_shuffle_alike_when_a_stream_begins() -> None:
    files = []
    for rank in range(3):
        sequence = Sequence(Readers(StreamReader(Lengths([9]), 7), 0), rank, Position(2), 4, 1)
        files.append([sample[2] for sample in sequence.take(sequence.available(9))])
    assert files[0] == files[1] == files[2]


@given(states(st.binary()))
def test_state_round_trip(state: Any) -> None:
    assert repr(decode(json.loads(json.dumps(encode(state))))) == repr(state)


def test_states_with_tensors_and_arrays() -> None:
    given = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
        "half": torch.full((), 0.1, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 3),
        "number": np.int64(3),
        "array": np.arange(6, dtype=np.float32).reshape(2, 3)[:, ::2],
    }
    found = decode(json.loads(json.dumps(encode(given))))
    for name in ("torch", "half", "empty"):
        assert torch.equal(found[name], given[name]) and found[name].dtype == given[name].dtype
    assert np.array_equal(found["array"], given["array"]) and found["number"] == 3
    assert np.array_equal(found["numpy"][1], given["numpy"][1]) and found["python"] == given["python"]
    mutable = torch.zeros(2)
    saved = encode(mutable)
    mutable += 1
    assert decode(saved).tolist() == [0, 0], "a state is a copy"


def test_checkpoints_of_earlier_releases_are_readable() -> None:
    text = (
        '{"dict": [["a", {"tensor": ["float32", [1], "AACAPw=="]}], [2, {"tuple": [{"bytes": "eA=="}, null]}],'
        ' [true, {"array": ["<i2", [2, 1], "AQACAA=="]}], [null, [1.5, "b"]]]}'
    )
    found = decode(json.loads(text))
    assert found["a"].tolist() == [1.0] and found[2] == (b"x", None) and found[None] == [1.5, "b"]
    assert found[True].tolist() == [[1], [2]] and json.dumps(encode(found)) == text


class Unfit(Stateful):
    def state_dict(self) -> dict[str, Any]:
        return {"of": [{1, 2}]}


class Failing(Lengths):
    def __iter__(self) -> Iterator[int]:
        yield 3
        raise OSError("cannot read shard-7.tar")


@pytest.mark.parametrize(
    ("dataset", "error", "message"),
    [
        (Unfit([3]), MisuseError, r"dataset: found set in its state_dict\(\)\['of'\]\[0\]; expected tensors"),
        (Failing([3]), SampleError, "sample 1 of the stream: OSError: cannot read shard-7.tar"),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_errors_name_the_sample(dataset: Any, error: type[Exception], message: str, workers: int) -> None:
    kind = error if not workers else SampleError
    with closing(Readers(StreamReader(dataset, 7), workers)) as readers, pytest.raises(kind, match=message):
        whole_epoch(readers, 2, 0)


def test_error_of_collate_fn_names_it() -> None:
    def collate(samples: list[Any]) -> Any:
        raise KeyError("label")

    loader = make_loader(Lengths([3]), CPU, make_plan(1), collate_fn=collate)
    assert isinstance(loader, StreamLoader)
    with pytest.raises(SampleError, match="collate_fn: found an error for a batch of 3 samples of the stream: KeyErr"):
        next(loader.once(0, 4))


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (Lengths([3]), {"sampler": [1]}, "sampler: found list for Lengths, a stream; expected none"),
        (Lengths([3]), {"workers": -1}, "workers: found -1; expected 0 or more"),
        (Lengths([3]), {"workers": 3, "prefetch": 2}, "prefetch: found 2 batches for 3 workers; expected at least one"),
        (Lengths([3]), {"workers": 1, "prefetch": 200}, "prefetch: found 200 batches for 1 workers; .* at most 128"),
        (Lengths([3]), {"prefetch": 2}, "prefetch: found 2 without workers"),
        ((i for i in range(3)), {}, "dataset: found generator; expected a map-style dataset"),
    ],
)
def test_options_that_do_not_suit_a_stream_are_errors(dataset: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(MisuseError, match=f"^{message}"):
        make_loader(dataset, CPU, make_plan(1), **options)


def test_length_of_a_stream_is_unknown() -> None:
    with pytest.raises(MisuseError, match=r"len\(loader\): found a loader of Lengths, a stream"):
        len(make_loader(Lengths([3]), CPU, make_plan(1)))
    with pytest.raises(
        MisuseError, match=r"loader.total_steps: found 2 epochs of Lengths, a stream; expected spec.ste"
    ):
        _ = make_loader(Lengths([3]), CPU, make_plan(1)).total_steps
    assert make_loader(Lengths([3]), CPU, make_plan(1, steps=9)).total_steps == 9


def test_objects_with_a_state_are_streams() -> None:
    """Hugging Face's IterableDataset is no class of torch."""

    class Plain:
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

        def state_dict(self) -> None:
            return None

        def load_state_dict(self, state: None) -> None:
            assert state is None

    loader = make_loader(Plain(), CPU, make_plan(1))
    assert isinstance(loader, StreamLoader)
    assert [batch.tolist() for batch in loader.once(0, 2)] == [[0, 1], [2]]


def test_requests_are_shown_in_errors() -> None:
    assert (str(Take(3)), str(Start(2, 0, 0, 0, Place()))) == ("of 3 samples", "of epoch 2")
    assert Chunk([1], Place(1)).place.read == 1
