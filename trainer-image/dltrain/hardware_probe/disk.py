"""Measure a folder's disk with a scratch file."""

import mmap
import os
import time
from contextlib import suppress
from pathlib import Path

from dlcontract.hardware import DiskRate

WRITTEN_NBYTES = 128 * 2**20
BLOCK_NBYTES = 2**20
MAX_S = 2.0
"""Maximum seconds for writing, and for reading. On a slow disk, the file is shorter."""
MIN_BLOCKS = 4


def disk_rates(folder: Path) -> tuple[DiskRate | None, str | None]:
    """Return the rates of a scratch file in ``folder`` (None if it could not be written), and a note about them.

    Writing ends with ``fsync``, so that the data is on the disk. The file is then read with ``O_DIRECT``, past the page
    cache. File systems without ``O_DIRECT``, such as ``tmpfs``, get no read rate, because a read from the cache says
    nothing about the disk. Caches of the disk itself, or of a virtual machine's host, may still have the data.
    """
    path = folder / f"dljob-probe-{os.getpid()}"
    try:
        room = os.statvfs(folder)
        blocks = min(WRITTEN_NBYTES, room.f_bavail * room.f_frsize // 4) // BLOCK_NBYTES
        if blocks < MIN_BLOCKS:
            return None, f"disk: found less than {4 * MIN_BLOCKS} MiB of free space in {folder}; not measured"
        written, write_Bps = _write(path, blocks)
        read_Bps = _read(path, written)
    except OSError as error:
        return None, f"disk: {folder}: {error.strerror or error}; not measured"
    finally:
        with suppress(OSError):
            path.unlink()
    if read_Bps is None:
        note = f"disk: {folder} allows no reads past the page cache; its read rate was not measured"
        return DiskRate(write_Bps=write_Bps), note
    return DiskRate(read_Bps=read_Bps, write_Bps=write_Bps, direct=True), None


def _write(path: Path, blocks: int) -> tuple[int, float]:
    """Write up to ``blocks`` blocks. Return (number of blocks written, bytes per second)."""
    block, written = os.urandom(BLOCK_NBYTES), 0
    with path.open("xb", buffering=0) as file:
        begin = time.perf_counter()
        while written < blocks and (written < MIN_BLOCKS or time.perf_counter() - begin < MAX_S):
            file.write(block)
            written += 1
            if written % 16 == 0:  # or the page cache would take everything at once
                os.fdatasync(file.fileno())
        os.fsync(file.fileno())
        return written, _rate(written, time.perf_counter() - begin)


def _read(path: Path, blocks: int) -> float | None:
    """Return the bytes per second of reads with ``O_DIRECT``, or None if the file system does not support it.

    ``blocks``: number of blocks to read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return None
    try:
        with mmap.mmap(-1, BLOCK_NBYTES) as buffer:  # aligned to pages, which O_DIRECT requires
            begin, read = time.perf_counter(), 0
            while read < blocks and (read < MIN_BLOCKS or time.perf_counter() - begin < MAX_S):
                if os.preadv(descriptor, [buffer], read * BLOCK_NBYTES) < BLOCK_NBYTES:
                    return None
                read += 1
            return _rate(read, time.perf_counter() - begin)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _rate(blocks: int, seconds: float) -> float:
    return float(f"{blocks * BLOCK_NBYTES / max(seconds, 1e-9):.4g}")
