"""Data that users have and that went wrong before: each is read as it is meant, or is one error that says what to do."""

import bz2
import gzip
import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dljob.cli.entry import main
from dljob.suggest.errors import DataError
from dljob.suggest.inspection.columns import Kind, inspect_column
from dljob.suggest.inspection.images import inspect_images
from dljob.suggest.inspection.table import inspect_table
from dljob.suggest.reading import archive
from dljob.suggest.reading.archive import read_archives
from dljob.suggest.reading.images import images_of_arrays, read_arrays, read_folder
from dljob.suggest.reading.table import read_table
from dljob.suggest.subject import Options, read_subject
from support.generated_data import BASIC, binary, chosen, real, table

Save = Callable[[int, Path], object]
X = np.random.default_rng(0).random((40, 8, 8))
Y = np.arange(40) % 3


def grey(i: int) -> np.ndarray:
    """Return the pixels of a random image that is darker for even numbers."""
    return np.random.default_rng(i).integers(0, 120, (12, 12)) + 120 * (i % 2)


def folder(path: Path, save: Save, suffix: str = ".png") -> Path:
    for i in range(24):
        file = path / f"c{i % 2}" / f"{i}{suffix}"
        file.parent.mkdir(parents=True, exist_ok=True)
        save(i, file)
    return path


def scaled_by_the_project(path: Path, file: Path) -> np.ndarray:
    """Return the pixels of a file as the data.py of the project for a folder reads them."""
    subject = read_subject(Options(path))
    data: Any = ModuleType("data")
    exec(subject.project(subject.models(None)[0], None)["data.py"], data.__dict__)
    found: np.ndarray = data.scaled(file)
    return found


class TestTables:
    @pytest.mark.parametrize("packed", [gzip.compress, bz2.compress, lambda raw: b"PK\x03\x04" + raw])
    def test_a_packed_file_with_the_suffix_of_a_table_is_named(self, packed: Any, tmp_path: Path) -> None:
        path = table(BASIC)(tmp_path)
        path.write_bytes(packed(path.read_bytes()))
        with pytest.raises(DataError, match="Unpack it first"):
            read_table(path)

    def test_utf_32_is_not_read_as_utf_16(self, tmp_path: Path) -> None:
        found = read_table(table(BASIC, encoding="utf-32")(tmp_path))
        assert found.names == tuple(BASIC) and found.encoding == "utf-32"

    def test_a_pipe_is_an_error_instead_of_a_wait_for_ever(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        os.mkfifo(tmp_path / "data.csv")
        assert main(["suggest", str(tmp_path / "data.csv")]) == 2
        assert "found a pipe or a device" in capsys.readouterr().err

    def test_classes_that_are_the_same_number_are_a_finding(self, tmp_path: Path) -> None:
        found = inspect_table(read_table(table({"a": real, "target": chosen("1", "1.0", "0")})(tmp_path)), None, None)
        assert any("are the same number" in text for text in found.findings)
        found = inspect_table(read_table(table({"a": real, "target": binary})(tmp_path)), None, None)
        assert not any("are the same number" in text for text in found.findings)

    @pytest.mark.parametrize("end", ["Z", "+02:00", ".250", ".250Z"])
    def test_times_with_a_zone_or_parts_of_seconds_are_dates(self, end: str, tmp_path: Path) -> None:
        cells = [f"2024-{1 + i % 12:02d}-01T10:00:00{end}" for i in range(30)]
        assert inspect_column("when", cells).kind is Kind.DATE
        path = table({"a": real, "when": lambda i, d: cells[i % 30], "target": binary})(tmp_path)
        subject = read_subject(Options(path))
        data: Any = ModuleType("data")
        exec(subject.project(subject.models(None)[0], None)["data.py"], data.__dict__)
        x = data.Preprocessing.fit(rows := data.read(path)).inputs(rows)
        assert np.isfinite(x).all() and x.shape[1] == 6


class TestImages:
    @pytest.mark.parametrize(
        ("kind", "factor", "suffix"), [(np.uint16, 4, ".png"), (np.uint16, 257, ".png"), (np.int32, 1, ".tif")]
    )
    def test_grey_values_of_any_number_of_bits_keep_their_contrast(
        self, kind: Any, factor: int, suffix: str, tmp_path: Path
    ) -> None:
        """Fixed bug: 10 of 16 bits lost all but two bits, and 8 of 32 bits were black."""
        path = folder(tmp_path / "p", lambda i, f: Image.fromarray((grey(i) * factor).astype(kind)).save(f), suffix)
        images = read_folder(path)
        assert len(np.unique(images.x)) > 100
        first = sorted((path / "c0").iterdir())[0]
        assert np.array_equal(scaled_by_the_project(path, first), images.x[0])

    def test_photographs_of_phones_are_upright(self, tmp_path: Path) -> None:
        """Fixed bug: images that viewers turn, as their Exif data say, were lying on their side."""

        def save(turned: bool) -> Save:
            def one(i: int, file: Path) -> None:
                image, exif = Image.fromarray(grey(i).astype(np.uint8)), Image.Exif()
                exif[0x0112] = 6 if turned else 1  # the orientation
                (image.transpose(Image.Transpose.ROTATE_90) if turned else image).save(file, exif=exif)

            return one

        upright = folder(tmp_path / "upright", save(False))
        turned = folder(tmp_path / "turned", save(True))
        images = read_folder(turned)
        assert np.array_equal(images.x, read_folder(upright).x)
        first = sorted((turned / "c0").iterdir())[0]
        assert np.array_equal(scaled_by_the_project(turned, first), images.x[0])

    def test_floating_point_pixels_are_an_error(self, tmp_path: Path) -> None:
        """Fixed bug: values from 0 to 1 were black."""
        with pytest.raises(DataError, match="floating-point numbers"):
            read_folder(
                folder(tmp_path, lambda i, f: Image.fromarray(grey(i).astype(np.float32) / 255).save(f), ".tif")
            )

    def test_transparent_pixels_are_white(self, tmp_path: Path) -> None:
        """Fixed bug: pictures whose shape is in the transparency alone were all black."""

        def save(i: int, file: Path) -> None:
            image = Image.new("RGB", (12, 12))
            image.putalpha(Image.fromarray(grey(i).astype(np.uint8)))
            image.save(file)

        path = folder(tmp_path / "p", save)
        images = read_folder(path)
        assert inspect_images(images).images == 24 and len(np.unique(images.x)) > 100
        first = sorted((path / "c0").iterdir())[0]
        assert np.array_equal(scaled_by_the_project(path, first), images.x[0])

    def test_an_archive_that_unpacks_to_more_than_memory_has_is_an_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(archive, "MAX_NBYTES", 2**20)
        with tarfile.open(tmp_path / "data.tar.gz", "w:gz") as file:
            member = tarfile.TarInfo("c0/1.png")
            member.size = 2**20 + 1
            file.addfile(member, io.BytesIO(bytes(member.size)))
        with pytest.raises(DataError, match="more than 1 MiB"):
            read_archives(tmp_path / "data.tar.gz")

    def test_a_damaged_archive_is_an_error(self, tmp_path: Path) -> None:
        """Fixed bug: an archive was read up to its last file, and the checksum behind it was not compared."""
        with tarfile.open(tmp_path / "data.tar.gz", "w:gz") as file:
            member = tarfile.TarInfo("c0/1.png")
            member.size = 20_000
            file.addfile(member, io.BytesIO(bytes(20_000)))
        raw = bytearray((tmp_path / "data.tar.gz").read_bytes())
        raw[-8] ^= 1  # The checksum of the unpacked bytes.
        (tmp_path / "data.tar.gz").write_bytes(raw)
        with pytest.raises(DataError, match="no readable tar archive"):
            read_archives(tmp_path / "data.tar.gz")

    def test_a_member_outside_of_the_archive_writes_nothing_and_gives_no_class(self, tmp_path: Path) -> None:
        with tarfile.open(tmp_path / "data.tar", "w") as file:
            for i in range(24):
                png = io.BytesIO()
                Image.fromarray(grey(i).astype(np.uint8)).save(png, "png")
                member = tarfile.TarInfo(f"../{i}.png")
                member.size = len(png.getvalue())
                file.addfile(member, io.BytesIO(png.getvalue()))
        with pytest.raises(DataError, match="found no class"):
            read_archives(tmp_path / "data.tar")
        assert [path.name for path in tmp_path.parent.iterdir() if path.suffix == ".png"] == []


class TestArrays:
    def test_classes_of_bytes_have_readable_names(self) -> None:
        images = images_of_arrays(Path("a.npz"), {"x": X, "y": np.array([b"cat", b"dog", b"owl"])[Y]})
        assert images.classes == ("cat", "dog", "owl")

    @pytest.mark.parametrize(
        ("arrays", "expected"),
        [
            pytest.param({"x": np.zeros((40, 0, 8)), "y": Y}, "expected images with pixels", id="no pixels"),
            pytest.param({"x": (X - 0.5) * 3.4e308, "y": Y}, "no finite numbers", id="range that is infinite"),
            pytest.param(
                {"x": X, "y": Y, "x_test": X * np.nan, "y_test": Y}, r"x_test\[0\]", id="NaN in the test part"
            ),
            pytest.param({"x": X.astype(complex), "y": Y}, "no finite numbers", id="complex numbers"),
            pytest.param({"x": np.array(1.0), "y": Y}, "one target for each sample", id="one number"),
        ],
    )
    def test_arrays_that_are_no_images_are_an_error(
        self, arrays: dict[str, np.ndarray], expected: str, tmp_path: Path
    ) -> None:
        np.savez(tmp_path / "a.npz", **arrays)  # type: ignore[arg-type]
        with pytest.raises(DataError, match=expected):
            images_of_arrays(tmp_path / "a.npz", read_arrays(tmp_path / "a.npz"))

    def test_a_damaged_file_is_an_error(self, tmp_path: Path) -> None:
        np.savez_compressed(tmp_path / "a.npz", x=X, y=Y)
        raw = bytearray((tmp_path / "a.npz").read_bytes())
        raw[500:600] = bytes(100)
        (tmp_path / "a.npz").write_bytes(raw)
        with pytest.raises(DataError, match=r"no readable \.npz"):
            read_arrays(tmp_path / "a.npz")


def test_path_with_bytes_that_are_not_utf_8(tmp_path: Path) -> None:
    """Regression: the command ended with a traceback when it wrote the path into the README."""
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    rows = "".join(f"{i * 7 % 5},{i % 3},{i % 2}\n" for i in range(40))
    (folder / "data.csv").write_text(f"a,b,y\n{rows}", encoding="utf-8")
    project = tmp_path / "project"
    assert main(["suggest", str(folder / "data.csv"), "--write", str(project), "--no-baseline"]) == 0
    assert "caf?/data.csv" in (project / "README.md").read_text(encoding="utf-8")
    assert r"caf\udce9/data.csv" in "".join(each.read_text(encoding="utf-8") for each in project.glob("*.py"))
