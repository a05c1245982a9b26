"""Traps in tables: each gives findings and a model, or one clear error with file, row or column, and remedy."""

import random
from pathlib import Path

import pytest

from dljob.suggest.errors import DataError
from dljob.suggest.inspection.columns import Kind, inspect_column, number
from dljob.suggest.inspection.table import TableFacts, inspect_table
from dljob.suggest.reading.table import read_table


def rows(count: int = 60, header: str = "age,income,bought", extra: str = "") -> list[str]:
    """Return the lines of a table whose classes follow the age."""
    draw = random.Random(1)
    ages = [draw.randint(18, 80) for _ in range(count)]
    return [header, *(f"{a},{draw.random():.4f}{extra},{'yes' if a > 45 else 'no'}" for a in ages)]


def facts(path: Path, lines: list[str], target: str | None = "bought", **options: str | None) -> TableFacts:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return inspect_table(read_table(path), target, options.get("task"))


def names(found: TableFacts) -> set[str]:
    return {column.name for column in found.columns}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data.csv"


class TestReading:
    @pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
    def test_delimiter_is_found(self, path: Path, delimiter: str) -> None:
        path.write_text("\n".join(line.replace(",", delimiter) for line in rows()), encoding="utf-8")
        table = read_table(path)
        assert (table.delimiter, table.names) == (delimiter, ("age", "income", "bought"))

    def test_decimal_commas_are_numbers(self, path: Path) -> None:
        lines = [line.replace(",", ";").replace(".", ",") for line in rows()]
        found = facts(path, lines)
        assert found.decimal == ","
        assert {column.kind for column in found.columns} == {Kind.NUMBER}

    def test_an_index_without_a_name_is_left_out(self, path: Path) -> None:
        """``DataFrame.to_csv`` and R's ``write.csv`` write it. Fixed bug: an error that asked for its name."""
        found = facts(path, [",age,income,bought", *(f"{3 * i % 61},{line}" for i, line in enumerate(rows()[1:]))])
        assert names(found) == {"age", "income"} and "pandas and R" in found.left_out[""]
        with pytest.raises(DataError, match="found no name of column 2"):
            facts(path, ["age,,bought", *rows()[1:]])

    def test_windows_1252_is_read_with_a_note(self, path: Path) -> None:
        path.write_bytes("\n".join([*rows(), "30,0.1,größe"]).encode("cp1252"))
        table = read_table(path)
        assert table.encoding == "cp1252"
        assert "line 62" in table.notes[0]

    @pytest.mark.parametrize(
        ("content", "expected"),
        [
            pytest.param(b"", "empty", id="empty"),
            pytest.param(b" \n\n", "empty", id="blank"),
            pytest.param(b"\n" * 300 + b"a\n1\n", "one column", id="blank lines before"),
            pytest.param(b"a,b\n", "only a header", id="header alone"),
            pytest.param(b"a,b\n1,2\n1,2,3\n", "line 3: found 3 fields", id="one field too many"),
            pytest.param(b"a\n1\n2\n", "one column", id="one column"),
            pytest.param(b"a,a\n1,2\n", "two columns 'a'", id="equal names"),
            pytest.param(b"a,\n1,2\n", "no name of column 2", id="no name"),
            pytest.param(b"1,2\n3,4\n", "names of the columns", id="no header"),
            pytest.param(b"a,b\n1,\xc3\xa9\n2,\xe9\n", "line 3: found byte 0xe9", id="mixed encodings"),
            pytest.param(b"a,b\n1,\x00\n", "line 2: found a NUL", id="binary"),
        ],
    )
    def test_broken_file_is_named_with_the_line(self, path: Path, content: bytes, expected: str) -> None:
        path.write_bytes(content)
        with pytest.raises(DataError) as error:
            read_table(path)
        assert expected in str(error.value)
        assert str(error.value).startswith(str(path))


class TestColumns:
    @pytest.mark.parametrize(
        ("cells", "kind"),
        [
            (["1", "2.5", "NA"], Kind.NUMBER),
            (["red", "blue", "red"], Kind.CATEGORY),
            (["2024-01-31", "2023-12-01"], Kind.DATE),
            (["31.12.2023", "01.02.2024"], Kind.DATE),
            (["2023-12-31T10:00:00", "2024-02-01T10:00:00.25", "2024-02-01 10:00Z"], Kind.DATE),
            (["2023-12-31T10:00:00", "2024-02-31T10:00:00.25"], Kind.CATEGORY),
            (["x", "x", "x"], Kind.CONSTANT),
            (["", "NA"], Kind.EMPTY),
            ([str(i) for i in range(30)], Kind.IDENTIFIER),
            ([f"user-{i}" for i in range(30)], Kind.IDENTIFIER),
            ([f"{i} is a long remark" for i in range(30)], Kind.TEXT),
            ([str(i * i * 37) for i in range(30)], Kind.NUMBER),
        ],
    )
    def test_kind(self, cells: list[str], kind: Kind) -> None:
        assert inspect_column("x", cells).kind is kind

    def test_percent_signs_are_numbers(self) -> None:
        assert inspect_column("x", [f"{i % 7}.5%" for i in range(30)]).kind is Kind.NUMBER

    def test_few_words_among_numbers_count_as_missing(self) -> None:
        column = inspect_column("x", [*(str(i % 7) for i in range(99)), "unknown"])
        assert (column.kind, column.invalid, column.first_invalid) == (Kind.NUMBER, 1, 99)


class TestTraps:
    def test_constant_column_is_left_out(self, path: Path) -> None:
        found = facts(path, rows(header="age,income,fixed,bought", extra=",7"))
        assert "fixed" in found.left_out

    def test_identifier_that_predicts_the_target_is_left_out(self, path: Path) -> None:
        lines = ["id,age,bought", *(f"{i},{20 + i % 9},{'yes' if i < 30 else 'no'}" for i in range(60))]
        found = facts(path, lines)
        assert "identifier" in found.left_out["id"]

    def test_copy_of_the_target_is_left_out_unless_kept(self, path: Path) -> None:
        lines = ["age,flag,bought", *(f"{20 + i % 9},{i % 2},{'yes' if i % 2 else 'no'}" for i in range(60))]
        assert "leak" in facts(path, lines).left_out["flag"]
        kept = inspect_table(read_table(path), "bought", None, keep=["flag"])
        assert "flag" in names(kept)
        assert any("'flag' is used because of --keep" in text and "(a leak)" in text for text in kept.findings)

    @pytest.mark.parametrize(("prefix", "kind"), [("", Kind.NUMBER), ("user-", Kind.CATEGORY)])
    def test_identifier_is_kept_on_request_with_a_warning(self, path: Path, prefix: str, kind: Kind) -> None:
        """Fixed bug: an identifier was left out although the user had named it, because "it holds identifier data"."""
        lines = ["id,age,bought", *(f"{prefix}{i},{20 + i % 9},{'yes' if i < 30 else 'no'}" for i in range(60))]
        assert "id" in facts(path, lines).left_out
        found = inspect_table(read_table(path), "bought", None, keep=["id"])
        assert [column.kind for column in found.columns if column.name == "id"] == [kind] and not found.left_out
        assert any("'id' is used because of --keep" in text and "(a leak)" in text for text in found.findings)

    def test_constant_column_has_nothing_to_keep(self, path: Path) -> None:
        lines = rows(header="age,income,fixed,bought", extra=",7")
        facts(path, lines)
        found = inspect_table(read_table(path), "bought", None, keep=["fixed"])
        assert found.left_out["fixed"].endswith("so --keep has no effect")

    def test_rare_class_is_found(self, path: Path) -> None:
        lines = ["age,bought", *(f"{i % 50 + i / 7:.3f},{'yes' if i % 100 == 0 else 'no'}" for i in range(1000))]
        found = facts(path, lines)
        assert found.rare
        assert any("1.0%" in text for text in found.findings)

    def test_outlier_of_the_target_is_found_with_its_line(self, path: Path) -> None:
        found = facts(path, ["a,y", *(f"{i % 7},{1e9 if i == 7 else i / 7:.4f}" for i in range(60))], "y")
        assert any("line 9" in text for text in found.findings)

    def test_wrong_delimiter_is_an_error_that_names_the_option(self, path: Path) -> None:
        path.write_text("\n".join(rows()), encoding="utf-8")
        with pytest.raises(DataError, match="--delimiter"):
            read_table(path, ";")

    def test_commas_that_may_separate_thousands_are_found(self, path: Path) -> None:
        lines = ["price;bought", *(f"{1 + i % 9},{100 + i};{'yes' if i % 2 else 'no'}" for i in range(60))]
        assert any("'1,100' in line 2" in text for text in facts(path, lines).findings)

    def test_points_stay_decimal_beside_a_column_with_commas(self) -> None:
        assert (number("0.5", ","), number("0,5", ",")) == (0.5, 0.5)

    def test_classes_of_equal_rows_leave_nothing_to_judge(self, path: Path) -> None:
        lines = ["a,b,bought", *(f"{i % 2},{i % 2},{'yes' if i % 2 else 'no'}" for i in range(60))]
        path.write_text("\n".join(lines), encoding="utf-8")
        with pytest.raises(DataError, match="differ in no column"):
            inspect_table(read_table(path), "bought", None, keep=["a"])

    def test_long_cells_are_read(self, path: Path) -> None:
        path.write_text("\n".join([*rows(), f"30,0.5,{'x' * 200_000}"]), encoding="utf-8")
        assert len(read_table(path).cells[-1][2]) == 200_000

    def test_many_categories_are_found(self, path: Path) -> None:
        lines = ["city,age,bought", *(f"c{i % 10_000},{i % 60},{'yes' if i % 3 else 'no'}" for i in range(20_000))]
        found = facts(path, lines)
        assert any("10,000 categories" in text for text in found.findings)

    def test_rows_without_a_target_are_left_out(self, path: Path) -> None:
        found = facts(path, [*rows(), "20,0.5,", "30,0.5,NA"])
        assert found.rows == 60
        assert any("2 rows without a target" in text and "line 62" in text for text in found.findings)

    def test_more_columns_than_rows_are_found(self, path: Path) -> None:
        draw = random.Random(2)
        lines = [",".join([*(f"x{j}" for j in range(40)), "bought"])]
        lines += [",".join([*(f"{draw.random():.3f}" for _ in range(40)), "yes" if i % 2 else "no"]) for i in range(20)]
        assert any("more columns" in text for text in facts(path, lines).findings)

    @pytest.mark.parametrize(
        ("lines", "target", "task", "expected"),
        [
            pytest.param(rows(), "price", None, "--target: found 'price'", id="unknown target"),
            pytest.param(["a,b", *(f"{i},1" for i in range(30))], "b", None, "'1' in all rows", id="constant target"),
            pytest.param(["a,b", *(f"{i}," for i in range(30))], "b", None, "found no value", id="no target"),
            pytest.param(["a,b", *(f"{i % 7},u{i}" for i in range(60))], "b", None, "60 classes", id="names as target"),
            pytest.param(rows(), "bought", "regression", "line 2", id="words in a regression"),
            pytest.param(rows(5), "bought", None, "at least 10", id="five rows"),
        ],
    )
    def test_impossible_target_is_an_error(
        self, path: Path, lines: list[str], target: str, task: str | None, expected: str
    ) -> None:
        with pytest.raises(DataError) as error:
            facts(path, lines, target, task=task)
        assert expected in str(error.value)

    def test_test_part_that_repeats_training_rows(self, path: Path, tmp_path: Path) -> None:
        facts(path, rows())
        other = tmp_path / "test.csv"
        other.write_text("\n".join([*rows()[:11], "99,0.77,yes"]), encoding="utf-8")
        found = inspect_table(read_table(path), "bought", None, read_table(other))
        assert found.test_rows == 1
        other.write_text("\n".join(rows()[:11]), encoding="utf-8")
        with pytest.raises(DataError, match="all of which repeat"):
            inspect_table(read_table(path), "bought", None, read_table(other))

    def test_test_part_with_other_classes(self, path: Path, tmp_path: Path) -> None:
        """Fixed bug: with 1.0 in place of 1, the training ended with an AttributeError after its last step."""
        facts(path, rows())
        other = tmp_path / "test.csv"
        other.write_text("age,income,bought\n99,0.77,Yes\n98,0.66,No\n", encoding="utf-8")
        with pytest.raises(
            DataError, match=r"test\.csv: line 2: column 'bought': found 'Yes'; expected its classes .*: .*yes"
        ):
            inspect_table(read_table(path), "bought", None, read_table(other))
        other.write_text("age,income,bought\n99,0.77,yes\n98,0.66,maybe\n", encoding="utf-8")
        found = inspect_table(read_table(path), "bought", None, read_table(other))
        assert found.test_rows == 2
        assert any("1 of 2 rows" in text and "'maybe'" in text for text in found.findings)

    def test_test_part_with_words_in_a_regression(self, path: Path, tmp_path: Path) -> None:
        facts(path, rows(), "income")
        other = tmp_path / "test.csv"
        other.write_text("age,income,bought\n99,0.77,yes\n98,unknown,no\n", encoding="utf-8")
        with pytest.raises(DataError, match=r"column 'income': found 'unknown'; expected a number in each row"):
            inspect_table(read_table(path), "income", None, read_table(other))
