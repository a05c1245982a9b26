"""Tests of checkpoints whose parts several pods write, each in a folder of its own."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dltrain.object_store import stage, watching
from dltrain.object_store.client import ObjectStore
from dltrain.object_store.commit_log import CommitLog
from dltrain.object_store.content import without_logs
from dltrain.object_store.parts import Part, PartExchange
from dltrain.object_store.staged_folder import ChangedError, StagedFolder, scan
from dltrain.object_store.watching import Following, Leading
from support.trainer.object_store import Server

LATER = 2e9
"""A time at which all files of a test have settled."""


@dataclass
class Pods:
    """The pods ``a``, ``b``, … of a job, each with a disk of its own, in one attempt after another."""

    directory: Path
    names: list[str] = field(default_factory=lambda: ["a", "b"])
    attempt: int = 0
    now_s: float = 0.0
    work: dict[str, Leading | Following] = field(default_factory=dict)

    def folder(self, pod: str) -> StagedFolder:
        folder = self.directory / pod / "job"
        folder.parent.mkdir(exist_ok=True)
        log = CommitLog(ObjectStore("s3://models/job"), 1)
        return StagedFolder(folder, log, 2, has_parts=len(self.names) > 1)

    def start(self) -> None:
        """Restore the folders of all pods, and start a new attempt."""
        self.attempt += 1
        name, store = f"1.{self.attempt}", ObjectStore("s3://models/job")
        sequence = self.folder(self.names[0]).restore(LATER)
        self.work = {}
        for pod in self.names[1:]:
            folder = self.folder(pod)
            folder.restore_sequence(sequence)
            PartExchange(store, name).publish(pod, Part(folder.log.run, 0, stage.Changes(), 0, 0))
            self.work[pod] = Following(self.folder(pod), PartExchange(store, name), pod)
        self.work[self.names[0]] = Leading(self.folder(self.names[0]), PartExchange(store, name), self.names)
        for work in self.work.values():
            work.open()

    def write(self, pod: str, **files: str) -> None:
        for name, text in files.items():
            path = self.directory / pod / "job" / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def read(self, pod: str) -> dict[str, str]:
        folder = self.directory / pod / "job"
        return {path: (folder / path).read_text() for path in sorted(scan(folder))}

    def turn(self, *pods: str) -> None:
        """Let the folders of ``pods`` (all: without arguments), which have settled, do what is due."""
        for pod in pods or self.names:
            self.now_s += 1e-3
            self.work[pod]._ask_s = 0.0  # The time between two requests has passed.
            self.work[pod].settled(without_logs(scan(self.directory / pod / "job")))

    def turns(self, count: int = 4) -> None:
        for _ in range(count):
            self.turn()

    def commits(self) -> list[set[str]]:
        return [set(entry.files) for entry in self.folder("a").log.commits()]


@pytest.fixture
def pods(tmp_path: Path, store: Server, monkeypatch: pytest.MonkeyPatch) -> Pods:
    made = Pods(tmp_path)
    monkeypatch.setattr(watching, "time", _Clock(made))
    return made


class _Clock:
    """The clock of the pods, and the end of a wait: it lets the other pods go on."""

    def __init__(self, pods: Pods) -> None:
        self._pods = pods
        self.unix_s = time.time()
        self.on_sleep: Callable[[], None] = lambda: None

    def time(self) -> float:
        return self.unix_s

    def monotonic(self) -> float:
        return self._pods.now_s

    def sleep(self, _: float) -> None:
        self.on_sleep()


def test_commit_has_the_parts_of_all_pods_and_every_pod_restores_all(pods: Pods) -> None:
    pods.start()
    pods.write("a", step5__shard0="zero", step5__metadata="{}")
    pods.write("b", step5__shard1="one")
    pods.turns()
    assert pods.commits() == [{"step5/shard0", "step5/shard1", "step5/metadata"}]
    pods.names = ["c", "b", "a"]
    pods.start()
    everything = {"step5/shard0": "zero", "step5/shard1": "one", "step5/metadata": "{}"}
    assert [pods.read(pod) for pod in pods.names] == [everything] * 3


def test_one_pod_continues_from_the_parts_of_several(pods: Pods) -> None:
    pods.start()
    pods.write("a", shard0="zero")
    pods.write("b", shard1="one")
    pods.turns()
    pods.names = ["c"]
    pods.start()
    assert pods.read("c") == {"shard0": "zero", "shard1": "one"}


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_no_commit_without_a_part_that_is_still_being_written(pods: Pods, order: str) -> None:
    pods.start()
    pods.write("a", shard0="zero")
    pods.write("b", shard1="half")
    for _ in range(9):
        pods.turn(*order.replace("b", ""))  # The folder of b does not settle.
    assert not pods.commits()
    pods.write("b", shard1="one")
    for _ in range(4):
        pods.turn(*order)
    assert pods.commits() == [{"shard0", "shard1"}]
    assert pods.folder("a").log.commits()[0].files["shard1"].nbytes == 3


def test_pod_that_begins_late_is_awaited(pods: Pods) -> None:
    pods.start()
    pods.write("a", shard0="zero")
    pods.turns(9)
    assert not pods.commits(), "b looks settled, because it has not begun"
    pods.write("b", shard1="one")
    pods.turns()
    assert pods.commits() == [{"shard0", "shard1"}]
    pods.write("a", shard0="zero again")
    pods.turns(9)
    assert len(pods.commits()) == 1, "b has written before"
    pods.write("b", shard1="one again")
    pods.turns()
    assert len(pods.commits()) == 2


def test_pods_that_write_nothing_delay_only_the_first_commit(pods: Pods) -> None:
    pods.start()
    pods.write("a", model="1")
    pods.turns()
    pods.now_s += watching.LATE_S
    pods.turns(1)
    assert pods.commits() == [{"model"}]
    pods.write("a", model="22")
    pods.turns()
    assert len(pods.commits()) == 2
    pods.start()
    pods.write("a", model="333")
    pods.turns()
    assert pods.folder("a").log.commits()[-1].files["model"].nbytes == 3


def test_parts_of_two_checkpoints_are_never_mixed(pods: Pods) -> None:
    """b writes the next checkpoint between the round and its commit. Its old part is at that time not confirmed."""
    pods.start()
    pods.write("a", shard0="5")
    pods.write("b", shard1="5")
    pods.turn("b")  # uploads
    pods.turn("a")  # begins a round
    pods.write("b", shard1="6")
    pods.turn("b")  # uploads the new state, which it did not have when the round began
    pods.turn("a")
    assert not pods.commits()
    pods.write("a", shard0="6")
    pods.turns()
    commit = pods.folder("a").log.commits()
    assert len(commit) == 1
    pods.names = ["c", "d"]
    pods.start()
    assert pods.read("d") == {"shard0": "6", "shard1": "6"}


def test_lost_node_leaves_the_checkpoint_before(pods: Pods, capsys: pytest.CaptureFixture[str]) -> None:
    pods.start()
    pods.write("a", shard0="5")
    pods.write("b", shard1="5")
    pods.turns()
    pods.write("a", shard0="6")
    pods.turns(9)
    pods.names = ["a", "c"]
    pods.start()
    assert pods.read("a") == pods.read("c") == {"shard0": "5", "shard1": "5"}
    assert "discarded 1 files that were not in a checkpoint of all pods, such as shard0" in capsys.readouterr().err


def test_first_checkpoint_without_all_parts_is_never_restored(pods: Pods, store: Server) -> None:
    pods.start()
    pods.write("a", shard0="5")
    pods.turns(3)
    pods.write("b", shard1="5")
    pods.turn("b")
    assert len(store.keys("models", "job/data/")) == 2 and not pods.commits()
    pods.start()
    assert pods.read("a") == pods.read("b") == {}
    pods.write("a", shard0="6")
    pods.write("b", shard1="6")
    pods.turns()
    assert len(store.keys("models", "job/data/")) == 2, "the parts without a marker are deleted"


def test_kill_between_parts_and_marker(pods: Pods, store: Server) -> None:
    pods.start()
    pods.write("a", shard0="5")
    pods.write("b", shard1="5")
    pods.turns()
    pods.write("a", shard0="6")
    pods.write("b", shard1="6")
    store.refuse("PutObject", 403, "AccessDenied", key="commits/")
    with pytest.raises(PermissionError):
        pods.turns()
    store.allow_all()
    pods.start()
    assert pods.read("a") == pods.read("b") == {"shard0": "5", "shard1": "5"}


def test_errors_of_the_store_are_repeated(pods: Pods, store: Server) -> None:
    pods.start()
    pods.write("a", shard0="x" * 20_000_000)
    pods.write("b", shard1="y" * 20_000_000)
    store.refuse("UploadPart", 503, "SlowDown", times=2)
    store.refuse("PutObject", 500, "InternalError", times=2, key="attempts/")
    store.refuse("PutObject", 0, "lost answer", times=1, key="commits/")
    pods.turns(5)
    assert pods.commits() == [{"shard0", "shard1"}]


def test_upload_of_a_part_that_fails_leaves_no_commit(pods: Pods, store: Server) -> None:
    pods.start()
    pods.write("a", shard0="0")
    pods.write("b", shard1="1" * 20_000_000)
    store.refuse("UploadPart", 403, "AccessDenied")
    with pytest.raises(PermissionError):
        pods.turn("b")
    for _ in range(9):
        pods.turn("a")
    assert not pods.commits()
    store.allow_all()
    pods.turns()
    assert pods.commits() == [{"shard0", "shard1"}]


def test_part_that_the_store_has_lost_is_not_committed(pods: Pods, store: Server) -> None:
    pods.start()
    pods.write("a", shard0="0")
    pods.write("b", shard1="1")
    pods.turn("b", "a", "b")
    [key] = [key for key in store.keys("models", "job/data/") if key.endswith("shard1")]
    store.client().delete_object(Bucket="models", Key=key)
    with pytest.raises(OSError, match="shard1: found no bytes after the upload"):
        pods.turn("a", "b", "a", "b", "a")
    assert not pods.commits()


def test_uploads_of_other_pods_in_progress_are_not_pruned(pods: Pods, monkeypatch: pytest.MonkeyPatch) -> None:
    pods.start()
    pods.write("a", shard0="5")
    pods.write("b", shard1="5")
    pods.turn("b", "a", "b")
    pods.write("b", next1="6", next2="6")
    follower = pods.work["b"].folder
    upload = follower._upload_file

    def slow(path: str, nbytes: int) -> object:
        stored = upload(path, nbytes)
        if path == "next1":
            pods.turn("a")
            assert pods.commits() == [{"shard0", "shard1"}]
        return stored

    monkeypatch.setattr(follower, "_upload_file", slow)
    pods.turn("b")
    pods.write("a", next0="6")
    pods.turns()
    assert pods.commits()[-1] == {"shard0", "shard1", "next0", "next1", "next2"}


def test_parts_of_old_checkpoints_are_deleted_everywhere(pods: Pods, store: Server) -> None:
    """Rank 0 deletes old checkpoints, as on a shared volume. The other nodes lose their parts of these."""
    pods.start()
    for step in ("5", "6", "7", "8"):
        pods.write("a", **{f"step{step}__shard0": step})
        pods.write("b", **{f"step{step}__shard1": step})
        if step > "5":
            before = pods.directory / "a/job" / f"step{int(step) - 1}"
            (before / "shard0").unlink()
            before.rmdir()
        pods.turns(6)
    assert pods.commits()[-1] == {"step8/shard0", "step8/shard1"}
    assert pods.read("b") == {"step8/shard1": "8"}
    assert len(store.keys("models", "job/data/")) == 4, "two checkpoints are kept"
    assert len(store.keys("models", "job/attempts/")) == 2, "the round and one part"


def test_parts_are_not_deleted_before_rank_0_has_a_folder(pods: Pods) -> None:
    pods.start()
    pods.write("b", step5__shard1="1")
    pods.turns()
    pods.write("a", step5__shard0="0")
    pods.turns()
    assert pods.commits() == [{"step5/shard0", "step5/shard1"}] and pods.read("b")


def test_file_that_several_pods_write_is_that_of_the_first(pods: Pods) -> None:
    pods.start()
    pods.write("b", config="of b", only="b")
    pods.write("a", config="of a", other="a")
    pods.turns()
    pods.start()
    assert pods.read("b") == {"config": "of a", "only": "b", "other": "a"}


def test_pod_that_clears_its_folder_deletes_nothing_of_others(pods: Pods) -> None:
    pods.start()
    pods.write("a", shard0="0")
    pods.write("b", shard1="1")
    pods.turns()
    pods.start()
    for path in ("shard0", "shard1"):
        (pods.directory / "b/job" / path).unlink()
    pods.write("b", shard2="2")
    pods.turn("b")
    pods.write("a", shard3="3")
    pods.turns()
    assert pods.commits()[-1] == {"shard0", "shard2", "shard3"}


def test_last_commit_waits_for_the_last_pod(pods: Pods, monkeypatch: pytest.MonkeyPatch) -> None:
    pods.start()
    pods.write("a", shard0="0")
    pods.write("b", shard1="1")
    seen: list[int] = []

    def other_ends() -> None:
        seen.append(len(pods.commits()))
        watching.time.on_sleep = lambda: None  # type: ignore[attr-defined]
        with pytest.raises(StopIteration):
            _finish_without_waiting(pods, "b")

    watching.time.on_sleep = other_ends  # type: ignore[attr-defined]
    pods.work["a"].finish(exited=True)
    assert seen == [0] and pods.commits() == [{"shard0", "shard1"}]


def _finish_without_waiting(pods: Pods, pod: str, *, exited: bool = True) -> None:
    """End the ranks of ``pod``. Raise StopIteration if its end is not reported before the last commit."""
    clock = watching.time

    def waits() -> None:
        raise StopIteration

    clock.on_sleep = waits  # type: ignore[attr-defined]
    try:
        pods.work[pod].finish(exited=exited)
    finally:
        clock.on_sleep = lambda: None  # type: ignore[attr-defined]


def test_pod_that_ends_first_does_not_wait(pods: Pods) -> None:
    pods.start()
    pods.write("a", shard0="0")
    pods.write("b", shard1="1")
    _finish_without_waiting(pods, "b")
    _finish_without_waiting(pods, "a")
    assert pods.commits() == [{"shard0", "shard1"}]


@pytest.mark.parametrize(("later_s", "commits"), [(-9, 0), (9, 1)])
def test_stop_commits_only_what_had_settled_before_the_ranks_were_killed(
    pods: Pods, later_s: float, commits: int
) -> None:
    pods.start()
    pods.write("a", shard0="0")
    pods.write("b", shard1="perhaps half")
    watching.time.unix_s = time.time() + later_s  # type: ignore[attr-defined]
    _finish_without_waiting(pods, "b", exited=False)
    _finish_without_waiting(pods, "a")
    assert len(pods.commits()) == commits


def test_stop_before_the_last_part_has_begun_leaves_the_checkpoint_before(pods: Pods) -> None:
    pods.start()
    for text in ("5", "6"):
        pods.write("a", shard0=text)
        if text == "5":
            pods.write("b", shard1=text)
            pods.turns()
    watching.time.unix_s = time.time() + 9  # type: ignore[attr-defined]
    _finish_without_waiting(pods, "b", exited=False)
    _finish_without_waiting(pods, "a", exited=False)
    pods.names = ["c", "d"]
    pods.start()
    assert pods.read("c") == {"shard0": "5", "shard1": "5"}


def test_pod_that_has_ended_does_not_delay_other_commits(pods: Pods) -> None:
    pods.start()
    pods.write("b", shard1="1")
    _finish_without_waiting(pods, "b")
    pods.write("a", shard0="0")
    for _ in range(3):
        pods.turn("a")
    assert pods.commits() == [{"shard0", "shard1"}]


def test_pods_with_agents_of_an_earlier_release_are_left_out(pods: Pods, store: Server) -> None:
    pods.start()
    [key] = store.keys("models", "job/attempts/1.1/parts/")
    store.client().delete_object(Bucket="models", Key=key)
    pods.write("a", model="0")
    for _ in range(3):
        pods.turn("a")
    pods.now_s += watching.LATE_S
    pods.turn("a")
    assert pods.commits() == [{"model"}]


def test_commit_can_be_read_by_an_earlier_release(pods: Pods, store: Server) -> None:
    pods.start()
    pods.write("a", shard0="0")
    pods.write("b", shard1="1")
    pods.turns()
    found = store.last_commit("models", "job/")
    assert found["format"] == 1 and found["kind"] == "folder" and set(found["files"]) == {"shard0", "shard1"}
    assert set(found["about"]["mtimes_ns"]) == {"shard0", "shard1"} and found["about"]["links"] == {}


def test_commit_of_an_earlier_release_is_restored_and_extended(pods: Pods) -> None:
    pods.names = ["a"]
    old = pods.folder("a")
    old.restore(LATER)
    pods.write("a", model="0")
    old.upload()
    pods.names = ["a", "b"]
    pods.start()
    assert pods.read("b") == {"model": "0"}
    pods.write("a", shard0="0")
    pods.write("b", shard1="1")
    pods.turns()
    assert pods.commits()[-1] == {"model", "shard0", "shard1"}


def test_folder_that_changes_while_a_round_begins_does_not_count(pods: Pods, monkeypatch: pytest.MonkeyPatch) -> None:
    pods.start()
    pods.write("a", shard0="0")
    pods.write("b", shard1="1")
    pods.turn("b")
    exchange = pods.work["a"]._exchange
    announce = exchange.announce

    def slow(latest: object) -> None:
        announce(latest)  # type: ignore[arg-type]
        pods.write("a", shard0="new")

    monkeypatch.setattr(exchange, "announce", slow)
    with pytest.raises(ChangedError):
        pods.turn("a")
    monkeypatch.setattr(exchange, "announce", announce)
    pods.turns()
    pods.start()
    assert pods.read("b") == {"shard0": "new", "shard1": "1"}


def test_invalid_part_is_an_error_of_the_store(pods: Pods, store: Server) -> None:
    pods.start()
    key = "job/attempts/1.1/parts/b/0000000009.json"
    store.client().put_object(Bucket="models", Key=key, Body=json.dumps({"run": "x"}))
    with pytest.raises(OSError, match="invalid part of pod b"):
        pods.turn("a")
