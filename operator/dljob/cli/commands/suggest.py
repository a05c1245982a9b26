"""``dljob suggest``: look at data, recommend a model, and write a project that trains it."""

import argparse
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from dljob.cli import files
from dljob.cli.errors import BadInputError
from dljob.cluster import ClusterView, cluster_view
from dljob.suggest.errors import DataError
from dljob.suggest.project import render
from dljob.suggest.recommendation import model
from dljob.suggest.recommendation.page import page
from dljob.suggest.recommendation.prediction import predicted
from dljob.suggest.subject import TASKS, Facts, Options, Subject, read_subject

BASELINE_LIMIT_S = 300.0


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "suggest",
        help="look at data, recommend a model and write a project that trains it",
        description="Look at a table (CSV, TSV, JSON Lines, Parquet), or images (folder, WebDataset archive, .npz). "
        "Print what it holds, what a scikit-learn baseline reaches, the recommended model with two alternatives, and the time, memory, energy and "
        "cost that the planner predicts. With --write, also write a project of PyTorch scripts and a manifest. The "
        "command exits with 2 if the data has to be corrected first.",
    )
    command.add_argument(
        "data", metavar="DATA", help="a table, a folder with a folder for each class, a .tar archive, or .npz"
    )
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


def run(given: argparse.Namespace) -> int:
    folder = _target_folder(given.write)
    try:
        subject = read_subject(_options(given))
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


def _options(given: argparse.Namespace) -> Options:
    return Options(
        data=Path(given.data),
        task=given.task,
        target=given.target,
        test=Path(given.test) if given.test else None,
        delimiter=given.delimiter,
        encoding=given.encoding,
        keep=tuple(given.keep),
        image_size=given.image_size,
        dataset_uri=given.dataset_uri,
    )


def _target_folder(name: str | None) -> Path | None:
    if name is None:
        return None
    folder = Path(name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInputError(f"--write: found {folder}, which is not empty; expected a new folder. Choose another name.")
    return folder


def _write(folder: Path, subject: Subject, settings: model.Settings) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in subject.project(settings, None).items():
            (folder / name).write_text(text, encoding="utf-8")
        if subject.arrays is not None:
            packed = io.BytesIO()
            np.savez_compressed(packed, **subject.arrays)
            (folder / "images.npz").write_bytes(packed.getvalue())
    except OSError as error:
        raise BadInputError(f"--write: {folder}: {error.strerror}. Choose another folder.") from None


def _baseline(subject: Subject) -> model.Baseline | None:
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


def _document(facts: Facts, rows: list[Any], baseline: model.Baseline | None) -> Mapping[str, Any]:
    return {
        "facts": asdict(facts),
        "baseline": None if baseline is None else asdict(baseline),
        "models": [{"settings": asdict(settings), "predicted": asdict(found)} for settings, found in rows],
    }
