"""Tests of sharded checkpoints: the parts of all ranks in one checkpoint, and faults while they are written."""

import errno
import json
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from dlcontract.checkpoint import parts
from dlcontract.checkpoint.parts import Chunk, ShardedTensor, part_name
from dltrain.checkpoint import tensor_file
from dltrain.checkpoint.sharded.export import export
from dltrain.checkpoint.sharded.verification import divide
from dltrain.checkpoint.store import MANIFEST, MODEL, OPTIMIZER, SHARDED_FORMAT, Checkpoints, Snapshot
from dltrain.protocol.errors import FencedError
from dltrain.protocol.volume_layout import TERM
from support.trainer.ranks import BODIES, command, run, run_ranks

BODY = BODIES / "faults/sharded_checkpoints.py"


def tensors(step: int) -> dict[str, Tensor]:
    return {"w": torch.arange(21.0).reshape(7, 3) + step, "b": torch.tensor([float(step)]), "n": torch.tensor(step)}


def save(checkpoints: Checkpoints, step: int, ranks: int = 3, whole: dict[str, Tensor] | None = None) -> Path:
    """Write a checkpoint with the parts of several ranks, as torch.distributed.checkpoint does.

    ``whole``: the tensors of the model and of the optimizer, by default ``tensors(step)``.
    """
    whole, folder = whole or tensors(step), checkpoints.directory / f".step-{step}"
    folder.mkdir()
    files, table = {}, {}
    for file in (MODEL, OPTIMIZER):
        chunks: dict[str, list[Chunk]] = {name: [] for name in whole}
        for rank in range(ranks):
            name, own = part_name(file, rank), {}
            for key, tensor in whole.items():
                rows = torch.arange(parts.row_count(tensor.shape)).chunk(ranks)
                if rank < len(rows):
                    own[key] = tensor[rows[rank]].contiguous() if tensor.dim() else tensor
                    chunks[key].append(Chunk(name, int(rows[rank][0]), len(rows[rank])))
            files[name] = tensor_file.write(folder / name, own)
        table[file] = {
            key: ShardedTensor(tensor_file.NAMES[tensor.dtype], tuple(tensor.shape), tuple(chunks[key]))
            for key, tensor in whole.items()
        }
    fields = {"format": SHARDED_FORMAT, "parts": parts.to_json(table)}
    path, _ = checkpoints.commit(Snapshot(step, {}, {}), folder, files, fields)
    return path


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "job", "x", keep=2)


def loaded(checkpoints: Checkpoints) -> Snapshot:
    stored = checkpoints.load()
    assert stored is not None
    return stored.snapshot()


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_parts_are_read_as_whole_tensors(checkpoints: Checkpoints, ranks: int) -> None:
    save(checkpoints, 4, ranks)
    snapshot = loaded(checkpoints)
    assert snapshot.step == 4
    for found in (snapshot.model, snapshot.optimizer):
        assert found.keys() == tensors(4).keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors(4).items())


def test_whole_and_sharded_checkpoints_follow_each_other(checkpoints: Checkpoints) -> None:
    checkpoints.save(Snapshot(1, tensors(1), tensors(1)))
    save(checkpoints, 2)
    assert torch.equal(loaded(checkpoints).model["w"], tensors(2)["w"])
    checkpoints.save(Snapshot(3, tensors(3), tensors(3)))
    assert torch.equal(loaded(checkpoints).model["w"], tensors(3)["w"])
    save(checkpoints, 4)
    assert checkpoints.steps() == [3, 4], "only the newest two remain"


def test_export_is_a_file_with_whole_tensors(checkpoints: Checkpoints, tmp_path: Path) -> None:
    export(save(checkpoints, 5), tmp_path / MODEL)
    found = load_file(tmp_path / MODEL)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors(5).items()) and len(found) == 3


def test_parts_of_complex_tensors_are_joined(checkpoints: Checkpoints, tmp_path: Path) -> None:
    whole = {
        f"z{bits}": torch.complex(torch.arange(10.0), torch.ones(10)).reshape(5, 2).to(getattr(torch, f"complex{bits}"))
        for bits in (64, 128)
    }
    folder = save(checkpoints, 6, whole=whole)
    found = loaded(checkpoints).model
    assert all(found[name].dtype == z.dtype and torch.equal(found[name], z) for name, z in whole.items())
    export(folder, tmp_path / MODEL)
    others, own = load_file(tmp_path / MODEL), tensor_file.TensorFile(tmp_path / MODEL)
    assert torch.equal(torch.view_as_complex(others["z128"]), whole["z128"])
    assert torch.equal(others["z64"], whole["z64"])
    assert all(torch.equal(own.read(name), z) for name, z in whole.items()), "a run may resume from it"


def test_export_rejects_what_it_cannot_read(checkpoints: Checkpoints, tmp_path: Path) -> None:
    whole, _ = checkpoints.save(Snapshot(1, tensors(1), tensors(1)))
    with pytest.raises(ValueError, match="found a checkpoint without parts"):
        export(whole, tmp_path / MODEL)
    folder = save(checkpoints, 2)
    manifest = (folder / MANIFEST).read_bytes()
    (folder / MANIFEST).write_bytes(manifest.replace(b'"step": 2', b'"step": 3'))
    with pytest.raises(ValueError, match="does not match its field sha256"):
        export(folder, tmp_path / MODEL)
    (folder / MANIFEST).write_bytes(manifest)
    with pytest.raises(ValueError, match="found an existing file"):
        export(folder, folder / MANIFEST)
    (folder / part_name(MODEL, 1)).write_bytes(b"damaged")
    with pytest.raises(ValueError, match=f"{part_name(MODEL, 1)}: found SHA-256"):
        export(folder, tmp_path / MODEL)
    assert not (tmp_path / MODEL).exists()


def test_export_has_one_tensor_in_memory_at_a_time(tmp_path: Path) -> None:
    arrays: list[weakref.ref[NDArray[np.float32]]] = []

    def read(name: str) -> Tensor:
        assert not any(array() is not None for array in arrays), "found the tensor before in memory"
        array = np.zeros(tensor_file.PIECE_NBYTES // 2, np.float32)  # two pieces
        arrays.append(weakref.ref(array))
        return torch.from_numpy(array)

    shape = (tensor_file.PIECE_NBYTES // 2,)
    entries = dict.fromkeys(("a", "b", "c"), (torch.float32, shape))
    tensor_file.write_pieces(tmp_path / MODEL, tensor_file.streamed(entries, read))
    assert len(arrays) == 3 and load_file(tmp_path / MODEL)["c"].shape == shape


def test_export_that_fails_leaves_no_file(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(checkpoints, 1)

    def joined(folder: Path, tensors: object) -> Iterator[bytes]:
        yield b"the first bytes"
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(parts, "joined", joined)
    with pytest.raises(OSError, match="No space left"):
        export(folder, tmp_path / MODEL)
    assert {path.name for path in tmp_path.iterdir()} == {"job"}


def test_opening_frees_the_space_of_a_checkpoint_that_was_interrupted(checkpoints: Checkpoints) -> None:
    save(checkpoints, 1)
    left = checkpoints.directory / ".step-0000000002.0123456789abcdef"
    left.mkdir()
    (left / part_name(MODEL, 0)).write_bytes(b"incomplete")
    (checkpoints.directory / TERM).write_text("2")
    with pytest.raises(FencedError):
        Checkpoints(checkpoints.directory, "x", keep=2, term=1)
    assert left.exists(), "a run that is fenced removes nothing"
    reopened = Checkpoints(checkpoints.directory, "x", keep=2, term=2)
    assert not left.exists() and loaded(reopened).step == 1


@pytest.mark.parametrize("damage", ["missing", "changed", "short"])
@pytest.mark.parametrize("file", [MODEL, OPTIMIZER])
def test_damaged_part_is_named_and_the_checkpoint_before_is_used(
    checkpoints: Checkpoints, file: str, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save(checkpoints, 1)
    path = save(checkpoints, 2) / part_name(file, 1)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(content if damage == "changed" else content[:-1])
    assert loaded(checkpoints).step == 1
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "skipped the damaged checkpoint" in told and path.name in told
    save(checkpoints, 3)
    assert checkpoints.steps() == [1, 3], "the damaged one is removed, the good one is kept"


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([Chunk("a", 0, 3), Chunk("b", 4, 3)], "no parts with row 3"),
        ([Chunk("a", 0, 3), Chunk("b", 2, 5)], "two parts with row 2"),
        ([Chunk("a", 0, 6)], "parts with 6 of 7 rows"),
        ([], "parts with 0 of 7 rows"),
    ],
)
def test_parts_must_have_each_row_once(
    checkpoints: Checkpoints, chunks: list[Chunk], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    table = {MODEL: {"w": ShardedTensor("F32", (7, 3), tuple(chunks))}}
    with pytest.raises(ValueError, match=message):
        parts.check(table)
    path = save(checkpoints, 1) / MANIFEST
    manifest = json.loads(path.read_text()) | {"parts": parts.to_json(table)}
    del manifest["sha256"]
    path.write_text(json.dumps(manifest))
    assert checkpoints.load() is None and message in capsys.readouterr().err


def test_contract_knows_the_types_of_tensors_that_checkpoints_have() -> None:
    assert {tensor_file.NAMES[dtype]: dtype.itemsize for dtype in tensor_file.NAMES} == parts.ELEMENT_NBYTES


@pytest.mark.mpi(3)
def test_run_on_two_ranks_resumes_on_one_two_and_three(tmp_path: Path) -> None:
    run_ranks(2, BODY, "2", tmp_path / "2", "train", timeout_s=120)
    saved = tmp_path / "2/digits-0001/step-0000000006"
    assert {path.name for path in saved.glob("*.safetensors")} == {
        *(part_name(file, rank) for file in (MODEL, OPTIMIZER) for rank in range(2)), MODEL,
    }  # fmt: skip
    for ranks in (1, 3):
        shutil.copytree(tmp_path / "2", tmp_path / str(ranks))
    for ranks in (1, 2, 3):
        output = run_ranks(ranks, BODY, str(ranks), tmp_path / str(ranks), "resume", timeout_s=120).output
        assert f"resumed 2 parts on {ranks} ranks" in output, output


@pytest.mark.mpi(2)
def test_rank_killed_while_writing_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    ended = run(command(2, BODY, "2", tmp_path, "killed"), timeout_s=120)
    assert ended.code != 0, ended.output
    job = tmp_path / "digits-0001"
    (saved,) = job.glob("step-*")
    assert len(list(saved.glob("*-part-*"))) == 4
    output = run_ranks(2, BODY, "2", tmp_path, "resume", timeout_s=120).output
    assert f"resumed from step {int(saved.name[5:])}" in output and "resumed 2 parts on 2 ranks" in output, output
    assert not list(job.glob(".step-*")), "the rest of the interrupted checkpoint is removed"


def test_ranks_verify_the_parts_that_they_read(checkpoints: Checkpoints) -> None:
    manifest = json.loads((save(checkpoints, 1, ranks=4) / MANIFEST).read_text())
    manifest["files"][MODEL] = {"nbytes": 1, "sha256": ""}

    def shares(ranks: int) -> list[int]:
        found = divide(manifest, ranks)
        assert found.keys() == manifest["files"].keys(), "each file has one rank"
        assert found["state.json"] == 0, "rank 0 reads it"
        assert found[MODEL] == {1: 0, 2: 1, 4: 3, 8: 1}[ranks], "the rank with the fewest bytes"
        by_file = [[found[part_name(file, rank)] for rank in range(4)] for file in (MODEL, OPTIMIZER)]
        assert by_file[0] == by_file[1]
        return by_file[0]

    assert [shares(ranks) for ranks in (1, 2, 4, 8)] == [[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 2, 3], [0, 2, 4, 6]]
    del manifest["parts"][OPTIMIZER], manifest["files"][MODEL]
    assert divide(manifest, 4)[part_name(OPTIMIZER, 3)] == 0, "rank 0 verifies what no part names"


@pytest.mark.mpi(2)
def test_ranks_verify_together_and_use_the_same_checkpoint(tmp_path: Path) -> None:
    output = run_ranks(2, BODY, "2", tmp_path, "verified", "damaged", timeout_s=180).output
    assert "each rank verifies its files" in output and "resumed from step 6 after damage" in output, output
    assert output.count("resumed from step 6 in") == 2, output


@pytest.mark.mpi(2)
def test_ranks_write_in_the_background_and_share_errors(tmp_path: Path) -> None:
    output = run_ranks(2, BODY, "2", tmp_path, "background", "separate", "gathered", "full", timeout_s=120).output
    assert "training continues while parts are written" in output and "rank 0 writes the whole state" in output
    assert "a full volume is an error on all ranks" in output, output
    assert output.count("found ranks that do not see the files of rank 0") == 2, output
    assert "rank 0 gathers one state at a time" in output, output


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_memory_for_a_checkpoint_falls_with_the_number_of_ranks(ranks: int, tmp_path: Path) -> None:
    output = run_ranks(ranks, BODY, str(ranks), tmp_path, "memory", timeout_s=120).output
    assert output.count("of the state") == ranks, output
