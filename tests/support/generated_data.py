"""Write small data sets of all kinds, ordinary ones and traps, for tests of ``dljob suggest`` and its projects."""

import csv
import io
import json
import math
import random
import sysconfig
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow
from PIL import Image
from pyarrow import parquet

ROWS = 60
Write = Callable[[Path], Path]


@dataclass(frozen=True)
class Case:
    """A data set. ``write``: write it below a new folder, and return what to pass to ``dljob suggest``."""

    name: str
    write: Write
    options: tuple[str, ...] = ()


def table(
    columns: Mapping[str, Callable[[int, random.Random], object]],
    *,
    rows: int = ROWS,
    delimiter: str = ",",
    encoding: str = "utf-8",
    name: str = "data.csv",
    quoting: int = csv.QUOTE_MINIMAL,
    end: str = "\n",
) -> Write:
    """Return a function that writes a table. ``columns``: name → cell of row i."""

    def write(folder: Path) -> Path:
        draw = random.Random(5)
        records = [{key: make(i, draw) for key, make in columns.items()} for i in range(rows)]
        path = folder / name
        if name.endswith(".parquet"):
            parquet.write_table(pyarrow.Table.from_pylist(records), path, row_group_size=16)
            return path
        if name.endswith("l"):
            path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records), encoding=encoding)
            return path
        with path.open("w", encoding=encoding, newline="") as file:
            writer = csv.writer(file, delimiter=delimiter, quoting=quoting, lineterminator=end)  # type: ignore[arg-type]
            writer.writerow(columns)
            writer.writerows(record.values() for record in records)
        return path

    return write


def real(i: int, draw: random.Random) -> object:
    return f"{math.sin(i) + draw.random():.4f}"


def binary(i: int, draw: random.Random) -> object:
    return "yes" if math.sin(i) > 0 else "no"


def number_target(i: int, draw: random.Random) -> object:
    return f"{3 * math.sin(i) + 7:.3f}"


def spread(low: float, high: float) -> Callable[[int, random.Random], object]:
    return lambda i, draw: f"{draw.uniform(low, high):.6g}"


def chosen(*values: object) -> Callable[[int, random.Random], object]:
    return lambda i, draw: draw.choice(values)


def dates(form: str) -> Callable[[int, random.Random], object]:
    return lambda i, draw: (datetime(2021, 1, 1) + timedelta(days=7 * i)).strftime(form)


BASIC = {"a": real, "b": real, "city": chosen("Bonn", "Köln", ""), "target": binary}
NUMBERS = {"a": real, "b": real, "price": number_target}


def moment(i: int, draw: random.Random) -> datetime:
    return datetime(2021, 1, 1, 12, 30) + timedelta(days=7 * i, milliseconds=i)


def parquet_folder(folder: Path) -> Path:
    """Write a table as Spark does: files in folders that hold the values of a column, and a mark of success."""
    for year in (2023, 2024):
        (folder / f"year={year}").mkdir()
        table(BASIC, name=f"year={year}/part-0.parquet")(folder)
    (folder / "_SUCCESS").write_text("")
    return folder


def tables() -> list[Case]:
    """Return ordinary tables and traps."""
    found = [
        Case("comma", table(BASIC)),
        Case("semicolon", table(BASIC, delimiter=";")),
        Case("tab", table(BASIC, delimiter="\t", name="data.tsv")),
        Case("pipe", table(BASIC, delimiter="|")),
        Case("byte order mark", table(BASIC, encoding="utf-8-sig")),
        Case("windows-1252", table(BASIC, encoding="cp1252")),
        Case("utf-16", table(BASIC, encoding="utf-16")),
        Case("CRLF and quotes", table(BASIC, quoting=csv.QUOTE_ALL, end="\r\n")),
        Case(
            "JSON Lines", table(BASIC | {"flag": chosen(True, False, None), "n": chosen(1, 2.5, None)}, name="a.jsonl")
        ),
        Case("Parquet", table(BASIC | {"at": moment, "day": lambda i, d: moment(i, d).date()}, name="data.parquet")),
        Case(
            "Parquet of numbers",
            table(
                {
                    "a": lambda i, d: d.random(),
                    "cost": lambda i, d: Decimal(i % 7) / 4,
                    "flag": chosen(True, False, None),
                    "price": lambda i, d: 3 * math.sin(i) + 7,
                },
                name="data.parquet",
            ),
        ),
        Case("a folder of Parquet files", parquet_folder),
        Case("texts in Parquet", table({"text": sentence, "label": label}, name="data.parquet")),
        Case("JSON Lines of numbers", table(NUMBERS, name="a.jsonl")),
        Case("regression", table(NUMBERS)),
        Case("decimal comma", table({k: _comma(v) for k, v in NUMBERS.items()}, delimiter=";")),
        Case("unscaled columns", table(BASIC | {"big": spread(1e8, 9e9), "small": spread(1e-9, 9e-9)})),
        Case("enormous numbers", table(BASIC | {"big": spread(-1e300, 1e300)})),
        Case("enormous target", table({"a": real, "target": lambda i, d: f"{1e30 * (math.sin(i) + 2):.6g}"})),
        Case("infinite cells", table(BASIC | {"c": lambda i, d: "inf" if i == 3 else f"{d.random():.3f}"})),
        Case(
            "outlier",
            table(NUMBERS | {"c": lambda i, d: 1e12 if i == 7 else f"{d.random():.3f}"}),
            ("--target", "price"),
        ),
        Case("outlier in the target", table({"a": real, "y": lambda i, d: 1e9 if i == 7 else f"{math.sin(i):.3f}"})),
        Case(
            "times with and without fractions",
            table(BASIC | {"at": lambda i, d: f"2024-01-{1 + i % 28:02}T10:00:00{'.5' * (i % 2)}"}),
        ),
        Case("constant column", table(BASIC | {"fixed": chosen(7)})),
        Case("empty column", table(BASIC | {"nothing": chosen("")})),
        Case("one percent", table({"a": real, "target": lambda i, d: "rare" if i % 100 == 0 else "usual"}, rows=300)),
        Case("one row of a class", table({"a": real, "target": lambda i, d: "c" if i == 9 else binary(i, d)})),
        Case("ten thousand categories", table(BASIC | {"street": lambda i, d: f"s{i % 10_000}"}, rows=20_000)),
        Case("categories alone", table({"a": chosen("x", "y"), "b": chosen("u", "v", "w"), "target": binary})),
        Case("missing targets", table({"a": real, "target": lambda i, d: "" if i % 5 == 0 else binary(i, d)})),
        Case("missing cells", table({"a": lambda i, d: "" if d.random() < 0.8 else real(i, d), "target": binary})),
        Case("missing words", table(BASIC | {"c": lambda i, d: d.choice(("NA", "?", "null", "1.5", "2"))})),
        Case("more columns than rows", table({**{f"x{j}": real for j in range(90)}, "target": binary}, rows=30)),
        Case("ten rows", table(BASIC, rows=10)),
        Case("twelve classes", table({"a": real, "target": lambda i, d: f"c{i % 12}"})),
        Case("numbers as classes", table({"a": real, "target": lambda i, d: i % 3})),
        Case("negative classes", table({"a": real, "target": lambda i, d: -1 if i % 2 else 1})),
        Case("true and false", table({"a": real, "target": chosen(True, False)})),
        Case(
            "strange names", table({"a b": real, 'q"u{o}te': real, "$cost": real, "größe\\n": real, "target": binary})
        ),
        Case("strange classes", table({"a": real, "target": chosen("$x", 'say "no"', "back\\slash", "{brace}")})),
        Case("line breaks in cells", table(BASIC | {"note": chosen("two\nlines", "one, line")})),
        Case("Python words", table({"class": real, "def": real, "import": binary}), ("--target", "import")),
        Case("long names", table({"n" * 300: real, "b": chosen("v" * 400, "w" * 400), "target": binary})),
        Case("identifier", table({"id": lambda i, d: i, **BASIC})),
        Case("remarks", table(BASIC | {"note": lambda i, d: f"remark {i} about the case"})),
        Case("copies of rows", table({"a": lambda i, d: i % 7, "b": lambda i, d: i % 3, "target": lambda i, d: i % 2})),
        Case("sorted by class", table({"a": real, "target": lambda i, d: "a" if i < 50 else "b"})),
    ]
    found += [
        Case(f"dates {form}", table(BASIC | {"day": dates(form)}))
        for form in ("%Y-%m-%d", "%d.%m.%Y", "%m/%d/%Y", "%Y-%m-%dT%H:%M:%S", "%d-%b-%Y")
    ]
    return found


def _comma(make: Callable[[int, random.Random], object]) -> Callable[[int, random.Random], object]:
    return lambda i, draw: str(make(i, draw)).replace(".", ",")


def picture(i: int, mode: str = "RGB", size: tuple[int, int] = (12, 12)) -> Image.Image:
    """Return a random image that is darker for even numbers."""
    pixels = np.random.default_rng(i).integers(0, 120, (*size[::-1], 3)) + 120 * (i % 2)
    return Image.fromarray(pixels.astype(np.uint8)).convert(mode)


def image_folder(
    suffix: str = ".png",
    mode: str = "RGB",
    *,
    classes: int = 2,
    sizes: Sequence[tuple[int, int]] = ((12, 12),),
    test: bool = False,
) -> Write:
    """Return a function that writes a folder of images."""

    def write(folder: Path) -> Path:
        for part, first in (("train", 0), ("test", 100)) if test else (("", 0),):
            for i in range(first, first + 24):
                path = folder / part / f"class {i % classes}" / f"{i}{suffix}"
                path.parent.mkdir(parents=True, exist_ok=True)
                picture(i, mode, sizes[i % len(sizes)]).save(path)
        return folder

    return write


def mixed_modes(folder: Path) -> Path:
    """Write images of all modes and of several formats."""
    forms = [("RGB", "jpg"), ("L", "png"), ("P", "gif"), ("RGBA", "png"), ("CMYK", "jpg"), ("1", "png"), ("LA", "png")]
    for i in range(28):
        mode, suffix = forms[i % len(forms)]
        path = folder / f"c{i % 2}" / f"{i}.{suffix}"
        path.parent.mkdir(exist_ok=True)
        picture(i, mode, (10 + i % 5, 12 + i % 3)).save(path)
    return folder


def sixteen_bits(folder: Path) -> Path:
    for i in range(24):
        path = folder / f"c{i % 2}" / f"{i}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(np.asarray(picture(i, "L")).astype(np.uint16) * 257).save(path)
    return folder


def archive(form: str, name: str = "data.tar") -> Write:
    """Return a function that writes a WebDataset archive. ``form``: where the class is: cls, json or folder."""

    def write(folder: Path) -> Path:
        with tarfile.open(folder / name, "w:gz" if name.endswith("gz") else "w") as packed:
            for i in range(24):
                png = io.BytesIO()
                picture(i).save(png, "png")
                files = {f"c{i % 2}/{i}.png" if form == "folder" else f"{i}.png": png.getvalue()}
                if form != "folder":
                    files[f"{i}.{form}"] = (
                        json.dumps({"label": i % 2}).encode() if form == "json" else f"{i % 2}".encode()
                    )
                for key, content in files.items():
                    member = tarfile.TarInfo(key)
                    member.size = len(content)
                    packed.addfile(member, io.BytesIO(content))
        return folder / name

    return write


def arrays(shape: tuple[int, ...], kind: type = np.float64, *, names: bool = False, test: bool = False) -> Write:
    """Return a function that writes images as an .npz file."""

    def write(folder: Path) -> Path:
        draw = np.random.default_rng(3)
        y = np.arange(40) % 3
        x: np.ndarray = (draw.random((40, *shape)) * 80 + 60 * y.reshape(-1, *([1] * len(shape)))).astype(kind)
        found: dict[str, np.ndarray] = {"x": x, "y": np.array(["a", "b", "c"])[y] if names else y}
        if test:
            found |= {"x_test": x[:9] + kind(1), "y_test": found["y"][:9]}
        np.savez(folder / "data.npz", **found)  # type: ignore[arg-type]
        return folder / "data.npz"

    return write


def images() -> list[Case]:
    return [
        Case("image folder", image_folder()),
        Case("grey JPEG", image_folder(".jpg", "L")),
        Case("five classes of BMP", image_folder(".bmp", classes=5)),
        Case("images of different sizes", image_folder(sizes=((9, 30), (40, 12), (12, 12)))),
        Case("large images", image_folder(".webp", sizes=((150, 90),))),
        Case("images with a test part", image_folder(".tif", test=True)),
        Case("images of all modes", mixed_modes),
        Case("images of 16 bits", sixteen_bits),
        Case("archive with class files", archive("cls")),
        Case("archive with JSON files", archive("json", "data.tar.gz")),
        Case("archive with folders", archive("folder")),
        Case("arrays of grey images", arrays((8, 8))),
        Case("arrays of colours first", arrays((3, 9, 8), np.uint8, names=True)),
        Case("arrays with a test part", arrays((10, 10, 3), np.float32, test=True)),
    ]


WORDS = {
    "sport": ["match", "goal", "team", "win", "ball", "player", "season", "coach"],
    "money": ["bank", "market", "price", "share", "trade", "profit", "budget", "tax"],
}


def sentence(i: int, draw: random.Random, most: int = 14) -> str:
    own = list(WORDS)[i % 2]
    common = ["the", "a", "of", "to", "in", "and", "was", "it", "for", "on"]
    return " ".join(draw.choice(WORDS[own] if draw.random() < 0.4 else common) for _ in range(draw.randint(3, most)))


def label(i: int, draw: random.Random) -> object:
    return list(WORDS)[i % 2]


def class_files(suffix: str = ".txt", encoding: str = "utf-8", extra: str = "", *, test: bool = False) -> Write:
    def write(folder: Path) -> Path:
        draw = random.Random(4)
        for part, first in (("train", 0), ("test", 100)) if test else (("", 0),):
            for i in range(first, first + 40):
                path = folder / part / str(label(i, draw)) / f"{i}{suffix}"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(f"{sentence(i, draw)} {extra}", encoding=encoding)
        return folder

    return write


def sources() -> str:
    """Return text of which every Python has some: modules of its standard library."""
    folder = Path(sysconfig.get_path("stdlib"))
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in ("heapq.py", "bisect.py", "textwrap.py"))


def file_of(text: Callable[[], str], name: str, encoding: str = "utf-8") -> Write:
    def write(folder: Path) -> Path:
        (folder / name).write_text(text(), encoding=encoding)
        return folder / name

    return write


def text_folder(folder: Path) -> Path:
    for i, part in enumerate(sources().split("\n\n")):
        (folder / f"{i}.md").write_text(part, encoding="utf-8")
    return folder


def story(words: int) -> str:
    draw = random.Random(2)
    return " ".join(sentence(i, draw) for i in range(words // 8))


def texts() -> list[Case]:
    return [
        Case("folders of texts", class_files()),
        Case("folders of texts with a test part", class_files(test=True)),
        Case("folders of texts in windows-1252", class_files(".md", "cp1252", "für große Fälle")),
        Case("texts in JSON Lines", table({"text": sentence, "label": label}, name="a.jsonl")),
        Case("texts in a table", table({"label": label, "review": sentence})),
        Case(
            "texts of one word",
            table({"text": lambda i, d: d.choice(WORDS[str(label(i, d))]), "label": label}),
            ("--task", "text-classification"),
        ),
        Case(
            "texts beside other columns",
            table({"n": real, "text": sentence, "label": label}),
            ("--task", "text-classification", "--text", "text", "--target", "label"),
        ),
        Case(
            "texts with a rare class",
            table(
                {
                    "text": lambda i, d: f"{sentence(i, d)} number {i}",
                    "label": lambda i, d: "rare" if i % 40 == 0 else "usual",
                },
                rows=200,
            ),
        ),
        Case("long texts", table({"text": lambda i, d: sentence(i, d, 3000), "label": label}, name="a.jsonl")),
        Case(
            "Chinese texts",
            table(
                {
                    "text": lambda i, d: "".join(d.choices("天地玄黄宇宙" if i % 2 else "日月盈昃辰宿", k=9)),
                    "label": label,
                }
            ),
            ("--task", "text-classification"),
        ),
        Case(
            "texts of signs",
            table({"text": lambda i, d: f"{d.choice('🙂🙁')} … {i % 2} !?", "label": label}),
            ("--task", "text-classification"),
        ),
        Case("a text file", file_of(sources, "data.txt")),
        Case("a text of one line", file_of(lambda: story(4000), "story.txt")),
        Case("a text in utf-16", file_of(sources, "data.txt", "utf-16")),
        Case("a text in windows-1252", file_of(lambda: story(3000).replace("o", "ö"), "data.md", "cp1252")),
        Case("a program", file_of(sources, "data.py"), ("--task", "language-modelling")),
        Case("a folder of texts without classes", text_folder),
        Case("texts without classes", table({"text": lambda i, d: f"{i} {sentence(i, d)}"}, rows=300, name="a.jsonl")),
    ]


CASES = [*tables(), *images(), *texts()]
