"""The sharded checkpoints of a job in an object store: every rank uploads and downloads its own part."""

import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from dlcontract import Plan
from dlcontract.checkpoint.parts import Table
from dltrain.checkpoint.remote_store import RESTORED, RemoteCheckpoints, open_remote, upload_tensors
from dltrain.checkpoint.sharded import exchange
from dltrain.checkpoint.sharded.verification import Claims, Verification, divide, raise_together
from dltrain.checkpoint.state import PartTarget
from dltrain.checkpoint.store import Snapshot, Stored
from dltrain.checkpoint.tensor_file import TensorFile, Written, content
from dltrain.comm.process_group import ProcessGroup
from dltrain.host.volume_access import is_transient
from dltrain.object_store.client import FIELD, PART_NBYTES, STREAMS, ObjectStore
from dltrain.object_store.commit_log import COMMITS, DamagedError, StoredFile
from dltrain.object_store.reading import STAGING_FIELD, fetch, opening_error
from dltrain.protocol.errors import CheckpointVolumeError, VolumeError
from dltrain.protocol.volume_layout import checkpoint_place, job_directory

T = TypeVar("T")


class _RemoteFile(TensorFile):
    """A safetensors file in an object store, of which only the ranges with the tensors that are read are downloaded."""

    def __init__(self, store: ObjectStore, key: str) -> None:
        self._store, self._key = store, key
        super().__init__(Path(key))

    def _header(self) -> bytes:
        length = int.from_bytes(self._store.read_range(self._key, 0, 8), "little")
        self._begin = 8 + length
        return self._store.read_range(self._key, 8, length)

    def _fill(self, tensor: Tensor, offset: int) -> None:
        target = content(tensor)
        for at in range(0, len(target), PART_NBYTES):
            nbytes = min(PART_NBYTES, len(target) - at)
            read = self._store.read_range(self._key, offset + at, nbytes)
            target[at : at + nbytes] = np.frombuffer(read, np.uint8)

    def _repeat(self, operation: Callable[[], T]) -> T:
        return operation()  # the store has repeated each request


class _Parts:
    """The parts of a checkpoint, of which ``folder`` has those that this rank has downloaded. See ``exchange.Parts``.

    The rank reads of others only the rows that it needs, after another rank has verified the part.
    """

    streams = STREAMS

    def __init__(self, store: ObjectStore, files: Mapping[str, StoredFile], folder: Path) -> None:
        self._store, self._files, self._folder = store, files, folder
        self._open: dict[str, TensorFile] = {}
        self._lock = threading.Lock()

    def error(self, error: OSError) -> VolumeError:
        return CheckpointVolumeError(self._store.uri, error, FIELD)

    def read_rows(self, target: Tensor, file: str, name: str, first: int = 0) -> None:
        with self._lock:
            if (found := self._open.get(file)) is None:
                path = self._folder / file
                found = TensorFile(path) if path.exists() else _RemoteFile(self._store, self._files[file].key)
                self._open[file] = found
        found.read_rows(target, name, first)


class RemoteShardedCheckpoints:
    """Checkpoints in an object store to which every rank uploads its part. Every rank has such an object.

    Rank 0 finds, commits and removes them, as it does with other checkpoints in the store. Both kinds can follow each
    other in one log.
    """

    def __init__(self, store: ObjectStore, checkpoints: RemoteCheckpoints | None, scratch: Path, group: Any) -> None:
        """Create the object. ``checkpoints``: those of the job on rank 0, None on other ranks.

        ``scratch``: folder on the local disk for the files that this rank downloads; on rank 0, that of
        ``checkpoints``. ``group``: torch's process group, which only the thread that writes checkpoints uses after the
        resume.
        """
        self.store, self._checkpoints, self._scratch, self.group = store, checkpoints, scratch, group
        self._files: dict[str, StoredFile] = {}
        """The files of the checkpoint that ``load_verified`` has verified last."""

    @property
    def place(self) -> str:
        return self.store.uri

    def release(self) -> None:
        """Delete the local copies of this rank."""
        shutil.rmtree(self._scratch, ignore_errors=True)

    def steps(self) -> list[int]:
        return self._on_rank_0().steps()

    def load(self) -> Stored | None:
        return self._on_rank_0().load()

    def load_verified(self, process_group: ProcessGroup, *, wanted: bool) -> Stored | None:
        """Return the newest valid checkpoint, which all ranks download and verify; None on other ranks than rank 0.

        All ranks must call it. ``wanted``: on rank 0, False to read none. Each rank downloads the parts that it has
        written if as many ranks resume, and otherwise an equal number of parts. See ``RemoteCheckpoints.load`` for the
        errors, which all ranks raise.
        """
        verification = Verification(process_group)
        if self._checkpoints is None:
            verification.serve(self._download)
            return None

        def verify(manifest: Mapping[str, Any], files: Mapping[str, StoredFile], check: Callable[[str], None]) -> None:
            self._files = dict(files)
            shares = {name: rank for name, rank in divide(manifest, process_group.size).items() if name in files}
            claims = {name: (file.key, file.nbytes, file.sha256) for name, file in files.items()}
            verification.verify(shares, claims, check)

        return verification.of(lambda: self._on_rank_0().load(verify) if wanted else None)

    def _download(self, names: Sequence[str], claims: Claims) -> dict[str, str]:
        """Download files of a checkpoint, in place of others. See ``VerifyMine``.

        Raise CheckpointVolumeError if the local disk fails.
        """
        self._files, failures = {name: StoredFile(*claim) for name, claim in claims.items()}, dict[str, str]()
        self.release()
        try:
            self._scratch.mkdir(parents=True)
        except OSError as error:
            raise CheckpointVolumeError(self._scratch, error, STAGING_FIELD) from None
        for name in names:
            try:
                fetch(self.store, self._files[name], self._scratch / name)
            except CheckpointVolumeError:
                raise
            except DamagedError as damage:
                failures[name] = str(damage)
            except OSError as error:
                failures[name] = error.strerror or str(error)
        return failures

    def _on_rank_0(self) -> RemoteCheckpoints:
        assert self._checkpoints is not None, "only rank 0 calls it"
        return self._checkpoints

    def read(self, folder: Path, table: Table, target: PartTarget) -> dict[int, dict[str, Any]]:
        """Read this rank's rows of the checkpoint that ``load_verified`` has found. All ranks must call it.

        ``folder``: that of rank 0, which is not used. See ``exchange.load``.
        """
        return exchange.load(_Parts(self.store, self._files, self._scratch), table, target, self.group)

    def save(self, snapshot: Snapshot) -> tuple[str, int]:
        """Upload this rank's parts of a checkpoint. All ranks must call it. Return (its URI, its size in bytes).

        It returns on all ranks when the checkpoint is durable. The size is known on rank 0. An error on one rank is
        raised on all ranks, and leaves no checkpoint. See ``exchange.save`` for the errors.
        """
        place, committing, done = "", False, (self.place, 0)

        def create() -> str:
            nonlocal place
            place = self._on_rank_0().begin_parts(snapshot.step)
            return place

        def write(place: str, name: str, tensors: Mapping[str, Tensor]) -> Written:
            file = upload_tensors(self.store, f"{place}/{name}", tensors)
            return Written(file.nbytes, file.sha256)

        def commit(written: Mapping[str, Written], table: Table) -> None:
            nonlocal committing, done
            committing = True
            done = self._on_rank_0().commit_parts(snapshot, place, written, table)

        try:
            exchange.save(snapshot, self.group, create, write, commit)
        except (OSError, ValueError) as error:
            # After ``committing``, the marker may exist although its answer was lost.
            if place and not committing and not (isinstance(error, OSError) and is_transient(error)):
                self._on_rank_0().discard_parts(place)
            raise
        return done


def open_together(
    plan: Plan, identity: str, process_group: ProcessGroup, target: PartTarget
) -> tuple[RemoteCheckpoints | None, RemoteShardedCheckpoints]:
    """Return (the checkpoints of the plan's job on rank 0, None elsewhere; this rank's sharded checkpoints).

    All ranks must call it. Each rank lists objects, so that a store that one of them cannot reach is an error at the
    start of a training, and not at its first checkpoint. All ranks raise the same error: see ``RemoteCheckpoints``.
    ``identity``: hash that identifies the model. ``target``: the model and the optimizer.
    """
    rank, scratch = process_group.rank, job_directory(plan) / RESTORED
    store: ObjectStore | None = None
    checkpoints: RemoteCheckpoints | None = None
    error: Exception | None = None
    try:
        if process_group.local_rank == 0:
            for left in scratch.parent.glob(f"{RESTORED}-*"):  # of ranks that were killed in this pod
                shutil.rmtree(left, ignore_errors=True)
        if rank == 0:
            checkpoints = open_remote(plan, identity)
            store = checkpoints.store
        else:
            scratch = scratch.with_name(f"{RESTORED}-{rank:05d}")
            store = ObjectStore(checkpoint_place(plan))
            store.list(COMMITS)
    except OSError as found:
        of_rank = OSError(found.errno, f"rank {rank}: {found.strerror or found}")
        error = found if rank == 0 else opening_error(checkpoint_place(plan), of_rank)
    except Exception as found:  # noqa: BLE001 raised on all ranks
        error = found
    raise_together(process_group, error)
    assert store is not None, "otherwise there is an error"
    return checkpoints, RemoteShardedCheckpoints(store, checkpoints, scratch, target.group())
