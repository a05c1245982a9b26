"""Tests of read and write errors of the volume: they lose no checkpoint and fail no job for good."""

import contextlib
import errno
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dlcontract import reasons
from dltrain.checkpoint.background import Writer
from dltrain.checkpoint.store import MODEL, OPTIMIZER, Checkpoints, Snapshot
from dltrain.data.files import read_arrays
from dltrain.data.tokens import read_tokens
from dltrain.host import volume_access
from dltrain.protocol.errors import BadInputError, CheckpointError, VolumeError, failure

Fail = Callable[[str, int, int], None]
"""Let operations on paths that contain a text fail: (text, errno, number of failures)."""


def snapshot(step: int) -> Snapshot:
    return Snapshot(step, {"w": torch.full((3,), float(step))}, {}, {})


def loaded_step(checkpoints: Checkpoints) -> int | None:
    found = checkpoints.load()
    return found.snapshot().step if found is not None else None


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "job", "x", keep=2)


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the pauses between repetitions and do not wait."""
    waited: list[float] = []
    monkeypatch.setattr("dltrain.host.volume_access.time.sleep", waited.append)
    return waited


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fail]:
    rules: list[list[Any]] = []

    def check(path: Any) -> None:
        for rule in rules:
            if rule[0] in str(path) and rule[2] > 0:
                rule[2] -= 1
                raise OSError(rule[1], os.strerror(rule[1]), str(path))

    def checked(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *arguments: Any, **options: Any) -> Any:
            check(path)
            return original(path, *arguments, **options)

        return call

    for module, name in ((os, "listdir"), (os, "open"), (Path, "open"), (Path, "mkdir"), (Path, "read_bytes")):
        monkeypatch.setattr(module, name, checked(getattr(module, name)))
    yield lambda text, number, times: rules.append([text, number, times])
    rules.clear()


ALWAYS = 10**9


@pytest.mark.parametrize("path", [f"step-0000000002/{MODEL}", f"step-0000000002/{OPTIMIZER}", "step-0000000002/man"])
def test_short_read_error_is_survived_by_repetition(
    checkpoints: Checkpoints, fail: Fail, path: str, pauses: list[float]
) -> None:
    for step in (1, 2):
        checkpoints.save(snapshot(step))
    fail(path, errno.EIO, 3)
    assert loaded_step(checkpoints) == 2
    assert pauses == list(volume_access.PAUSES_S[:3])


@pytest.mark.parametrize("path", ["/job", "step-"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_lasting_read_error_neither_starts_anew_nor_deletes(
    checkpoints: Checkpoints, fail: Fail, number: int, path: str
) -> None:
    for step in (1, 2):
        checkpoints.save(snapshot(step))
    fail(path, number, ALWAYS)
    with pytest.raises(VolumeError) as raised:
        checkpoints.load()
    told = failure(raised.value, 0, "host")
    assert told.reason == reasons.CHECKPOINT_FAILED and told.retry and told.message.startswith("spec.checkpoint.volume")


def test_unreadable_checkpoint_is_skipped_for_an_older_one_and_stays(checkpoints: Checkpoints, fail: Fail) -> None:
    for step in (10, 90):
        checkpoints.save(snapshot(step))
    fail("step-0000000090", errno.EIO, len(volume_access.PAUSES_S) + 1)
    assert loaded_step(checkpoints) == 10
    for step in (20, 30):
        checkpoints.save(snapshot(step))
    assert checkpoints.steps() == [20, 30, 90], "only checkpoints that `keep` readable ones supersede are deleted"
    assert loaded_step(Checkpoints(checkpoints.directory, "x", keep=2)) == 90


def test_checkpoint_that_nothing_proved_corrupt_is_not_deleted(checkpoints: Checkpoints) -> None:
    checkpoints.save(snapshot(9))
    Checkpoints(checkpoints.directory, "x", keep=2).save(snapshot(1))
    assert checkpoints.steps() == [1, 9]


def test_corrupt_checkpoint_does_not_count_as_one_to_keep(checkpoints: Checkpoints) -> None:
    checkpoints.save(snapshot(1))
    path, _ = checkpoints.save(snapshot(2))
    (path / MODEL).write_bytes(b"")
    assert loaded_step(checkpoints) == 1
    checkpoints.save(snapshot(3))
    assert checkpoints.steps() == [1, 3]


@pytest.mark.parametrize("at", range(3))
def test_replacing_a_checkpoint_of_the_same_step_never_leaves_none(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """A process that dies between two renames leaves the old or the new checkpoint."""
    checkpoints.save(snapshot(5))
    rename, calls = Path.rename, itertools.count()

    def dying(self: Path, target: Path) -> Path:
        if next(calls) == at:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", dying)
    with contextlib.suppress(KeyboardInterrupt):
        checkpoints.save(snapshot(5))
    monkeypatch.undo()
    assert loaded_step(Checkpoints(checkpoints.directory, "x", keep=2)) == 5


def test_volume_that_returns_errors_at_start_is_tried_again(tmp_path: Path, fail: Fail, pauses: list[float]) -> None:
    fail("/job", errno.ETIMEDOUT, 4)
    checkpoints = Checkpoints(tmp_path / "job", "x", keep=2)
    assert pauses == list(volume_access.PAUSES_S[:4])
    checkpoints.save(snapshot(1))
    assert loaded_step(checkpoints) == 1


@pytest.mark.parametrize(
    ("number", "kind", "retry"),
    [
        (errno.EIO, VolumeError, True),
        (errno.ENOTCONN, VolumeError, True),
        (errno.ENOSPC, CheckpointError, True),
        (errno.EACCES, BadInputError, False),
        (errno.EROFS, BadInputError, False),
    ],
)
def test_error_at_start_fails_the_job_for_good_only_if_it_is_the_users(
    tmp_path: Path, fail: Fail, number: int, kind: type[Exception], retry: bool
) -> None:
    fail("/job", number, ALWAYS)
    with pytest.raises(kind) as raised:
        Checkpoints(tmp_path / "job", "x", keep=2)
    told = failure(raised.value, 0, "host")
    assert told.retry is retry and "spec.checkpoint.volume" in told.message and os.strerror(number) in told.message


def test_short_write_error_fails_no_checkpoint(checkpoints: Checkpoints, fail: Fail, pauses: list[float]) -> None:
    fail(MODEL, errno.EIO, 2)
    writer = Writer(checkpoints, None)
    writer.begin(snapshot(3))
    writer.wait()
    assert loaded_step(checkpoints) == 3 and len(pauses) == 2


@pytest.mark.parametrize(("name", "read"), [("a.npz", read_arrays), ("a.npy", read_tokens), ("a.bin", read_tokens)])
def test_read_error_of_a_dataset_is_no_bad_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, read: Callable[[Path], Any], pauses: list[float]
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("numpy.load", broken)
    monkeypatch.setattr("numpy.memmap", broken)
    with pytest.raises(VolumeError) as raised:
        read(tmp_path / name)
    told = failure(raised.value, 0, "host")
    assert told.retry and told.message.startswith("spec.dataset.uri") and len(pauses) == len(volume_access.PAUSES_S)
