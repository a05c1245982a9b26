"""Checkpoints on disk: written atomically, verified when read, and without pickle.

A checkpoint is a directory with ``model.safetensors``, ``optimizer.safetensors``, ``state.json`` and ``manifest.json``,
which holds the hashes of the other files and the identity of the model. ``kept.safetensors`` holds the tensors of
objects that a script keeps. A checkpoint is written under a temporary name, synced, then renamed, so that a crash at
any time leaves the previous checkpoint intact. Reading uses the newest checkpoint with valid hashes.
"""

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from dltrain.checkpoint import tensor_file
from dltrain.protocol.errors import BadInputError, FencedError
from dltrain.protocol.volume_layout import TERM, step_name, term_in

FORMAT = 1
MODEL, OPTIMIZER, STATE, MANIFEST = "model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"
USER_OBJECTS = "kept.safetensors"
_FIELD = "spec.checkpoint.volume"


@dataclass(frozen=True)
class Snapshot:
    """The training state after ``step`` steps. ``state``: all parts that are not tensors, as JSON."""

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: dict[str, Any] = field(default_factory=dict)
    kept: dict[str, Tensor] = field(default_factory=dict)
    """Tensors of objects that the script keeps in addition to model and optimizer."""


def identity(name: str, model: Mapping[str, Tensor]) -> str:
    """Return a hash of a model's name and its tensors' names, shapes and dtypes. Equal models have equal hashes."""
    rows = [name, *(f"{key} {tuple(tensor.shape)} {tensor.dtype}" for key, tensor in sorted(model.items()))]
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()


def decode(files: Mapping[str, bytes]) -> Snapshot:
    from safetensors.torch import load

    state = json.loads(files[STATE])
    kept = load(files[USER_OBJECTS]) if USER_OBJECTS in files else {}
    return Snapshot(state.pop("step"), load(files[MODEL]), load(files[OPTIMIZER]), state, kept)


class Checkpoints:
    """The checkpoints of one job in ``directory``, for the model ``identity``. Only the newest ``keep`` remain.

    A term is a number that rises whenever another coordinator takes over the job. The directory stores the highest
    ``term`` of any run. A run whose term is lower than the stored one raises FencedError instead of completing a
    checkpoint. A term of 0 is neither stored nor compared.
    """

    def __init__(self, directory: Path, identity: str, keep: int, term: int = 0) -> None:
        """Create the directory and store the term.

        Raise BadInputError if the directory is not writable, and FencedError if it stores a higher term.
        """
        self.directory = directory
        self.identity = identity
        self.keep = keep
        self.term = term
        try:
            directory.mkdir(parents=True, exist_ok=True)
            probe = directory / ".writable"
            probe.write_bytes(b"")
            probe.unlink()
            self._claim()
        except OSError as error:
            found = f"{directory}: {error.strerror or error}"
            raise BadInputError(_FIELD, found, "a directory this user can write to", _REMEDY) from None

    def _claim(self) -> None:
        """Store the term. Raise FencedError if a higher term is stored already, and OSError if storing fails."""
        path, found = self.directory / TERM, term_in(self.directory)
        if found > self.term > 0:
            why = f"found term {found} in {self.directory}; expected {self.term}: another coordinator has taken over"
            raise FencedError(why)
        if found < self.term:
            temporary = path.with_name(f".{TERM}.{os.getpid()}")
            _write(temporary, str(self.term).encode())
            temporary.replace(path)

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, oldest first, without verifying their content."""
        names = (path.name.removeprefix("step-") for path in self.directory.glob("step-*"))
        return sorted(int(name) for name in names if name.isdigit())

    def save(self, snapshot: Snapshot) -> tuple[Path, int]:
        """Write a checkpoint durably. Return its directory and its size in bytes.

        Raise OSError if writing fails, FencedError if the directory stores a higher term, and ValueError for an
        unsupported dtype. No part of the checkpoint is then left.
        """
        temporary = self.directory / f".{step_name(snapshot.step)}.{os.getpid()}"
        try:
            return self._save(snapshot, temporary)
        except Exception:
            _remove(temporary)
            raise

    def _save(self, snapshot: Snapshot, temporary: Path) -> tuple[Path, int]:
        final = self.directory / step_name(snapshot.step)
        _remove(temporary)
        temporary.mkdir()
        state = json.dumps({"step": snapshot.step} | snapshot.state, indent=1).encode()
        _write(temporary / STATE, state)
        files = {
            MODEL: tensor_file.write(temporary / MODEL, snapshot.model),
            OPTIMIZER: tensor_file.write(temporary / OPTIMIZER, snapshot.optimizer),
            STATE: tensor_file.Written(len(state), hashlib.sha256(state).hexdigest()),
        }
        if snapshot.kept:
            files[USER_OBJECTS] = tensor_file.write(temporary / USER_OBJECTS, snapshot.kept)
        content = {
            "format": FORMAT,
            "identity": self.identity,
            "step": snapshot.step,
            "unix_s": time.time(),
            "files": {name: asdict(written) for name, written in files.items()},
        }
        manifest = json.dumps(content | {"sha256": _digest(content)}, indent=1).encode()
        _write(temporary / MANIFEST, manifest)
        _sync(temporary)
        self._claim()
        stale = self.directory / f".{final.name}.stale"
        if final.exists():  # A damaged checkpoint of this step, which ``load`` has skipped.
            _remove(stale)
            final.rename(stale)
        temporary.rename(final)
        _sync(self.directory)
        self._prune(snapshot.step)
        return final, len(manifest) + sum(written.nbytes for written in files.values())

    def load(self) -> tuple[Path, dict[str, bytes]] | None:
        """Return the directory and files of the newest checkpoint with valid hashes, or None if there is none.

        Raise BadInputError if that checkpoint has another model or format. No file is changed.
        """
        for step in reversed(self.steps()):
            folder = self.directory / step_name(step)
            try:
                return folder, self._read(folder)
            except (
                OSError,
                KeyError,
                TypeError,
                AttributeError,
                UnicodeDecodeError,
                json.JSONDecodeError,
                _CorruptError,
            ) as error:
                text = f"skipped the damaged checkpoint {folder}: {type(error).__name__}: {error}"
                print(f"dltrain: {text}", file=sys.stderr, flush=True)  # noqa: T201
        return None

    def _read(self, folder: Path) -> dict[str, bytes]:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        claimed = manifest.pop("sha256", None)
        if claimed not in (None, _digest(manifest)):  # None: an older version wrote no hash of the manifest.
            raise _CorruptError(f"{folder / MANIFEST}: found content that does not match its sha256 field")
        if manifest["format"] != FORMAT:
            found = f"{folder} of format {manifest['format']}"
            raise BadInputError(_FIELD, found, f"format {FORMAT}", "use the trainer image that wrote it")
        files = {}
        for name, claim in manifest["files"].items():
            files[name] = (folder / name).read_bytes()
            if hashlib.sha256(files[name]).hexdigest() != claim["sha256"]:
                raise _CorruptError(f"{folder / name}: found content that does not match its sha256 in the manifest")
        if manifest["identity"] != self.identity:
            found = f"{folder}, a checkpoint of another model"
            raise BadInputError(_FIELD, found, "a checkpoint of this job's model", "use another volume or that model")
        return files

    def _prune(self, newest: int) -> None:
        """Remove old and incomplete checkpoints, and those after step ``newest``, which ``load`` skipped as damaged."""
        steps = self.steps()
        good = [step for step in steps if step <= newest][-self.keep :]
        for step in set(steps) - set(good):
            _remove(self.directory / step_name(step))
        for leftover in self.directory.glob(".step-*"):
            _remove(leftover)


_REMEDY = "check the PersistentVolumeClaim, its access mode and its owner"


class _CorruptError(Exception):
    pass


def _digest(manifest: Mapping[str, Any]) -> str:
    """Return the hash of a checkpoint's manifest, which is stored in the manifest itself.

    Without this hash, a flipped bit in the manifest could look like another model's checkpoint.
    """
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


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


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
