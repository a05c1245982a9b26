"""Checksums of the blocks of a file: ``python -m dltrain.data.sharded.block_sums FILE`` writes ``FILE.blocks``.

Nodes that fetch only a part of a file cannot verify a checksum of the whole file. With ``FILE.blocks`` beside the file,
they verify each block that they fetch. The first line has the file's size and the size of a block in bytes; each
further line has the SHA-256 of a block in hex digits.
"""

import argparse
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from dltrain.protocol.errors import BadInputError

SUFFIX = ".blocks"
BLOCK_NBYTES = 2**20
"""Size of a block in bytes, unless ``FILE.blocks`` has another one. A node may fetch one block too many per run of
shards, and a request for a single block should not be dominated by its latency."""
MIN_BLOCK_NBYTES = 2**12
_HEAD = re.compile(r"dljob-blocks 1 (\d{1,18}) (\d{1,12})")
_SUM = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class BlockSums:
    """The checksums of a file of ``nbytes`` bytes, in blocks of ``block_nbytes`` bytes; the last may be smaller."""

    nbytes: int
    block_nbytes: int
    sums: tuple[str, ...]

    @classmethod
    def of(cls, path: Path, block_nbytes: int = BLOCK_NBYTES) -> Self:
        """Compute the checksums of the blocks of a local file. Raise OSError if it cannot be read.

        ``block_nbytes``: size of a block.
        """
        with path.open("rb") as file:
            sums = tuple(hashlib.sha256(data).hexdigest() for data in iter(lambda: file.read(block_nbytes), b""))
        return cls(path.stat().st_size, block_nbytes, sums)

    def text(self) -> str:
        return "\n".join((f"dljob-blocks 1 {self.nbytes} {self.block_nbytes}", *self.sums)) + "\n"

    @classmethod
    def parse(cls, text: str, field: str, shown: str) -> Self:
        """Parse the content of a ``.blocks`` file. Raise BadInputError if it is invalid.

        ``field``: the field of the spec that messages name. ``shown``: the file's URI for messages.
        """
        first, *sums = text.splitlines() or [""]
        head = _HEAD.fullmatch(first)
        if head is not None and all(_SUM.fullmatch(line) for line in sums):
            nbytes, block_nbytes = int(head[1]), int(head[2])
            if block_nbytes >= MIN_BLOCK_NBYTES and len(sums) == -(-nbytes // block_nbytes):
                return cls(nbytes, block_nbytes, tuple(sums))
        raise BadInputError(
            field,
            f"{shown}, whose first line is {first[:80]!r} and which has {len(sums)} further lines",
            "checksums of blocks",
            "make it with python -m dltrain.data.sharded.block_sums FILE",
        )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m dltrain.data.sharded.block_sums",
        description="Writes FILE.blocks with the checksums of a file's blocks, and prints its own checksum, which "
        "spec.dataset.sha256 takes.",
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--block-bytes", type=int, default=BLOCK_NBYTES, help="size of a block (default: 1 MiB)")
    options = parser.parse_args(arguments)
    if options.block_bytes < MIN_BLOCK_NBYTES:
        parser.error(f"--block-bytes: found {options.block_bytes}; expected at least {MIN_BLOCK_NBYTES}")
    try:
        content = BlockSums.of(options.file, options.block_bytes).text().encode()
        target = options.file.with_name(options.file.name + SUFFIX)
        target.write_bytes(content)
    except OSError as error:
        parser.error(f"FILE: found {error}; expected a file that can be read, in a folder that can be written")
    print(f"{hashlib.sha256(content).hexdigest()}  {target.name}")  # noqa: T201


if __name__ == "__main__":
    main()
