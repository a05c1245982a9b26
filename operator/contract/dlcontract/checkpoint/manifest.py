"""The hash that the manifest of a checkpoint has of itself.

Without it, a flipped bit in the manifest could look like another model's checkpoint.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

HASH = "sha256"
"""Name of the field with the hash."""


def digest(manifest: Mapping[str, Any]) -> str:
    """Return the hash of a checkpoint's manifest, without its own field ``HASH``."""
    content = {key: value for key, value in manifest.items() if key != HASH}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def is_whole(manifest: Mapping[str, Any]) -> bool:
    """Return True if a manifest matches its hash. Older versions wrote none: return True for these, too."""
    return manifest.get(HASH) in (None, digest(manifest))
