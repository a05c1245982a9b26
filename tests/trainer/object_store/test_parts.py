"""Tests of checkpoints whose parts several pods write, each in a folder of its own."""

import pytest

from dltrain.object_store import watching
from support.trainer.object_store import Server
from support.trainer.uploading_pods import Pods


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


def test_part_that_could_not_be_announced_is_not_taken_for_the_one_before(pods: Pods, store: Server) -> None:
    """Regression: b confirmed its old part in the next round, and the commit had shard0 of 6 and shard1 of 5."""
    pods.start()
    pods.write("a", shard0="5")
    pods.write("b", shard1="5")
    pods.turns()
    pods.write("a", shard0="6")
    pods.write("b", shard1="6")
    store.refuse("PutObject", 403, "AccessDenied", key="parts/")
    with pytest.raises(PermissionError):
        pods.turn("b")
    store.allow_all()
    for _ in range(3):
        pods.turns()
        pods.now_s += watching.LATE_S
    pods.names = ["c", "d"]
    pods.start()
    assert pods.read("d") == {"shard0": "6", "shard1": "6"}


def test_part_that_could_not_be_announced_is_announced_without_a_new_round(pods: Pods, store: Server) -> None:
    pods.start()
    pods.write("a", shard0="5")
    pods.turn("a")  # begins a round
    pods.write("b", shard1="5")
    store.refuse("PutObject", 403, "AccessDenied", key="parts/")
    with pytest.raises(PermissionError):
        pods.turn("b")
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
