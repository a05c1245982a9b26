"""Checkpoints on disk: written atomically, and verified when read; if one is damaged, the one before is used.

A checkpoint is a directory with ``model.safetensors``, ``optimizer.safetensors``, ``state.json`` and ``manifest.json``,
which holds the hashes of the other files and a hash that identifies the model. ``kept.safetensors`` holds the tensors
of the objects that the script passes to ``t.keep``. In a sharded checkpoint (``SHARDED_FORMAT``), the parts of all
ranks (``parts``) stand in for the first two files. A checkpoint is written under a temporary name, synced, then
renamed, so that a crash at any time leaves the previous checkpoint intact. Only the newest ``keep`` checkpoints remain.
Reading uses the newest checkpoint with valid hashes. No file is a pickle.

A read error does not prove that a checkpoint is damaged. Only checkpoints with a wrong hash, an invalid manifest or a
missing file count as damaged and may be deleted. If read errors persist and no older checkpoint is valid, training does
not start anew: the run fails and is restarted.
"""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch import Tensor

from dlcontract.checkpoint import parts
from dlcontract.checkpoint.manifest import is_whole
from dlcontract.checkpoint.parts import Table
from dltrain.checkpoint import tensor_file
from dltrain.checkpoint.manifest import encode
from dltrain.checkpoint.parts import PartsFile
from dltrain.checkpoint.tensor_file import TensorFile, Written
from dltrain.host.volume_access import PAUSES_S, is_input_error, is_transient, retry
from dltrain.protocol.errors import BadInputError, CheckpointError, CheckpointVolumeError, FencedError
from dltrain.protocol.volume_layout import TERM, step_name, term_in

T = TypeVar("T")

FORMAT, SHARDED_FORMAT = 1, 2
MODEL, OPTIMIZER, STATE, MANIFEST = "model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"
USER_OBJECTS = "kept.safetensors"
_FIELD = "spec.checkpoint.volume"

Verify = Callable[[Path, Mapping[str, Any], Callable[[str], None]], None]
"""Verify the files of a checkpoint, given its folder, its manifest and a function that verifies a file by its name."""
Extents = Mapping[str, tuple[int, tuple[int, ...]]]
"""The rows of each tensor that a rank has: index of the first one, and shape of the whole tensor.

By file and name of the tensor (``model.safetensors/NAME``). Tensors without an entry are whole."""


@dataclass(frozen=True)
class Snapshot:
    """The training state after ``step`` steps, in main memory.

    ``model``, ``optimizer``: tensors by name. ``state``: the other data of the training state, as JSON.
    """

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: dict[str, Any] = field(default_factory=dict)
    kept: dict[str, Tensor] = field(default_factory=dict)
    """Tensors of objects that the script keeps in addition to model and optimizer."""
    extents: Extents = field(default_factory=dict)
    """The rows of each tensor that this rank has, if the checkpoint is sharded."""
    export: bool = False
    """Of a sharded checkpoint: True to write the whole model to one file in addition."""


def identity(name: str, model: Mapping[str, Tensor]) -> str:
    """Return a hash of a model's name and its tensors' names, shapes and dtypes. Equal models have equal hashes."""
    rows = [name, *(f"{key} {tuple(tensor.shape)} {tensor.dtype}" for key, tensor in sorted(model.items()))]
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()


class Stored:
    """A checkpoint whose hashes were verified. Its tensors are read one at a time, when they are needed."""

    def __init__(
        self,
        folder: Path,
        state: bytes,
        names: Iterable[str],
        place: str | None = None,
        unix_s: float | None = None,
        table: Table | None = None,
    ) -> None:
        """Open the checkpoint. ``state``: content of its file ``STATE``. ``names``: its file names. Raise OSError.

        ``place``: where users find the checkpoint, by default ``folder``. ``unix_s``: time at which it was written, by
        default that of the folder. ``table``: the parts of a sharded checkpoint.
        """
        self.folder, self.place, self.table = folder, place if place is not None else str(folder), table
        self.unix_s = unix_s if unix_s is not None else folder.stat().st_mtime
        self.state: dict[str, Any] = json.loads(state)
        self.step: int = self.state.pop("step")
        self.files: dict[str, TensorFile | PartsFile] = (
            {name: PartsFile(folder, tensors) for name, tensors in table.items()}
            if table is not None
            else {name: TensorFile(folder / name) for name in names if name in (MODEL, OPTIMIZER)}
        )
        if USER_OBJECTS in names:
            self.files[USER_OBJECTS] = TensorFile(folder / USER_OBJECTS)

    def snapshot(self) -> Snapshot:
        """Read all tensors, and return the whole training state in memory. Raise OSError."""
        files = [self.files.get(name) for name in (MODEL, OPTIMIZER, USER_OBJECTS)]
        model, optimizer, kept = ({key: file.read(key) for key in file.entries} if file else {} for file in files)
        return Snapshot(self.step, model, optimizer, self.state, kept)


class CheckpointStore(Protocol):
    """The checkpoints of one job, on a volume (``Checkpoints``) or in an object store (``RemoteCheckpoints``)."""

    @property
    def place(self) -> str:
        """The directory or URI of the checkpoints."""

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, oldest first. Raise OSError."""

    def save(self, snapshot: Snapshot) -> tuple[Path | str, int]:
        """Write a checkpoint durably. Return (its place, its size in bytes).

        Raise OSError if writing fails, FencedError if another coordinator has taken over the job, and ValueError for an
        unsupported dtype.
        """

    def load(self) -> Stored | None:
        """Return the newest valid checkpoint; None if there is none.

        Raise BadInputError if the checkpoint has another model, and CheckpointVolumeError if some checkpoints cannot be
        read and no other checkpoint is valid.
        """

    def release(self) -> None:
        """Delete local copies of the checkpoint that ``load`` has returned. It must not be used any more."""


class Checkpoints:
    """The checkpoints of one job in ``directory``, for the model ``identity``. Only the newest ``keep`` remain.

    A term is a number that rises whenever another coordinator takes over the job. The directory stores the highest
    ``term`` of any run. A run whose term is lower than the stored one raises FencedError instead of completing a
    checkpoint. A term of 0 is neither stored nor compared.
    """

    def __init__(self, directory: Path, identity: str, keep: int, term: int = 0) -> None:
        """Create the directory and store the term.

        Raise BadInputError if the directory is not writable, FencedError if it stores a higher term, CheckpointError if
        the volume is full, and CheckpointVolumeError if the volume returns other errors, even after repetitions.
        ``identity``: hash that identifies the model. ``keep``: number of checkpoints to keep.
        """
        self.directory, self.identity, self.keep, self.term = directory, identity, keep, term
        self._corrupt: set[int] = set()
        """Steps of the checkpoints that ``load`` has proven damaged. ``_prune`` deletes them at any age."""
        self._unreadable: set[int] = set()
        """Steps of the checkpoints that ``load`` could not read, which may be valid."""
        try:
            retry(self._open, str(directory))
        except OSError as error:
            if is_transient(error):
                raise CheckpointVolumeError(directory, error) from None
            if not is_input_error(error):
                raise CheckpointError(directory, error) from None
            found = f"{directory}: {error.strerror or error}"
            raise BadInputError(_FIELD, found, "a directory this user can write to", _REMEDY) from None

    @property
    def place(self) -> str:
        return str(self.directory)

    def release(self) -> None:
        """Do nothing: ``load`` makes no copies."""

    def _open(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        probe = self.directory / ".writable"
        probe.write_bytes(b"")
        probe.unlink(missing_ok=True)
        self._claim()
        for stale in self.directory.glob(f".step-*{_STALE}"):  # ``_save`` was interrupted between its two renames
            final = self.directory / stale.name.removeprefix(".").removesuffix(_STALE)
            if not final.exists():
                stale.rename(final)
        _remove(*self.directory.glob(".step-*"))  # of runs that were killed: the next checkpoint may need the space

    def _claim(self) -> None:
        """Store this run's term in the directory if it is higher than the stored one.

        The term is a number that rises whenever another coordinator takes over the job. Raise FencedError if the stored
        term is higher, unless this run's term is 0, and OSError if storing fails.
        """
        path, found = self.directory / TERM, term_in(self.directory)
        if found > self.term > 0:
            raise FencedError(
                f"{self.directory}: found term {found}; expected {self.term}. Another coordinator has taken over the "
                "job, so this run writes no more checkpoints"
            )
        if found < self.term:
            temporary = path.with_name(f".{TERM}.{os.getpid()}")
            _write(temporary, str(self.term).encode())
            temporary.replace(path)

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, oldest first, without verifying their content.

        Raise OSError if the directory cannot be read. (``Path.glob`` would return nothing, as if it were empty.)
        """
        paths = (path for path in self.directory.iterdir() if path.name.startswith("step-"))
        names = (path.name.removeprefix("step-") for path in paths)
        return sorted(int(name) for name in names if name.isdigit())

    def save(self, snapshot: Snapshot) -> tuple[Path, int]:
        """Write a checkpoint durably. Return (its directory, its size in bytes).

        After a transient error, write the checkpoint again. Raise OSError if writing fails, FencedError if another
        coordinator has taken over the job (the directory stores a higher term), and ValueError for an unsupported
        dtype. An error leaves no part of the checkpoint.
        """
        temporary = self.directory / f".{step_name(snapshot.step)}.{os.getpid()}"
        try:
            return retry(lambda: self._save(snapshot, temporary), str(temporary))
        except Exception:
            _remove(temporary)
            raise

    def _save(self, snapshot: Snapshot, temporary: Path) -> tuple[Path, int]:
        _remove(temporary)
        temporary.mkdir()
        files = {
            MODEL: tensor_file.write(temporary / MODEL, snapshot.model),
            OPTIMIZER: tensor_file.write(temporary / OPTIMIZER, snapshot.optimizer),
        }
        return self.commit(snapshot, temporary, files, {"format": FORMAT})

    def commit(
        self, snapshot: Snapshot, temporary: Path, files: dict[str, Written], fields: Mapping[str, Any]
    ) -> tuple[Path, int]:
        """Add the other files of a checkpoint to ``temporary``, and rename this folder. Return (its path, its size).

        ``files``: the files with tensors of model and optimizer. ``fields``: fields of the manifest. Raise OSError, and
        FencedError if another coordinator has taken over the job.
        """
        final = self.directory / step_name(snapshot.step)
        state = json.dumps({"step": snapshot.step} | snapshot.state, indent=1).encode()
        _write(temporary / STATE, state)
        files = files | {STATE: Written(len(state), hashlib.sha256(state).hexdigest())}
        if snapshot.kept:
            files[USER_OBJECTS] = tensor_file.write(temporary / USER_OBJECTS, snapshot.kept)
        manifest = encode(self.identity, snapshot.step, files, fields)
        _write(temporary / MANIFEST, manifest)
        _sync(temporary)
        self._claim()
        if final.exists():  # A checkpoint of this step that ``load`` has skipped, or one without the whole model.
            stale = self.directory / f".{final.name}{_STALE}"
            _remove(stale)
            final.rename(stale)
        temporary.rename(final)
        retry(lambda: _sync(self.directory), str(self.directory))
        self._corrupt.discard(snapshot.step)
        self._unreadable.discard(snapshot.step)
        with suppress(OSError):  # The checkpoint is complete. The next one removes what is left.
            self._prune(snapshot.step)
        return final, len(manifest) + sum(written.nbytes for written in files.values())

    def load(self, verify: Verify | None = None) -> Stored | None:
        """Return the newest checkpoint with valid hashes, or None if no checkpoint is valid. Read no tensors yet.

        ``verify``: a function that verifies all files of a sharded checkpoint; None: this rank does. Read again after a
        transient error. If a checkpoint cannot be read, use an older checkpoint. Change no file. Raise BadInputError if
        the checkpoint has another model or format, and CheckpointVolumeError if some cannot be read and no other
        checkpoint is valid.
        """
        pauses, error = iter(PAUSES_S), None  # all checkpoints share one budget of repetitions
        self._corrupt, self._unreadable = set(), set()
        try:
            steps = retry(self.steps, str(self.directory), pauses)
        except OSError as unreadable:
            raise CheckpointVolumeError(self.directory, unreadable) from None
        for step in reversed(steps):
            folder = self.directory / step_name(step)
            try:
                return self._read(folder, pauses, verify)
            except _CorruptError as damage:
                self._corrupt.add(step)
                _tell(f"skipped the damaged checkpoint {folder}: {damage}")
            except OSError as unreadable:
                self._unreadable.add(step)
                error = error or unreadable
                _tell(f"skipped the checkpoint {folder}, which cannot be read: {unreadable}")
        if error is not None:
            raise CheckpointVolumeError(self.directory, error)
        return None

    def _read(self, folder: Path, pauses: Iterator[float], verify: Verify | None) -> Stored:
        """Verify and open the checkpoint in ``folder``. ``pauses``: yields the seconds before each retry.

        ``verify``: as in ``load``. Raise OSError if the checkpoint cannot be read, _CorruptError if it is damaged, and
        BadInputError if it has another model or format.
        """

        def read(name: str, reader: Callable[[Path], T]) -> T:
            path = folder / name
            try:
                return retry(lambda: reader(path), str(path), pauses)
            except FileNotFoundError:
                if path in retry(lambda: list(folder.iterdir()), str(folder), pauses):
                    raise
                raise _CorruptError(f"found no {name}") from None

        def check(name: str) -> None:
            if read(name, tensor_file.sha256) != manifest["files"][name]["sha256"]:
                raise _CorruptError(f"found content of {name} that does not match its sha256 in {MANIFEST}")

        try:
            manifest = json.loads(read(MANIFEST, Path.read_bytes))
            if not is_whole(manifest):
                raise _CorruptError(f"found content of {MANIFEST} that does not match its sha256 field")
            if manifest["format"] not in (FORMAT, SHARDED_FORMAT):
                found, expected = f"{folder} of format {manifest['format']}", f"format {FORMAT} or {SHARDED_FORMAT}"
                raise BadInputError(_FIELD, found, expected, "use the trainer image that wrote the checkpoint")
            if verify is not None and manifest["format"] == SHARDED_FORMAT:
                verify(folder, manifest, check)
            else:
                for name in manifest["files"]:
                    check(name)
            if manifest["identity"] != self.identity:
                found = f"{folder}, a checkpoint of another model"
                remedy = "use another checkpoint volume, or the model of this checkpoint"
                raise BadInputError(_FIELD, found, "a checkpoint of this job's model", remedy)
            table = parts.parse(manifest["parts"]) if manifest["format"] == SHARDED_FORMAT else None
            return Stored(folder, read(STATE, Path.read_bytes), manifest["files"], table=table)
        except (KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise _CorruptError(f"found an invalid {MANIFEST} ({type(error).__name__}: {error})") from None

    def _prune(self, newest: int) -> None:
        """Remove damaged, incomplete and old checkpoints. ``newest``: step of the checkpoint that was written last.

        A checkpoint is old if it precedes the last ``keep`` readable checkpoints up to step ``newest``. Checkpoints
        after this step remain unless they are proven damaged.
        """
        steps = self.steps()
        doubtful = self._corrupt | self._unreadable
        good = [step for step in steps if step <= newest and step not in doubtful][-self.keep :]
        _remove(*(self.directory / step_name(step) for step in steps if step in self._corrupt or step < good[0]))
        _remove(*self.directory.glob(".step-*"))


_STALE = ".stale"
"""Ending of the temporary name of an old checkpoint while a new checkpoint of the same step replaces it."""
_REMEDY = "check the PersistentVolumeClaim, its access mode and its owner"


class _CorruptError(Exception):
    pass


def _tell(text: str) -> None:
    print(f"dltrain: {text}", file=sys.stderr, flush=True)  # noqa: T201


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(*folders: Path) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
