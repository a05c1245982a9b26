"""Read documents: text files, folders of text files, or the column of a table that holds text."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from dljob.suggest.errors import DataError
from dljob.suggest.reading.images import PARTS
from dljob.suggest.reading.table import MAX_NBYTES, Table, decoded, read_bytes
from dljob.suggest.wording import counted

SUFFIXES = frozenset({".txt", ".text", ".md", ".rst"})
BLANK_NBYTES = 2**16
"""Larger files of blanks alone are errors, because nobody writes them on purpose."""
FILE, FOLDER, CLASS_FOLDERS = "file", "folder", "class folders"
"""Formats in which no table holds the documents."""


@dataclass(frozen=True)
class Texts:
    """Documents. ``labels``: the class of each, or empty. ``places``: where each document is, for messages."""

    path: Path
    documents: tuple[str, ...]
    labels: tuple[str, ...]
    places: tuple[str, ...]
    encoding: str
    form: str
    """FILE, FOLDER, CLASS_FOLDERS or the format of the table."""
    table: Table | None = None
    text: str = ""
    """Column with the text."""
    target: str = ""
    """Column with the class."""
    notes: tuple[str, ...] = ()


def text_files(path: Path) -> list[Path]:
    """Return the text files in a folder and below it, without hidden ones."""
    found = (file for file in sorted(path.rglob("*")) if file.suffix.lower() in SUFFIXES and file.is_file())
    return [file for file in found if not any(part.startswith(".") for part in file.relative_to(path).parts)]


def class_folders(path: Path) -> list[Path]:
    """Return the folders in ``path`` that hold text files."""
    return [c for c in sorted(path.iterdir()) if c.is_dir() and not c.name.startswith(".") and text_files(c)]


def separate_parts(path: Path) -> tuple[Path, Path] | None:
    """Return the folders of the training part and of the test part, or None without a separate test part."""
    folders = {child.name.lower(): child for child in path.iterdir() if child.is_dir()}
    train, test = (next((folders[name] for name in names if name in folders), None) for names in PARTS)
    return (train, test) if train is not None and test is not None else None


def read_file(path: Path, encoding: str | None = None) -> Texts:
    """Return one text file as a document. Raise DataError if it is empty or mixes encodings."""
    text, encoding, notes = decoded(path, read_bytes(path), encoding)
    return Texts(path, (text,), (), (path.name,), encoding, FILE, notes=notes)


def read_text_folder(path: Path, encoding: str | None = None) -> Texts:
    """Return the text files of a folder as documents. Raise DataError if encodings differ, or for too much text."""
    return _of_files(path, [(file, "") for file in text_files(path)], encoding, FOLDER)


def read_class_folders(path: Path, encoding: str | None = None) -> Texts:
    """Return the documents in ``path/CLASS/*``. Raise DataError like ``read_text_folder``, or for one class."""
    files = [(file, folder.name) for folder in class_folders(path) for file in text_files(folder)]
    if (count := len({label for _, label in files})) < 2:
        raise DataError(
            f"{path}: found documents of {count} classes; expected a folder for each of at least "
            "two classes. Sort the files into folders, or pass --task language-modelling."
        )
    return _of_files(path, files, encoding, CLASS_FOLDERS)


def _of_files(path: Path, files: Sequence[tuple[Path, str]], encoding: str | None, form: str) -> Texts:
    documents: list[str] = []
    labels: list[str] = []
    places: list[str] = []
    encodings: dict[str, Path] = {}
    nbytes = empty = 0
    for file, label in files:
        if file.stat().st_size <= BLANK_NBYTES and not file.read_bytes().strip():
            empty += 1
            continue
        raw = read_bytes(file)
        nbytes += len(raw)
        if nbytes > MAX_NBYTES:
            raise DataError(
                f"{path}: found more than {MAX_NBYTES >> 20} MiB of text; expected at most this. Pass less."
            )
        text, own, _ = decoded(file, raw, encoding)
        encodings.setdefault("ascii" if raw.isascii() and b"\0" not in raw else own, file)
        documents.append(text.strip() if label else text)
        labels += [label] if label else []
        places.append(str(file.relative_to(path)))
    if not documents:
        raise DataError(
            f"{path}: found no text ({counted(empty, 'empty file', 'empty files')}); expected files that end with "
            f"{', '.join(sorted(SUFFIXES))}. Check the path."
        )
    chosen, notes = _one_encoding(encodings)
    notes += [f"{counted(empty, 'empty file is', 'empty files are')} left out."] if empty else []
    return Texts(path, tuple(documents), tuple(labels), tuple(places), chosen, form, notes=tuple(notes))


def _one_encoding(encodings: dict[str, Path]) -> tuple[str, list[str]]:
    """Return the encoding that reads all files, and notes. ASCII files are in any of them but UTF-16 and UTF-32."""
    others = sorted(set(encodings) - {"ascii"})
    if set(others) <= {"utf-8", "utf-8-sig"}:
        return others[-1] if others else "utf-8", []
    if len(others) == 1 and (not others[0].startswith(("utf-16", "utf-32")) or "ascii" not in encodings):
        return others[0], [f"The files are not UTF-8. They were read as {others[0]}; pass --encoding if that is wrong."]
    first, second = list(encodings.items())[:2]
    raise DataError(
        f"{second[1]}: found the encoding {second[0]}, but {first[1]} has {first[0]}; expected one encoding in all "
        "files. Convert the files to UTF-8, or pass --encoding to read all in one encoding."
    )


def texts_of_table(table: Table, text: str, target: str | None, missing: Collection[str]) -> Texts:
    """Return the documents in the column ``text``. ``target``: column of their classes; None: none.

    Rows without a text or a class are left out, with a note. ``missing``: the cells that mean an unknown value.
    """
    own, goal = table.column(text), table.column(target) if target else None
    kept = [i for i, cell in enumerate(own) if cell not in missing and (goal is None or goal[i] not in missing)]
    notes = list(table.notes)
    if gap := len(own) - len(kept):
        first = table.lines[min(set(range(len(own))) - set(kept))]
        lacking = "a text or a class" if target else "a text"
        words = counted(gap, f"row without {lacking} is", f"rows without {lacking} are")
        notes.append(f"{words} left out; the first is {table.unit} {first}.")
    if not kept:
        raise DataError(
            f"{table.path}: column {text!r}: found no text"
            + (" with a class" if target else "")
            + "; expected a document in each row. Choose another --text or --target."
        )
    return Texts(
        table.path,
        tuple(own[i] for i in kept),
        tuple(goal[i] for i in kept) if goal is not None else (),
        tuple(f"{table.unit} {table.lines[i]}" for i in kept),
        table.encoding,
        table.form,
        table,
        text,
        target or "",
        tuple(notes),
    )
