"""Verify the hashes of a sharded checkpoint on all ranks, so that no rank has to read all of it.

Rank 0 alone decides whether a checkpoint is damaged, because another rank may read other content than rank 0, such as
an old listing of a folder on a network file system. So rank 0 reads again what another rank could not verify.
"""

import errno
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from dlcontract.checkpoint import parts
from dltrain.checkpoint import tensor_file
from dltrain.checkpoint.store import MODEL
from dltrain.comm.process_group import ProcessGroup
from dltrain.host.volume_access import PAUSES_S, retry


def divide(manifest: Mapping[str, Any], ranks: int) -> dict[str, int]:
    """Return which rank verifies each file of a sharded checkpoint, by the file's name.

    Parts are verified by the ranks that read them if as many ranks have written the checkpoint; otherwise, each rank
    verifies equally many. Rank 0 verifies the files that it reads alone. No rank reads the whole model to resume, so
    the rank with the fewest bytes verifies it. ``manifest``: that of the checkpoint. Raise KeyError, TypeError or
    AttributeError if it is invalid.
    """
    files = {str(name): int(claim["nbytes"]) for name, claim in manifest["files"].items()}
    shares = dict.fromkeys(files, 0)
    for tensors in parts.parse(manifest["parts"]).values():
        names = sorted({chunk.file for tensor in tensors.values() for chunk in tensor.chunks} & files.keys())
        shares |= {name: index * ranks // len(names) for index, name in enumerate(names)}
    if MODEL in files:
        load = [sum(files[name] for name, by in shares.items() if by == rank) for rank in range(ranks)]
        load[shares[MODEL]] -= files[MODEL]
        shares[MODEL] = load.index(min(load))
    return shares


class Verification:
    """The verification of checkpoints by all ranks of ``process_group``, until rank 0 calls ``end``.

    Rank 0 calls ``verify`` for one checkpoint after another, and the other ranks call ``serve``.
    """

    def __init__(self, process_group: ProcessGroup) -> None:
        self._process_group = process_group

    def verify(self, folder: Path, manifest: Mapping[str, Any], check: Callable[[str], None]) -> None:
        """Verify all files of the checkpoint in ``folder`` together with the other ranks.

        ``check``: a function that raises an error if rank 0 cannot verify the file with this name. Raise its error, and
        OSError if another rank cannot verify a file that rank 0 can. Raise PeerLostError if a rank is lost.
        """
        shares = divide(manifest, self._process_group.size)
        files = {name: [rank, manifest["files"][name]["sha256"]] for name, rank in shares.items()}
        self._process_group.broadcast(json.dumps({"folder": str(folder), "files": files}).encode())
        error: Exception | None = None
        try:
            for name, rank in shares.items():
                if rank == 0:
                    check(name)
        except Exception as found:  # noqa: BLE001 raised when the other ranks are done
            error = found
        failures = self._failures({})
        if error is not None:
            raise error
        for _, name, _ in failures:
            check(name)
        if failures:
            rank, name, text = failures[0]
            raise OSError(errno.EIO, f"rank {rank}: {text}; rank 0 found its content as expected", str(folder / name))

    def end(self) -> None:
        """Let the other ranks return from ``serve``."""
        self._process_group.broadcast(b"null")

    def serve(self) -> None:
        """Verify this rank's part of each checkpoint until rank 0 calls ``end``. Raise PeerLostError if one is lost."""
        pauses = iter(PAUSES_S)  # all checkpoints share one budget of repetitions
        while (asked := json.loads(self._process_group.broadcast(b""))) is not None:
            folder, failures = Path(asked["folder"]), dict[str, str]()
            for name, (rank, claimed) in asked["files"].items():
                if rank != self._process_group.rank:
                    continue
                path = folder / name
                try:
                    if retry(partial(tensor_file.sha256, path), str(path), pauses) != claimed:
                        failures[name] = f"found content of {name} that does not match its sha256"
                except OSError as error:
                    failures[name] = f"cannot read {name}: {error.strerror or error}"
            self._failures(failures)

    def _failures(self, mine: Mapping[str, str]) -> list[tuple[int, str, str]]:
        """Return (rank, name, text) of each file that a rank could not verify. All ranks must call it."""
        rows = self._process_group.collect(json.dumps(mine).encode())
        return [(rank, name, text) for rank, row in enumerate(rows) for name, text in json.loads(row).items()]
