"""Read data of any format, and gather what recommendation and project need of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dljob.suggest.errors import DataError
from dljob.suggest.inspection.images import ImageFacts, inspect_images
from dljob.suggest.inspection.table import CLASSIFICATION, REGRESSION, TableFacts, inspect_table
from dljob.suggest.project import render
from dljob.suggest.reading.archive import is_archive, read_archives
from dljob.suggest.reading.images import Images, images_of_arrays, read_arrays, read_folder
from dljob.suggest.reading.records import SUFFIXES, read_any_table
from dljob.suggest.reading.table import Table
from dljob.suggest.recommendation import model

IMAGE_CLASSIFICATION = "image-classification"
TABULAR = {"tabular-classification": CLASSIFICATION, "tabular-regression": REGRESSION}
TASKS = (*TABULAR, IMAGE_CLASSIFICATION)

Facts = TableFacts | ImageFacts


@dataclass(frozen=True)
class Options:
    """What the user says about the data. None: found in the data."""

    data: Path
    task: str | None = None
    target: str | None = None
    test: Path | None = None
    delimiter: str | None = None
    encoding: str | None = None
    keep: tuple[str, ...] = ()
    image_size: int | None = None
    dataset_uri: str | None = None


@dataclass(frozen=True)
class Subject:
    """The data with its facts, and the functions that give models and render a project for the settings of one.

    The second argument of ``project`` is the limit of the training's time in seconds, or None.
    """

    facts: Facts
    source: render.Source
    models: Callable[[model.Baseline | None], list[model.Settings]]
    project: Callable[[model.Settings, float | None], dict[str, str]]
    arrays: Mapping[str, Any] | None = None
    """The images, which the project gets as ``images.npz``; None for other data."""


def read_subject(options: Options) -> Subject:
    """Return the data of ``options`` with its facts. Raise DataError if it has to be corrected."""
    path, suffix = options.data, options.data.suffix.lower()
    if not path.exists():
        raise DataError(
            f"{path}: found no such file or folder; expected data on this machine. Correct the path; --dataset-uri "
            "names the place from which a job reads the data."
        )
    if path.is_dir() or suffix == ".npz" or is_archive(path):
        return _images(options)
    if options.task == IMAGE_CLASSIFICATION:
        raise DataError(
            f"{path}: found a file; expected a folder with a folder for each class, a .tar archive, or an .npz file."
        )
    if suffix not in SUFFIXES:
        raise DataError(
            f"{path}: found the suffix {suffix or '(none)'}; expected a table ({', '.join(sorted(SUFFIXES))}), .npz, "
            ".tar, or a folder. Convert other files, such as those of Excel, to CSV first."
        )
    table = read_any_table(path, options.delimiter, options.encoding)
    return _table(options, table)


def _images(options: Options) -> Subject:
    path = options.data
    arrays = read_arrays(path) if path.suffix.lower() == ".npz" else None
    if arrays is not None and arrays["x"].ndim == 2:
        raise DataError(
            f"{path}: x: found the shape {arrays['x'].shape}; expected images of shape (n, height, width). "
            "Save a table as CSV, with a row of column names."
        )
    for option in ("target", "test", "delimiter", "encoding"):
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
    source = render.Source(images.path.resolve(), None, options.dataset_uri, samples, images.x[0].nbytes)
    return Subject(
        facts,
        source,
        lambda baseline: model.image_models(facts),
        lambda settings, limit_s: render.image_project(facts, source, settings, limit_s),
        images.arrays(),
    )


def _table(options: Options, table: Table) -> Subject:
    test = read_test(options.test, table) if options.test else None
    task = TABULAR[options.task] if options.task else None
    facts = inspect_table(table, options.target, task, test, options.keep)
    nbytes = sum(len(cell) + 1 for row in table.cells for cell in row)
    source = render.Source(
        table.path.resolve(),
        test.path.resolve() if test else None,
        options.dataset_uri,
        facts.rows if test else round(0.8 * facts.rows),
        max(1, nbytes // len(table.cells)),
    )
    return Subject(
        facts,
        source,
        lambda baseline: model.table_models(facts, baseline),
        lambda settings, limit_s: render.table_project(table, facts, source, settings, limit_s),
    )


def read_test(path: Path, table: Table) -> Table:
    """Return the test part in a file, which the written project reads like the training part ``table``."""
    form = SUFFIXES.get(path.suffix.lower())
    if form != table.form:
        raise DataError(f"--test: found {path}; expected a file of the same format as {table.path}. Convert it.")
    if form == "csv":
        return read_any_table(path, table.delimiter, table.encoding)
    return read_any_table(path, None, table.encoding if form == "jsonl" else None)
