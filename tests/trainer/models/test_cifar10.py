"""Tests of benchmarks/papers/cifar10.py: Caffe's nets, CIFAR-10's archive, differences, and a small case on ranks."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.papers import cifar10
from benchmarks.papers.cifar10_net import WithinChannelNorm, caffe_net, groups, read_cifar10


@pytest.mark.parametrize(("name", "parameters"), [("full", 89_578), ("quick", 145_578)])
def test_nets_have_the_sizes_of_caffes(name: str, parameters: int) -> None:
    """Three convolutions have 79,328 parameters. 32 x 32 pixels become 4 x 4, as with Caffe's rounding up."""
    net = caffe_net(name, torch.zeros(3, 32, 32), 10)
    assert sum(p.numel() for p in net.parameters()) == parameters
    assert net(torch.rand(2, 3, 32, 32)).shape == (2, 10)
    assert caffe_net(name, torch.zeros(1, 8, 8), 10)(torch.rand(2, 1, 8, 8)).shape == (2, 10)
    with pytest.raises(ValueError, match="expected full or quick"):
        caffe_net("slow", torch.zeros(3, 32, 32), 10)


def test_biases_learn_twice_as_fast_and_the_full_nets_linear_layer_decays_most() -> None:
    found = groups(caffe_net("full", torch.zeros(3, 32, 32), 10), 0.001, full=True)
    assert [(round(g["lr"], 6), g["weight_decay"]) for g in found] == [
        (0.001, 0.004), (0.002, 0.004), (0.001, 0.004), (0.002, 0.004), (0.001, 0.004), (0.002, 0.004),
        (0.001, 1.0), (0.001, 0.0),
    ]  # fmt: skip


def test_normalization_divides_by_the_mean_square_of_neighbours() -> None:
    x = torch.full((1, 2, 3, 3), 2.0)
    found = WithinChannelNorm(alpha=1.0, beta=0.5)(x)
    assert found[0, 0, 1, 1] == pytest.approx(2 / (1 + 4) ** 0.5)
    assert found[0, 0, 0, 0] == pytest.approx(2 / (1 + 4 * 4 / 9) ** 0.5), "outside the image there are zeros"


def archive(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


BATCHES = {f"data_batch_{i}.bin": bytes([i] * 3073) for i in range(1, 6)} | {"test_batch.bin": bytes([9] * 2 * 3073)}


def test_archive_is_read_by_label_and_planes(tmp_path: Path) -> None:
    found = read_cifar10(archive(tmp_path / "a.tar.gz", BATCHES | {"readme.html": b"x"}))
    assert found["x"].shape == (5, 3, 32, 32) and list(found["y"]) == [1, 2, 3, 4, 5]
    assert found["x_test"].shape == (2, 3, 32, 32) and list(found["y_test"]) == [9, 9]
    assert np.unique(found["x"][2]).tolist() == [3]


@pytest.mark.parametrize(
    ("files", "match"),
    [
        ({n: d for n, d in BATCHES.items() if "3" not in n}, "found no data_batch_3.bin"),
        (BATCHES | {"test_batch.bin": b"ab"}, "test_batch.bin: found 2 bytes"),
    ],
    ids=["missing", "short"],
)
def test_damaged_archive_is_rejected(files: dict[str, bytes], match: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=match):
        read_cifar10(archive(tmp_path / "a.tar.gz", files))


def test_differences_are_paired_and_have_a_standard_error() -> None:
    found = cifar10.Difference.of([0.91, 0.92, 0.90], [0.90, 0.90, 0.90])
    assert found.points == pytest.approx(1.0) and found.error == pytest.approx(1 / 3**0.5)
    assert cifar10.Difference.of([0.5], [0.4]).text == "+10.00"
    assert cifar10.shares_of("layered server", 4) == [0, 34, 33, 33]


def test_runs_of_an_earlier_file_are_not_repeated(tmp_path: Path) -> None:
    about = {"net": "quick"}
    assert cifar10.known(tmp_path / "none", about)["ring"] == []
    (tmp_path / "a").write_text(json.dumps({"about": about, "accuracies": {"ring": [0.5]}}))
    assert cifar10.known(tmp_path / "a", about)["ring"] == [0.5]
    with pytest.raises(ValueError, match="Choose another file"):
        cifar10.known(tmp_path / "a", {"net": "full"})


@pytest.mark.parametrize("wrong", [["--ranks", "3"], ["--seeds", "0"], ["--iterations", "5"], ["--net", "slow"]])
def test_invalid_arguments_are_rejected(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cifar10.main(wrong)
    assert "error" in capsys.readouterr().err


@pytest.mark.mpi
@pytest.mark.long
def test_all_ways_train_the_same_net(capsys: pytest.CaptureFixture[str]) -> None:
    """So few steps do not let rounding grow, so the accuracies are equal."""
    assert cifar10.main(["--seeds", "1", "--iterations", "10"]) == 0
    text = capsys.readouterr().out
    assert "NOT CIFAR-10" in text and text.count("+0.00") == 2
