"""Tables for the evaluation (``--test``): other orders and columns are read, and each difference that matters is named."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from dljob.suggest.errors import DataError
from dljob.suggest.inspection.table import TableFacts
from dljob.suggest.inspection.text import TextFacts
from dljob.suggest.subject import LANGUAGE_MODELLING, Options, read_subject

HEAD = ("a", "city", "day", "target")
ROWS = [
    (f"{i * 0.5}", "Köln" if i % 3 else "Bonn", f"2024-01-{1 + i % 28:02}", "ja" if i % 2 else "nein")
    for i in range(60)
]
NEW = [(f"{float(row[0]) + 1000}", *row[1:]) for row in ROWS[:20]]


def write(
    path: Path,
    rows: Sequence[Sequence[str]],
    head: Sequence[str] = HEAD,
    *,
    delimiter: str = ",",
    encoding: str = "utf-8",
) -> Path:
    lines = [delimiter.join(head), *(delimiter.join(row) for row in rows)]
    path.write_text("\n".join(lines) + "\n", encoding=encoding)
    return path


def facts(tmp_path: Path, test: Path, *, encoding: str = "utf-8") -> TableFacts:
    found = read_subject(Options(write(tmp_path / "train.csv", ROWS, encoding=encoding), test=test)).facts
    assert isinstance(found, TableFacts)
    return found


def test_other_order_and_more_columns_do_not_matter(tmp_path: Path) -> None:
    rows = [(*reversed(row), "more") for row in NEW]
    assert facts(tmp_path, write(tmp_path / "t.csv", rows, (*reversed(HEAD), "other"))).test_rows == 20


def test_memory_counts_the_rows_of_the_test_part(tmp_path: Path) -> None:
    """Fixed bug: the prediction of the memory left them out, however many."""
    train = write(tmp_path / "train.csv", ROWS)
    few, many = write(tmp_path / "few.csv", NEW[:1]), write(tmp_path / "many.csv", NEW[:1] * 1001)
    nbytes = [read_subject(Options(train, test=test)).source.memory_nbytes for test in (few, many)]
    assert nbytes[1] - nbytes[0] > 1000 * 600


def test_byte_order_mark_does_not_matter(tmp_path: Path) -> None:
    assert facts(tmp_path, write(tmp_path / "t.csv", NEW, encoding="utf-8-sig")).test_rows == 20


@pytest.mark.parametrize(
    ("place", "cell", "expected"),
    [
        (3, "viel", "1 of 20 rows of {} has a class that the training rows lack, such as 'viel'"),
        (0, "x", "Column 'a' of {} has 1 cell that is no number, such as 'x' in line 2. It counts as missing."),
        (2, "1.2.24", "Column 'day' of {} has 1 cell that is no date, such as '1.2.24' in line 2"),
    ],
)
def test_a_cell_that_cannot_be_judged_is_a_finding(tmp_path: Path, place: int, cell: str, expected: str) -> None:
    first = [*NEW[0][:place], cell, *NEW[0][place + 1 :]]
    test = write(tmp_path / "t.csv", [first, *NEW[1:]])
    assert any(expected.format(test) in text for text in facts(tmp_path, test).findings)


def test_categories_that_are_written_in_another_way_are_a_finding(tmp_path: Path) -> None:
    test = write(tmp_path / "t.csv", [(a, "KOELN", day, goal) for a, _, day, goal in NEW])
    assert any("has no category of the training rows" in text for text in facts(tmp_path, test).findings)


@pytest.mark.parametrize(
    ("rows", "head", "options", "expected"),
    [
        pytest.param(NEW, HEAD, {"delimiter": ";"}, "t.csv: found the delimiter ';'; expected ','", id="delimiter"),
        pytest.param(
            NEW, HEAD, {"encoding": "cp1252"}, "t.csv: found the encoding cp1252; expected utf-8", id="cp1252"
        ),
        pytest.param(NEW, HEAD, {"encoding": "utf-16"}, "t.csv: found the encoding utf-16", id="utf-16"),
        pytest.param(
            [row[1:] for row in NEW], HEAD[1:], {}, "t.csv: found no column 'a', but city, day, target", id="column"
        ),
        pytest.param(
            [(*row[:3], "viel") for row in NEW], HEAD, {}, "t.csv: line 2: column 'target': found 'viel'", id="classes"
        ),
        pytest.param(
            [(*row[:3], "") for row in NEW], HEAD, {}, "column 'target': found no value in 20 rows", id="no target"
        ),
        pytest.param(ROWS[:9], HEAD, {}, "9 rows with a target, all of which repeat rows", id="copies"),
        pytest.param([], HEAD, {}, "t.csv: found only a header", id="no row"),
    ],
)
def test_a_file_that_cannot_judge_is_one_error(
    tmp_path: Path, rows: list[tuple[str, ...]], head: tuple[str, ...], options: dict[str, str], expected: str
) -> None:
    test = write(tmp_path / "t.csv", rows, head, **options)  # type: ignore[arg-type]
    with pytest.raises(DataError) as error:
        facts(tmp_path, test)
    assert expected in str(error.value)


def test_utf_8_is_not_read_as_windows_1252(tmp_path: Path) -> None:
    """Fixed bug: the cells of the test part were read as mojibake, and so as categories that no training row has."""
    with pytest.raises(DataError, match="found the encoding utf-8; expected cp1252"):
        facts(tmp_path, write(tmp_path / "t.csv", NEW), encoding="cp1252")


def test_a_text_among_the_numbers_of_the_target_is_named_with_its_line(tmp_path: Path) -> None:
    train = write(tmp_path / "train.csv", [(*row[:3], f"{i * 1.5}") for i, row in enumerate(ROWS)])
    test = write(tmp_path / "t.csv", [(*row[:3], "abc" if i == 5 else f"{i}") for i, row in enumerate(NEW)])
    with pytest.raises(DataError, match=r"t\.csv: line 7: column 'target': found 'abc'; expected a number"):
        read_subject(Options(train, test=test))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("missing.csv", "--test: .*missing.csv: found no such file"), ("train.jsonl", "a file of the same format")],
)
def test_a_file_that_is_no_table_of_the_same_format(tmp_path: Path, name: str, expected: str) -> None:
    (tmp_path / "train.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(DataError, match=expected):
        facts(tmp_path, tmp_path / name)


class TestTexts:
    def text(self, words: int, seed: int = 1) -> str:
        draw = random.Random(seed)
        return " ".join("".join(draw.choices("abcdefghij", k=draw.randint(2, 9))) for _ in range(words))

    def test_a_language_model_needs_enough_text_to_be_judged(self, tmp_path: Path) -> None:
        """Fixed bug: a project was written whose training found no sample to judge by."""
        (tmp_path / "train.txt").write_text(self.text(3000))
        (tmp_path / "t.txt").write_text("some words")
        with pytest.raises(DataError, match=r"t\.txt: found 10 bytes of text that is not in .*expected at least 1,000"):
            read_subject(Options(tmp_path / "train.txt", test=tmp_path / "t.txt"))
        (tmp_path / "t.txt").write_text(self.text(300, seed=2))
        found = read_subject(Options(tmp_path / "train.txt", test=tmp_path / "t.txt")).facts
        assert isinstance(found, TextFacts) and found.test_documents == 1

    @pytest.mark.parametrize("name", ["train.txt", "missing"])
    def test_a_folder_is_judged_by_a_folder(self, tmp_path: Path, name: str) -> None:
        """Fixed bug: NotADirectoryError."""
        (tmp_path / "texts").mkdir()
        (tmp_path / "train.txt").write_text(self.text(3000))
        (tmp_path / "texts" / "a.txt").write_text(self.text(3000))
        with pytest.raises(DataError, match=r"--test: found .*; expected a folder of text files"):
            read_subject(Options(tmp_path / "texts", task=LANGUAGE_MODELLING, test=tmp_path / name))
