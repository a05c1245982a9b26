"""WebDataset archives: the class comes from a file, a JSON key or a folder; a broken archive or image is named."""

import io
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dljob.suggest.errors import DataError
from dljob.suggest.reading.archive import is_archive, read_archives
from dljob.suggest.subject import Options, read_subject


def picture(value: int) -> bytes:
    pixels = np.random.default_rng(value).integers(0, 100, (12, 12), dtype=np.uint8) + 10 * (value % 10)
    packed = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(packed, "png")
    return packed.getvalue()


def write(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def samples(form: str, first: int = 0) -> dict[str, bytes]:
    """Return the files of 12 samples of two classes."""
    files = {}
    for i in range(first, first + 12):
        label = f"c{i % 2}"
        if form == "folder":
            files[f"{label}/{i:04d}.png"] = picture(i)
            continue
        files[f"{i:04d}.png"] = picture(i)
        files[f"{i:04d}.{form}"] = f'{{"label": "{label}"}}'.encode() if form == "json" else label.encode()
    return files


@pytest.mark.parametrize("form", ["cls", "json", "folder"])
def test_class_of_a_sample(tmp_path: Path, form: str) -> None:
    images = read_archives(write(tmp_path / "a.tar", samples(form)))
    assert images.classes == ("c0", "c1")
    assert images.x.shape == (12, 12, 12, 1)


def test_null_is_no_class(tmp_path: Path) -> None:
    files = {f"a/{i}.png": picture(i) for i in range(12)}
    files |= {f"a/{i}.json": b'{"label": null}' if i % 2 else b'{"cls": null, "label": "b"}' for i in range(12)}
    assert read_archives(write(tmp_path / "a.tar", files)).classes == ("a", "b")


@pytest.mark.parametrize("label", ["[1]", "1.0", '{"a": 1}'])
def test_a_class_of_another_type_is_shown(tmp_path: Path, label: str) -> None:
    """Fixed bug: the error said that there is no class."""
    files = samples("json") | {"0003.json": f'{{"label": {label}}}'.encode()}
    with pytest.raises(DataError, match=r"0003: found the class .*1.*; expected one text or whole number"):
        read_archives(write(tmp_path / "a.tar", files))


def test_folder_of_archives_with_a_test_part(tmp_path: Path) -> None:
    write(tmp_path / "train-000.tar", samples("cls"))
    write(tmp_path / "train-001.tar", samples("cls", 100))
    write(tmp_path / "test-000.tar", samples("cls", 200))
    assert is_archive(tmp_path)
    images = read_archives(tmp_path)
    assert len(images.x) == 24
    assert images.x_test is not None and len(images.x_test) == 12


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({}, "archive without files", id="empty"),
        pytest.param({"0.png": b""}, "0: found no class", id="no class"),
        pytest.param({"0.png": b"", "0.json": b"{"}, "0: found a class that cannot be read", id="broken JSON"),
        pytest.param(samples("cls") | {"0003.png": picture(3)[:60]}, "0003.png: found an image", id="truncated image"),
        pytest.param({"0.txt": b"a", "0.cls": b"x"}, "found 0 classes", id="no image"),
    ],
)
def test_broken_sample_is_named(tmp_path: Path, files: dict[str, bytes], expected: str) -> None:
    with pytest.raises(DataError) as error:
        read_archives(write(tmp_path / "a.tar", files))
    assert expected in str(error.value)
    assert "a.tar" in str(error.value)


def test_memory_of_the_training_has_room_for_the_files_of_archives(tmp_path: Path) -> None:
    """Regression: ranks of a job with spec.task ended with OOMKilled, because they hold all files while they decode."""
    for name in ("train-0.tar", "train-1.tar"):
        write(tmp_path / name, samples("cls") | {f"notes-{i}.txt": bytes(3_000_000) for i in range(2)})
    options = Options(tmp_path, "image-classification", copies=False)
    held = [read_subject(replace(options, copies=copies)).source.memory_nbytes for copies in (False, True)]
    images, labels = sum(len(picture(i)) for i in range(12)), 12 * len("c0")
    assert held[0] - held[1] == images + 6_000_000 + images + labels


def test_other_archives_have_to_be_unpacked(tmp_path: Path) -> None:
    (tmp_path / "pictures.zip").write_bytes(b"PK\x03\x04")
    with pytest.raises(DataError, match=r"expected a folder .*\. Unpack other archives, such as \.zip"):
        read_subject(Options(tmp_path / "pictures.zip", "image-classification"))


def test_file_that_is_no_archive(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(b"no archive" * 100)
    with pytest.raises(DataError, match="no readable tar archive"):
        read_archives(tmp_path / "a.tar")
