"""Join the parts of a sharded checkpoint to one safetensors file with the whole model.

Only the last checkpoint of a training has this file. Others have a part from each rank, such as those of a job that
failed. A part is a safetensors file with consecutive rows of each tensor, so that the bytes of the parts, one after
another, are those of the tensor. The manifest of the checkpoint has the order.
"""

import hashlib
import json
from collections.abc import Mapping
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from dljob.client.errors import BadInputError

MODEL = "model.safetensors"
PART, OPTIMIZER_PART = "model-part-", "optimizer-part-"
"""How the names of parts begin."""
_PIECE_NBYTES = 2**20
_Found = tuple[Path, int, int]
"""A tensor's bytes in a part: (path, offset, number of bytes)."""


def only_in_parts(manifest: Mapping[str, Any]) -> bool:
    """Return True if a checkpoint has the model in parts, and not in one file. ``manifest``: with the key ``files``."""
    names = manifest["files"]
    return MODEL not in names and any(str(name).startswith(PART) for name in names)


def join(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write ``MODEL`` from its parts in ``folder``, whose checksums were verified, and delete the parts.

    ``manifest``: the content of the checkpoint's manifest. Raise BadInputError if it does not fit the parts.
    """
    try:
        _check_hash(manifest)
        table = {str(name): _row(row) for name, row in manifest["parts"][MODEL].items()}
        paths = {path.name: path for path in folder.glob(f"{PART}*")}
        places = {name: _places(path) for name, path in paths.items()}
        header: dict[str, object] = {}
        order, at = sorted(table, key=lambda name: (-_item_nbytes(places, table[name], name), name)), 0
        for name in order:
            dtype, shape, files = table[name]
            nbytes = sum(places[file][name][2] for file in files)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + nbytes]}
            at += nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with (folder / MODEL).open("wb") as target:
            target.write(len(text).to_bytes(8, "little") + text)
            for name in order:
                for file in table[name][2]:
                    _copy(*places[file][name], target)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadInputError(
            f"manifest.json: found parts that do not fit the files ({type(error).__name__}: {error}); expected those "
            "of a sharded checkpoint. Copy an earlier checkpoint with --all"
        ) from None
    for path in paths.values():
        path.unlink()


def _check_hash(manifest: Mapping[str, Any]) -> None:
    """Raise ValueError if ``manifest`` does not match the hash of itself that it has, unless it has none."""
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    found = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    if manifest.get("sha256") not in (None, found):
        raise ValueError("found content that does not match its field sha256")


def _row(row: Any) -> tuple[str, list[int], list[str]]:
    """Return (dtype, shape, names of the parts in the order of their rows) of a tensor in the manifest."""
    dtype, shape, chunks = row
    files = [str(file) for file, _, _ in sorted(chunks, key=lambda chunk: chunk[1])]
    if len(set(files)) != len(files):
        raise ValueError(f"found the parts {files} of a tensor; expected each of them once")
    return str(dtype), [int(size) for size in shape], files


def _places(path: Path) -> dict[str, _Found]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.load(BytesIO(file.read(length)))
    header.pop("__metadata__", None)
    return {
        name: (path, 8 + length + entry["data_offsets"][0], entry["data_offsets"][1] - entry["data_offsets"][0])
        for name, entry in header.items()
    }


def _item_nbytes(places: Mapping[str, Mapping[str, _Found]], row: tuple[str, list[int], list[str]], name: str) -> int:
    """Return the bytes of an element, by which the tensors of a file are sorted, so that all are aligned."""
    _, shape, files = row
    nbytes, count = sum(places[file][name][2] for file in files), prod(shape)
    if count and (nbytes % count or not nbytes):
        raise ValueError(f"{name}: found {nbytes} bytes; expected {count} elements")
    return nbytes // count if count else 1


def _copy(path: Path, offset: int, nbytes: int, target: BinaryIO) -> None:
    with path.open("rb") as file:
        file.seek(offset)
        rest = nbytes
        while rest:
            piece = file.read(min(rest, _PIECE_NBYTES))
            if not piece:
                raise ValueError(f"{path.name}: found its end within a tensor; expected {rest} bytes more")
            target.write(piece)
            rest -= len(piece)
