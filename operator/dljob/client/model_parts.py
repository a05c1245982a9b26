"""Join the parts of a sharded checkpoint to one safetensors file with the whole model.

Only the last checkpoint of a training has this file. Others have a part from each rank, such as those of a job that
failed. The manifest of the checkpoint has the table of the parts (``dlcontract.checkpoint.parts``).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlcontract.checkpoint.manifest import is_whole
from dlcontract.checkpoint.parts import MODEL, joined, parse
from dljob.client.errors import BadInputError

PART, OPTIMIZER_PART = "model-part-", "optimizer-part-"
"""How the names of parts begin."""


def only_in_parts(manifest: Mapping[str, Any]) -> bool:
    """Return True if a checkpoint has the model in parts, and not in one file. ``manifest``: with the key ``files``."""
    names = manifest["files"]
    return MODEL not in names and any(str(name).startswith(PART) for name in names)


def join(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write ``MODEL`` from its parts in ``folder``, whose checksums were verified, and delete the parts.

    ``manifest``: the content of the checkpoint's manifest. Raise BadInputError if it does not fit the parts.
    """
    paths = list(folder.glob(f"{PART}*"))
    try:
        if not is_whole(manifest):
            raise ValueError("found content that does not match its field sha256")
        tensors = parse(manifest["parts"])[MODEL]
        named = {chunk.file for tensor in tensors.values() for chunk in tensor.chunks}
        if unknown := named - {path.name for path in paths}:
            raise ValueError(f"found no file {min(unknown)}; expected each part of the table")
        with (folder / MODEL).open("wb") as target:
            for piece in joined(folder, tensors):
                target.write(piece)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadInputError(
            f"manifest.json: found parts that do not fit the files ({type(error).__name__}: {error}); expected those "
            "of a sharded checkpoint. Copy an earlier checkpoint with --all"
        ) from None
    for path in paths:
        path.unlink()
