"""``dljob suggest``: look at data, recommend a model, and write a project that trains it."""

import argparse
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dljob.cli import files
from dljob.cli.errors import BadInputError
from dljob.cluster import ClusterView, cluster_view
from dljob.suggest.errors import DataError
from dljob.suggest.inspection.images import ImageFacts, inspect_images
from dljob.suggest.inspection.table import CLASSIFICATION, REGRESSION, TableFacts, inspect_table
from dljob.suggest.project import render
from dljob.suggest.reading.images import Images, images_of_arrays, read_arrays, read_folder
from dljob.suggest.reading.table import Table, read_table
from dljob.suggest.recommendation import model
from dljob.suggest.recommendation.page import page
from dljob.suggest.recommendation.prediction import predicted

TASKS = {"tabular-classification": CLASSIFICATION, "tabular-regression": REGRESSION, "image-classification": None}
TABLES = frozenset({".csv", ".tsv", ".txt", ".data", ".tab"})
BASELINE_LIMIT_S = 300.0


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "suggest",
        help="look at data, recommend a model and write a project that trains it",
        description="Look at a table (CSV, TSV), a folder of images or an .npz file. Print what it holds, what a "
        "scikit-learn baseline reaches, the recommended model with two alternatives, and the time, memory, energy and "
        "cost that the planner predicts. With --write, also write a project of PyTorch scripts and a manifest. The "
        "command exits with 2 if the data has to be corrected first.",
    )
    command.add_argument("data", metavar="DATA", help="a table, a folder with a folder for each class, or an .npz file")
    command.add_argument("--task", choices=TASKS, help="what to predict; default: by the data")
    command.add_argument("--target", metavar="COLUMN", help="the column to predict; default: by its name, or the last")
    command.add_argument("--test", metavar="FILE", help="a table for the evaluation; default: a fifth of the rows")
    command.add_argument("--write", metavar="DIR", help="write the project to this folder, which must be new or empty")
    command.add_argument(
        "--delimiter", metavar="CHARACTER", help="the character between columns; default: found in the file"
    )
    command.add_argument("--encoding", help="the encoding of the table; default: found in the file")
    command.add_argument(
        "--keep",
        metavar="COLUMN",
        action="append",
        default=[],
        help="use a column that would be left out; may be repeated",
    )
    command.add_argument(
        "--image-size",
        type=int,
        metavar="PIXELS",
        help="scale images of a folder to squares of this side; default: by their median size",
    )
    command.add_argument("--dataset-uri", metavar="URI", help="where a job reads the data, such as pvc://CLAIM/FILE")
    command.add_argument(
        "--cluster", metavar="FILE", help="predict for the cluster in this file; default: for this machine"
    )
    command.add_argument("--no-baseline", action="store_true", help="do not run the baseline")
    command.add_argument("--json", action="store_true", help="print one JSON document")
    command.set_defaults(run=run)


@dataclass(frozen=True)
class _Subject:
    """The data with its facts, and the function that renders a project for settings."""

    facts: TableFacts | ImageFacts
    source: render.Source
    models: Callable[[model.Baseline | None], list[model.Settings]]
    project: Callable[[model.Settings], dict[str, str]]
    images: Images | None = None


def run(given: argparse.Namespace) -> int:
    folder = _target_folder(given.write)
    try:
        subject = _subject(given)
    except DataError as error:
        raise BadInputError(str(error)) from None
    baseline = None if given.no_baseline else _baseline(subject)
    models = subject.models(baseline)
    view = files.cluster(given.cluster) if given.cluster else _this_machine()
    try:
        rows = [(settings, predicted(render.job(settings, subject.source), view)) for settings in models]
    except ValueError as error:
        raise BadInputError(f"--dataset-uri: {error}" if given.dataset_uri else str(error)) from None
    if given.json:
        print(json.dumps(_document(subject.facts, rows, baseline), indent=2))
    else:
        print("\n".join(page(subject.facts, rows, baseline)))
    if folder is not None:
        _write(folder, subject, models[0])
        if not given.json:
            print(f"\nWrote {folder}. Next: cd {folder} && python train.py")
    return 0


def _target_folder(name: str | None) -> Path | None:
    if name is None:
        return None
    folder = Path(name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInputError(f"--write: found {folder}, which is not empty; expected a new folder. Choose another name.")
    return folder


def _subject(given: argparse.Namespace) -> _Subject:
    path = Path(given.data)
    wanted = TASKS[given.task] if given.task else None
    if not path.exists():
        raise DataError(
            f"{path}: found no such file or folder; expected data on this machine. Correct the path; --dataset-uri "
            "names the place from which a job reads the data."
        )
    suffix = path.suffix.lower()
    if path.is_dir() or suffix == ".npz":
        arrays = None if path.is_dir() else read_arrays(path)
        if arrays is not None and arrays["x"].ndim == 2:
            raise DataError(
                f"{path}: x: found the shape {arrays['x'].shape}; expected images of shape (n, height, width). "
                "Save a table as CSV, with a row of column names."
            )
        _reject(given, "an image data set", "target", "test", "delimiter", "encoding")
        if wanted is not None:
            raise DataError(f"--task: found {given.task}; expected image-classification, because {path} holds images.")
        images = read_folder(path, given.image_size) if arrays is None else images_of_arrays(path, arrays)
        return _of_images(given, images)
    if given.task == "image-classification":
        raise DataError(f"{path}: found a file; expected a folder with a folder for each class, or an .npz file.")
    if suffix not in TABLES:
        raise DataError(
            f"{path}: found the suffix {suffix or '(none)'}; expected a table ({', '.join(sorted(TABLES))}), .npz, or "
            "a folder of images. Convert Parquet, Excel and JSON files to CSV first."
        )
    table = read_table(path, given.delimiter, given.encoding)
    test = read_table(Path(given.test), table.delimiter, table.encoding) if given.test else None
    return _of_table(given, table, test, wanted)


def _reject(given: argparse.Namespace, what: str, *options: str) -> None:
    for option in options:
        if getattr(given, option) is not None:
            raise DataError(f"--{option}: found this option for {what}; expected it for a table only. Remove it.")


def _of_table(given: argparse.Namespace, table: Table, test: Table | None, task: str | None) -> _Subject:
    facts = inspect_table(table, given.target, task, test, given.keep)
    nbytes = sum(len(cell) + 1 for row in table.cells for cell in row)
    source = render.Source(
        table.path.resolve(),
        test.path.resolve() if test else None,
        given.dataset_uri,
        facts.rows if test else round(0.8 * facts.rows),
        max(1, nbytes // len(table.cells)),
    )
    return _Subject(
        facts,
        source,
        lambda baseline: model.table_models(facts, baseline),
        lambda settings: render.table_project(table, facts, source, settings, None),
    )


def _of_images(given: argparse.Namespace, images: Images) -> _Subject:
    facts = inspect_images(images)
    samples = facts.images if facts.test_images else round(0.8 * facts.images)
    source = render.Source(images.path.resolve(), None, given.dataset_uri, samples, images.x[0].nbytes)
    return _Subject(
        facts,
        source,
        lambda baseline: model.image_models(facts),
        lambda settings: render.image_project(facts, source, settings, None),
        images,
    )


def _write(folder: Path, subject: _Subject, settings: model.Settings) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in subject.project(settings).items():
            (folder / name).write_text(text, encoding="utf-8")
        if subject.images is not None:
            packed = io.BytesIO()
            np.savez_compressed(packed, **subject.images.arrays())  # type: ignore[arg-type]
            (folder / "images.npz").write_bytes(packed.getvalue())
    except OSError as error:
        raise BadInputError(f"--write: {folder}: {error.strerror}. Choose another folder.") from None


def _baseline(subject: _Subject) -> model.Baseline | None:
    """Run the baseline of the project in a process of its own. Return None, with a line for the user, without it."""
    with tempfile.TemporaryDirectory() as folder:
        _write(Path(folder), subject, subject.models(None)[0])
        environment = {k: v for k, v in os.environ.items() if k not in ("DLJOB_DATASET", "SEED")}
        try:
            done = subprocess.run(
                [sys.executable, "baseline.py"],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=BASELINE_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            print(f"dljob: the baseline took more than {BASELINE_LIMIT_S:.0f} s and was stopped", file=sys.stderr)
            return None
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no output"]
        advice = ". Run pip install './operator[suggest]' in a clone of dljob, or pass --no-baseline"
        hint = advice if "No module named" in last[0] else ""
        print(f"dljob: the baseline failed: {last[0]:.300}{hint}", file=sys.stderr)
        return None
    found = json.loads(done.stdout)
    linear, trees = (model.Score(**found[name]) for name in ("linear", "trees"))
    return model.Baseline(found["scoring"], linear, trees, found.get("strength", 1.0))


def _this_machine() -> ClusterView:
    """Return this machine as a cluster of one CPU node."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return cluster_view({"nodes": [{"name": "this-machine", "cpu": len(os.sched_getaffinity(0)), "memory": memory}]})


def _document(facts: TableFacts | ImageFacts, rows: list[Any], baseline: model.Baseline | None) -> Mapping[str, Any]:
    return {
        "facts": asdict(facts),
        "baseline": None if baseline is None else asdict(baseline),
        "models": [{"settings": asdict(settings), "predicted": asdict(found)} for settings, found in rows],
    }
