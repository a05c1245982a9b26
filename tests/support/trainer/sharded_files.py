"""Sharded datasets on a web server of this process, opened as the ranks of a plan open them."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np

from dlcontract import DatasetRef
from dltrain.data.sharded.block_sums import MIN_BLOCK_NBYTES, BlockSums
from support.servers.files import FileServer, serving

BLOCK = MIN_BLOCK_NBYTES
TOKENS = np.random.Generator(np.random.Philox(3)).integers(0, 50, 128 * 1000 + 1).astype(np.uint16)
"""A text of 1000 sequences: 900 for training, and 100 held out."""


@contextmanager
def impatient_server() -> Iterator[FileServer]:
    """Serve files. Clients inside the context repeat requests after faults at once."""
    waits = (0.0,) * 4
    with (
        patch.dict("os.environ", NO_PROXY="127.0.0.1"),
        patch("dltrain.data.download.WAITS_S", waits),
        patch("dltrain.data.sharded.partial_file.WAITS_S", waits),
        serving() as server,
    ):
        yield server


def publish(server: FileServer, path: Path, *, sums: bool = True) -> DatasetRef:
    """Serve a file with checksums of small blocks, and return the reference to it in a plan."""
    server.files[f"/{path.name}"] = path.read_bytes()
    sha256 = None
    if sums:
        content = BlockSums.of(path, BLOCK).text().encode()
        server.files[f"/{path.name}.blocks"], sha256 = content, hashlib.sha256(content).hexdigest()
    at = str(path.parent / "node" / path.name)
    return DatasetRef(path=at, distribution="Sharded", uri=f"{server.uri}/{path.name}", sha256=sha256)


def publish_text(server: FileServer, folder: Path, *, sums: bool = True) -> DatasetRef:
    """Serve ``TOKENS``, and return the reference to them."""
    np.save(folder / "text.npy", TOKENS)
    return publish(server, folder / "text.npy", sums=sums)
