"""Checkpoints: written whole or not at all, verified when read, never a pickle.

A checkpoint is a folder with ``model.safetensors``, ``optimizer.safetensors``, ``state.json`` and ``manifest.json``
(hashes of the others, and which model it is), and ``kept.safetensors`` where a script keeps tensors of its own. It is
written under another name, made durable, then renamed, so that a crash at any moment leaves the one before. Reading
falls back to the newest one whose hashes hold.
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
    """State of training after ``step`` steps. ``state``: JSON, all that is no tensor."""

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: dict[str, Any] = field(default_factory=dict)
    kept: dict[str, Tensor] = field(default_factory=dict)
    """Of what a script keeps beside model and optimizer."""


def identity(name: str, model: Mapping[str, Tensor]) -> str:
    """Hash of a model's name and its tensors' names, shapes and dtypes: which weights fit which model."""
    rows = [name, *(f"{key} {tuple(tensor.shape)} {tensor.dtype}" for key, tensor in sorted(model.items()))]
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()


def decode(files: Mapping[str, bytes]) -> Snapshot:
    from safetensors.torch import load

    state = json.loads(files[STATE])
    kept = load(files[USER_OBJECTS]) if USER_OBJECTS in files else {}
    return Snapshot(state.pop("step"), load(files[MODEL]), load(files[OPTIMIZER]), state, kept)


class Checkpoints:
    """The checkpoints of one job in ``directory``, of the model ``identity``; the newest ``keep`` are kept.

    The directory knows the highest ``term`` that anyone wrote under: a run that was cut off from its pods while another
    coordinator took over finds out here, before it commits anything. A term of 0 claims nothing.
    """

    def __init__(self, directory: Path, identity: str, keep: int, term: int = 0) -> None:
        """Makes the directory and claims the term. Raises BadInputError when it cannot be written to, FencedError."""
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
        """Raises FencedError when the directory is claimed under a higher term, OSError."""
        path, found = self.directory / TERM, term_in(self.directory)
        if found > self.term > 0:
            why = f"found term {found} in {self.directory}, this run has {self.term}: another one has taken over"
            raise FencedError(why)
        if found < self.term:
            temporary = path.with_name(f".{TERM}.{os.getpid()}")
            _write(temporary, str(self.term).encode())
            temporary.replace(path)

    def steps(self) -> list[int]:
        """Steps of the checkpoints that are there, oldest first; nothing is said of their content."""
        names = (path.name.removeprefix("step-") for path in self.directory.glob("step-*"))
        return sorted(int(name) for name in names if name.isdigit())

    def save(self, snapshot: Snapshot) -> tuple[Path, int]:
        """Write a checkpoint; returns its folder and size in bytes once it is durable. Raises OSError, FencedError;
        then nothing of it is left.
        """
        temporary = self.directory / f".{step_name(snapshot.step)}.{os.getpid()}"
        try:
            return self._save(snapshot, temporary)
        except OSError:
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
        if final.exists():  # a corrupt one that training fell back from and has now passed again
            _remove(stale)
            final.rename(stale)
        temporary.rename(final)
        _sync(self.directory)
        self._prune(snapshot.step)
        return final, len(manifest) + sum(written.nbytes for written in files.values())

    def load(self) -> tuple[Path, dict[str, bytes]] | None:
        """Folder and files of the newest checkpoint whose hashes hold, None when there is none.

        Raises BadInputError when it is of another model, or from a newer dltrain; it is left as it is.
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
                text = f"{folder} is damaged and passed over: {type(error).__name__}: {error}"
                print(f"dltrain: {text}", file=sys.stderr, flush=True)  # noqa: T201
        return None

    def _read(self, folder: Path) -> dict[str, bytes]:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        claimed = manifest.pop("sha256", None)
        if claimed not in (None, _digest(manifest)):  # None: written before manifests had a hash of their own
            raise _CorruptError(f"{folder / MANIFEST}: its hash differs from its content's")
        if manifest["format"] != FORMAT:
            found = f"{folder} of format {manifest['format']}"
            raise BadInputError(_FIELD, found, f"format {FORMAT}", "use the trainer image that wrote it")
        files = {}
        for name, claim in manifest["files"].items():
            files[name] = (folder / name).read_bytes()
            if hashlib.sha256(files[name]).hexdigest() != claim["sha256"]:
                raise _CorruptError(f"{folder / name}: its hash differs from the manifest's")
        if manifest["identity"] != self.identity:
            found = f"{folder}, a checkpoint of another model"
            raise BadInputError(_FIELD, found, "one of this job's model", "use another volume, or that model again")
        return files

    def _prune(self, newest: int) -> None:
        """Remove what is too old, and what is newer than the one just written: ``load`` has passed over that."""
        steps = self.steps()
        good = [step for step in steps if step <= newest][-self.keep :]
        for step in set(steps) - set(good):
            _remove(self.directory / step_name(step))
        for leftover in self.directory.glob(".step-*"):
            _remove(leftover)


_REMEDY = "check the volume's claim, its access mode and its owner"


class _CorruptError(Exception):
    pass


def _digest(manifest: Mapping[str, Any]) -> str:
    """Of a manifest without its own hash: a flipped bit in it must not pass for another model's checkpoint."""
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
