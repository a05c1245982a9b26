"""The sharded checkpoints of a job on a volume that all ranks share."""

import errno
import secrets
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from dlcontract.checkpoint import parts
from dlcontract.checkpoint.parts import Table
from dltrain.checkpoint import tensor_file
from dltrain.checkpoint.parts import PartsFile
from dltrain.checkpoint.sharded import exchange
from dltrain.checkpoint.sharded.verification import Verification, divide, verify_files
from dltrain.checkpoint.state import PartTarget
from dltrain.checkpoint.store import MODEL, SHARDED_FORMAT, Checkpoints, CheckpointStore, Snapshot, Stored
from dltrain.checkpoint.tensor_file import Written
from dltrain.comm.process_group import ProcessGroup
from dltrain.host.volume_access import PAUSES_S, retry
from dltrain.protocol.errors import CheckpointVolumeError, VolumeError
from dltrain.protocol.volume_layout import step_name


def shared_by_all(directory: Path, process_group: ProcessGroup) -> bool:
    """Return True if all ranks can write to ``directory``, and see the files there that rank 0 writes, and it theirs.

    All ranks must call it. Raise PeerLostError if a rank is lost.
    """
    rank, size = process_group.rank, process_group.size
    token = process_group.broadcast(secrets.token_hex(8).encode()).decode()
    files = [directory / f".shared-{token}.{each}" for each in range(size)]

    def written(after: int | None) -> bool:
        """Write this rank's file if that of rank ``after`` exists. Return True if it is written."""
        try:
            if after is None or files[after].exists():
                files[rank].write_bytes(b"")
                return True
        except OSError:
            pass
        return False

    wrote = rank == 0 and written(None)
    process_group.sum([0.0])
    wrote = wrote or (rank > 0 and written(0))
    wrote = process_group.sum([float(wrote)])[0] == size
    try:
        seen = rank != 0 or all(file.exists() for file in files)
    except OSError:
        seen = False
    shared = wrote and process_group.sum([float(seen)])[0] == size
    with suppress(OSError):
        files[rank].unlink(missing_ok=True)
    return shared


class _Parts(PartsFile):
    """The parts of the checkpoint in ``folder`` on the volume. See ``exchange.Parts``."""

    streams = 1

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, {})

    def error(self, error: OSError) -> VolumeError:
        return CheckpointVolumeError(self.folder, error)


class ShardedCheckpoints:
    """Checkpoints to which every rank writes its part of the state. Every rank has such an object.

    Rank 0 finds, commits and removes them, as it does with other checkpoints. They have the same place, names and
    manifest, so both kinds can follow each other in one directory.
    """

    def __init__(self, directory: Path, checkpoints: CheckpointStore | None, group: Any) -> None:
        """Create the object. ``checkpoints``: those of the job on rank 0, None on other ranks.

        ``group``: torch's process group, which only the thread that writes checkpoints uses after the resume.
        """
        assert checkpoints is None or isinstance(checkpoints, Checkpoints), "sharded checkpoints are on a volume"
        self.directory, self._checkpoints, self.group = directory, checkpoints, group

    @property
    def place(self) -> str:
        return str(self.directory)

    def release(self) -> None:
        """Do nothing: ``load`` makes no copies."""

    def steps(self) -> list[int]:
        return self._on_rank_0().steps()

    def load(self) -> Stored | None:
        return self._on_rank_0().load()

    def load_verified(self, process_group: ProcessGroup, *, wanted: bool) -> Stored | None:
        """Return the newest checkpoint with valid hashes, which all ranks verify; None on other ranks than rank 0.

        All ranks must call it. ``wanted``: on rank 0, False to read none. See ``Checkpoints.load`` for the errors.
        """
        verification = Verification(process_group)
        if self._checkpoints is None:
            pauses = iter(PAUSES_S)  # all checkpoints share one budget of repetitions
            verification.serve(lambda names, claims: verify_files(names, claims, pauses))
            return None

        def verify(folder: Path, manifest: Mapping[str, Any], check: Callable[[str], None]) -> None:
            claims = {name: (str(folder / name), claim["sha256"]) for name, claim in manifest["files"].items()}
            verification.verify(divide(manifest, process_group.size), claims, check)

        return verification.of(lambda: self._on_rank_0().load(verify) if wanted else None)

    def _on_rank_0(self) -> Checkpoints:
        assert self._checkpoints is not None, "only rank 0 calls it"
        return self._checkpoints

    def read(self, folder: Path, table: Table, target: PartTarget) -> dict[int, dict[str, Any]]:
        """Read this rank's parts of the checkpoint in ``folder``. All ranks must call it. See ``exchange.load``."""
        return exchange.load(_Parts(folder), table, target, self.group)

    def save(self, snapshot: Snapshot) -> tuple[Path, int]:
        """Write this rank's parts of a checkpoint. All ranks must call it. Return (its directory, its size in bytes).

        It returns on all ranks when the checkpoint is durable, and an error on one rank leaves no checkpoint. See
        ``exchange.save`` for the errors.
        """
        final, nbytes = self.directory / step_name(snapshot.step), 0
        temporary = self.directory / f".{final.name}.{secrets.token_hex(8)}"  # rank 0 tells the others

        def create() -> str:
            retry(temporary.mkdir, str(temporary))
            return str(temporary)

        def write(folder: str, name: str, tensors: Mapping[str, Tensor]) -> Written:
            path = Path(folder) / name
            return retry(lambda: tensor_file.write(path, tensors), str(path))

        def commit(written: Mapping[str, Written], table: Table) -> None:
            nonlocal nbytes
            _, nbytes = retry(lambda: self._commit(snapshot, temporary, dict(written), table), str(temporary))

        try:
            exchange.save(snapshot, self.group, create, write, commit)
        except BaseException:
            if self._checkpoints is not None:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        return final, nbytes

    def _commit(self, snapshot: Snapshot, temporary: Path, files: dict[str, Written], table: Table) -> tuple[Path, int]:
        for name, written in files.items():
            if (size := (temporary / name).stat().st_size) != written.nbytes:
                raise OSError(errno.ESTALE, f"found {size} bytes; expected {written.nbytes}", str(temporary / name))
        if snapshot.export:
            try:
                files[MODEL] = tensor_file.write_pieces(temporary / MODEL, parts.joined(temporary, table[MODEL]))
            except ValueError as error:  # This pod sees an older content of the volume.
                raise OSError(errno.ESTALE, str(error), str(temporary)) from None
        fields = {"format": SHARDED_FORMAT, "parts": parts.to_json(table)}
        return self._on_rank_0().commit(snapshot, temporary, files, fields)
