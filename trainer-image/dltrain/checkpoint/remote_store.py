"""Save and load the trainer's checkpoints in an object store, with a log (``object_store/commit_log.py``) of commits.

A checkpoint in the store has the files of a checkpoint on a volume, and a commit marker in the log.

Tensors are sent in parts directly from the memory of the snapshot, so that a checkpoint needs neither a copy nor disk
space. To resume, the files are downloaded to the local disk and verified there, and then read like those on a volume.
"""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from dltrain.checkpoint import tensor_file
from dltrain.checkpoint.store import MODEL, OPTIMIZER, STATE, USER_OBJECTS, Snapshot, Stored
from dltrain.object_store.client import FIELD, ObjectStore
from dltrain.object_store.commit_log import CommitLog, DamagedError, Entry, StoredFile
from dltrain.object_store.reading import LogReader, fetch
from dltrain.protocol.errors import BadInputError
from dltrain.protocol.volume_layout import step_name

KIND = "dltrain"
_NAMES = {MODEL, OPTIMIZER, STATE, USER_OBJECTS}


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
        state = json.dumps({"step": snapshot.step} | snapshot.state, indent=1).encode()
        parts = {MODEL: snapshot.model, OPTIMIZER: snapshot.optimizer}
        if snapshot.kept:
            parts[USER_OBJECTS] = snapshot.kept
        files = {STATE: self._upload(snapshot.step, STATE, (state,), len(state))}
        for name, tensors in parts.items():
            nbytes = sum(tensor.nbytes for tensor in tensors.values())
            files[name] = self._upload(snapshot.step, name, tensor_file.pieces(tensors), nbytes)
        entry = self.log.commit(KIND, files, {"step": snapshot.step, "identity": self.identity})
        self._reader.prune(self.keep)
        return self._place(entry), sum(file.nbytes for file in files.values())

    def _upload(self, step: int, name: str, pieces: Iterable[bytes | memoryview], nbytes: int) -> StoredFile:
        key = self.log.data_key(f"{step_name(step)}/{name}")
        return StoredFile(key, *self.store.upload(key, pieces, nbytes))

    def load(self) -> Stored | None:
        """Return the newest valid checkpoint, or None if there is none. Its files are then in ``scratch``.

        Read again after a transient error. If a checkpoint cannot be read, use an older one. Delete nothing in the
        store. Raise BadInputError if the checkpoint has another model, or if a permission is missing, and
        CheckpointVolumeError if some checkpoints cannot be read and no other checkpoint is valid.
        """
        return self._reader.newest(self._read)

    def _read(self, entry: Entry) -> Stored:
        if not {MODEL, OPTIMIZER, STATE} <= entry.files.keys() <= _NAMES:
            raise DamagedError(f"found the files {sorted(entry.files)} in entry {entry.sequence}")
        if entry.about.get("identity") != self.identity:
            raise BadInputError(
                FIELD, f"{self._place(entry)}, a checkpoint of another model", "a checkpoint of this job's model",
                "use another location for the checkpoints, or the model of this checkpoint",
            )  # fmt: skip
        self.release()
        self.scratch.mkdir(parents=True)
        for name, file in entry.files.items():
            fetch(self.store, file, self.scratch / name)
        state = (self.scratch / STATE).read_bytes()
        return Stored(self.scratch, state, entry.files, self._place(entry), entry.unix_s)

    def _place(self, entry: Entry) -> str:
        return self.store.path(next(iter(entry.files.values())).key.rpartition("/")[0])
