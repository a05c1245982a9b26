"""Tests of the folder of a script that is staged in an object store."""

import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dltrain.object_store import watching
from dltrain.object_store.client import ObjectStore
from dltrain.object_store.commit_log import CommitLog, DamagedError
from dltrain.object_store.staged_folder import ChangedError, StagedFolder, scan
from dltrain.protocol.errors import CheckpointVolumeError
from support.trainer.object_store import Server

Make = Callable[..., StagedFolder]
LATER = 2e9
"""A time at which all files of a test have settled."""


@pytest.fixture
def make(tmp_path: Path, store: Server) -> Make:
    def made(disk: str = "a", term: int = 1, keep: int = 2) -> StagedFolder:
        folder = tmp_path / disk / "job"
        folder.parent.mkdir(exist_ok=True)
        return StagedFolder(folder, CommitLog(ObjectStore("s3://models/job"), term), keep)

    return made


def write(folder: StagedFolder, **files: str) -> None:
    for name, text in files.items():
        path = folder.folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def read(folder: StagedFolder) -> dict[str, str]:
    return {path: (folder.folder / path).read_text() for path, seen in scan(folder.folder).items() if seen != "step.5"}


def delete(folder: StagedFolder, path: str) -> None:
    found = folder.folder / path
    shutil.rmtree(found) if found.is_dir() else found.unlink()


def test_folder_is_restored_on_another_disk(make: Make) -> None:
    first = make()
    assert first.restore(LATER) == 0 and first.folder.is_dir()
    write(first, step_5__weights_bin="five", step_5__state_json="{}", latest="5")
    (first.folder / "best").symlink_to("step.5")
    assert first.upload() is not None and first.upload() is None, "nothing has changed since"
    other = make("b", term=2)
    assert other.restore(LATER) > 0
    assert read(other)["step.5/weights.bin"] == "five" and (other.folder / "best").readlink() == Path("step.5")
    assert scan(other.folder) == scan(first.folder), "also the times, by which scripts sort checkpoints"


def test_only_changed_files_are_uploaded(make: Make, store: Server) -> None:
    folder = make()
    folder.restore(LATER)
    write(folder, a_bin="one", b_bin="two")
    folder.upload()
    store.requests.clear()
    write(folder, b_bin="other")
    entry = folder.upload()
    assert entry is not None and store.requests.count("PutObject") == 2, "the file and the marker"
    (folder.folder / "a.bin").unlink()
    folder.upload()
    other = make("b")
    other.restore(LATER)
    assert read(other) == {"b.bin": "other"}


def test_old_commits_are_pruned_with_files_that_no_commit_needs(make: Make, store: Server) -> None:
    folder = make(keep=2)
    folder.restore(LATER)
    write(folder, same="same")
    for number in range(4):
        write(folder, each=f"{number}")
        folder.upload()
    keys = store.keys("models", "job/data/")
    assert len(keys) == 3, "one file that both commits share, and one of each"
    assert len(folder.log.commits()) == 2


def test_folder_that_changes_during_the_upload_is_not_committed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make()
    folder.restore(LATER)
    write(folder, a_bin="one")
    upload = folder.log.store.upload

    def slow(*arguments: object) -> object:
        write(folder, b_bin="new")
        return upload(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(folder.log.store, "upload", slow)
    with pytest.raises(ChangedError):
        folder.upload()
    assert not folder.log.commits()


def test_logs_need_not_settle(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make()
    folder.restore(LATER)
    write(folder, a_bin="one", train_log="1")
    upload = folder.log.store.upload

    def slow(*arguments: object) -> object:
        write(folder, train_log="1234")
        return upload(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(folder.log.store, "upload", slow)
    entry = folder.upload()
    assert entry is not None and entry.files["train.log"].nbytes == 1
    assert folder.upload() is None and folder.upload(final=True) is not None


def test_settled_content_of_a_pod_that_survives_is_kept(make: Make) -> None:
    folder = make()
    folder.restore(LATER)
    write(folder, a_bin="one")
    folder.upload()
    write(folder, a_bin="newer")
    again = make()
    again.restore(LATER)
    assert read(again) == {"a.bin": "newer"}
    other = make("b", term=2)
    other.restore(LATER)
    assert read(other) == {"a.bin": "newer"}, "it was uploaded"


def test_content_that_was_still_being_written_is_discarded(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make()
    folder.restore(LATER)
    write(folder, a_bin="one", b_bin="two")
    folder.upload()
    ended_unix_s = time.time()
    write(folder, a_bin="ha", c_bin="half")
    again = make()
    again.restore(ended_unix_s)
    assert read(again) == {"a.bin": "one", "b.bin": "two"}
    assert "discarded 2 files that were still being written, such as a.bin" in capsys.readouterr().err


@pytest.mark.parametrize("uploaded", [True, False])
@pytest.mark.parametrize("settled", [True, False])
def test_first_content_is_uploaded_after_the_end_only_if_it_had_settled(
    make: Make, settled: bool, uploaded: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fixed bug: a rank that was killed in its first checkpoint left a torn file, which was committed and restored."""
    folder = make()
    folder.restore(LATER)
    write(folder, a_bin="half", train_log="1")
    if uploaded:  # An upload that was interrupted before its commit does not count.
        folder.upload_content(folder.content, {"a.bin": scan(folder.folder)["a.bin"]})
    again = make()
    sequence = again.restore(folder.newest_change_s({}) + (9 if settled else 0))
    expected = {"a.bin": "half", "train.log": "1"} if settled else {}
    assert read(again) == expected and (sequence > 0) == settled == bool(folder.log.commits())
    assert ("discarded 2 files that were still being written" in capsys.readouterr().err) != settled
    other = make("b", term=2)
    other.restore(LATER)
    assert read(other) == expected


def with_deletion(make: Make, deleted: str) -> tuple[StagedFolder, dict[str, str]]:
    """Return a folder whose path ``deleted`` was deleted after a commit, and the contents that the commit has."""
    folder = make()
    folder.restore(LATER)
    write(folder, config_json="{}", ckpt__model_bin="weights", ckpt__state_bin="state")
    folder.upload()
    before = read(folder)
    delete(folder, deleted)
    return folder, before


@pytest.mark.parametrize("settled", [True, False])
@pytest.mark.parametrize("deleted", ["ckpt/model.bin", "ckpt"])
def test_deletion_right_before_the_ranks_end_is_not_committed(make: Make, deleted: str, settled: bool) -> None:
    """Fixed bug: a script that deleted its checkpoint to replace it, and failed then, lost the checkpoint."""
    folder, before = with_deletion(make, deleted)
    after = read(folder)
    make().restore(folder.newest_change_s(folder.committed) + (9 if settled else 0))
    expected = after if settled else before
    assert read(folder) == expected
    other = make("b", term=2)
    other.restore(LATER)
    assert read(other) == expected, "a settled deletion counts: scripts delete old checkpoints"


@pytest.mark.parametrize("later_s", [0, 9])
@pytest.mark.parametrize("deleted", ["ckpt/model.bin", "ckpt"])
def test_stop_does_not_commit_a_deletion_right_before(
    make: Make, deleted: str, later_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, before = with_deletion(make, deleted)
    now_s = folder.newest_change_s(folder.committed) + later_s
    monkeypatch.setattr(watching.time, "time", lambda: now_s)
    watching.finish(watching.Alone(folder), exited=False)
    other = make("b", term=2)
    other.restore(LATER)
    assert read(other) == (read(folder) if later_s else before)


def test_folder_without_files_is_committed_only_if_the_ranks_have_exited(make: Make) -> None:
    folder = make()
    folder.restore(LATER)
    write(folder, ckpt__model_bin="weights", train_log="1")
    folder.upload()
    delete(folder, "ckpt")
    work = watching.Alone(folder)
    work.settled({})
    watching.finish(work, exited=False)
    make().restore(LATER)
    assert read(folder) == {"ckpt/model.bin": "weights", "train.log": "1"}
    delete(folder, "ckpt")
    watching.finish(work, exited=True)
    other = make("b", term=2)
    other.restore(LATER)
    assert read(other) == {"train.log": "1"}


@pytest.mark.parametrize("settled", [True, False])
def test_unknown_end_of_the_ranks_is_the_time_that_the_watch_noted_last(make: Make, settled: bool) -> None:
    """Fixed bug: a container that was killed in the middle of a write committed the torn file when it started again."""
    folder = make()
    folder.restore(LATER)
    write(folder, a_bin="one")
    folder.upload()
    write(folder, a_bin="newer")
    folder.note_time()
    [note] = folder.folder.parent.glob(".job.json")
    alive_s = (folder.folder / "a.bin").stat().st_mtime + (9 if settled else 0)
    os.utime(note, (alive_s, alive_s))
    make().restore(None)
    assert read(make()) == {"a.bin": "newer" if settled else "one"}


def test_new_pod_without_a_known_end_restores_the_commit(make: Make) -> None:
    folder = make()
    assert folder.restore(None) == 0
    write(folder, a_bin="one")
    folder.upload()
    other = make("b", term=2)
    other.restore(None)
    assert read(other) == {"a.bin": "one"}


@pytest.mark.parametrize(
    ("later_s", "exited", "expected"), [(-9, False, "one"), (9, False, "newer"), (-9, True, "newer")]
)
def test_stop_commits_only_what_had_settled_before_the_ranks_were_killed(
    make: Make, later_s: float, exited: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fixed bug: a rank that was killed in the middle of a write left a torn file in the newest commit."""
    folder = make()
    folder.restore(LATER)
    write(folder, a_bin="one")
    folder.upload()
    write(folder, a_bin="newer")
    now_s = time.time() + later_s
    monkeypatch.setattr(watching.time, "time", lambda: now_s)
    watching.finish(watching.Alone(folder), exited=exited)
    other = make("b", term=2)
    other.restore(LATER)
    assert read(other) == {"a.bin": expected}


def test_interrupted_restore_is_not_taken_for_deletions_by_the_script(make: Make, store: Server) -> None:
    """Fixed bug: the files that were missing then were missing in the next commit, and the script started afresh."""
    folder = make()
    folder.restore(LATER)
    write(folder, config_json="{}", last_pt="good")
    folder.upload()
    ended_unix_s = time.time()
    write(folder, last_pt="torn in the middle")
    store.refuse("GetObject", 500, "InternalError", key="data/")
    with pytest.raises(CheckpointVolumeError):
        make().restore(ended_unix_s)
    store.allow_all()
    assert not (folder.folder / "last.pt").exists()
    again = make()
    again.restore(ended_unix_s)
    assert read(again) == {"config.json": "{}", "last.pt": "good"}
    assert [set(each.files) for each in again.log.commits()][-1] == {"config.json", "last.pt"}


def test_disk_of_an_earlier_leader_is_not_uploaded(make: Make) -> None:
    folder = make()
    folder.restore(LATER)
    write(folder, a_bin="one")
    folder.upload()
    write(folder, a_bin="stale")
    other = make("b", term=2)
    other.restore(LATER)
    write(other, a_bin="two")
    other.upload()
    back = make("a", term=3)
    back.restore(LATER)
    assert read(back) == {"a.bin": "two"}


@pytest.mark.parametrize("path", ["../evil", "/tmp/evil", "link/evil"])
def test_files_outside_of_the_folder_are_refused(make: Make, tmp_path: Path, path: str) -> None:
    folder = make()
    folder.restore(LATER)
    write(folder, a_bin="one")
    entry = folder.upload()
    assert entry is not None
    about = {"mtimes_ns": {path: 1}, "links": {"link": str(tmp_path)}}
    folder.log.commit("folder", {path: entry.files["a.bin"]}, about)
    with pytest.raises(DamagedError):
        folder.restore_entry(folder.log.commits()[-1])
    other = make("b")
    other.restore(LATER)
    assert read(other) == {"a.bin": "one"} and not list(tmp_path.rglob("evil"))


def test_damaged_file_falls_back_to_the_commit_before(make: Make, store: Server) -> None:
    folder = make()
    folder.restore(LATER)
    for text in ("one", "two"):
        write(folder, a_bin=text)
        entry = folder.upload()
    assert entry is not None
    store.client().put_object(Bucket="models", Key=f"job/{entry.files['a.bin'].key}", Body=b"bad")
    other = make("b")
    other.restore(LATER)
    assert read(other) == {"a.bin": "one"}


def test_unreadable_commit_is_no_fresh_start(make: Make, store: Server) -> None:
    folder = make()
    folder.restore(LATER)
    write(folder, a_bin="one")
    folder.upload()
    store.refuse("GetObject", 500, "InternalError", key="data/")
    with pytest.raises(CheckpointVolumeError):
        make("b").restore(LATER)
    store.allow_all()
    other = make("b")
    other.restore(LATER)
    assert read(other) == {"a.bin": "one"}


def test_watch_uploads_what_has_settled(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "POLL_S", 0.01)
    monkeypatch.setattr(watching, "SETTLE_S", 0.05)
    folder, stop = make(), threading.Event()
    folder.restore(LATER)
    thread = threading.Thread(target=watching.watch, args=(watching.Alone(folder), stop))
    thread.start()
    write(folder, a_bin="one")
    reader = make("b")
    deadline_s = time.monotonic() + 30
    while not reader.log.commits():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    write(folder, b_bin="last")
    stop.set()
    thread.join(30)
    reader.restore(LATER)
    assert read(reader) == {"a.bin": "one", "b.bin": "last"}


def test_folder_that_never_settles_is_named(
    make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watching, "POLL_S", 0.01)
    monkeypatch.setattr(watching, "UNSETTLED_S", 0.05)
    folder, stop = make(), threading.Event()
    folder.restore(LATER)
    thread = threading.Thread(target=watching.watch, args=(watching.Alone(folder), stop))
    thread.start()
    deadline_s, told = time.monotonic() + 30, ""
    while "found changes all the time, last in a.txt" not in told:
        assert time.monotonic() < deadline_s
        write(folder, a_txt=os.urandom(8).hex() * len(told[:9] + "x"))
        told += capsys.readouterr().err
    stop.set()
    thread.join(30)
    assert len(json.dumps(read(folder))) > 9 and folder.log.commits()
