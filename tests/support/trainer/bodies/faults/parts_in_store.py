"""Check sharded checkpoints in an object store on every rank: faults while they are written and read.

Arguments: ranks, a folder for local files, the URI for the checkpoints, and names of checks. Each check has a prefix of
its own in the bucket, unless there is only one.
"""

import errno
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dltrain.checkpoint import remote_store
from dltrain.checkpoint.sharded import remote
from dltrain.checkpoint.tensor_file import TensorFile
from dltrain.comm.process_group import ProcessGroup
from dltrain.object_store.client import ObjectStore
from dltrain.object_store.commit_log import CommitLog, StoredFile
from dltrain.protocol.errors import BadInputError, CheckpointError, CheckpointVolumeError
from support.trainer.bodies.faults.sharded_checkpoints import STEPS, trained
from support.trainer.bodies.harness import print_on_rank_0, start_process_group

ALWAYS_S = 1e-6
"""Interval with which a checkpoint follows each step, as soon as the one before is complete."""


def downloaded(folder: Path) -> list[str]:
    """Return the paths of the local copies of checkpoints."""
    return [str(path) for path in folder.rglob("*") if "restored" in path.name]


def check_train(group: ProcessGroup, folder: Path, uri: str) -> None:
    trained(group, folder, STEPS // 2, uri=uri)


def check_resume(group: ProcessGroup, folder: Path, uri: str) -> None:
    """The resumed training equals one that was not interrupted. On as many ranks, it is bitwise equal."""
    local: list[str] = []
    ranges: list[str] = []
    fetch, header = remote.fetch, remote._RemoteFile._header

    def fetched(store: ObjectStore, file: StoredFile, target: Path) -> None:
        local.append(target.name)
        fetch(store, file, target)

    def opened(self: TensorFile) -> bytes:
        ranges.append(self.path.name)
        return header(self)  # type: ignore[arg-type]

    remote.fetch = remote_store.fetch = fetched
    remote._RemoteFile._header = opened  # type: ignore[assignment,method-assign]
    resumed = trained(group, folder, STEPS, uri=uri)
    remote.fetch = remote_store.fetch = fetch
    remote._RemoteFile._header = header  # type: ignore[method-assign]
    written = 2
    expected = trained(group, folder / "other", STEPS)
    off = float((resumed - expected).abs().max())
    sys.stdout.write(f"rank {group.rank} downloaded {sorted(local)} and ranges of {sorted(set(ranges))}\n")
    sys.stdout.flush()
    print_on_rank_0(group, f"resumed {written} parts on {group.size} ranks: off by {off:.1e}")
    assert off < 1e-12 if written != group.size else off == 0.0
    group.sum([0.0])
    assert not downloaded(folder), "the local copies are deleted"


def replace_upload(new: Callable[[str], object]) -> None:
    """Let each rank call ``new`` with the key of a part before it uploads the part."""
    original = remote_store.upload_tensors

    def upload(store: ObjectStore, key: str, tensors: Mapping[str, Tensor]) -> StoredFile:
        new(key)
        return original(store, key, tensors)

    remote.upload_tensors = upload


def check_killed_in_upload(group: ProcessGroup, folder: Path, uri: str) -> None:
    """Rank 1 is killed after it has uploaded a part of its second checkpoint."""
    keys: list[str] = []

    def upload(key: str) -> None:
        keys.append(key)
        if group.rank == 1 and len(keys) == 4:
            os.kill(os.getpid(), signal.SIGKILL)

    replace_upload(upload)
    trained(group, folder, 10**6, ALWAYS_S, uri=uri)


def check_killed_before_commit(group: ProcessGroup, folder: Path, uri: str) -> None:
    """Rank 0 is killed when all parts of its second checkpoint are uploaded, before the commit marker."""
    commits = []
    original = CommitLog.commit

    def commit(self: CommitLog, *arguments: Any, **options: Any) -> Any:
        commits.append(self)
        if len(commits) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, *arguments, **options)

    CommitLog.commit = commit  # type: ignore[method-assign]
    trained(group, folder, 10**6, ALWAYS_S, uri=uri)


def check_refused(group: ProcessGroup, folder: Path, uri: str) -> None:
    """The store rejects a part of rank 1 of the second checkpoint. All ranks get the error."""
    with pytest.raises(CheckpointError, match="rank 1: no permission s3:PutObject on bucket 'models'") as error:
        trained(group, folder, 10**6, ALWAYS_S, uri=uri)
    assert group.collect(str(error.value).encode()) == [str(error.value).encode()] * group.size
    torch.distributed.destroy_process_group()
    print_on_rank_0(group, "a rejected part is an error on all ranks")


def same_error(group: ProcessGroup, folder: Path, uri: str, kind: type[Exception], match: str) -> None:
    """Check that all ranks get the same error when they resume."""
    with pytest.raises(kind, match=match) as error:
        trained(group, folder, STEPS, uri=uri)
    assert type(error.value) is kind
    assert group.collect(str(error.value).encode()) == [str(error.value).encode()] * group.size
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    print_on_rank_0(group, f"the same error on all ranks: {error.value}")


def check_no_permission(group: ProcessGroup, folder: Path, uri: str) -> None:
    """The store rejects the claim of rank 0."""
    same_error(group, folder, uri, BadInputError, "no permission s3:PutObject on bucket 'models'")


def check_unreachable(group: ProcessGroup, folder: Path, uri: str) -> None:
    """Only rank 1 cannot reach the store."""
    original = ObjectStore.list

    def unreachable(self: ObjectStore, prefix: str) -> dict[str, int]:
        if group.rank == 1:
            raise OSError(errno.EIO, "ListObjectsV2: ConnectTimeoutError")
        return original(self, prefix)

    ObjectStore.list = unreachable  # type: ignore[method-assign]
    same_error(group, folder, uri, CheckpointVolumeError, "rank 1: ListObjectsV2: ConnectTimeoutError")
    ObjectStore.list = original  # type: ignore[method-assign]


def check_local_disk(group: ProcessGroup, folder: Path, uri: str) -> None:
    """The local disk of rank 1 is full when it downloads its parts."""
    trained(group, folder, STEPS // 2, uri=uri)
    original = remote.fetch

    def full(store: ObjectStore, file: StoredFile, target: Path) -> None:
        if group.rank == 1:
            raise CheckpointVolumeError(target, OSError(errno.ENOSPC, "No space left on device"), remote.STAGING_FIELD)
        original(store, file, target)

    remote.fetch = full
    same_error(group, folder, uri, CheckpointVolumeError, r"spec\.checkpoint\.stagingSize: .*No space left on device")
    remote.fetch = original


def check_unreadable(group: ProcessGroup, folder: Path, uri: str) -> None:
    """Rank 1 cannot read the rows of rank 0's part that it needs, after the parts are verified."""
    trained(group, folder, STEPS // 2, uri=uri)
    original = ObjectStore.read_range

    def broken(self: ObjectStore, key: str, begin: int, nbytes: int) -> bytes:
        if group.rank == 1 and "part-00000" in key:
            raise OSError(errno.EIO, "GetObject: the connection is broken", key)
        return original(self, key, begin, nbytes)

    ObjectStore.read_range = broken  # type: ignore[method-assign]
    same_error(group, folder, uri, CheckpointVolumeError, "rank 1: GetObject: the connection is broken")
    ObjectStore.read_range = original  # type: ignore[method-assign]


def main() -> None:
    group, folder, uri = start_process_group(), Path(sys.argv[2]), sys.argv[3]
    for name in sys.argv[4:]:
        several = len(sys.argv) > 5
        globals()[f"check_{name}"](group, folder / name if several else folder, f"{uri}/{name}" if several else uri)
    group.close()


main()
