"""Tests of ranks of one pod that read and free blocks of the same copy of a file at the same time."""

import fcntl
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlcontract import DatasetRef
from dltrain.data.sharded.dataset import ShardedTokens, open_sharded
from dltrain.data.sharded.partial_file import PartialFile
from support.servers.files import FileServer
from support.trainer.plans import make_plan
from support.trainer.sharded_files import BLOCK, TOKENS, impatient_server, publish_text

SHARES = (2, 2, 4)
"""Local batch sizes. The first two ranks are in one pod, and have the first half of the text."""
Sequences = tuple[Any, Any]


class Rank:
    """A rank of the pod, with its own mapping of the copy, and ``interrupt``, which runs just before it reads."""

    def __init__(self, ref: DatasetRef, number: int) -> None:
        self.shares, self.interrupt = SHARES, list[Callable[[], Any]]()
        plan = make_plan(3, shares=SHARES, global_batch=sum(SHARES), dataset=ref)
        ranks = tuple(rank.model_copy(update={"pod": f"pod-{rank.rank // 2}"}) for rank in plan.ranks)
        data = open_sharded(ref)
        assert isinstance(data, ShardedTokens)
        data.divide(plan.model_copy(update={"ranks": ranks}), number, {}, lambda: self.shares)
        data._tokens = _Interrupted(data._tokens, self.interrupt)
        data.file.path = _InterruptedPath(data.file.path)
        data.file.path.interrupt = self.interrupt
        self.data = data


class _Interrupted:
    """An array that runs what is in ``interrupt`` once before its elements are read."""

    def __init__(self, array: Any, interrupt: list[Callable[[], Any]]) -> None:
        self._array, self._interrupt = array, interrupt

    def __getitem__(self, key: Any) -> Any:
        while self._interrupt:
            self._interrupt.pop()()
        return self._array[key]


class _InterruptedPath(type(Path())):  # type: ignore[misc]
    interrupt: list[Callable[[], Any]]

    def open(self, mode: str = "r", *arguments: Any, **named: Any) -> Any:
        while mode == "rb" and self.interrupt:
            self.interrupt.pop()()
        return super().open(mode, *arguments, **named)


def sequences(first: int, count: int) -> Sequences:
    """Return the inputs and targets of sequences of the text."""
    rows = TOKENS[np.arange(first, first + count)[:, None] * 128 + np.arange(129)].astype(np.int64)
    return rows[:, :-1], rows[:, 1:]


def equal(found: Sequences, expected: Sequences) -> bool:
    return all(np.array_equal(np.array(a), b) for a, b in zip(found, expected, strict=True))


@pytest.fixture
def server() -> Iterator[FileServer]:
    with impatient_server() as found:
        yield found


@pytest.fixture
def pod(server: FileServer, tmp_path: Path) -> tuple[Rank, Rank]:
    """Two ranks of a pod whose disk has room for its shards and two blocks of held-out samples, but not for more."""
    ref = publish_text(server, tmp_path).model_copy(update={"size_nbytes": 32 * BLOCK})
    return Rank(ref, 0), Rank(ref, 1)


def test_held_out_samples_that_another_rank_frees_are_read_again(pod: tuple[Rank, Rank]) -> None:
    """Both ranks evaluate their part of the held-out samples, for which there is not enough room together."""
    first, second = pod
    first.data.fetch_own()
    first.data.test(np.arange(16))
    assert first.data.file.present.sum() == 31
    first.interrupt.append(lambda: second.data.test(np.arange(64, 80)))
    assert equal(first.data.test(np.arange(16)), sequences(900, 16))
    assert equal(second.data.test(np.arange(64, 80)), sequences(964, 16))


@pytest.mark.parametrize("read", [
    lambda data: equal(data.train(np.arange(9)), sequences(0, 9)),
    lambda data: data.largest_target() == TOKENS[: 450 * 128 + 1].max(),
    lambda data: data.file.read(0, 6) == b"\x93NUMPY",
], ids=["training samples", "largest target", "header"])  # fmt: skip
def test_shards_that_another_rank_frees_are_read_again(read: Callable[[ShardedTokens], bool], pod: Any) -> None:
    """The second rank knows already that the pod has lost its shards, while the first one reads ahead."""
    first, second = pod
    first.data.fetch_own()
    second.shares = (0, 0, 8)
    first.interrupt.append(lambda: second.data.test(np.arange(0, 90)))
    assert read(first.data)
    assert not first.interrupt and second.data.file.fetched_nbytes


def test_rank_that_begins_with_an_empty_copy_does_not_spoil_what_others_read(
    server: FileServer, tmp_path: Path
) -> None:
    """The server tells no version, so a rank that starts cannot know whether the blocks of the others are still right."""
    server.etags = False
    ref = publish_text(server, tmp_path, sums=False)
    first = Rank(ref, 0)
    first.data.train(np.arange(9))
    first.interrupt.append(lambda: PartialFile(str(ref.uri), Path(str(ref.path)).parent / ".dljob"))
    assert equal(first.data.train(np.arange(9)), sequences(0, 9))


ACTION = st.tuples(
    st.integers(0, 2),
    st.sampled_from([SHARES, (1, 1, 6), (2, 1, 5), (0, 0, 8)]),
    st.booleans(),
    st.integers(0, 84),
    st.integers(1, 16),
)
"""Rank, its local batch sizes, whether it reads held-out samples, the first one and their number."""


@given(actions=st.lists(ACTION, min_size=2, max_size=12), nested=st.integers(1, 3))
def test_no_interleaving_of_ranks_reads_freed_blocks(actions: list[Any], nested: int) -> None:
    """Each rank is interrupted by the next action just before it reads, unless it has the lock.

    The disk has room for one shard and two more blocks.
    """
    with impatient_server() as server, tempfile.TemporaryDirectory() as folder:
        ref = publish_text(server, Path(folder)).model_copy(update={"size_nbytes": 11 * BLOCK})
        ranks, left = [Rank(ref, number) for number in (0, 1, 0)], list(reversed(actions))

        def act(depth: int) -> None:
            number, shares, held_out, first, count = left.pop()
            rank = ranks[number]
            rank.shares = shares

            def others() -> None:
                with (Path(folder) / "node/.dljob/shards.lock").open("w") as lock:
                    try:
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:
                        return
                if left and depth < nested:
                    act(depth + 1)

            rank.interrupt.append(others)
            read = rank.data.test if held_out else rank.data.train
            assert equal(read(np.arange(first, first + count)), sequences(first + 900 * held_out, count))

        while left:
            act(0)
