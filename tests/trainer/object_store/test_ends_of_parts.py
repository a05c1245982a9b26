"""Tests of checkpoints in parts when pods end, change, or have agents of an earlier release."""

import json
import time

import pytest

from dltrain.object_store import watching
from dltrain.object_store.staged_folder import ChangedError
from support.trainer.object_store import Server
from support.trainer.uploading_pods import LATER, Pods


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


@pytest.mark.parametrize("pod", ["a", "b"])
@pytest.mark.parametrize("later_s", [0, 9])
def test_stop_does_not_commit_a_deletion_right_before(pods: Pods, pod: str, later_s: float) -> None:
    """Fixed bug: pods whose ranks deleted a checkpoint to replace it, and were killed, lost the checkpoint."""
    pods.start()
    pods.write("a", shard0="0", config="{}")
    pods.write("b", shard1="1")
    pods.turns()
    other, shard = {"a": ("b", "shard0"), "b": ("a", "shard1")}[pod]
    (pods.directory / pod / "job" / shard).unlink()
    pods.write(other, new="of the next checkpoint")
    watching.time.unix_s = time.time() + later_s  # type: ignore[attr-defined]
    _finish_without_waiting(pods, "b", exited=pod != "b")
    _finish_without_waiting(pods, "a", exited=pod != "a")
    files = {"config", "shard0", "shard1"}
    assert pods.commits()[-1] == (files - {shard} | {"new"} if later_s else files)


def test_folders_without_files_are_no_checkpoint(pods: Pods) -> None:
    pods.start()
    pods.write("a", shard0="0")
    pods.write("b", shard1="1")
    pods.turns()
    (pods.directory / "a/job/shard0").unlink()
    (pods.directory / "b/job/shard1").unlink()
    for _ in range(2):
        pods.now_s += watching.LATE_S
        pods.turns()
    assert pods.commits()[-1] == {"shard0", "shard1"}
    watching.time.unix_s = time.time() + 9  # type: ignore[attr-defined]
    _finish_without_waiting(pods, "b", exited=False)
    _finish_without_waiting(pods, "a", exited=False)
    assert pods.commits()[-1] == {"shard0", "shard1"}


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
