"""``dljob suggest``: look at data, recommend a model, and write a project that trains it."""

import argparse
import json
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dljob.client import files
from dljob.client.errors import BadInputError
from dljob.cluster import ClusterView, cluster_view
from dljob.suggest.errors import DataError
from dljob.suggest.project import render
from dljob.suggest.reading.remote import copy_of, is_uri
from dljob.suggest.recommendation import model
from dljob.suggest.recommendation.accuracy import accuracy_class
from dljob.suggest.recommendation.limit import NO_LIMIT, START_S, fitted, race_nbytes, with_race
from dljob.suggest.recommendation.page import limit_lines, page
from dljob.suggest.recommendation.prediction import Prediction, predicted
from dljob.suggest.subject import TASKS, Facts, Options, Subject, read_subject
from dljob.suggest.trial import BASELINE_LIMIT_S, TrialError, baseline, can_train, pace, write

MOST_PACE_S = 60.0
"""Longest training that only measures the pace."""


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "suggest",
        help="look at data, recommend a model and write a project that trains it",
        description="Look at a table (CSV, TSV, JSON Lines, Parquet), or images (folder, WebDataset archive, .npz), "
        "or text (files, folders). Print what it holds, what a baseline without deep learning reaches, the recommended "
        "model with two alternatives, and the time, memory, energy and cost that the planner predicts. With --write, "
        "also write a project of PyTorch scripts and a manifest. The command exits with 2 if the data has to be "
        "corrected first.",
    )
    command.add_argument(
        "data",
        metavar="DATA",
        help="a table, a text file, a folder with a folder for each class, .tar or .npz; also a file at a URI",
    )
    command.add_argument("--task", choices=TASKS, help="what to predict; default: by the data")
    command.add_argument("--target", metavar="COLUMN", help="the column to predict; default: by its name, or the last")
    command.add_argument("--text", metavar="COLUMN", help="the column with the texts; default: the one with free text")
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
    command.add_argument(
        "--within",
        metavar="TIME",
        help="limit of this command and of the training together, such as 20m: epochs, or the model, are cut to fit",
    )
    command.add_argument("--no-baseline", action="store_true", help="do not run the baseline")
    command.add_argument("--json", action="store_true", help="print one JSON document")
    command.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    began_s = time.monotonic()
    folder = _target_folder(given.write)
    limit_s = _seconds(given.within)
    with tempfile.TemporaryDirectory() as temporary:
        return _run(given, began_s, limit_s, folder, Path(temporary))


def _run(given: argparse.Namespace, began_s: float, limit_s: float | None, folder: Path | None, temporary: Path) -> int:
    """Look at the data and write the project. ``temporary``: a folder for a copy of data at a URI.

    ``began_s``: time when the command began. ``limit_s``: limit of its run time in seconds; None: no limit.
    """
    remote = is_uri(given.data)
    if remote and given.test:
        raise BadInputError(
            f"--test: found {given.test} for data at a URI; expected both on this machine. Download the data first."
        )
    path = Path(given.data)
    try:
        path = copy_of(given.data, temporary) if remote else path
        if folder is not None and path.is_dir() and folder.resolve().is_relative_to(path.resolve()):
            raise BadInputError(
                f"--write: found {folder}, which is in {given.data}; expected a folder elsewhere, because the files of "
                "the project would become data. Choose another folder."
            )
        subject = read_subject(_options(given, path))
    except DataError as error:
        # Users do not know the path of the copy.
        raise BadInputError(str(error).replace(str(path), given.data) if remote else str(error)) from None
    if remote:
        subject = replace(subject, copied=path)
    reading_s = time.monotonic() - began_s
    if limit_s is not None and limit_s < (least_s := 2 * (START_S + reading_s)):
        raise BadInputError(
            f"--within: found {given.within}; expected at least {math.ceil(least_s)}s, because the start of a training "
            "and reading the data take time. Pass a longer limit."
        )
    found = None if given.no_baseline else _baseline(subject, limit_s)
    view = files.cluster(given.cluster) if given.cluster is not None else this_machine()
    here = given.cluster is None

    def predict(settings: model.Settings) -> Prediction:
        return predicted(render.job(settings, subject.source), view, subject.source.memory_nbytes, here=here)

    models, notes, left_s, race = subject.models(found), [], None, NO_LIMIT
    try:
        if limit_s is None:
            rows = [(settings, predict(settings)) for settings in models]
        else:
            pace = _pace(subject, models[0], predict, limit_s) if here else None
            left_s = limit_s - (time.monotonic() - began_s)
            if left_s < START_S + reading_s + 1:
                raise BadInputError(
                    f"--within: found {given.within}, of which reading and baseline left {max(0.0, left_s):.0f} s; "
                    f"expected at least {limit_s - left_s + 2 * (START_S + reading_s):.0f}s. Pass a longer limit, a "
                    "sample of the data, or --no-baseline."
                )
            rows = fitted(models, predict, left_s, reading_s, pace.factor if pace else 1.0)
            if pace is not None:
                rows = [
                    (s, replace(f, memory_nbytes=max(f.memory_nbytes, pace.memory_nbytes))) for s, f in rows[:1]
                ] + rows[1:]
            left_s = limit_s - (time.monotonic() - began_s)
            chosen, race = with_race(rows[0], models, left_s, reading_s, pace.factor if pace else 1.0)
            memory_nbytes = rows[0][1].memory_nbytes + race_nbytes(chosen)
            rows = [(chosen, replace(rows[0][1], memory_nbytes=memory_nbytes)), *rows[1:]]
            notes = limit_lines(limit_s, left_s, rows[0], models, reading_s, pace.factor if pace else None)
    except ValueError as error:
        raise BadInputError(f"--dataset-uri: {error}" if given.dataset_uri else str(error)) from None
    if given.json:
        print(json.dumps(_document(subject.facts, rows, found, left_s, race), indent=2))
    else:
        print("\n".join([*page(subject.facts, rows, found, race), *notes]))
    if folder is not None:
        try:
            write(folder, subject, rows[0][0], left_s, found)
        except OSError as error:
            text = f"--write: found {folder}, which cannot be written ({error.strerror}); expected a writable folder."
            raise BadInputError(f"{text} Choose another folder.") from None
        if not given.json:
            print(f"\nWrote {folder}. Next: cd {folder} && python train.py")
    return 0


@dataclass(frozen=True)
class _Measured:
    factor: float
    """Measured seconds of a step for each predicted second."""
    memory_nbytes: int


def _pace(
    subject: Subject, settings: model.Settings, predict: Callable[[model.Settings], Prediction], limit_s: float
) -> _Measured | None:
    """Train for a tenth of the limit at most. Return None, with a line for the user, if that is impossible."""
    allowed_s = min(MOST_PACE_S, limit_s / 10)
    if not can_train() or allowed_s < START_S:
        return None
    try:
        found = pace(subject, settings, _environment(), allowed_s)
    except TrialError as error:
        print(f"dljob: {error}", file=sys.stderr)
        return None
    expected_s = predict(settings).time_s
    return _Measured(found.training_s / expected_s if expected_s else 1.0, found.peak_nbytes)


def _seconds(text: str | None) -> float | None:
    """Return the seconds of a duration such as 90s, 20m or 1h30m. Raise BadInputError for another text."""
    if text is None:
        return None
    found = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text)
    seconds = sum(int(n or 0) * unit for n, unit in zip(found.groups(), (3600, 60, 1), strict=True)) if found else 0
    if not seconds:
        raise BadInputError(f"--within: found {text!r}; expected a duration such as 90s, 20m or 1h30m. Correct it.")
    return float(seconds)


def _options(given: argparse.Namespace, path: Path) -> Options:
    remote = is_uri(given.data)
    return Options(
        data=path,
        task=given.task,
        target=given.target,
        text=given.text,
        test=Path(given.test) if given.test else None,
        delimiter=given.delimiter,
        encoding=given.encoding,
        keep=tuple(given.keep),
        image_size=given.image_size,
        dataset_uri=given.dataset_uri or (given.data if remote else None),
        moved_to=Path(given.write) / path.name if remote and given.write else None,
    )


def _target_folder(name: str | None) -> Path | None:
    if name is None:
        return None
    folder = Path(name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInputError(f"--write: found {folder}, which is not empty; expected a new folder. Choose another name.")
    return folder


def _baseline(subject: Subject, limit_s: float | None) -> model.Baseline | None:
    """Run the baseline. Return None, with a line for the user, without a result."""
    try:
        return baseline(
            subject, _environment(), BASELINE_LIMIT_S if limit_s is None else min(BASELINE_LIMIT_S, limit_s / 4)
        )
    except TrialError as error:
        advice = ". Run pip install './operator[suggest]' in a clone of dljob, or pass --no-baseline"
        print(f"dljob: {error}{advice if 'No module named' in str(error) else ''}", file=sys.stderr)
        return None


def _environment() -> dict[str, str]:
    """Return the environment of the project's scripts, without variables that choose other data or settings."""
    return {k: v for k, v in os.environ.items() if k not in ("DLJOB_DATASET", "SEED", "MODEL_DIR", "TIME_LIMIT_S")}


def this_machine() -> ClusterView:
    """Return this machine as a cluster of one CPU node."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return cluster_view({"nodes": [{"name": "this-machine", "cpu": len(os.sched_getaffinity(0)), "memory": memory}]})


def _document(
    facts: Facts,
    rows: Sequence[tuple[model.Settings, Prediction]],
    baseline: model.Baseline | None,
    left_s: float | None,
    race: str,
) -> Mapping[str, Any]:
    return {
        "facts": asdict(facts),
        "baseline": None if baseline is None else asdict(baseline),
        "models": [
            {
                "settings": asdict(settings),
                "accuracyClass": accuracy_class(settings, facts, baseline),
                "predicted": asdict(found),
            }
            for settings, found in rows
        ],
        "race": race,
        "timeLimitSeconds": left_s,
    }
