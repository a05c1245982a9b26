"""Datasets by URI of which each node fetches only the shards of its ranks, and the other data that these ranks read."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlcontract import DATASET_SECRET_DIR, DatasetRef, Plan
from dltrain.batch.sharding import ShardedSampler, Shards, begin_of, shard_of
from dltrain.data.files import FIELD, KEYS, MAX_CLASSES, check_samples, check_targets, labels_in, scale_in
from dltrain.data.sharded import layout
from dltrain.data.sharded.partial_file import Bytes, PartialFile, Wanted
from dltrain.data.tokens import KINDS, POSITIONS
from dltrain.models import InputShape
from dltrain.protocol.errors import BadInputError, MisuseError


class ShardedDataset:
    """A dataset in a partial file. Samples are fetched when they are read first, with all of their shard.

    Before ``divide``, samples are fetched one by one.
    """

    in_shards = True
    """True: the dataset is sharded. Callers check this attribute instead of the class, whose module imports aiohttp."""
    labels: tuple[str, ...] = ()
    scale: float | None = None
    train_samples: int
    test_samples: int

    def __init__(self, file: PartialFile) -> None:
        self.file = file
        self.sampler: ShardedSampler | None = None
        """The assignment of shards to nodes; None before ``divide``."""
        self._node = 0
        self._shares: Callable[[], Sequence[int]] = lambda: ()

    @property
    def shape(self) -> InputShape:
        raise NotImplementedError

    def largest_target(self) -> int:
        """Return the largest class, or the largest token in this node's shards. Valid after ``divide``."""
        raise NotImplementedError

    def agree_on_classes(self, classes: int) -> None:
        """Set the number of classes or tokens, which no node may know alone. ``classes``: the maximum of all nodes."""

    def train(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        return self.file.reading(self._bytes_of(indices), lambda: self._samples(indices), lambda: self._wanted(indices))

    def test(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def held_shards(self, batch: int) -> Shards:
        """Return the shards of which this node has all samples. ``batch``: the number of shards."""
        if not self.file.present.any():
            return ()
        shards = np.arange(min(batch, self.train_samples))
        first, end = (each * self.train_samples // len(shards) for each in (shards, shards + 1))
        count = np.concatenate([[0], np.cumsum(self.file.present, dtype=np.int64)])
        begin_block = self._begin_of_sample(first) // self.file.block_nbytes
        end_block = (self._end_of_sample(end - 1) - 1) // self.file.block_nbytes + 1
        present = count[end_block] - count[begin_block] == end_block - begin_block
        return tuple(np.flatnonzero(present).tolist())

    def divide(
        self, plan: Plan, rank: int, held: Mapping[int, Sequence[int]], shares: Callable[[], Sequence[int]]
    ) -> None:
        """Assign shards to nodes. ``held``: node → the shards that it has. ``shares``: returns local batch sizes."""
        self.sampler = ShardedSampler.sharded(plan, self.train_samples, held)
        self._node, self._shares = self.sampler.nodes[rank], shares

    def own(self) -> Shards:
        """Return the shards of this node."""
        assert self.sampler is not None, "divide was called"
        return self.sampler.owned_by_node(self._shares(), self._node)

    def own_samples(self, count: int) -> NDArray[np.int64]:
        """Return ``count`` numbers of samples of this node, for measurements. They repeat if there are fewer."""
        assert self.sampler is not None, "divide was called"
        own = np.array(self.own() or (0,), np.int64)
        firsts = own * self.train_samples // self.sampler.batch
        return firsts[np.arange(count) % len(firsts)]

    def fetch_own(self) -> None:
        """Fetch all shards of this node."""
        assert self.sampler is not None, "divide was called"
        shards = np.array(self.own(), np.int64)
        if len(shards):
            blocks = self._blocks_of_shards(shards, self.sampler.batch)
            self.file.ensure(Wanted(blocks, self._name, self._needed(shards)))

    def _wanted(self, indices: NDArray[np.int64]) -> Wanted:
        """Return the blocks to fetch for samples: those of their shards or, before ``divide``, their own."""
        if self.sampler is None:
            return Wanted(self.file.blocks(*self._bytes_of(indices)), self._name)
        shards = np.unique(shard_of(indices, self.sampler.batch, self.train_samples))
        own = np.union1d(shards, np.array(self.own(), np.int64))
        return Wanted(self._blocks_of_shards(shards, self.sampler.batch), self._name, self._needed(own))

    def _needed(self, shards: NDArray[np.int64]) -> NDArray[np.int64]:
        assert self.sampler is not None, "only called then"
        return np.union1d(self._blocks_of_shards(shards, self.sampler.batch), self._common_blocks())

    def _blocks_of_shards(self, shards: NDArray[np.int64], batch: int) -> NDArray[np.int64]:
        first, end = (each * self.train_samples // batch for each in (shards, shards + 1))
        return self.file.blocks(self._begin_of_sample(first), self._end_of_sample(end - 1))

    def _bytes_of(self, indices: NDArray[np.int64]) -> Bytes:
        return self._begin_of_sample(indices), self._end_of_sample(indices)

    def _name(self, begin: int, end: int) -> str:
        """Return the shards and samples in the bytes from ``begin`` to ``end``, for messages."""
        first, last = self._sample_at(begin), self._sample_at(end - 1)
        if last < 0 or first >= self.train_samples:
            return "held-out samples, or arrays that every node needs"
        first, last = max(first, 0), min(last, self.train_samples - 1)
        if self.sampler is None:
            return f"samples {first} to {last}"
        shards = shard_of(np.array([first, last]), self.sampler.batch, self.train_samples)
        which = f"shard {shards[0]}" if shards[0] == shards[1] else f"shards {shards[0]} to {shards[1]}"
        return f"{which} of {self.sampler.batch} (samples {first} to {last})"

    def _common_blocks(self) -> NDArray[np.int64]:
        """Return the blocks that every node needs."""
        return np.empty(0, np.int64)

    def _begin_of_sample(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        raise NotImplementedError

    def _end_of_sample(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        raise NotImplementedError

    def _sample_at(self, byte: int) -> int:
        raise NotImplementedError

    def _samples(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


class ShardedTokens(ShardedDataset):
    """The sequences of one text, of ``POSITIONS`` tokens each. The last sequences are held out.

    Each node has its shards of the training sequences, and the held-out sequences that it evaluates.
    """

    def __init__(self, file: PartialFile) -> None:
        super().__init__(file)
        self._placed = placed = layout.of_tokens(file)
        if len(placed.shape) != 1 or placed.dtype not in KINDS or placed.shape[0] <= 2 * POSITIONS:
            found = f"{file.shown} with {placed.dtype} of shape {placed.shape}"
            expected = f"one dimension of uint8, uint16 or uint32, and over {2 * POSITIONS} tokens"
            raise BadInputError(FIELD, found, expected, "correct the file")
        sequences = (placed.shape[0] - 1) // POSITIONS
        self.test_samples = max(1, sequences // 10)
        self.train_samples = sequences - self.test_samples
        self._tokens = placed.mapped(file)
        self._vocabulary: int | None = None

    @property
    def shape(self) -> InputShape:
        if self._vocabulary is None:
            raise MisuseError(
                "dataset.shape: found no number of tokens, because with spec.dataset.distribution Sharded no node has "
                "all of them; expected the number of tokens in the script. Write it there"
            )
        return InputShape((POSITIONS,), self._vocabulary, tokens=True)

    def largest_target(self) -> int:
        assert self.sampler is not None, "divide was called"
        self.fetch_own()
        largest = 0
        for shard in self.own():
            first, end = (begin_of(each, self.sampler.batch, self.train_samples) for each in (shard, shard + 1))
            if end > first:
                largest = max(largest, self._largest_in(first, end))
        return largest

    def _largest_in(self, first: int, end: int) -> int:
        """Return the largest token in the samples ``first`` to ``end`` (exclusive) of one shard."""
        one, last = np.array([first]), np.array([end - 1])
        return self.file.reading(
            (self._begin_of_sample(one), self._end_of_sample(last)),
            lambda: int(self._tokens[first * POSITIONS : end * POSITIONS + 1].max()),
            lambda: self._wanted(one),
        )

    def agree_on_classes(self, classes: int) -> None:
        if classes > MAX_CLASSES:
            raise BadInputError(
                FIELD, f"{self.file.shown} with token {classes - 1}", f"tokens below {MAX_CLASSES}", "correct the file"
            )
        self._vocabulary = classes

    def test(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        indices = indices + self.train_samples
        places = self._bytes_of(indices)

        def wanted() -> Wanted:
            needed = None if self.sampler is None else self._needed(np.array(self.own(), np.int64))
            return Wanted(self.file.blocks(*places), self._name, needed)

        x, y = self.file.reading(places, lambda: self._samples(indices), wanted)
        if self._vocabulary is not None and len(indices) and (top := int(max(x.max(), y.max()))) >= self._vocabulary:
            raise BadInputError(
                FIELD, f"{self.file.shown} with token {top} in its held-out part alone",
                f"tokens below {self._vocabulary}, as in its training part", "shuffle the text, or correct the file",
            )  # fmt: skip
        return x, y

    def _begin_of_sample(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._placed.offset + indices * POSITIONS * self._placed.dtype.itemsize

    def _end_of_sample(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._placed.offset + ((indices + 1) * POSITIONS + 1) * self._placed.dtype.itemsize

    def _sample_at(self, byte: int) -> int:
        return (byte - self._placed.offset) // (POSITIONS * self._placed.dtype.itemsize)

    def _samples(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        rows = self._tokens[indices[:, None] * POSITIONS + np.arange(POSITIONS + 1)].astype(np.int64)
        return torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, 1:].copy())


class ShardedArrays(ShardedDataset):
    """The arrays x, y, x_test and y_test of an ``.npz`` file. Each node has its shards of x, and all other arrays."""

    def __init__(self, file: PartialFile) -> None:
        super().__init__(file)
        places = layout.of_arrays(file)
        if missing := [key for key in KEYS if key not in places]:
            found = f"{file.shown} with arrays {', '.join(sorted(places)) or 'none'}"
            raise BadInputError(
                FIELD, found, f"an .npz file with arrays {', '.join(KEYS)}", f"add {', '.join(missing)}"
            )
        self._x, self._x_test = places["x"], places["x_test"]
        if len(self._x.shape) == 2 and self._x.dtype.kind in "iu" and places["y"].shape == self._x.shape:
            raise BadInputError(
                FIELD, f"{file.shown} with sequences of tokens", "images or tables (distribution Sharded)",
                "save the tokens as a one-dimensional .npy, or use distribution Full",
            )  # fmt: skip
        self._others = [place for key, place in places.items() if key != "x" and place.nbytes]
        others = {key: place.whole(file) for key, place in places.items() if key != "x"}
        check_targets(file.shown, "x", self._x.dtype, self._x.shape, "y", others["y"])
        check_targets(file.shown, "x_test", self._x_test.dtype, self._x_test.shape, "y_test", others["y_test"])
        check_samples(file.shown, self._x.shape, self._x.dtype, self._x_test.shape, self._x_test.dtype, tokens=False)
        self.train_samples, self.test_samples = self._x.shape[0], self._x_test.shape[0]
        self._y, self._y_test = (torch.from_numpy(others[key].astype(np.int64)) for key in ("y", "y_test"))
        self._classes = int(max(self._y.max(), self._y_test.max())) + 1
        self.labels = labels_in(file.shown, others)
        self._factor = scale_in(file.shown, others)
        self.scale = self._factor if self._x.dtype == np.uint8 else None
        self._train, self._held_out = self._x.mapped(file), others["x_test"]

    @property
    def shape(self) -> InputShape:
        return InputShape(self._x.shape[1:], self._classes, tokens=False)

    def largest_target(self) -> int:
        return self._classes - 1

    def test(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        return self._inputs(self._held_out[indices]), self._y_test[torch.from_numpy(indices)]

    def _samples(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        x = self._inputs(self._train[indices])
        if not bool(torch.isfinite(x).all()):
            bad = int(indices[int(torch.nonzero(~torch.isfinite(x).flatten(1).all(1))[0])])
            name = self._name(*(int(edge[0]) for edge in self._bytes_of(np.array([bad]))))
            found = f"values that are not finite in {name} of {self.file.shown}"
            raise BadInputError(FIELD, found, "finite numbers", "correct the file")
        return x, self._y[torch.from_numpy(indices)]

    def _inputs(self, rows: NDArray[Any]) -> Tensor:
        x = torch.from_numpy(np.ascontiguousarray(rows, rows.dtype.newbyteorder("=")))
        return x.float() * self._factor if x.dtype is torch.uint8 else x.float()

    def _common_blocks(self) -> NDArray[np.int64]:
        begin = np.array([place.offset for place in self._others], np.int64)
        return self.file.blocks(begin, begin + np.array([place.nbytes for place in self._others], np.int64))

    def _begin_of_sample(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._x.offset + indices * self._x.row_nbytes

    def _end_of_sample(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._x.offset + (indices + 1) * self._x.row_nbytes

    def _sample_at(self, byte: int) -> int:
        return (byte - self._x.offset) // self._x.row_nbytes


def open_sharded(ref: DatasetRef) -> ShardedDataset:
    """Open the sharded dataset of a plan. Only what every node needs is fetched at once.

    Raise BadInputError if the file cannot be used, and OSError if it cannot be fetched now.
    """
    assert ref.uri is not None and ref.path is not None, "a plan with distribution Sharded has them"
    folder = Path(ref.path).parent / ".dljob"
    file = PartialFile(
        ref.uri, folder, sha256=ref.sha256, room_nbytes=ref.size_nbytes, secret=_secret(Path(DATASET_SECRET_DIR))
    )
    return ShardedArrays(file) if ref.path.endswith(".npz") else ShardedTokens(file)


def encode(dataset: ShardedDataset, batch: int) -> bytes:
    """Return the message that a rank sends to the others before ``divide``: its version of the file and its shards.

    ``batch``: the number of shards.
    """
    return json.dumps([dataset.file.version, dataset.file.nbytes, dataset.held_shards(batch)]).encode()


def decode(told: Sequence[bytes], nodes: Sequence[int], shown: str) -> dict[int, Shards]:
    """Return node → the shards that it has. ``told``: the result of ``encode`` on each rank.

    ``nodes``: node of each rank. ``shown``: the file's URI for messages. Raise BadInputError if the ranks see different
    versions of the file.
    """
    values = [json.loads(one) for one in told]
    if len({(version, nbytes) for version, nbytes, _ in values}) > 1:
        raise BadInputError(
            FIELD, f"different versions of {shown} on different nodes", "one version",
            "start the job again, and do not replace its data",
        )  # fmt: skip
    return {node: tuple(shards) for node, (_, _, shards) in zip(nodes, values, strict=True)}


def _secret(folder: Path) -> dict[str, str] | None:
    """Return the credentials in ``folder``, which has a file for each; None if there are none."""
    found = {path.name: path.read_text().strip() for path in folder.glob("[A-Z]*") if path.is_file()}
    return found or None
