"""Verify the hashes of a sharded checkpoint on all ranks, so that no rank has to read all of it.

Rank 0 alone decides whether a checkpoint is damaged, because another rank may read other content than rank 0, such as
an old listing of a folder on a network file system. So rank 0 reads again what another rank could not verify.
"""

import errno
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from dlcontract.checkpoint import parts
from dltrain.checkpoint import tensor_file
from dltrain.checkpoint.store import MODEL
from dltrain.comm.process_group import ProcessGroup
from dltrain.host.volume_access import retry
from dltrain.protocol.errors import BadInputError, CheckpointError, CheckpointVolumeError, FencedError, PeerLostError


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


T = TypeVar("T")

Claims = Mapping[str, Sequence[Any]]
"""What identifies each file of a checkpoint, by its name: its place, and what is needed to verify it, as JSON."""
VerifyMine = Callable[[Sequence[str], Claims], dict[str, str]]
"""Verify the files with these names, given the claims of all files. Return what is wrong with a file, by its name."""
_ERROR = "error"
_SHARED = {kind.__name__: kind for kind in (BadInputError, CheckpointError, CheckpointVolumeError, FencedError)}


class Verification:
    """The verification of checkpoints by all ranks of ``process_group``, until ``of`` returns on rank 0.

    Rank 0 calls ``verify`` for one checkpoint after another, and the other ranks call ``serve``.
    """

    def __init__(self, process_group: ProcessGroup) -> None:
        self._process_group = process_group

    def verify(self, shares: Mapping[str, int], claims: Claims, check: Callable[[str], None]) -> None:
        """Verify the files of a checkpoint together with the other ranks.

        ``shares``: which rank verifies each file, by the file's name. ``check``: a function that raises an error if
        rank 0 cannot verify the file with this name. Raise its error, OSError if another rank cannot verify a file that
        rank 0 can, and the error of another rank that cannot verify any file. Raise PeerLostError if a rank is lost.
        """
        self._process_group.broadcast(json.dumps({"shares": shares, "claims": claims}).encode())
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
        for _, name, text in failures:
            if name not in shares:
                raise _rebuilt(json.loads(text))
            check(name)
        if failures:
            rank, name, text = failures[0]
            raise OSError(errno.EIO, f"rank {rank}: {text}; rank 0 found its content as expected", claims[name][0])

    def of(self, load: Callable[[], T]) -> T:
        """Return the result of ``load``, a function that calls ``verify``, on rank 0, and end ``serve`` on other ranks.

        Other ranks raise the error that it raises, if it does.
        """
        try:
            found = load()
        except PeerLostError:
            raise
        except Exception as error:
            self._end({_ERROR: _described(error)})
            raise
        self._end(None)
        return found

    def _end(self, said: Any) -> None:
        self._process_group.broadcast(json.dumps(said).encode())

    def serve(self, verify_mine: VerifyMine) -> None:
        """Verify this rank's part of each checkpoint with ``verify_mine`` until ``of`` returns on rank 0.

        Raise the error that ``of`` raises there, and PeerLostError if a rank is lost.
        """
        while (asked := json.loads(self._process_group.broadcast(b""))) is not None:
            if _ERROR in asked:
                raise _rebuilt(asked[_ERROR])
            mine = [name for name, rank in asked["shares"].items() if rank == self._process_group.rank]
            try:
                failures = verify_mine(mine, asked["claims"])
            except CheckpointVolumeError as error:  # The local disk fails. Rank 0 ends all ranks with this error.
                failures = {"": json.dumps(_described(error))}
            self._failures(failures)

    def _failures(self, mine: Mapping[str, str]) -> list[tuple[int, str, str]]:
        """Return (rank, name, text) of each file that a rank could not verify. All ranks must call it."""
        rows = self._process_group.collect(json.dumps(mine).encode())
        return [(rank, name, text) for rank, row in enumerate(rows) for name, text in json.loads(row).items()]


def raise_together(process_group: ProcessGroup, error: Exception | None) -> None:
    """Raise the error of the lowest rank that has one on all ranks. All ranks must call it.

    Raise PeerLostError if a rank is lost.
    """
    rows = process_group.collect(json.dumps(_described(error) if error is not None else None).encode())
    for rank, row in enumerate(rows):
        if (described := json.loads(row)) is not None:
            raise error if error is not None and rank == process_group.rank else _rebuilt(described)


def _described(error: Exception) -> list[str]:
    return [type(error).__name__, str(error)]


def _rebuilt(described: Sequence[str]) -> Exception:
    """Return the error of another rank, with the same message. Errors of other types become a PeerLostError."""
    name, text = described
    kind = _SHARED.get(name, PeerLostError)
    error = kind.__new__(kind)  # without ``__init__``, which composes the message
    error.args = (text,)
    return error


def verify_files(names: Sequence[str], claims: Claims, pauses: Iterator[float]) -> dict[str, str]:
    """Verify files on a volume, whose claims are their paths and SHA-256. See ``VerifyMine``.

    ``pauses``: yields the seconds before each repetition.
    """
    failures: dict[str, str] = {}
    for name in names:
        path, claimed = claims[name]
        try:
            if retry(partial(tensor_file.sha256, Path(path)), path, pauses) != claimed:
                failures[name] = f"found content of {name} that does not match its sha256"
        except OSError as error:
            failures[name] = f"cannot read {name}: {error.strerror or error}"
    return failures
