"""Read data of any format, and gather what recommendation and project need of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dljob.suggest.errors import DataError, permission_checked
from dljob.suggest.inspection.columns import MISSING, Kind, inspect_column
from dljob.suggest.inspection.images import ImageFacts, inspect_images
from dljob.suggest.inspection.table import TableFacts, inspect_table
from dljob.suggest.inspection.target import CLASSIFICATION, REGRESSION, target_name
from dljob.suggest.inspection.text import TextFacts, inspect_texts
from dljob.suggest.project import render
from dljob.suggest.project.text import text_project
from dljob.suggest.reading.archive import is_archive, read_archives
from dljob.suggest.reading.evaluation_part import read_test
from dljob.suggest.reading.images import COPY, Images, has_images, images_of_arrays, read_arrays, read_folder
from dljob.suggest.reading.parquet import is_parquet_folder
from dljob.suggest.reading.records import SUFFIXES, read_any_table
from dljob.suggest.reading.table import PARQUET, Table, looks_delimited, numbers_between_blanks
from dljob.suggest.reading.text import SUFFIXES as TEXT_SUFFIXES
from dljob.suggest.reading.text import (
    Texts,
    class_folders,
    read_class_folders,
    read_file,
    read_text_folder,
    separate_parts,
    text_files,
    texts_of_table,
)
from dljob.suggest.recommendation import model, text
from dljob.suggest.wording import counted

IMAGE_CLASSIFICATION = "image-classification"
TABULAR = {"tabular-classification": CLASSIFICATION, "tabular-regression": REGRESSION}
TEXT_CLASSIFICATION, LANGUAGE_MODELLING = "text-classification", "language-modelling"
MIN_SIZE, MAX_SIZE = 4, 1024
TEXT_NAMES = ("text", "document", "content", "sentence", "review", "message", "body")
"""Usual names of a column with documents."""
TEXT_TASKS = (TEXT_CLASSIFICATION, LANGUAGE_MODELLING)
TASKS = (*TABULAR, IMAGE_CLASSIFICATION, *TEXT_TASKS)

# Memory of the data in the written scripts, at most. A test measures it.
ROW_NBYTES, CELL_NBYTES = 600, 260
"""Of a row, and of each cell: two dictionaries of texts, while the file is read."""
INPUT_NBYTES = 28
"""Of an input of the model: two float64 and three float32, while blocks are joined."""
PIXEL_NBYTES = 20
"""Of a byte of a pixel: two copies, and four float32."""
ARROW_NBYTES = 160 * 2**20
"""Of the package pyarrow, its threads and buffers, for Parquet. Measured with a file of 40 rows: 113 MiB."""
TEXT_NBYTES, DOCUMENT_NBYTES = 10, 8000
"""Of a byte of text: some copies of up to four bytes. Of a document: 256 numbers and weights of words, twice."""

Facts = TableFacts | ImageFacts | TextFacts


@dataclass(frozen=True)
class Options:
    """The options of ``dljob suggest`` about the data. A value of None is determined from the data."""

    data: Path
    task: str | None = None
    target: str | None = None
    text: str | None = None
    test: Path | None = None
    delimiter: str | None = None
    encoding: str | None = None
    keep: tuple[str, ...] = ()
    image_size: int | None = None
    dataset_uri: str | None = None
    moved_to: Path | None = None
    """Where the project keeps the data, if it is not ``data``."""
    copies: bool = True
    """True: a project that learns from images gets a scaled copy of them. False: it reads them from ``data``."""

    def final(self, path: Path) -> Path:
        """Return the absolute path from which the project reads what is at ``path`` now."""
        return self.moved_to.absolute() if self.moved_to and path == self.data else path.resolve()


@dataclass(frozen=True)
class Subject:
    """The user's data with the facts about it, and functions that recommend models and write a project for one.

    ``models``: returns the settings of the recommended model and its alternatives. ``project``: returns file name →
    content for the settings of a model and a limit of the training's time in seconds (None: no limit).
    """

    facts: Facts
    source: render.Source
    models: Callable[[model.Baseline | None], list[model.Settings]]
    project: Callable[[model.Settings, float | None], dict[str, str]]
    arrays: Mapping[str, Any] | None = None
    """The images, which the project gets as ``images.npz``; None for other data."""
    copied: Path | None = None
    """A file that the project keeps a copy of; None: the project reads the data where it is."""


@permission_checked()
def read_subject(options: Options) -> Subject:
    """Return the data of ``options`` with its facts. Raise DataError if it has to be corrected."""
    path, suffix = options.data, options.data.suffix.lower()
    if options.image_size is not None and not MIN_SIZE <= options.image_size <= MAX_SIZE:
        raise DataError(
            f"--image-size: found {options.image_size}; expected {MIN_SIZE} to {MAX_SIZE} pixels. Correct it."
        )
    if not path.exists():
        raise DataError(
            f"{path}: found no such file or folder; expected data on this machine. Correct the path; --dataset-uri "
            "names the place from which a job reads the data."
        )
    if not path.is_dir() and not path.is_file():
        raise DataError(f"{path}: found a pipe or a device; expected a file or a folder. Write the data to a file.")
    if path.is_dir() and not is_archive(path) and not has_images(path):
        _check_folder(path, options.task)
    if options.task != IMAGE_CLASSIFICATION and not has_images(path) and is_parquet_folder(path):
        return _of_table(options)
    if path.is_dir() and not is_archive(path) and _holds_text(options):
        return _folder(options)
    if path.is_dir() or suffix == ".npz" or is_archive(path):
        return _images(options)
    if _is_plain_text(options):
        return _of_texts(options, read_file(path, options.encoding), None)
    if options.task == IMAGE_CLASSIFICATION:
        raise DataError(
            f"{path}: found a file; expected a folder with a folder for each class, a .tar archive, or an .npz file. "
            "Unpack other archives, such as .zip, into a folder."
        )
    if suffix not in SUFFIXES:
        raise DataError(
            f"{path}: found the suffix {suffix or '(none)'}; expected a table ({', '.join(sorted(SUFFIXES))}), .npz, "
            ".tar, or a folder. Unpack packed files, and convert others, such as those of Excel, to CSV first."
        )
    return _of_table(options)


def _check_folder(path: Path, task: str | None) -> None:
    """Raise DataError for an empty folder, and for one of tables that are no Parquet files and of nothing else."""
    files = [file for file in sorted(path.rglob("*")) if file.is_file()]
    if not files and task is None:
        raise DataError(f"{path}: found a folder without files; expected data. Check the path.")
    tables = [f for f in files if f.suffix.lower() in SUFFIXES and f.suffix.lower() not in TEXT_SUFFIXES]
    tables = [file for file in tables if SUFFIXES[file.suffix.lower()] != PARQUET]
    if tables and not text_files(path) and not is_parquet_folder(path):
        raise DataError(
            f"{path}: found a folder with {counted(len(tables), 'table', 'tables')}, such as {tables[0].name}; "
            "expected one file. Pass the file, or join the files into one."
        )


def _of_table(options: Options) -> Subject:
    """Return the data of a table: of documents, or of columns."""
    path = options.data
    one_column = options.task == LANGUAGE_MODELLING
    table = read_any_table(path, options.delimiter, options.encoding, one_column=one_column)
    task, column, target = table_task(table, options.task, options.text, options.target)
    if task in TEXT_TASKS:
        classify = task == TEXT_CLASSIFICATION
        test = read_test(options.test, table) if options.test else None
        if test is not None and (lacking := {column, *([target] if classify else [])} - set(test.names)):
            raise DataError(f"--test: {test.path}: found no column {min(lacking)!r}; expected it as in {table.path}.")
        return _of_texts(
            options,
            texts_of_table(table, column, target if classify else None, MISSING),
            texts_of_table(test, column, target if classify else None, MISSING) if test else None,
        )
    return _table(options, table)


def table_task(table: Table, task: str | None, text: str | None, target: str | None) -> tuple[str | None, str, str]:
    """Return (task, column of the texts, column of the classes) of a table of documents.

    For any other table, the task is None and the columns are empty. ``task``, ``text``, ``target``: the user's options;
    None: not given. Without options, a table contains documents if its only column besides the target has free text.
    """
    for option, name in (("--text", text), ("--target", target)):
        if name is not None and name not in table.names:
            shown = ", ".join(table.names[:12])
            raise DataError(f"{option}: found {name!r}; expected a column of {table.path}: {shown}. Correct it.")
    if task is not None and task not in TEXT_TASKS:
        if text is not None:
            raise DataError(f"--text: found {text!r} with --task {task}; expected a task of texts. Remove it.")
        return None, "", ""
    kinds = {name: inspect_column(name, table.column(name)).kind for name in table.names}
    goal = target or target_name(table) or next((n for n in reversed(table.names) if n != text), "")
    free = [name for name, kind in kinds.items() if kind is Kind.TEXT and name != goal]
    if task is None and text is None:
        ignored = (Kind.CONSTANT, Kind.EMPTY, Kind.IDENTIFIER)
        own = {name: kind for name, kind in kinds.items() if name}  # An index without a name tells nothing.
        others = [name for name, kind in own.items() if name != goal and name not in free and kind not in ignored]
        if len(table.names) == 1 and kinds[table.names[0]] is Kind.TEXT:
            return LANGUAGE_MODELLING, table.names[0], ""
        if len(free) != 1 or others:
            return None, "", ""
    if text is None:
        named = [name for name in table.names if name.strip().lower() in TEXT_NAMES]
        candidates = free or named or [n for n in table.names if n != goal] or list(table.names)
        if len(candidates) > 1:
            candidates = [name for name in candidates if name in named] or candidates
        if len(candidates) != 1:
            raise DataError(
                f"{table.path}: found {len(candidates)} columns that may hold the text: {', '.join(candidates[:12])}; "
                "expected one. Pass --text COLUMN."
            )
        text = candidates[0]
    if task == LANGUAGE_MODELLING:
        return LANGUAGE_MODELLING, text, ""
    if goal in ("", text):
        raise DataError(
            f"{table.path}: found no column of classes beside {text!r}; expected one for {TEXT_CLASSIFICATION}. Pass "
            f"--target COLUMN, or --task {LANGUAGE_MODELLING}."
        )
    return TEXT_CLASSIFICATION, text, goal


def _holds_text(options: Options) -> bool:
    """Return True if a folder is to be read as documents: by the task, or because it has text files, but no images."""
    if options.task is not None:
        return options.task in TEXT_TASKS
    return bool(text_files(options.data)) and not has_images(options.data)


def _is_plain_text(options: Options) -> bool:
    """Return True for a file without columns: by its suffix, or a .txt whose lines have no delimiter in common."""
    path, suffix = options.data, options.data.suffix.lower()
    if options.image_size is not None and not MIN_SIZE <= options.image_size <= MAX_SIZE:
        raise DataError(
            f"--image-size: found {options.image_size}; expected {MIN_SIZE} to {MAX_SIZE} pixels. Correct it."
        )
    if options.task not in (None, LANGUAGE_MODELLING) or options.text or options.target or options.delimiter:
        return False
    if suffix not in SUFFIXES:
        return suffix in TEXT_SUFFIXES or options.task == LANGUAGE_MODELLING
    return suffix == ".txt" and not looks_delimited(path) and not numbers_between_blanks(path)


def _folder(options: Options) -> Subject:
    path = options.data
    for option in ("target", "text", "delimiter"):
        if getattr(options, option) is not None:
            raise DataError(f"--{option}: found this option for a folder; expected it for a table only. Remove it.")
    if not text_files(path):
        raise DataError(f"{path}: found no text file; expected files that end with {', '.join(sorted(TEXT_SUFFIXES))}.")
    parts = separate_parts(path)
    train = parts[0] if parts else path
    test = options.test or (parts[1] if parts else None)
    if test is not None and not test.is_dir():
        raise DataError(f"--test: found {test}; expected a folder of text files, as {path} is one. Pass a folder.")
    classify = options.task == TEXT_CLASSIFICATION or (options.task is None and len(class_folders(train)) > 1)
    read = read_class_folders if classify else read_text_folder
    texts = read(train, options.encoding)
    training_folder = train.name if parts and options.test is None else ""
    return _of_texts(options, texts, read(test, options.encoding) if test else None, training_folder)


def _of_texts(options: Options, texts: Texts, test: Texts | None, training_folder: str = "") -> Subject:
    if test is None and options.test is not None:
        test = read_file(options.test, texts.encoding)
    if test is not None and test.encoding != texts.encoding:
        raise DataError(
            f"{test.path}: found the encoding {test.encoding}; expected {texts.encoding}, as in {texts.path}. Convert "
            "one of them, or pass --encoding."
        )
    facts = inspect_texts(texts, test)
    held = sum(len(document.encode("utf-8", "replace")) for document in test.documents) if test else 0
    memory = TEXT_NBYTES * (facts.nbytes + held)
    if facts.classes:
        samples = facts.documents if test else round(0.8 * facts.documents)
        nbytes = max(1, facts.nbytes // facts.documents)
        memory += DOCUMENT_NBYTES * (facts.documents + (len(test.documents) if test else 0))
    else:
        samples, nbytes = text.language_sequences(facts), text.POSITIONS
    memory += ARROW_NBYTES if texts.form == PARQUET else 0
    source = render.Source(
        options.final(texts.path.parent if training_folder else texts.path),
        test.path.resolve() if test else None,
        options.dataset_uri,
        samples,
        nbytes,
        memory,
        texts.form == PARQUET,
        training_folder,
    )
    return Subject(
        facts,
        source,
        lambda baseline: text.text_models(facts, baseline) if facts.classes else text.language_models(facts),
        lambda settings, limit_s: text_project(texts, facts, source, settings, limit_s),
    )


def _images(options: Options) -> Subject:
    path = options.data
    arrays = read_arrays(path) if path.suffix.lower() == ".npz" else None
    if arrays is not None and arrays["x"].ndim == 2:
        raise DataError(
            f"{path}: x: found the shape {arrays['x'].shape}; expected images of shape (n, height, width). "
            "Save a table as CSV, with a row of column names."
        )
    for option in ("target", "text", "test", "delimiter", "encoding"):
        if getattr(options, option) is not None:
            raise DataError(f"--{option}: found this option for images; expected it for other data only. Remove it.")
    if options.task not in (None, IMAGE_CLASSIFICATION):
        raise DataError(f"--task: found {options.task}; expected {IMAGE_CLASSIFICATION}, because {path} holds images.")
    if arrays is not None:
        images = images_of_arrays(path, arrays)
    elif is_archive(path):
        images = read_archives(path, options.image_size)
    else:
        images = read_folder(path, options.image_size)
    return _of_images(options, images)


def _of_images(options: Options, images: Images) -> Subject:
    facts = inspect_images(images)
    samples = facts.images if facts.test_images else round(0.8 * facts.images)
    memory = PIXEL_NBYTES * (images.x.nbytes + (images.x_test.nbytes if images.x_test is not None else 0))
    memory += 0 if options.copies else images.held_nbytes
    source = render.Source(options.final(images.path), None, options.dataset_uri, samples, images.x[0].nbytes, memory)
    return Subject(
        facts,
        source,
        lambda baseline: model.image_models(facts),
        lambda settings, limit_s: render.image_project(
            facts, source, settings, limit_s, form=COPY if options.copies else images.form, parts=images.parts
        ),
        images.arrays() if options.copies else None,
    )


def _table(options: Options, table: Table) -> Subject:
    test = read_test(options.test, table) if options.test else None
    task = TABULAR[options.task] if options.task else None
    facts = inspect_table(table, options.target, task, test, options.keep)
    nbytes = sum(len(cell) + 1 for row in table.cells for cell in row)
    held = sum(len(cell) + 1 for row in test.cells for cell in row) if test else 0
    of_row = ROW_NBYTES + CELL_NBYTES * len(table.names) + INPUT_NBYTES * model.table_inputs(facts)
    memory = of_row * (facts.rows + (len(test.cells) if test else 0)) + nbytes + held
    memory += ARROW_NBYTES if table.form == PARQUET else 0
    source = render.Source(
        options.final(table.path),
        test.path.resolve() if test else None,
        options.dataset_uri,
        facts.rows if test else round(0.8 * facts.rows),
        max(1, nbytes // len(table.cells)),
        memory,
        table.form == PARQUET,
    )
    return Subject(
        facts,
        source,
        lambda baseline: model.table_models(facts, baseline),
        lambda settings, limit_s: render.table_project(table, facts, source, settings, limit_s),
    )
