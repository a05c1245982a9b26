"""Tests of sharded checkpoints in an object store, without ranks: commit, pruning, damage and the reading of ranges."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dlcontract.checkpoint import parts
from dlcontract.checkpoint.parts import Chunk, ShardedTensor, Table, part_name
from dltrain.checkpoint import remote_store, tensor_file
from dltrain.checkpoint.remote_store import RemoteCheckpoints, upload_tensors
from dltrain.checkpoint.sharded import remote
from dltrain.checkpoint.sharded.export import export
from dltrain.checkpoint.sharded.verification import _described, _rebuilt
from dltrain.checkpoint.store import MANIFEST, MODEL, OPTIMIZER, STATE, Snapshot
from dltrain.checkpoint.tensor_file import Written
from dltrain.object_store import commit_log
from dltrain.object_store.client import ObjectStore
from dltrain.protocol.errors import BadInputError, CheckpointVolumeError, FencedError, PeerLostError
from support.trainer.object_store import Server

Open = Callable[..., RemoteCheckpoints]


def tensors(step: int) -> dict[str, Tensor]:
    return {"w": torch.arange(21.0).reshape(7, 3) + step, "b": torch.tensor([float(step)]), "n": torch.tensor(step)}


def uploaded(checkpoints: RemoteCheckpoints, step: int, ranks: int = 3) -> tuple[str, dict[str, Written], Table]:
    """Upload the parts of several ranks, and return (their place, their sizes and hashes, the table)."""
    place, whole = checkpoints.begin_parts(step), tensors(step)
    written: dict[str, Written] = {}
    table: dict[str, dict[str, ShardedTensor]] = {}
    for file in (MODEL, OPTIMIZER):
        chunks: dict[str, list[Chunk]] = {name: [] for name in whole}
        for rank in range(ranks):
            name, own = part_name(file, rank), dict[str, Tensor]()
            for key, tensor in whole.items():
                rows = torch.arange(parts.row_count(tensor.shape)).chunk(ranks)
                if rank < len(rows):
                    own[key] = tensor[rows[rank]].contiguous() if tensor.dim() else tensor
                    chunks[key].append(Chunk(name, int(rows[rank][0]), len(rows[rank])))
            stored = upload_tensors(checkpoints.store, f"{place}/{name}", own)
            written[name] = Written(stored.nbytes, stored.sha256)
        table[file] = {
            key: ShardedTensor(tensor_file.NAMES[tensor.dtype], tuple(tensor.shape), tuple(chunks[key]))
            for key, tensor in whole.items()
        }
    return place, written, table


def save(checkpoints: RemoteCheckpoints, step: int, *, whole: bool = False) -> str:
    kept = {"ema": tensors(step)["w"]}
    snapshot = Snapshot(step, {}, {}, {"seed": 7}, kept, export=whole)
    return checkpoints.commit_parts(snapshot, *uploaded(checkpoints, step))[0]


@pytest.fixture
def opened(tmp_path: Path, store: Server) -> Open:
    def open_them(term: int = 1, keep: int = 2) -> RemoteCheckpoints:
        return RemoteCheckpoints(ObjectStore("s3://models/job"), "x", keep, tmp_path / "restored", term)

    return open_them


def loaded(checkpoints: RemoteCheckpoints) -> Snapshot:
    stored = checkpoints.load()
    assert stored is not None
    return stored.snapshot()


def equal(found: Mapping[str, Tensor], step: int) -> bool:
    expected = tensors(step)
    return found.keys() == expected.keys() and all(torch.equal(found[name], each) for name, each in expected.items())


def data(store: Server) -> list[str]:
    return store.keys("models", "job/data/")


def key_of(store: Server, name: str) -> str:
    return f"job/{store.last_commit('models', 'job/')['files'][name][0]}"


def content(store: Server, key: str) -> bytes:
    found: bytes = store.client().get_object(Bucket="models", Key=key)["Body"].read()
    return found


def change(store: Server, key: str) -> None:
    before = content(store, key)
    store.client().put_object(Bucket="models", Key=key, Body=before[:-1] + bytes([before[-1] ^ 1]))


def test_parts_are_read_as_whole_tensors_by_one_rank(opened: Open) -> None:
    place = save(opened(), 4)
    assert place.startswith("s3://models/job/data/t0000000001-") and place.endswith("/step-0000000004")
    snapshot = loaded(opened())
    assert snapshot.step == 4 and equal(snapshot.model, 4) and equal(snapshot.optimizer, 4)
    assert snapshot.state == {"seed": 7} and torch.equal(snapshot.kept["ema"], tensors(4)["w"])


def test_whole_and_sharded_checkpoints_follow_each_other_and_all_parts_are_pruned(opened: Open, store: Server) -> None:
    checkpoints = opened()
    checkpoints.save(Snapshot(1, tensors(1), tensors(1)))
    save(checkpoints, 2)
    checkpoints.save(Snapshot(3, tensors(3), tensors(3)))
    assert equal(loaded(opened()).model, 3)
    save(checkpoints, 4)
    assert checkpoints.steps() == [3, 4] and equal(loaded(opened()).model, 4)
    assert not [key for key in data(store) if "step-0000000002" in key]
    assert len([key for key in data(store) if "part-" in key]) == 6


def test_whole_model_is_joined_in_the_store(
    opened: Open, store: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_store, "PART_NBYTES", 16)
    checkpoints = opened()
    save(checkpoints, 5)
    place = save(checkpoints, 5, whole=True)
    assert place.endswith("/step-0000000005-2"), "the files of the first checkpoint of this step are not replaced"
    (tmp_path / MODEL).write_bytes(content(store, key_of(store, MODEL)))
    assert equal(load_file(tmp_path / MODEL), 5) and equal(loaded(opened()).model, 5)
    assert not (tmp_path / "restored" / MODEL).exists(), "no rank reads it to resume"


def test_copied_checkpoint_is_one_of_a_volume(opened: Open, store: Server, tmp_path: Path) -> None:
    save(opened(), 6)
    files, folder = store.last_commit("models", "job/")["files"], tmp_path / "copied"
    folder.mkdir()
    for name, (key, _, _) in files.items():
        (folder / name).write_bytes(content(store, f"job/{key}"))
    assert json.loads((folder / MANIFEST).read_bytes())["files"].keys() == files.keys() - {MANIFEST}
    export(folder, tmp_path / MODEL)
    assert equal(load_file(tmp_path / MODEL), 6)


@pytest.mark.parametrize("name", [part_name(MODEL, 1), part_name(OPTIMIZER, 2), STATE, MANIFEST])
@pytest.mark.parametrize("damage", ["missing", "changed"])
def test_damaged_file_leads_to_the_checkpoint_before(
    opened: Open, store: Server, name: str, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = opened(keep=3)
    save(checkpoints, 1)
    save(checkpoints, 2)
    key = key_of(store, name)
    if damage == "missing":
        store.client().delete_object(Bucket="models", Key=key)
    else:
        change(store, key)
    again = opened(keep=3)
    assert loaded(again).step == 1
    told = capsys.readouterr().err
    assert told.count("skipped a damaged checkpoint") == 1 and name in told
    save(again, 3)
    assert again.steps() == [1, 3] and not [key for key in data(store) if "step-0000000002" in key]


def test_commit_needs_all_parts(opened: Open, store: Server) -> None:
    checkpoints = opened()
    place, written, table = uploaded(checkpoints, 1)
    store.client().delete_object(Bucket="models", Key=f"job/{place}/{part_name(MODEL, 1)}")
    with pytest.raises(OSError, match=f"{part_name(MODEL, 1)}: found no bytes after the upload"):
        checkpoints.commit_parts(Snapshot(1, {}, {}), place, written, table)
    assert checkpoints.load() is None


def test_run_with_a_lower_term_cannot_commit_and_its_parts_are_deleted(opened: Open, store: Server) -> None:
    old = opened(term=1)
    place, written, table = uploaded(old, 1)
    new = opened(term=2)
    with pytest.raises(FencedError):
        old.commit_parts(Snapshot(1, {}, {}), place, written, table)
    save(new, 2)
    assert new.steps() == [2] and not [key for key in data(store) if "step-0000000001" in key]


def test_interrupted_parts_are_deleted(opened: Open, store: Server) -> None:
    checkpoints = opened()
    save(checkpoints, 1)
    place, _, _ = uploaded(checkpoints, 2)
    unfinished = f"job/{place}/{part_name(MODEL, 7)}"
    store.client().create_multipart_upload(Bucket="models", Key=unfinished)
    again = opened()
    assert not store.client().list_multipart_uploads(Bucket="models").get("Uploads")
    assert loaded(again).step == 1 and [key for key in data(store) if "step-0000000002" in key]
    save(again, 3)
    assert not [key for key in data(store) if "step-0000000002" in key] and again.steps() == [1, 3]


def test_earlier_releases_reject_the_format(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    save(opened(), 1)
    monkeypatch.setattr(commit_log, "PARTS_FORMAT", commit_log.FORMAT)
    with pytest.raises(BadInputError, match=r"of format 2; expected format 1 .*trainer image that wrote"):
        opened(term=2)


def test_rows_of_parts_that_other_ranks_have_verified_are_read_by_ranges(
    opened: Open, store: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "PART_NBYTES", 16)
    checkpoints = opened()
    save(checkpoints, 8)
    files = checkpoints.log.commits()[-1].files
    (tmp_path / part_name(MODEL, 1)).write_bytes(content(store, key_of(store, part_name(MODEL, 1))))
    source = remote._Parts(checkpoints.store, files, tmp_path)
    store.requests.clear()
    target = torch.zeros(2, 3)
    source.read_rows(target, part_name(MODEL, 1), "w", 1)
    assert torch.equal(target, tensors(8)["w"][4:6]) and not store.requests, "this rank has downloaded this part"
    source.read_rows(target, part_name(MODEL, 0), "w", 1)
    assert torch.equal(target, tensors(8)["w"][1:3])
    assert store.requests == ["GetObject"] * 4, "the header, its length, and 24 bytes in two ranges"
    number = torch.tensor(0)
    source.read_rows(number, part_name(MODEL, 0), "n")
    assert number == 8 and len(store.requests) == 5


@pytest.mark.parametrize("kind", [CheckpointVolumeError, BadInputError, FencedError])
def test_error_of_another_rank_has_its_type_and_message(kind: type[Exception]) -> None:
    error = kind.__new__(kind)
    error.args = ("the message",)
    again = _rebuilt(_described(error))
    assert type(again) is kind and str(again) == "the message"
    assert type(_rebuilt(["KeyError", "x"])) is PeerLostError
