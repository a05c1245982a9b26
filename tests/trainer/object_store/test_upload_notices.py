"""Tests of what the process that copies a script's folder tells its agent about uploads."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlcontract import CheckpointRef, ModelRef, reasons
from dltrain.object_store import stage, watching
from dltrain.object_store.client import ObjectStore
from dltrain.object_store.commit_log import CommitLog, Entry, StoredFile
from dltrain.object_store.content import Content
from dltrain.object_store.notices import UploadNotices, uploaded
from dltrain.object_store.staged_folder import StagedFolder
from dltrain.protocol.upload_messages import NotUploaded, Uploaded, UploadMessage, upload_message_adapter
from support.trainer.object_store import Server
from support.trainer.plans import make_plan
from support.trainer.uploading_pods import Pods

LATER = 2e9
SECOND_NS = 10**9


class Agent:
    """The agent's end of the pipe."""

    def __init__(self) -> None:
        self._read_fd, self.write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        self.seen: list[UploadMessage] = []

    def messages(self) -> list[UploadMessage]:
        """Return the messages since the last call."""
        try:
            lines = os.read(self._read_fd, 2**16).splitlines()
        except BlockingIOError:
            return []
        found = [upload_message_adapter.validate_json(line) for line in lines]
        self.seen += found
        return found

    def until(self, wanted: Callable[[list[UploadMessage]], bool]) -> list[UploadMessage]:
        deadline_s = time.monotonic() + 60
        while not wanted(self.seen):
            assert time.monotonic() < deadline_s, self.seen
            self.messages()
            time.sleep(0.01)
        return self.seen


@pytest.fixture
def agent() -> Iterator[Agent]:
    yield (made := Agent())
    os.close(made.write_fd)
    os.close(made._read_fd)


@pytest.fixture
def folder(tmp_path: Path, store: Server, agent: Agent) -> StagedFolder:
    return on_disk(tmp_path / "a", agent)


def on_disk(disk: Path, agent: Agent, term: int = 1) -> StagedFolder:
    disk.mkdir(exist_ok=True)
    log = CommitLog(ObjectStore("s3://models/job"), term)
    return StagedFolder(disk / "job", log, 2, notices=UploadNotices(agent.write_fd))


def write(folder: StagedFolder, name: str, text: str, unix_s: float | None = None) -> None:
    path = folder.folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    if unix_s is not None:
        os.utime(path, (unix_s, unix_s))


def test_commit_is_told_with_what_the_status_shows(folder: StagedFolder, agent: Agent) -> None:
    folder.restore(LATER)
    assert agent.messages() == [Uploaded(upload=None)], "nothing is committed yet"
    began_s = time.time()
    write(folder, "checkpoint-5/weights.bin", "12345678", began_s - 100)
    write(folder, "checkpoint-5/state.json", "{}", began_s - 90)
    write(folder, "latest", "checkpoint-5", began_s - 80)
    folder.upload()
    [told] = agent.messages()
    assert isinstance(told, Uploaded) and told.upload is not None and told.age_s is not None
    made = told.upload
    assert (made.name, made.files, made.nbytes, made.new_nbytes) == ("checkpoint-5", 3, 22, 22)
    assert made.path == "s3://models/job/commits/0000000002.json" and made.duration_s is not None
    assert 100 <= told.age_s <= 100 + (time.time() - began_s) + 0.1, "of the first file of the checkpoint"
    write(folder, "checkpoint-9/weights.bin", "9")
    folder.upload()
    [told] = agent.messages()
    assert isinstance(told, Uploaded) and told.upload is not None
    assert (told.upload.name, told.upload.nbytes, told.upload.new_nbytes) == ("checkpoint-9", 23, 1)


def test_new_logs_are_no_new_checkpoint(folder: StagedFolder, agent: Agent) -> None:
    folder.restore(LATER)
    write(folder, "checkpoint-5/weights.bin", "1", time.time() - 10)
    write(folder, "runs/events.out.tfevents.1", "1")
    folder.upload()
    write(folder, "runs/events.out.tfevents.1", "12")
    folder.upload(final=True)
    *_, first, second = agent.messages()
    for told, has_age in ((first, True), (second, False)):
        assert isinstance(told, Uploaded) and told.upload is not None
        assert told.upload.name == "checkpoint-5" and (told.age_s is not None) == has_age


def test_new_pod_tells_the_commit_with_which_the_ranks_resume(
    folder: StagedFolder, agent: Agent, tmp_path: Path
) -> None:
    """The message about a commit is lost if the pod is lost. The store is not."""
    folder.restore(LATER)
    write(folder, "model.pt", "1")
    folder.upload()
    [*_, made] = agent.messages()
    other = on_disk(tmp_path / "b", agent, term=2)
    other.restore(LATER)
    [found] = agent.messages()
    assert isinstance(made, Uploaded) and isinstance(found, Uploaded) and made.upload and found.upload
    assert (found.upload.path, found.upload.name, found.age_s) == (made.upload.path, "model.pt", None)
    assert found.upload.duration_s is None, "it is not counted again"


def test_restore_that_uploads_what_had_settled_tells_one_commit(
    folder: StagedFolder, agent: Agent, tmp_path: Path
) -> None:
    folder.restore(LATER)
    write(folder, "a.bin", "one")
    folder.upload()
    write(folder, "a.bin", "newer")
    agent.messages()
    again = on_disk(tmp_path / "a", agent)
    again.restore(LATER)
    [told] = agent.messages()
    assert isinstance(told, Uploaded) and told.upload is not None and told.upload.duration_s is not None
    assert told.upload.path == again.log.uri(again.log.commits()[-1])


@contextmanager
def watched(folder: StagedFolder) -> Iterator[None]:
    """Copy what changes in the folder, as the process beside a script does."""
    stop = threading.Event()
    thread = threading.Thread(target=watching.watch, args=(watching.Alone(folder), stop))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(30)


def test_store_that_fails_and_works_again(
    folder: StagedFolder, agent: Agent, store: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("POLL_S", 0.01), ("SETTLE_S", 0.05), ("AGAIN_S", 0.05)):
        monkeypatch.setattr(watching, name, value)
    folder.restore(LATER)
    store.refuse("PutObject", 403, "AccessDenied", key="data/")
    with watched(folder):
        write(folder, "a.bin", "one")
        seen = agent.until(lambda seen: sum(isinstance(each, NotUploaded) for each in seen) >= 2)
        failed = [each for each in seen if isinstance(each, NotUploaded)][-1]
        assert failed.reason == reasons.UPLOAD_FAILED and failed.failed and failed.unix_s > 0
        for word in ("spec.checkpoint.uri", "s3:PutObject", "s3://models/job", "expected", "tries again"):
            assert word in failed.message, failed.message
        store.allow_all()
        agent.until(lambda seen: isinstance(seen[-1], Uploaded))
    assert [type(each) for each in agent.seen if isinstance(each, Uploaded)] == [Uploaded] * 2


def test_folder_that_never_settles_is_told_once_and_revoked(
    folder: StagedFolder, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("POLL_S", 0.01), ("SETTLE_S", 0.2), ("UNSETTLED_S", 0.05)):
        monkeypatch.setattr(watching, name, value)
    folder.restore(LATER)
    with watched(folder):
        number = 0

        def told(seen: list[UploadMessage]) -> bool:
            nonlocal number
            write(folder, "a.txt", f"{number}")
            number += 1
            return any(isinstance(each, NotUploaded) for each in seen)

        [told_once] = [each for each in agent.until(told) if isinstance(each, NotUploaded)]
        assert told_once.reason == reasons.FOLDER_CHANGES and "a.txt" in told_once.message and not told_once.failed
        agent.until(lambda seen: isinstance(seen[-1], Uploaded) and seen[-1].upload is not None)


def test_folder_that_never_settles_again_is_told_again(
    folder: StagedFolder, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fixed bug: after one upload, the status said forever that uploads work."""
    for name, value in (("POLL_S", 0.01), ("SETTLE_S", 0.2), ("UNSETTLED_S", 0.05)):
        monkeypatch.setattr(watching, name, value)
    folder.restore(LATER)
    with watched(folder):
        number = 0

        def told(count: int) -> Callable[[list[UploadMessage]], bool]:
            def changed(seen: list[UploadMessage]) -> bool:
                nonlocal number
                number += 1
                write(folder, "a.txt", f"{number}")
                return [getattr(each, "reason", None) for each in seen].count(reasons.FOLDER_CHANGES) == count

            return changed

        for count in (1, 2):
            agent.until(told(count))
            agent.until(lambda seen: isinstance(seen[-1], Uploaded) and seen[-1].upload is not None)


def test_checkpoint_that_is_written_while_the_store_fails_does_not_hide_the_failure(
    folder: StagedFolder, agent: Agent, store: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fixed bug: the status said that the folder changes all the time, and advised to write logs elsewhere."""
    passed_s = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed_s[0], time=time.time, sleep=time.sleep)
    for name, value in (("POLL_S", 0.01), ("SETTLE_S", 0.05), ("time", clock)):
        monkeypatch.setattr(watching, name, value)
    scans, scan = list[Path](), watching.scan
    monkeypatch.setattr(watching, "scan", lambda path: scans.append(path) or scan(path))
    folder.restore(LATER)
    store.refuse("PutObject", 403, "AccessDenied", key="data/")
    with watched(folder):
        write(folder, "a.bin", "one")
        agent.until(lambda seen: any(isinstance(each, NotUploaded) for each in seen))
        passed_s[0] = watching.UNSETTLED_S + 1.0
        write(folder, "b.bin", "two")
        count = len(scans)
        agent.until(lambda _: len(scans) > count + 2)
        store.allow_all()
    agent.messages()
    assert reasons.FOLDER_CHANGES not in [getattr(each, "reason", None) for each in agent.seen]


def test_only_the_pod_of_rank_0_tells_and_a_last_upload_that_fails_is_told(
    tmp_path: Path, store: Server, agent: Agent
) -> None:
    plan = make_plan(
        1, model=ModelRef(command=("true",), framework="Torchrun"),
        checkpoint=CheckpointRef(directory=str(tmp_path), uri="s3://models/scripts"),
    )  # fmt: skip
    file = tmp_path / "plan.json"
    file.write_text(plan.to_json())

    def run(mode: str, pod: str) -> int:
        arguments = ["--plan", str(file), "--attempt", "1.1", "--pod", pod, "--notices", str(agent.write_fd)]
        return stage.main([mode, *arguments])

    assert run("restore", plan.pods[0]) == 0 and agent.messages() == [Uploaded(upload=None)]
    path = stage.job_directory(plan) / "model.pt"
    path.write_text("1")
    store.refuse("PutObject", 403, "AccessDenied", key="data/")
    assert run("upload", plan.pods[0]) != 0
    [failed] = agent.messages()
    assert isinstance(failed, NotUploaded) and failed.failed and "s3:PutObject" in failed.message
    assert run("upload", "other") != 0 and not agent.messages()


def test_pods_without_their_part_are_told_and_revoked_by_the_commit(pods: Pods, agent: Agent) -> None:
    pods.start()
    leader = pods.work["a"]
    leader.folder.notices = UploadNotices(agent.write_fd)
    pods.write("a", x="1")
    pods.write("b", y="1")
    pods.turns()
    told = agent.messages()
    assert [type(each) for each in told] == [Uploaded]
    assert isinstance(told[0], Uploaded) and told[0].upload is not None
    assert (told[0].upload.files, told[0].upload.new_nbytes) == (2, 2), "the files of both pods"
    pods.write("a", x="2")
    pods.turn("a")
    pods.now_s += watching.UNSETTLED_S + 1
    pods.turn("a")
    [late] = agent.messages()
    assert isinstance(late, NotUploaded) and late.reason == reasons.PARTS_MISSING and "pods b" in late.message
    pods.turns()
    [made] = agent.messages()
    assert isinstance(made, Uploaded) and made.upload is not None and made.upload.duration_s is not None
    assert made.upload.duration_s >= watching.UNSETTLED_S, "the wait for the other pod is part of the upload"


def test_name_of_any_bytes_is_told(agent: Agent) -> None:
    told = uploaded("s3://b/c", entry_of({os.fsdecode(b"step-\xff\n5"): ("x", 1)}, 2), Content(), 1.0, 2.0)
    assert told.upload is not None and told.upload.name == "step-??5"
    assert upload_message_adapter.validate_json(told.model_dump_json()) == told
    UploadNotices(agent.write_fd).problem(reason=reasons.FOLDER_CHANGES, message=os.fsdecode(b"\xff") * 9000)
    [problem] = agent.messages()
    assert isinstance(problem, NotUploaded) and set(problem.message) == {"?"}


def test_agent_that_has_ended_does_not_stop_an_upload(tmp_path: Path, store: Server) -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    log = CommitLog(ObjectStore("s3://models/job"), 1)
    folder = StagedFolder(tmp_path / "job", log, 2, notices=UploadNotices(write_fd))
    folder.restore(LATER)
    write(folder, "a.bin", "1")
    assert folder.upload() is not None
    os.close(write_fd)


names = st.sampled_from(["a", "b.log", "latest", "step-1/w", "step-1/o", "step-2/w", "step-2/sub/o", "logs/x.csv"])
files = st.dictionaries(names, st.tuples(st.sampled_from("xyz"), st.integers(0, 99)), max_size=6)


def entry_of(found: dict[str, tuple[str, int]], sequence: int) -> Entry:
    stored = {path: StoredFile(f"data/{path}/{key}", 3, "0") for path, (key, _) in found.items()}
    about = {"mtimes_ns": {path: second * SECOND_NS for path, (_, second) in found.items()}, "links": {}}
    return Entry(sequence, 1, "folder", 100.0, stored, about)


@given(files, files)
def test_what_is_told_of_any_commit(before: dict[str, tuple[str, int]], now: dict[str, tuple[str, int]]) -> None:
    old, entry = Content.of(entry_of(before, 1)), entry_of(now, 2)
    told = uploaded("s3://b/c", entry, old, 1.0, 100.0)
    assert told.upload is not None
    new = [path for path in now if before.get(path, ("", 0))[0] != now[path][0]]
    assert told.upload.new_nbytes == 3 * len(new) <= told.upload.nbytes == 3 * len(now)
    assert (told.upload.name == "") == (not now)
    assert told.upload.name in {path.split("/")[0] for path in now} | {""}
    if told.age_s is not None:
        assert told.age_s in {100.0 - now[path][1] for path in new if path.split("/")[0] == told.upload.name}
    assert uploaded("s3://b/c", entry).age_s is None
