"""Render the files of a project: scripts, the manifest of the job, and a README. This module reads only templates."""

import codecs
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import yaml

from dlcontract import CHECKPOINT_DIR, JOB_VARIABLE, UID_VARIABLE
from dljob.job.task.suggested_spec import MODEL_FOLDER
from dljob.job.task.suggestion import JUDGED, RACE, SCRIPTS
from dljob.suggest.inspection.columns import MISSING, Kind
from dljob.suggest.inspection.dates import ISO
from dljob.suggest.inspection.images import ImageFacts
from dljob.suggest.inspection.table import TableFacts
from dljob.suggest.inspection.target import CLASSIFICATION
from dljob.suggest.inspection.text import TextFacts
from dljob.suggest.reading.archive import LABELS
from dljob.suggest.reading.images import ARCHIVE, ARRAYS, COPY, FOLDER, PARTS, SUFFIXES
from dljob.suggest.reading.table import CSV, JSON_LINES, PARQUET, Table
from dljob.suggest.recommendation.model import RACE_PART, Baseline, Settings

TEMPLATES = files("dljob.suggest.project") / "templates"
MODEL_IN_JOB = f"{CHECKPOINT_DIR}/${JOB_VARIABLE}-${UID_VARIABLE}/{MODEL_FOLDER}"
"""The job's folder for the trained model. ``train.py`` replaces the variables, whose values Kubernetes chooses."""
IN_JOB = ("data.py", "model.py", "train.py", RACE)
"""Scripts that a job's pods need."""
TEST_BYTES = {
    "table": "repr(test_rows).encode()",
    "images": "x_test.tobytes() + y_test.tobytes()",
    "text": "repr((test_texts, test_labels)).encode()",
    "language": "test.text.tobytes()",
}
"""Kind of project → expression in its ``train.py`` for bytes that identify the test part."""
MOST_WRONG = {
    "table": " `most_wrong.json` has the rows with the largest errors.",
    "text": " `most_wrong.json` has the texts of the surest errors.",
}
"""Kind of project → sentence of its README about the samples that it writes down."""
PYARROW_HERE = " Parquet needs `pip install pyarrow`."
PYARROW_IN_JOB = " The image of the trainer has pyarrow."
"""Sentences of the README of a project that reads Parquet."""
RACE_CALLS = {
    "race_import": "from race import race\n",
    "race": """\
left_s = max(1.0, TIME_LIMIT_S - (time.monotonic() - BEGAN_S)) if TIME_LIMIT_S else 0
chosen = race(t, model, opt, train_rows, x, y, weights, BATCH, EPOCHS, SEED, left_s)
PENALTY = chosen["penalty"]
""",
    "race_result": '    run["race"] = chosen\n',
}
"""Placeholder in ``train.py`` → its text if the training begins with a race."""
RACE_ROW = "| `race.py` | A race between settings before the training, on the training part only |\n"
RACE_SETTINGS = """
A race chooses learning rate, penalty and dropout (`CANDIDATES` in `race.py`). `metrics.json` has its result."""
"""Texts of the README if the training begins with a race."""
AMOUNT_COLUMN = """
    if kind.startswith("amount"):
        return np.array([[amount(cell, kind)] for cell in cells])"""
"""Lines of a project whose table has amounts, such as $1,200.50."""
LINE = 100
"""Longest line of a rendered constant."""
Facts = TableFacts | ImageFacts | TextFacts
READ_AS = {
    CSV: "text in {ENCODING} with the delimiter {DELIMITER!r}",
    JSON_LINES: "JSON Lines in {ENCODING}",
    PARQUET: "a Parquet file",
}
"""Format of a table → its name in messages of the project, as part of an f-string."""
FORMS = {
    CSV: (("csv",), ""),
    JSON_LINES: (("json",), ""),
    PARQUET: ((), "from pyarrow import parquet, timestamp, types\n"),
}
"""Format of a table → modules of the standard library and other imports of the function that reads it."""
IMAGE_FORMS = {
    COPY: ("import zipfile",),
    ARRAYS: (),
    FOLDER: ("from pathlib import Path",),
    ARCHIVE: ("import io", "import json", "import tarfile", "from pathlib import Path, PurePosixPath"),
}
"""Form of images → imports of the functions that read them."""


@dataclass(frozen=True)
class Source:
    """Where the data is. ``uri``: where a job reads it; None: a placeholder, which the README explains."""

    data: Path
    test: Path | None
    uri: str | None
    samples: int
    sample_nbytes: int
    memory_nbytes: int = 0
    """Memory that the scripts take for the data, at most."""
    parquet: bool = False
    """True if the scripts read Parquet."""
    training_folder: str = ""
    """Folder in ``data`` with the training part, beside the folder ``test``; empty: ``data`` is the training part."""


def table_project(
    table: Table, facts: TableFacts, source: Source, settings: Settings, limit_s: float | None
) -> dict[str, str]:
    """Return file name → content of the project that learns from a table."""
    columns = {c.name: c.format if c.kind is Kind.DATE else c.amount or c.kind.value for c in facts.columns}
    left_out = "".join(f"# Left out: {name!r}, because {reason}.\n" for name, reason in facts.left_out.items())
    amounts = any(c.amount for c in facts.columns) or facts.amount is not None
    values = {
        **reader(table, "hashlib", "math", *(("re",) if amounts else ())),
        "new_rows": Template(shared("new_rows")).substitute(read_as=READ_AS[table.form]).rstrip("\n"),
        "amount": f"\n\n\n{shared('amount')}".rstrip("\n") if amounts else "",
        "amount_column": AMOUNT_COLUMN if amounts else "",
        "target_value": f"amount(row[TARGET], {facts.amount!r})" if facts.amount else "number(row[TARGET])",
        "encoding": repr(with_mark(table.encoding)),
        "delimiter": repr(table.delimiter),
        "decimal": repr(facts.decimal),
        "iso": repr(ISO),
        "target": repr(facts.target),
        "task": repr(facts.task),
        "columns": _mapping(columns),
        "left_out": left_out.rstrip("\n") or "# No column is left out.",
        "missing": "{" + ", ".join(map(repr, sorted(MISSING))) + "}",
        "width": repr(settings.width),
        "dropout": repr(settings.dropout),
        "penalty": f"{settings.penalty:.4g}",
        "scoring": repr(scoring(facts)),
    }
    return project_files("table", values, settings, source, facts, limit_s)


def image_project(
    facts: ImageFacts,
    source: Source,
    settings: Settings,
    limit_s: float | None,
    form: str = COPY,
    parts: Sequence[str] = (),
) -> dict[str, str]:
    """Return file name → content of the project that learns from images, without the images themselves.

    ``form``: how the images are stored where the project reads them. ``parts``: names of the training part and the test
    part, as ``Images.parts``.
    """
    constants = {
        "suffixes": "{" + ", ".join(map(repr, sorted(SUFFIXES))) + "}",
        "labels": repr(LABELS),
        "parts": repr(tuple(parts)),
        "test_names": repr(PARTS[1]),
    }
    values = {
        "imports": "\n".join(("import hashlib", *IMAGE_FORMS[form])),
        "reader": Template(shared(f"images.{form}")).substitute(constants).rstrip("\n"),
        "size": repr(facts.size),
        "channels": repr(facts.channels),
        "grey_bits": repr(facts.grey_bits),
        "stages": repr(settings.stages),
        "weight_decay": "0.01",
        "shift": repr(max(1, round(min(facts.size) / 10))),
        "rotation": "10.0",
        "zoom": "0.1",
        "flip": repr(settings.flip),
        "scoring": repr(scoring(facts)),
    }
    return project_files("images", values, settings, source, facts, limit_s)


def reader(table: Table | None, *modules: str) -> dict[str, str]:
    """Return placeholder → text for a template that reads ``table``; None: for one that reads no table.

    ``modules``: other modules that the template imports.
    """
    if table is None:
        return {"imports": "\n".join(f"import {name}" for name in modules), "reader_import": "", "reader": ""}
    own, other = FORMS[table.form]
    return {
        "imports": "\n".join(f"import {name}" for name in sorted((*modules, *own))),
        "reader_import": other,
        "reader": shared(f"records.{table.form}").rstrip("\n"),
    }


def with_mark(encoding: str) -> str:
    """Return an encoding that reads ``encoding``, and UTF-8 with a byte order mark, which Excel writes into tables."""
    return "utf-8-sig" if codecs.lookup(encoding).name == "utf-8" else encoding


def shared(name: str) -> str:
    """Return the text of the template ``name``, which the projects of all kinds of data share."""
    return (TEMPLATES / "shared" / f"{name}.txt").read_text(encoding="utf-8")


def scoring(facts: Facts) -> str:
    """Return scikit-learn's name of the measure by which models are compared."""
    if isinstance(facts, TableFacts) and facts.task != CLASSIFICATION:
        return "r2"
    return "balanced_accuracy" if facts.rare else "accuracy"


def project_files(
    kind: str,
    values: Mapping[str, str],
    settings: Settings,
    source: Source,
    facts: Facts,
    limit_s: float | None,
) -> dict[str, str]:
    """Return file name → content of a project.

    ``kind``: folder of the templates, such as ``table``. ``values``: placeholder in these templates → its text.
    ``limit_s``: limit of the training's time; None: no limit.
    """
    common = {
        "batch": repr(settings.batch),
        "epochs": repr(settings.epochs),
        "learning_rate": f"{settings.learning_rate:g}",
        "class_weights": repr(settings.class_weights),
        "time_limit_s": f"{limit_s or 0:.0f}",
        "out_of_time": shared("out_of_time").rstrip("\n"),
        "export": shared("export").rstrip("\n"),
        "scores": shared("scores").rstrip("\n"),
        "folder": shared("folder").rstrip("\n"),
    }
    where = {
        "data": repr(str(source.data / source.training_folder)),
        "test_data": repr(str(source.test)) if source.test else "None",
        "in_dataset": f" + {f'/{source.training_folder}'!r}" if source.training_folder else "",
    }
    common |= RACE_CALLS if settings.race else dict.fromkeys(RACE_CALLS, "")
    common["other_models"] = Template(shared("other_models")).substitute(test_bytes=TEST_BYTES[kind])
    common["paths"] = Template(shared("paths")).substitute(where).rstrip("\n")
    project = {
        name: Template((TEMPLATES / kind / f"{name}.txt").read_text(encoding="utf-8")).substitute({**values, **common})
        for name in SCRIPTS
    }
    if settings.race:
        text = (TEMPLATES / kind / f"{RACE}.txt").read_text(encoding="utf-8")
        project[RACE] = Template(text).substitute(candidates=_candidates(settings), race_part=repr(RACE_PART))
    in_job = {name: project[name] for name in IN_JOB if name in project}
    project["job.yaml"] = manifests(in_job, job(settings, source))
    readme = Template(shared("README.md"))
    project["README.md"] = readme.substitute(_readme_values(kind, settings, source, facts))
    return project


def _candidates(settings: Settings) -> str:
    """Return the settings of a race as a list in Python."""
    lines = [
        f'    {{"learning_rate": {c.learning_rate:g}, "penalty": {c.penalty:.4g}, "dropout": {c.dropout:g}}},\n'
        for c in settings.candidates
    ]
    return f"[\n{''.join(lines)}]"


def _mapping(columns: Mapping[str, str | None]) -> str:
    one_line = repr(dict(columns))
    if len(one_line) <= LINE:
        return one_line
    return "{\n" + "".join(f"    {name!r}: {kind!r},\n" for name, kind in columns.items()) + "}"


def job(settings: Settings, source: Source) -> dict[str, Any]:
    """Return the manifest of the DLJob that runs the project. Its scripts come from the ConfigMap ``suggested``."""
    return {
        "apiVersion": "dljob.dev/v1alpha1",
        "kind": "DLJob",
        "metadata": {"name": "suggested"},
        "spec": {
            "model": {
                "hints": {
                    "parameters": settings.parameters,
                    "flopsPerSample": settings.flops_per_sample,
                    "activationBytesPerSample": settings.activation_nbytes,
                }
            },
            "trainer": {
                "command": ["python", "/scripts/train.py"],
                # The scripts lie on a read-only volume.
                "env": [{"name": "MODEL_DIR", "value": MODEL_IN_JOB}],
            },
            "dataset": {
                "uri": source.uri or f"pvc://my-data/{'images.npz' if settings.stages else source.data.name}",
                "samples": source.samples,
                "sampleBytes": source.sample_nbytes,
            },
            "globalBatchSize": settings.batch,
            "epochs": settings.epochs,
            "nodes": {"min": 1, "max": 1},
            "checkpoint": {"volume": {"size": "1Gi", "reclaimPolicy": "Retain"}},
            "podTemplateOverrides": [
                {
                    "manager": "suggest",
                    "spec": {
                        "containers": [
                            {
                                "name": "trainer",
                                "volumeMounts": [{"name": "scripts", "mountPath": "/scripts", "readOnly": True}],
                            }
                        ],
                        "volumes": [{"name": "scripts", "configMap": {"name": "suggested"}}],
                    },
                }
            ],
        },
    }


def with_baseline(project: Mapping[str, str], baseline: Baseline) -> dict[str, str]:
    """Return the project with the scores of the baseline in a file, and in the ConfigMap of ``job.yaml``."""
    judged = {"test_part": baseline.test_part, "other_models": baseline.other_models}
    text = json.dumps(judged, indent=1) + "\n"
    scripts, own = yaml.safe_load_all(project["job.yaml"])
    return {**project, JUDGED: text, "job.yaml": manifests({**scripts["data"], JUDGED: text}, own)}


def manifests(files: Mapping[str, str], own: Mapping[str, Any]) -> str:
    """Return the manifests of a ConfigMap with ``files`` and of the DLJob ``own`` as text."""

    class Dumper(yaml.SafeDumper):
        pass

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, text)
    scripts = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "suggested"},
        "data": dict(files),
    }
    shown: str = yaml.dump_all([scripts, dict(own)], Dumper=Dumper, sort_keys=False, width=120, allow_unicode=True)
    return shown


def _readme_values(kind: str, settings: Settings, source: Source, facts: Facts) -> dict[str, str]:
    if isinstance(facts, TextFacts):
        what = f"tells {len(facts.classes)} classes of texts apart" if facts.classes else "continues texts"
        goal = f"{what}, and learns from `{source.data.name}`"
        predict = 'python predict.py "a text"'
        data = f"`{source.data}`"
    elif isinstance(facts, TableFacts):
        goal = f"predicts the column `{facts.target}` of `{source.data.name}`"
        new = f"new{source.data.suffix or '.parquet'}"
        predict = f"python predict.py {new}   # a table of the same format, with the columns of {source.data.name}"
        data = f"`{source.data}`"
    else:
        goal = f"tells the {len(facts.classes)} classes of images in `{source.data.name}` apart"
        predict = "python predict.py new.png   # needs Pillow"
        data = "`images.npz`, which has all images at the same size"
    return {
        "goal": goal,
        "model": settings.name,
        "loss": settings.loss,
        "augmentation": settings.augmentation,
        "batch": str(settings.batch),
        "range": f"{settings.batch_range[0]} to {settings.batch_range[1]}",
        "epochs": str(settings.epochs),
        "rate": f"{settings.learning_rate:g}",
        "predict": predict,
        "predict_from_job": f"{predict.partition('   #')[0]} --model from-job/{MODEL_FOLDER}",
        "predict_baseline": "" if kind == "language" else "; with `--predict`, predictions of the best of its models",
        "data": data,
        "uri": job(settings, source)["spec"]["dataset"]["uri"],
        "test": f" and `{source.test.name}` beside it" if source.test and not source.training_folder else "",
        "here_too": PYARROW_HERE if source.parquet else "",
        "in_job_too": PYARROW_IN_JOB if source.parquet else "",
        "most_wrong": MOST_WRONG.get(kind, ""),
        "race_row": RACE_ROW if settings.race else "",
        "race_file": f" --from-file={RACE}" if settings.race else "",
        "race_settings": RACE_SETTINGS if settings.race else "",
        "findings": "".join(f"- {line}\n" for line in facts.findings) or "- Nothing unusual.\n",
    }
