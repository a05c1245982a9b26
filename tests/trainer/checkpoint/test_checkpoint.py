"""Tests of checkpoints: atomic writes, verification, fallback, and rejection of other models."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from dltrain.checkpoint import tensor_file
from dltrain.checkpoint.state import Staging, capture, restore
from dltrain.checkpoint.store import MANIFEST, MODEL, Checkpoints, Snapshot, identity
from dltrain.optim.options import like
from dltrain.protocol.errors import BadInputError, FencedError
from dltrain.protocol.volume_layout import TERM, term_in
from support.trainer.ranks import BODIES, alone, run


def snapshot(step: int, value: float = 1.0) -> Snapshot:
    return Snapshot(step, {"w": torch.full((3,), value)}, {"0.momentum_buffer": torch.ones(3)}, {"epoch": 2})


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "job", identity("m", snapshot(0).model), keep=3)


def newest(checkpoints: Checkpoints) -> Snapshot:
    loaded = checkpoints.load()
    assert loaded is not None
    return loaded.snapshot()


def test_superseded_run_writes_no_checkpoint(tmp_path: Path) -> None:
    def opened(term: int) -> Checkpoints:
        return Checkpoints(tmp_path / "job", "x", keep=3, term=term)

    before = opened(1)
    before.save(snapshot(1))
    opened(2).save(snapshot(5))
    names = set((tmp_path / "job").iterdir())
    with pytest.raises(FencedError, match=r"found term 2; expected 1"):
        before.save(snapshot(9))
    assert set((tmp_path / "job").iterdir()) == names, "no part of the checkpoint is left"
    with pytest.raises(FencedError):
        opened(1)
    assert before.steps() == [1, 5] and newest(opened(2)).step == 5


def test_damaged_term_file_is_rewritten(tmp_path: Path) -> None:
    opened = Checkpoints(tmp_path, "x", keep=3, term=4)
    for damage in (b"q", b"", b"\xff"):
        (tmp_path / TERM).write_bytes(damage)
        opened.save(snapshot(1))
        assert term_in(tmp_path) == 4


def test_save_and_load_round_trip(checkpoints: Checkpoints) -> None:
    assert checkpoints.load() is None
    path, nbytes = checkpoints.save(snapshot(7, 0.25))
    assert path.name == "step-0000000007" and nbytes == sum(file.stat().st_size for file in path.iterdir())
    back = newest(checkpoints)
    assert back.step == 7 and back.state == {"epoch": 2}
    assert back.model["w"].tolist() == [0.25] * 3 and back.optimizer["0.momentum_buffer"].tolist() == [1.0] * 3


def test_written_tensors_match_the_safetensors_library(tmp_path: Path) -> None:
    tensors = {
        str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in tensor_file.NAMES if not dtype.is_complex
    }
    tensors |= {"none": torch.empty(0, 3), "scalar": torch.tensor(2.5), "complex": torch.tensor([1 + 2j])}
    written = tensor_file.write(tmp_path / "t", tensors)
    content = (tmp_path / "t").read_bytes()
    assert written == tensor_file.Written(len(content), hashlib.sha256(content).hexdigest())
    back = load_file(tmp_path / "t")  # the library's own reader, which checks offsets and alignment
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype and back[name].shape == tensor.shape, name
        assert back[name].reshape(-1).view(torch.uint8).tolist() == tensor.reshape(-1).view(torch.uint8).tolist(), name
    with pytest.raises(ValueError, match=r"found tensor a of torch\.float8_e4m3fnuz"):
        tensor_file.write(tmp_path / "t", {"a": torch.zeros(1, dtype=torch.float8_e4m3fnuz)})


def test_complex128_is_float64_with_a_dimension_more_for_other_readers(tmp_path: Path) -> None:
    """The safetensors format has complex64, but not complex128."""
    values = torch.tensor([[1 + 2j, 3 - 4j, 1e-300j]], dtype=torch.complex128)
    tensors = {"z": values, "scalar": values[0, 1], "none": values[:, :0], "w": torch.ones(3)}
    tensor_file.write(tmp_path / "t", tensors)
    others = load_file(tmp_path / "t")
    assert {name: tuple(tensor.shape) for name, tensor in others.items()} == {
        "z": (1, 3, 2), "scalar": (2,), "none": (1, 0, 2), "w": (3,)
    }  # fmt: skip
    assert torch.equal(torch.view_as_complex(others["z"]), values)
    file = tensor_file.TensorFile(tmp_path / "t")
    assert file.entries.keys() == tensors.keys()
    for name, tensor in tensors.items():
        back = file.read(name)
        assert back.dtype == tensor.dtype and back.shape == tensor.shape and torch.equal(back, tensor), name
    rows = torch.empty(1, 3, dtype=torch.complex128)
    file.read_rows(rows, "z")
    assert torch.equal(rows, values)


def test_complex_tensors_survive_a_checkpoint(checkpoints: Checkpoints) -> None:
    model = nn.Linear(2, 2)
    for bits in (64, 128):
        values = torch.tensor([1 + 2j, 3 - 4j], dtype=getattr(torch, f"complex{bits}"))
        model.register_buffer(f"c{bits}", values)
        model.register_buffer(f"conjugate{bits}", values.conj())  # marked as conjugate, and not computed
    taken = capture(1, model.state_dict(), {"state": {}, "param_groups": []}, {}, kept={"z": model.c128})
    checkpoints.save(taken)
    back = newest(checkpoints)
    for name, tensor in model.state_dict().items():
        assert back.model[name].dtype == tensor.dtype and torch.equal(back.model[name], tensor), name
    assert torch.equal(back.kept["z"], model.c128)


def test_snapshot_does_not_change_with_later_training(tmp_path: Path) -> None:
    """This also holds while a snapshot is written, and when the next one is captured in the same memory."""
    model, staging = nn.Linear(2, 2), Staging()
    first = capture(1, model.state_dict(), {"state": {}, "param_groups": []}, {}, staging)
    before = first.model["weight"].clone()
    with torch.no_grad():
        model.weight.add_(1)
    assert torch.equal(first.model["weight"], before)
    second = capture(2, model.state_dict(), {"state": {}, "param_groups": []}, {}, staging)
    assert torch.equal(second.model["weight"], model.weight)
    assert second.model["weight"].data_ptr() == first.model["weight"].data_ptr()


def test_checkpoint_contains_no_pickle(checkpoints: Checkpoints) -> None:
    path, _ = checkpoints.save(snapshot(1))
    assert {file.suffix for file in path.iterdir()} == {".json", ".safetensors"}


def test_only_newest_checkpoints_remain(checkpoints: Checkpoints) -> None:
    for step in range(1, 6):
        checkpoints.save(snapshot(step))
    assert checkpoints.steps() == [3, 4, 5]


@pytest.mark.parametrize(
    "damage", ["flip a bit", "cut short", "remove a file", "remove the manifest", "break the manifest"]
)
def test_corrupt_checkpoint_falls_back_to_the_previous_one(
    checkpoints: Checkpoints, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints.save(snapshot(1, 0.5))
    path, _ = checkpoints.save(snapshot(2))
    content = bytearray((path / MODEL).read_bytes())
    match damage:
        case "flip a bit":
            content[-1] ^= 1
            (path / MODEL).write_bytes(content)
        case "cut short":
            (path / MODEL).write_bytes(content[: len(content) // 2])
        case "remove a file":
            (path / MODEL).unlink()
        case "remove the manifest":
            (path / MANIFEST).unlink()
        case "break the manifest":
            (path / MANIFEST).write_text('{"format": 1')
    assert newest(checkpoints).step == 1
    assert f"dltrain: skipped the damaged checkpoint {path}: " in capsys.readouterr().err
    checkpoints.save(snapshot(2, 0.75))
    assert newest(checkpoints).model["w"].tolist() == [0.75] * 3
    assert checkpoints.steps() == [1, 2]


def test_flipped_bit_in_manifest_is_detected_as_damage(checkpoints: Checkpoints) -> None:
    checkpoints.save(snapshot(1, 0.5))
    path, _ = checkpoints.save(snapshot(2))
    content = (path / MANIFEST).read_bytes()
    for at in range(len(content)):
        flipped = bytearray(content)
        flipped[at] ^= 1 << at % 8
        (path / MANIFEST).write_bytes(flipped)
        assert newest(checkpoints).step in (1, 2), f"bit {at % 8} of byte {at}"


def test_corrupt_newer_checkpoint_does_not_evict_valid_ones(checkpoints: Checkpoints) -> None:
    for step in (1, 9):
        path, _ = checkpoints.save(snapshot(step))
    (path / MODEL).unlink()
    assert newest(checkpoints).step == 1
    checkpoints.save(snapshot(2))
    assert checkpoints.steps() == [1, 2]


def test_checkpoint_of_another_model_is_rejected_and_unchanged(checkpoints: Checkpoints) -> None:
    path, _ = checkpoints.save(snapshot(1))
    other = Checkpoints(checkpoints.directory, identity("m", {"w": torch.zeros(4)}), keep=3)
    with pytest.raises(
        BadInputError, match=r"spec\.checkpoint\.volume: found .*step-0000000001, a checkpoint of another"
    ):
        other.load()
    assert path.exists()


def test_newer_format_is_rejected(checkpoints: Checkpoints) -> None:
    path, _ = checkpoints.save(snapshot(1))
    manifest = json.loads((path / MANIFEST).read_text())
    del manifest["sha256"]
    (path / MANIFEST).write_text(json.dumps(manifest | {"format": 3}))
    with pytest.raises(BadInputError, match="format 3; expected format 1 or 2"):
        checkpoints.load()


def test_error_names_directory_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInputError, match=r"spec\.checkpoint\.volume: found .*/file/job: Not a directory"):
        Checkpoints(tmp_path / "file" / "job", "x", 3)


def test_kill_at_any_time_leaves_a_valid_checkpoint(tmp_path: Path) -> None:
    ended = run(alone(BODIES / "faults/kill_while_saving.py", tmp_path))
    assert (ended.code, ended.output) == (0, "8 kills survived\n")


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_optimizer_resumes_exactly(kind: type[torch.optim.Optimizer], tmp_path: Path) -> None:
    extra: dict[str, Any] = {"momentum": 0.9} if kind is torch.optim.SGD else {}

    def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        return model, kind(model.parameters(), lr=0.1, **extra)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        x = torch.rand(5, 4, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    model, optimizer = fresh()
    for seed in range(3):
        step(model, optimizer, seed)
    checkpoints, staging = Checkpoints(tmp_path, "x", keep=1), Staging()
    capture(2, model.state_dict(), optimizer.state_dict(), {}, staging)  # the next one reuses its memory
    checkpoints.save(capture(3, model.state_dict(), optimizer.state_dict(), {}, staging))
    saved = newest(checkpoints)
    resumed, resumed_optimizer = fresh()
    restore(saved, resumed.load_state_dict, resumed_optimizer.load_state_dict)
    for seed in range(3, 6):
        step(model, optimizer, seed)
        step(resumed, resumed_optimizer, seed)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name


def test_learning_rate_in_a_tensor_is_saved_as_a_number(tmp_path: Path) -> None:
    """Fixed bug: with a tensor as learning rate, as for a compiled update, the first checkpoint ended the training."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.5), betas=(0.5, 0.75))
    checkpoints = Checkpoints(tmp_path, "x", keep=1)
    checkpoints.save(capture(3, model.state_dict(), optimizer.state_dict(), {}))
    (group,) = newest(checkpoints).state["optimizer"]["groups"]
    assert (group["lr"], group["betas"]) == (0.5, [0.5, 0.75])
    found = like(optimizer.param_groups[0], group | {"lr": 0.25, "new": 1})
    assert isinstance(found["lr"], torch.Tensor) and found["lr"].dtype == torch.float32
    assert (float(found["lr"]), found["betas"], found["new"]) == (0.25, (0.5, 0.75), 1)
