"""JSON Lines: records become the cells of a table, and what cannot become one is named with its line."""

import json
from pathlib import Path

import pytest

from dljob.suggest.errors import DataError
from dljob.suggest.reading.records import read_any_table, read_json_lines


def write(path: Path, records: list[object]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def test_keys_are_columns_in_their_order(tmp_path: Path) -> None:
    table = read_json_lines(write(tmp_path / "a.jsonl", [{"b": 1, "a": 2.5}, {"c": True, "b": None}]))
    assert table.names == ("b", "a", "c")
    assert table.cells == (("1", "2.5", ""), ("", "", "True"))


def test_lines_count_from_one_and_blank_lines_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"a": 1}\n\n{"a": "x\u2028y"}\n', encoding="utf-8")
    table = read_json_lines(path)
    assert table.lines == (2, 4)
    assert table.column("a") == ["1", "x\u2028y"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        pytest.param(b"", "empty file", id="empty"),
        pytest.param(b'{"a": 1}\n{"a": 2\n', "line 2", id="cut off"),
        pytest.param(b'{"a": 1}\n[1]\n', "line 2: found '[1]'", id="array in a line"),
        pytest.param(b'[{"a": 1}]', "JSON array", id="one array"),
        pytest.param(b'{\n "data": [\n  {"a": 1}\n ]\n}', "line 1: found a JSON document of many lines", id="indented"),
        pytest.param(b'{"a": 1}\n{"a": [1, 2]}\n', "line 2: column 'a': found a list", id="list"),
        pytest.param(b'{"a": {"b": 1}}\n', "line 1: column 'a': found an object", id="object"),
        pytest.param(b'{"": 1}\n', "column with the name ''", id="no name"),
        pytest.param(b'{"a": "\\ud800"}\n', "line 1: column 'a': found half of a surrogate", id="surrogate"),
        pytest.param(b"{}\n", "found no record", id="no key"),
        pytest.param(b'{"a": "\xc3\xa9"}\n{"a": "\xe9"}\n', "line 2: found byte 0xe9", id="mixed encodings"),
    ],
)
def test_broken_line_is_named(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError) as error:
        read_json_lines(path)
    assert expected in str(error.value)
    assert str(error.value).startswith(str(path))


@pytest.mark.parametrize("options", [{"delimiter": ";"}, {"encoding": "utf-8"}])
def test_options_of_csv_are_rejected(tmp_path: Path, options: dict[str, str]) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=f"--{next(iter(options))}"):
        read_any_table(tmp_path / "a.parquet", **options)
