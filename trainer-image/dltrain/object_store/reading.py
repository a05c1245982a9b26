"""Find the newest checkpoint in an object store that is valid, and download its files."""

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from dltrain.host.volume_access import is_input_error, is_transient
from dltrain.object_store.client import FIELD, ObjectStore
from dltrain.object_store.commit_log import CommitLog, DamagedError, Entry, StoredFile
from dltrain.protocol.errors import BadInputError, CheckpointError, CheckpointVolumeError, FencedError

T = TypeVar("T")


class LogReader:
    """Reads checkpoints from a log, newest first, and remembers which ones are damaged or could not be read."""

    def __init__(self, log: CommitLog, kind: str) -> None:
        self.log, self._kind = log, kind
        self._damaged: set[int] = set()
        """Numbers of the log's entries that ``newest`` has proven damaged. ``prune`` deletes them at any age."""
        self._unreadable: set[int] = set()
        """Numbers of the entries that ``newest`` could not read, which may be valid."""

    def open(self) -> None:
        """Claim the term of the log's run, and abort interrupted uploads of earlier runs.

        Raise BadInputError if the bucket does not exist or a permission is missing, FencedError if the log has a higher
        term, CheckpointError if the store is full, and CheckpointVolumeError if it returns other errors, even after
        repetitions.
        """
        try:
            self.log.claim()
        except OSError as error:
            raise opening_error(self.log.store.uri, error) from None
        try:
            self.log.abort_uploads()
        except OSError as error:
            tell(f"cannot abort interrupted uploads ({error.strerror or error}); their parts still take space")

    def newest(self, read: Callable[[Entry], T]) -> T | None:
        """Return the result of ``read`` for the newest valid checkpoint, or None if there is none.

        ``read``: a function that raises DamagedError if the checkpoint is damaged, and OSError if it cannot be read. An
        older checkpoint is used then. Raise BadInputError if a permission is missing, and CheckpointVolumeError if some
        checkpoints cannot be read and no other checkpoint is valid. Delete nothing.
        """
        failure: OSError | None = None
        self._damaged, self._unreadable = set(), set()
        uri = self.log.store.uri
        try:
            sequences = self.log.sequences()
        except OSError as error:
            raise opening_error(uri, error) from None
        for sequence in reversed(sequences):
            try:
                entry = self.log.entry(sequence)
                if entry.kind == self._kind:
                    return read(entry)
            except DamagedError as damage:
                self._damaged.add(sequence)
                tell(f"skipped a damaged checkpoint in {uri}: {damage}")
            except CheckpointVolumeError:
                raise
            except OSError as error:
                self._unreadable.add(sequence)
                failure = failure or error
                tell(f"skipped a checkpoint, which cannot be read: {error.strerror or error}")
        if failure is not None:
            raise opening_error(uri, failure)
        return None

    def prune(self, keep: int, spared: Callable[[str], bool] = lambda _: False) -> None:
        """Delete old and damaged checkpoints after a commit. On errors, leave that to the next commit.

        Raise FencedError if another run has taken over. ``keep``: number of checkpoints to keep. ``spared``: returns
        True for a key that another pod of this run still needs.
        """
        try:
            self.log.prune(keep, self._damaged, self._unreadable, spared)
        except FencedError:
            raise
        except OSError as error:
            tell(f"cannot delete old checkpoints ({error.strerror or error}); they remain in the store")


def fetch(store: ObjectStore, file: StoredFile, target: Path) -> None:
    """Download a file of a checkpoint to the path ``target``. Raise OSError, and DamagedError for a wrong checksum.

    Raise CheckpointVolumeError if the local disk fails, for example because it is full.
    """
    digest = hashlib.sha256()
    try:
        output = target.open("wb")
    except OSError as error:
        raise CheckpointVolumeError(target, error, STAGING_FIELD) from None
    with output:

        def take(part: bytes) -> None:
            digest.update(part)
            try:
                output.write(part)
            except OSError as error:
                raise CheckpointVolumeError(target, error, STAGING_FIELD) from None

        try:
            store.download(file.key, file.nbytes, take)
        except FileNotFoundError:
            raise DamagedError(f"found no {store.path(file.key)}") from None
    if digest.hexdigest() != file.sha256:
        raise DamagedError(f"found content of {store.path(file.key)} that does not match its sha256 in the marker")


def opening_error(uri: str, error: OSError) -> Exception:
    """Return the error to raise if the object store at ``uri`` cannot be read or written because of ``error``."""
    if is_transient(error):
        return CheckpointVolumeError(uri, error, FIELD)
    if not is_input_error(error):
        return CheckpointError(uri, error, FIELD)
    return BadInputError(
        FIELD, f"{uri}: {error.strerror or error}", "a bucket that the job may list, read and write",
        "correct the URI, grant the permission, or name a Secret with credentials in spec.checkpoint.secretName",
    )  # fmt: skip


STAGING_FIELD = "spec.checkpoint.stagingSize"


def tell(text: str) -> None:
    print(f"dltrain: {text}", file=sys.stderr, flush=True)  # noqa: T201
