"""Traps in images: other sizes and modes give a model; an image that cannot be decoded is named."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dljob.suggest.errors import DataError
from dljob.suggest.inspection.images import inspect_images
from dljob.suggest.reading.images import Images, images_of_arrays, read_arrays, read_folder


def folder(path: Path, count: int = 8, mode: str = "RGB", side: int = 16) -> Path:
    """Write images of two classes: dark and bright."""
    draw = np.random.default_rng(1)
    for name, low in (("bright", 128), ("dark", 0)):
        (path / name).mkdir(parents=True)
        for i in range(count):
            pixels = draw.integers(low, low + 128, (side, side, 3), dtype=np.uint8)
            Image.fromarray(pixels).convert(mode).save(path / name / f"{i}.png")
    return path


class TestFolder:
    def test_classes_are_the_names_of_the_folders(self, tmp_path: Path) -> None:
        images = read_folder(folder(tmp_path / "data"))
        assert images.classes == ("bright", "dark")
        assert images.x.shape == (16, 16, 16, 3)
        assert images.x[images.y == 0].min() >= 128 > images.x[images.y == 1].max()

    def test_other_sizes_and_modes_are_converted(self, tmp_path: Path) -> None:
        path = folder(tmp_path / "data")
        Image.new("L", (40, 20)).save(path / "dark" / "grey.png")
        Image.new("P", (8, 90)).save(path / "dark" / "palette.gif")
        Image.new("RGBA", (16, 16)).save(path / "dark" / "alpha.png")
        images = read_folder(path)
        assert images.x.shape == (19, 16, 16, 3)
        assert len(images.notes) == 2

    def test_grey_images_have_one_channel(self, tmp_path: Path) -> None:
        assert read_folder(folder(tmp_path / "data", mode="L")).x.shape[3] == 1

    def test_sixteen_bits_keep_their_contrast(self, tmp_path: Path) -> None:
        path = folder(tmp_path / "data", mode="L")
        deep = Image.fromarray(np.full((16, 16), 0x8000, dtype=np.uint16))
        deep.save(path / "dark" / "a.png")
        assert read_folder(path).x[8 + 8].max() == 0x80

    @pytest.mark.parametrize("kept", [0, 20, 200])
    def test_truncated_image_is_named(self, tmp_path: Path, kept: int) -> None:
        path = folder(tmp_path / "data", side=32)
        broken = path / "dark" / "3.png"
        broken.write_bytes(broken.read_bytes()[:kept])
        with pytest.raises(DataError, match=r"dark/3\.png: found an image that cannot be decoded"):
            read_folder(path)

    def test_one_class_is_an_error(self, tmp_path: Path) -> None:
        path = folder(tmp_path / "data")
        with pytest.raises(DataError, match="at least two classes"):
            read_folder(path / "dark")

    def test_a_folder_around_the_folders_of_classes_is_named(self, tmp_path: Path) -> None:
        """Archives often unpack to one: the error asked for other folders instead."""
        folder(tmp_path / "data" / "train")
        with pytest.raises(DataError, match=r"found 1 folder with images.* Pass .*data/train, which has such folders"):
            read_folder(tmp_path / "data")

    def test_a_class_of_one_image_is_found(self, tmp_path: Path) -> None:
        path = folder(tmp_path / "data")
        (path / "grey").mkdir()
        (path / "dark" / "1.png").rename(path / "grey" / "1.png")
        assert (
            "Class 'grey' has one image. The test part cannot judge it." in inspect_images(read_folder(path)).findings
        )

    def test_test_part_that_repeats_the_training_part(self, tmp_path: Path) -> None:
        folder(tmp_path / "train")
        folder(tmp_path / "test", count=3)
        for name in ("bright", "dark"):
            for file in (tmp_path / "test" / name).iterdir():
                file.write_bytes((tmp_path / "train" / name / file.name).read_bytes())
        with pytest.raises(DataError, match="all repeat training images"):
            inspect_images(read_folder(tmp_path))
        Image.new("RGB", (16, 16), 7).save(tmp_path / "test" / "dark" / "new.png")
        assert inspect_images(read_folder(tmp_path)).test_images == 1

    def test_images_that_are_not_read_are_counted(self, tmp_path: Path) -> None:
        """Fixed bug: formats that Pillow or this command does not read were left out without a word."""
        path = folder(tmp_path / "data")
        for name in ("a.heic", "b.heic", ".hidden.heic"):
            (path / "dark" / name).write_bytes(b"x")
        (path / "README.txt").write_text("not in a folder of a class")
        (note,) = read_folder(path).notes
        assert note.startswith("2 files in the folders of classes are left out, such as a.heic: images end with .bmp, ")

    def test_one_of_several_test_parts_is_read(self, tmp_path: Path) -> None:
        for name in ("train", "val", "test"):
            folder(tmp_path / name, count=8 if name == "train" else 3)
        images = read_folder(tmp_path)
        assert images.parts == ("train", "test")
        assert images.notes == ("6 images in val are left out: test is the test part.",)
        for file in sorted((tmp_path / "test").rglob("*.png")):
            file.rename(tmp_path / "test" / f"{file.parent.name} {file.name}")
        images = read_folder(tmp_path)
        assert images.parts == ("train", "val")
        assert images.notes == ("6 images in test are left out: they are not in a folder for each class.",)


def test_inspection_needs_little_memory_beside_the_images() -> None:
    """Regression: it held a copy of all images, so that the pod of a job with many ended with OOMKilled."""
    x = np.random.default_rng(1).integers(0, 255, (1000, 64, 64, 3), dtype=np.uint8)
    images = Images(Path("a"), x, np.arange(1000) % 2, ("a", "b"))
    tracemalloc.start()
    try:
        inspect_images(images)
        peak_nbytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_nbytes < x.nbytes / 10


class TestArrays:
    @pytest.mark.parametrize(
        ("shape", "expected"),
        [((20, 8, 8), (20, 8, 8, 1)), ((20, 3, 9, 8), (20, 9, 8, 3)), ((20, 9, 8, 3), (20, 9, 8, 3))],
    )
    def test_shape(self, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
        x = np.random.default_rng(1).random(shape)
        images = images_of_arrays(Path("a.npz"), {"x": x, "y": np.arange(20) % 3})
        assert images.x.shape == expected
        assert (images.x.min(), images.x.max()) == (0, 255)

    def test_duplicates_and_rare_classes_are_found(self) -> None:
        x = np.random.default_rng(1).integers(0, 255, (100, 8, 8), dtype=np.uint8)
        x[50] = x[51]
        facts = inspect_images(images_of_arrays(Path("a.npz"), {"x": x, "y": (np.arange(100) == 7).astype(int)}))
        assert facts.rare
        assert any("1 image repeats another" in text for text in facts.findings)

    def test_truth_values_are_black_and_white(self) -> None:
        x = np.random.default_rng(1).random((20, 8, 8)) < 0.5
        assert set(np.unique(images_of_arrays(Path("a.npz"), {"x": x, "y": np.arange(20) % 2}).x)) == {0, 255}

    def test_one_image_for_each_class_leaves_nothing_to_judge(self) -> None:
        x = np.random.default_rng(1).random((20, 8, 8))
        with pytest.raises(DataError, match="20 classes in 20 different images"):
            inspect_images(images_of_arrays(Path("a.npz"), {"x": x, "y": np.arange(20)}))

    @pytest.mark.parametrize(
        ("arrays", "expected"),
        [
            pytest.param({"x": np.zeros((20, 8, 8))}, "expected x and y", id="no targets"),
            pytest.param({"x": np.zeros((20, 8, 8)), "y": np.zeros(19)}, "one target for each sample", id="lengths"),
            pytest.param({"x": np.zeros((2, 8, 8)), "y": np.zeros(2)}, "at least 10", id="two samples"),
        ],
    )
    def test_wrong_arrays_are_an_error(self, tmp_path: Path, arrays: dict[str, np.ndarray], expected: str) -> None:
        np.savez(tmp_path / "a.npz", **arrays)  # type: ignore[arg-type]
        with pytest.raises(DataError, match=expected):
            read_arrays(tmp_path / "a.npz")

    def test_file_that_is_no_archive(self, tmp_path: Path) -> None:
        (tmp_path / "a.npz").write_bytes(b"no")
        with pytest.raises(DataError, match=r"no readable \.npz"):
            read_arrays(tmp_path / "a.npz")
