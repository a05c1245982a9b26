"""Plan, write and read the parts of a sharded checkpoint on all ranks, by torch.distributed.checkpoint.

Ranks agree on the parts, write them, and rank 0 commits the checkpoint when all of them are durable; an error on one
rank is an error on all. When reading, torch.distributed.checkpoint computes which rows a rank needs from which part, so
that the number of ranks may change. Its own storage is not used: its metadata is a pickle, it computes no hashes, and
it replaces files in place. The classes here write safetensors files and the same manifest as other checkpoints.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load as load_all
from torch.distributed.checkpoint.state_dict_saver import save as save_all
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult

from dlcontract.checkpoint.parts import Chunk, ShardedTensor, Table, check, part_name, row_count
from dltrain.checkpoint.state import PartTarget
from dltrain.checkpoint.store import MODEL, OPTIMIZER, Snapshot
from dltrain.checkpoint.tensor_file import DTYPES, NAMES, Written
from dltrain.comm.algorithms.torch_distributed import interpret
from dltrain.protocol.errors import VolumeError

Write = Callable[[str, str, Mapping[str, Tensor]], Written]
"""Write tensors durably to a new file, given the place of the checkpoint and the name of the file in it."""
Commit = Callable[[Mapping[str, Written], Table], None]
"""Complete a checkpoint on rank 0, from the sizes and hashes of its parts, and the table of the parts."""


class Parts(Protocol):
    """The parts of a checkpoint whose hashes were verified, for one rank."""

    streams: int
    """Number of reads at the same time."""

    def error(self, error: OSError) -> VolumeError:
        """Return the error to raise if a part cannot be read because of ``error``."""

    def read_rows(self, target: Tensor, file: str, name: str, first: int = 0) -> None:
        """Read rows of the tensor ``name`` from the part ``file`` into ``target``. See ``PartsFile.read_rows``."""


@dataclass(frozen=True)
class _Place:
    """Where a rank has written rows of a tensor. ``written``: size and hash of the file."""

    file: str
    rows: int
    written: Written


def _raise(error: CheckpointException) -> NoReturn:
    """Raise the error of the lowest rank that failed, without the stack of torch.distributed.checkpoint."""
    rank, (cause, _) = min(error.failures.items())
    if isinstance(cause, OSError) and cause.errno is not None:
        raise OSError(cause.errno, f"rank {rank}: {cause.strerror}", cause.filename) from None
    raise cause from None


def _box(begin: int, shape: Sequence[int]) -> ChunkStorageMetadata:
    """Return rows of a tensor from row ``begin`` on, in the terms of torch. ``shape``: shape of these rows."""
    return ChunkStorageMetadata(_corner(begin, len(shape)), torch.Size(shape))


def _corner(begin: int, dimensions: int) -> torch.Size:
    return torch.Size([begin, *[0] * (dimensions - 1)] if dimensions else [])


def _key(file: str, name: str) -> str:
    """Return the name by which torch.distributed.checkpoint knows the tensor ``name`` of ``file``."""
    return f"{file}/{name}"


def _file_and_name(key: str) -> tuple[str, str]:
    file, _, name = key.partition("/")
    return file, name


class _SavePlanner(SavePlanner):
    """Plan what a rank writes: the rows of each tensor that it has."""

    def __init__(self, snapshot: Snapshot, rank: int) -> None:
        self._extents, self._rank = snapshot.extents, rank
        self._tensors = {
            _key(file, name): tensor
            for file, tensors in ((MODEL, snapshot.model), (OPTIMIZER, snapshot.optimizer))
            for name, tensor in tensors.items()
        }

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        items = []
        for key, tensor in self._tensors.items():
            begin, shape = self._extents.get(key, (0, tuple(tensor.shape)))
            if row_count(tensor.shape) or not self._rank:  # small tensors have fewer rows than there are ranks
                data = TensorWriteData(_box(begin, tensor.shape), TensorProperties(tensor.dtype), torch.Size(shape))
                index = MetadataIndex(key, data.chunk.offsets)
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._tensors[write_item.index.fqn]


class _Writer(StorageWriter):
    """Write a rank's parts to the place that rank 0 has chosen, and commit the checkpoint on rank 0."""

    def __init__(self, rank: int, create: Callable[[], str], write: Write, commit: Commit) -> None:
        self._rank, self._create, self._write, self._commit = rank, create, write, commit

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *arguments: Any, **options: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        place = self._create()
        return [replace(plan, storage_data=place) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        files: dict[str, dict[str, Any]] = {}
        for item in plan.items:
            file, name = _file_and_name(item.index.fqn)
            files.setdefault(file, {})[name] = planner.resolve_data(item)
        written = {
            file: self._write(plan.storage_data, part_name(file, self._rank), tensors)
            for file, tensors in files.items()
        }
        results = []
        for item in plan.items:
            file, name = _file_and_name(item.index.fqn)
            tensor = files[file][name]
            place = _Place(part_name(file, self._rank), row_count(tensor.shape), written[file])
            results.append(WriteResult(item.index, tensor.nbytes, place))
        future: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        parts = dict[str, Written]()
        chunks: dict[str, list[Chunk]] = {}
        for result in (result for rank in results for result in rank):
            place, begin = result.storage_data, next(iter(result.index.offset or ()), 0)
            parts[place.file] = place.written
            chunks.setdefault(result.index.fqn, []).append(Chunk(place.file, begin, place.rows))
        table: dict[str, dict[str, ShardedTensor]] = {MODEL: {}, OPTIMIZER: {}}
        for key, found in metadata.state_dict_metadata.items():
            assert isinstance(found, TensorStorageMetadata), "there are only tensors"
            ordered = tuple(sorted(chunks[key], key=lambda chunk: chunk.begin))
            file, name = _file_and_name(key)
            table[file][name] = ShardedTensor(NAMES[found.properties.dtype], tuple(found.size), ordered)
        check(table)
        self._commit(parts, table)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


def save(snapshot: Snapshot, group: Any, create: Callable[[], str], write: Write, commit: Commit) -> None:
    """Write this rank's parts of ``snapshot``, and commit the checkpoint when all ranks have written theirs.

    All ranks must call it, in a thread that alone uses ``group``, torch's process group. ``create``: a function that
    creates the place for the parts and returns it, such as a folder. ``commit``: a function that completes the
    checkpoint. Only rank 0 calls these two. ``write``: a function with which each rank writes its parts to this place.

    Raise the error of any rank on all ranks: OSError if writing failed, ValueError for a dtype that is not supported,
    and FencedError if another coordinator has taken over. Raise PeerLostError if a rank is lost.
    """
    rank = torch.distributed.get_rank(group)
    try:
        save_all(
            {},
            storage_writer=_Writer(rank, create, write, commit),
            planner=_SavePlanner(snapshot, rank),
            process_group=group,
        )
    except CheckpointException as error:
        _raise(error)
    except RuntimeError as error:
        raise interpret(error) from None


class _LoadPlanner(LoadPlanner):
    """Plan what a rank reads: its rows of each tensor.

    ``targets``: memory for these rows and the index of the first one, by the tensor's name in the plan.
    """

    def __init__(self, targets: Mapping[str, tuple[Tensor, int]]) -> None:
        self._targets = targets

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        assert metadata is not None, "the reader has it"
        self._metadata = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for key, (tensor, begin) in self._targets.items():
            found = self._metadata[key]
            assert isinstance(found, TensorStorageMetadata), "there are only tensors"
            if tensor.numel():
                items += create_read_items_for_chunk_list(key, found, [_box(begin, tensor.shape)])
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise AssertionError("there are only tensors")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        tensor, _ = self._targets[read_item.dest_index.fqn]
        if not tensor.dim():
            return tensor
        return tensor.narrow(0, read_item.dest_offsets[0], read_item.lengths[0])

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass


class _Reader(StorageReader):
    """Read rows of tensors from the parts of a checkpoint whose hashes were verified."""

    def __init__(self, parts: Parts, table: Table) -> None:
        self._parts, self._table = parts, table

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *arguments: Any, **options: Any) -> Metadata:
        found: dict[str, Any] = {}
        for file, tensors in self._table.items():
            for name, tensor in tensors.items():
                chunks = [
                    _box(chunk.begin, (chunk.rows, *tensor.shape[1:]) if tensor.shape else ())
                    for chunk in tensor.chunks
                ]
                properties = TensorProperties(DTYPES[tensor.dtype])
                found[_key(file, name)] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
        return Metadata(found)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *arguments: Any, **options: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        items = []
        for item in plan.items:
            file, name = _file_and_name(item.storage_index.fqn)
            assert item.storage_index.index is not None, "the planner sets it"
            part, target = self._table[file][name].chunks[item.storage_index.index].file, planner.resolve_tensor(item)
            items.append((target, part, name, next(iter(item.storage_offsets), 0)))
        with ThreadPoolExecutor(self._parts.streams, "parts") as pool:
            try:
                for each in [pool.submit(self._read, *item) for item in items]:
                    each.result()
            finally:
                pool.shutdown(cancel_futures=True)
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        return future

    @torch.no_grad()
    def _read(self, target: Tensor, part: str, name: str, first: int) -> None:
        direct = target.device.type == "cpu" and target.is_contiguous()
        rows = target if direct else torch.empty(target.shape, dtype=target.dtype, device="cpu")
        self._parts.read_rows(rows, part, name, first)
        if not direct:
            target.copy_(rows)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


@torch.no_grad()
def load(parts: Parts, table: Table, target: PartTarget, group: Any) -> dict[int, dict[str, Any]]:
    """Read this rank's rows of a sharded checkpoint into ``target``. All ranks must call it.

    ``parts``: where to read them. ``group``: torch's process group. Return the optimizer's state by index of the
    parameter and name, as in a ``state_dict()``.

    Raise a VolumeError on all ranks if one of them cannot read a part, and PeerLostError if a rank is lost.
    """
    targets = {_key(MODEL, name): target.weight_part(name) for name in table[MODEL]}
    entries: dict[int, dict[str, Any]] = {}
    for name, tensor in table[OPTIMIZER].items():
        index, _, key = name.partition(".")
        value, rows, begin = target.optimizer_space(int(index), key, DTYPES[tensor.dtype], tensor.shape)
        entries.setdefault(int(index), {})[key] = value
        targets[_key(OPTIMIZER, name)] = rows, begin
    try:
        load_all({}, storage_reader=_Reader(parts, table), planner=_LoadPlanner(targets), process_group=group)
    except CheckpointException as error:
        try:
            _raise(error)
        except OSError as unreadable:
            raise parts.error(unreadable) from None
    except RuntimeError as error:
        raise interpret(error) from None
    return entries
