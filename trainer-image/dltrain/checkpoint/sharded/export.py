"""Write the whole model of a sharded checkpoint to one file: ``python -m dltrain.checkpoint.sharded.export STEP FILE``.

``STEP`` is the folder of a checkpoint, such as step-0000000300, and ``FILE`` a new safetensors file. The last
checkpoint of a training has the file already. This command is for the others, such as those of a run that was
interrupted.
"""

import json
import os
import sys
from pathlib import Path

from dlcontract.checkpoint import parts
from dlcontract.checkpoint.manifest import is_whole
from dltrain.checkpoint import tensor_file
from dltrain.checkpoint.store import MANIFEST, MODEL


def export(folder: Path, path: Path) -> None:
    """Write the whole model of the checkpoint in ``folder`` to the new file ``path``.

    The file appears when it is complete. Raise ValueError if the checkpoint is not sharded or is damaged, and OSError
    if a file cannot be read or written.
    """
    manifest = json.loads((folder / MANIFEST).read_bytes())
    if not isinstance(manifest, dict) or "parts" not in manifest:
        raise ValueError(f"{folder}: found a checkpoint without parts; expected a sharded one. Use its {MODEL}")
    try:
        if not is_whole(manifest):
            raise ValueError(
                f"{folder / MANIFEST}: found content that does not match its field sha256. Use an earlier checkpoint"
            )
        model = parts.parse(manifest["parts"])[MODEL]
        claims = {name: claim["sha256"] for name, claim in manifest["files"].items()}
        names = {chunk.file for tensor in model.values() for chunk in tensor.chunks}
        for name in sorted(names):
            if (found := tensor_file.sha256(folder / name)) != claims[name]:
                raise ValueError(
                    f"{folder / name}: found SHA-256 {found}; expected {claims[name]}, as in {MANIFEST}. Use an "
                    "earlier checkpoint"
                )
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{folder / MANIFEST}: found invalid parts ({type(error).__name__}: {error}); expected those of a sharded "
            "checkpoint. Use an earlier checkpoint"
        ) from None
    if path.exists():
        raise ValueError(f"{path}: found an existing file; expected a new one. Choose another name")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        tensor_file.write_pieces(temporary, parts.joined(folder, model))
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(
            "usage: python -m dltrain.checkpoint.sharded.export STEP FILE, such as step-0000000300 model.safetensors"
        )
    try:
        export(Path(sys.argv[1]), Path(sys.argv[2]))
    except (ValueError, OSError) as error:
        sys.exit(f"dltrain: {error}")


if __name__ == "__main__":
    main()
