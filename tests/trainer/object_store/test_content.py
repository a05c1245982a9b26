"""Tests of the union of the folders of several pods."""

from dltrain.object_store.commit_log import StoredFile
from dltrain.object_store.content import Changes, Content, union


def content(*paths: str, of: str = "x", links: dict[str, str] | None = None) -> Content:
    files = {path: StoredFile(f"data/{of}/{path}", len(path), "") for path in paths}
    return Content(files, dict.fromkeys(paths, 1), links or {})


def keys(found: Content) -> dict[str, str]:
    return {path: file.key.split("/")[1] for path, file in found.files.items()}


def test_union_keeps_what_nobody_has_changed() -> None:
    start = content("a", "b", links={"latest": "a"})
    found, writers = union(start, {"b": "two"}, {"one": Changes(), "two": Changes()})
    assert found == start and writers == {"b": "two"}


def test_first_pod_wins_and_writers_are_named() -> None:
    changes = {
        "one": Changes(content("a", of="one")),
        "two": Changes(content("a", "b", of="two")),
        "three": Changes(content("b", "c", of="three")),
    }
    found, writers = union(content("a", of="start"), {}, changes)
    assert keys(found) == {"a": "one", "b": "two", "c": "three"} and writers == {"b": "two", "c": "three"}


def test_pod_deletes_its_own_files_and_the_first_pod_any() -> None:
    start, writers = content("of one", "of two", "of lost"), {"of two": "two", "of lost": "lost"}
    everything = frozenset(start.seen)
    found, _ = union(start, writers, {"one": Changes(), "two": Changes(deleted=everything)})
    assert set(found.seen) == {"of one", "of lost"}
    found, _ = union(start, writers, {"one": Changes(deleted=everything), "two": Changes()})
    assert not found.seen


def test_path_is_either_a_file_or_a_folder() -> None:
    """Otherwise, the commit could not be restored."""
    changes = {"one": Changes(content("a", "b/c", of="one")), "two": Changes(content("a/d", "b", "b/e", of="two"))}
    found, writers = union(Content(), {}, changes)
    assert keys(found) == {"a": "one", "b/c": "one", "b/e": "two"} and writers == {"b/e": "two"}


def test_dropped_files_do_not_count_but_newer_ones_at_their_paths_do() -> None:
    changes = {"one": Changes(), "two": Changes(content("step5/shard", "step6/shard"))}
    states = changes["two"].written.seen
    found, _ = union(Content(), {}, changes, {("step5/shard", states["step5/shard"]), ("step6/shard", (99, 0))})
    assert set(found.seen) == {"step6/shard"}


def test_file_that_is_deleted_and_moved_back_has_changed() -> None:
    """Its first copy in the store may be gone with the commits that had it."""
    start, back = content("a"), content("a", of="again")
    assert not Changes.between(start, start).written.seen
    assert keys(Changes.between(start, back).written) == {"a": "again"}


def test_changes_are_compared_without_logs() -> None:
    start = content("a", "train.log")
    changes = Changes.between(start, content("a", "other.log"))
    assert changes.deleted == {"train.log"} and changes.state == Changes().state
