"""Save and load the trainer's checkpoints in an object store, with a log (``object_store/commit_log.py``) of commits.

A checkpoint in the store has the files of a checkpoint on a volume, and a commit marker in the log.

Tensors are sent in parts directly from the memory of the snapshot, so that a checkpoint needs neither a copy nor disk
space. To resume, the files are downloaded to the local disk and verified there, and then read like those on a volume.
Only a sharded checkpoint, to which every rank writes its part, has a manifest: it says which part has which rows.
"""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from dlcontract import Plan
from dlcontract.checkpoint import parts
from dlcontract.checkpoint.manifest import is_whole
from dlcontract.checkpoint.parts import Table
from dltrain.checkpoint import tensor_file
from dltrain.checkpoint.manifest import encode
from dltrain.checkpoint.store import MANIFEST, MODEL, OPTIMIZER, SHARDED_FORMAT, STATE, USER_OBJECTS, Snapshot, Stored
from dltrain.checkpoint.tensor_file import Written
from dltrain.object_store.client import FIELD, PART_NBYTES, ObjectStore
from dltrain.object_store.commit_log import FORMAT, PARTS_FORMAT, CommitLog, DamagedError, Entry, StoredFile
from dltrain.object_store.reading import LogReader, fetch
from dltrain.protocol.errors import BadInputError
from dltrain.protocol.volume_layout import checkpoint_place, job_directory, step_name

KIND = "dltrain"
RESTORED = "restored"
"""Name of the folder on the local disk for the files of a checkpoint from an object store, until they are loaded."""
_NAMES = {MODEL, OPTIMIZER, STATE, USER_OBJECTS}
VerifyParts = Callable[[Mapping[str, Any], Mapping[str, StoredFile], Callable[[str], None]], None]
"""Verify the files of a sharded checkpoint, given its manifest, its files and a function that verifies one by name."""


class RemoteCheckpoints:
    """The checkpoints of one job in the object store, for the model ``identity``. Only the newest ``keep`` remain.

    A term is a number that rises whenever another coordinator takes over the job. A run whose term is lower than one in
    the store's log raises FencedError instead of completing a checkpoint. A term of 0 is neither stored nor compared.
    """

    def __init__(self, store: ObjectStore, identity: str, keep: int, scratch: Path, term: int = 0) -> None:
        """Claim the term. ``scratch``: folder on the local disk for the files of the checkpoint that is restored.

        Raise BadInputError if the bucket does not exist or a permission is missing, FencedError if the store has a
        higher term, CheckpointError if the store is full, and CheckpointVolumeError if it returns other errors.
        ``identity``: hash that identifies the model. ``keep``: number of checkpoints to keep.
        """
        self.store, self.identity, self.keep, self.scratch = store, identity, keep, scratch
        self.log = CommitLog(store, term)
        self._reader = LogReader(self.log, KIND)
        self._begun = Counter[int]()
        """How often this run has begun a sharded checkpoint of each step."""
        self.release()
        self._reader.open()

    @property
    def place(self) -> str:
        return self.store.uri

    def release(self) -> None:
        """Delete the local copy of the checkpoint that ``load`` has returned."""
        shutil.rmtree(self.scratch, ignore_errors=True)

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, in the order in which they were written. Raise OSError."""
        return [int(entry.about["step"]) for entry in self.log.commits() if entry.kind == KIND]

    def save(self, snapshot: Snapshot) -> tuple[str, int]:
        """Write a checkpoint durably. Return (its URI, its size in bytes).

        Raise OSError if writing fails, FencedError if another coordinator has taken over, and ValueError for an
        unsupported dtype. Without the commit marker, which is written last, the uploaded files are no checkpoint.
        """
        place = self.log.data_key(step_name(snapshot.step))
        files = self._upload_others(place, snapshot)
        for name, tensors in ((MODEL, snapshot.model), (OPTIMIZER, snapshot.optimizer)):
            files[name] = upload_tensors(self.store, f"{place}/{name}", tensors)
        return self._commit(snapshot, files)

    def begin_parts(self, step: int) -> str:
        """Return the place for the files of a new sharded checkpoint: a key prefix without the slash.

        It is new also if this run has begun a checkpoint of this step before, such as one without the whole model.
        """
        self._begun[step] += 1
        again = f"-{self._begun[step]}" if self._begun[step] > 1 else ""
        return self.log.data_key(step_name(step) + again)

    def commit_parts(
        self, snapshot: Snapshot, place: str, written: Mapping[str, Written], table: Table
    ) -> tuple[str, int]:
        """Complete a checkpoint whose parts all ranks have uploaded to ``place``. Return (its URI, its size in bytes).

        ``written``: size and hash of each part. ``table``: which part has which rows. See ``save`` for the errors.
        """
        files = {name: StoredFile(f"{place}/{name}", each.nbytes, each.sha256) for name, each in written.items()}
        if snapshot.export:
            whole = parts.joined_from(lambda file, *span: self._ranges(f"{place}/{file}", *span), table[MODEL])
            nbytes = sum(written[name].nbytes for name in _part_names({MODEL: table[MODEL]}))
            files[MODEL] = self._upload(f"{place}/{MODEL}", whole, nbytes)
        files |= self._upload_others(place, snapshot)
        claims = {name: Written(file.nbytes, file.sha256) for name, file in files.items()}
        fields = {"format": SHARDED_FORMAT, "parts": parts.to_json(table)}
        manifest = encode(self.identity, snapshot.step, claims, fields)
        files[MANIFEST] = self._upload(f"{place}/{MANIFEST}", (manifest,), len(manifest))
        return self._commit(snapshot, files, PARTS_FORMAT)

    def discard_parts(self, place: str) -> None:
        """Delete the files of a sharded checkpoint that failed. On errors, the next checkpoint deletes them."""
        with suppress(OSError):
            self.store.delete(self.store.list(f"{place}/"))

    def _commit(self, snapshot: Snapshot, files: Mapping[str, StoredFile], version: int = FORMAT) -> tuple[str, int]:
        about = {"step": snapshot.step, "identity": self.identity}
        entry = self.log.commit(KIND, files, about, version=version)
        self._reader.prune(self.keep)
        return self._place(entry), sum(file.nbytes for file in files.values())

    def _upload_others(self, place: str, snapshot: Snapshot) -> dict[str, StoredFile]:
        """Upload the files without tensors of model and optimizer, and return them."""
        state = json.dumps({"step": snapshot.step} | snapshot.state, indent=1).encode()
        files = {STATE: self._upload(f"{place}/{STATE}", (state,), len(state))}
        if snapshot.kept:
            files[USER_OBJECTS] = upload_tensors(self.store, f"{place}/{USER_OBJECTS}", snapshot.kept)
        return files

    def _upload(self, key: str, pieces: Iterable[bytes | memoryview], nbytes: int) -> StoredFile:
        return StoredFile(key, *self.store.upload(key, pieces, nbytes))

    def _ranges(self, key: str, begin: int, nbytes: int) -> Iterator[bytes]:
        for at in range(begin, begin + nbytes, PART_NBYTES):
            yield self.store.read_range(key, at, min(PART_NBYTES, begin + nbytes - at))

    def load(self, verify: VerifyParts | None = None) -> Stored | None:
        """Return the newest valid checkpoint, or None if there is none. Its files are then in ``scratch``.

        ``verify``: a function that downloads and verifies all files of a sharded checkpoint; None: this rank does. Read
        again after a transient error. If a checkpoint cannot be read, use an older one. Delete nothing in the store.
        Raise BadInputError if the checkpoint has another model, or if a permission is missing, and
        CheckpointVolumeError if some checkpoints cannot be read and no other checkpoint is valid.
        """
        return self._reader.newest(lambda entry: self._read(entry, verify))

    def _read(self, entry: Entry, verify: VerifyParts | None) -> Stored:
        sharded = MANIFEST in entry.files
        if not sharded and not {MODEL, OPTIMIZER, STATE} <= entry.files.keys() <= _NAMES:
            raise DamagedError(f"found the files {sorted(entry.files)} in entry {entry.sequence}")
        if entry.about.get("identity") != self.identity:
            raise BadInputError(
                FIELD, f"{self._place(entry)}, a checkpoint of another model", "a checkpoint of this job's model",
                "use another location for the checkpoints, or the model of this checkpoint",
            )  # fmt: skip
        self.release()
        self.scratch.mkdir(parents=True)
        table = self._read_parts(entry, verify) if sharded else None
        for name in () if sharded else entry.files:
            self._fetch(entry, name)
        state = (self.scratch / STATE).read_bytes()
        return Stored(self.scratch, state, entry.files, self._place(entry), entry.unix_s, table)

    def _read_parts(self, entry: Entry, verify: VerifyParts | None) -> Table:
        """Download and verify the files of a sharded checkpoint, except the whole model, which no rank reads."""
        self._fetch(entry, MANIFEST)
        try:
            manifest = json.loads((self.scratch / MANIFEST).read_bytes())
            if not is_whole(manifest):
                raise DamagedError(f"found content of {MANIFEST} that does not match its sha256 field")
            table = parts.parse(manifest["parts"])
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise DamagedError(f"found an invalid {MANIFEST} ({type(error).__name__}: {error})") from None
        if missing := {STATE, *_part_names(table)} - entry.files.keys():
            raise DamagedError(f"found no {min(missing)} in entry {entry.sequence}")
        files = {name: file for name, file in entry.files.items() if name not in (MANIFEST, MODEL)}
        if verify is not None:
            verify(manifest, files, lambda name: self._fetch(entry, name))
        else:
            for name in files:
                self._fetch(entry, name)
        return table

    def _fetch(self, entry: Entry, name: str) -> None:
        fetch(self.store, entry.files[name], self.scratch / name)

    def _place(self, entry: Entry) -> str:
        return self.store.path(next(iter(entry.files.values())).key.rpartition("/")[0])


def open_remote(plan: Plan, identity: str) -> RemoteCheckpoints:
    """Return the checkpoints of the plan's job in its object store. See ``RemoteCheckpoints`` for the errors."""
    store, scratch = ObjectStore(checkpoint_place(plan)), job_directory(plan) / RESTORED
    return RemoteCheckpoints(store, identity, plan.checkpoint.keep, scratch, plan.term)


def upload_tensors(store: ObjectStore, key: str, tensors: Mapping[str, Tensor]) -> StoredFile:
    """Write a safetensors file to the object ``key``, and return it. Raise OSError, and ValueError for its dtypes."""
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    return StoredFile(key, *store.upload(key, tensor_file.pieces(tensors), nbytes))


def _part_names(table: Table) -> set[str]:
    return {chunk.file for tensors in table.values() for tensor in tensors.values() for chunk in tensor.chunks}
