"""Write the manifest of a checkpoint: the hashes of its files, and a hash of itself."""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from dlcontract.checkpoint.manifest import HASH, digest
from dltrain.checkpoint.tensor_file import Written


def encode(identity: str, step: int, files: Mapping[str, Written], fields: Mapping[str, Any]) -> bytes:
    """Return the content of a manifest.

    ``identity``: hash that identifies the model. ``files``: size and hash of each file. ``fields``: further fields.
    """
    content: dict[str, Any] = {
        "identity": identity,
        "step": step,
        "unix_s": time.time(),
        "files": {name: asdict(written) for name, written in files.items()},
        **fields,
    }
    return json.dumps(content | {HASH: digest(content)}, indent=1).encode()
