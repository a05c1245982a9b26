"""The curves and the command line that the exports of a run report to TensorBoard, MLflow and W&B share."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from dltrain.record.run_report.document import MEANS, Document


class Value(NamedTuple):
    """A value of a curve: its name such as ``run/loss``, its step, and the Unix time in seconds."""

    name: str
    value: float
    step: int
    unix_s: float


class ExportError(Exception):
    """The report cannot be exported. The message names the remedy."""


def curves(document: Document) -> Iterator[Value]:
    """Yield the values of all curves of a run report.

    Names: ``run/`` for values of steps, ``evaluation/accuracy``, and ``logged/`` for metrics of the script.
    """
    for point in document.points:
        for name in (*MEANS, "world_size", "noise_samples"):
            if (value := getattr(point, name)) is not None:
                yield Value(f"run/{name}", value, point.step, point.unix_s)
    for entry in document.evaluations:
        yield Value("evaluation/accuracy", entry.accuracy, entry.step, entry.unix_s)
    for logged in document.metrics:
        for name, value in logged.values.items():
            yield Value(f"logged/{name}", value, logged.step, logged.unix_s)


def settings(document: Document) -> dict[str, str | int | float]:
    """Return what identifies a run beside its job's name: its model, data and plan, and what it has used if known."""
    last = document.plans[-1] if document.plans else None
    planned: dict[str, str | int] = {} if last is None else {"ranks": last.ranks, "collective": last.collective}
    usage = document.usage
    used = {} if usage is None else {"energy_J": usage.energy_J, "cost_usd": usage.cost_usd, "carbon_g": usage.carbon_g}
    return {
        "namespace": document.namespace,
        "uid": document.uid,
        "model": document.model,
        "dataset": document.dataset,
        "global_batch": document.global_batch,
        "seed": document.seed,
        **planned,
        **{name: value for name, value in used.items() if value is not None},
    }


def run(arguments: list[str], package: str, target: str, export: Callable[[Path, Document, str], None]) -> int:
    """Run the command ``python -m dltrain.integrations.<package> report.json TARGET``. Return its exit code.

    ``package``: the Python package that the command needs. ``target``: the name of the second argument in the usage.
    ``export``: called with the path and content of the report, and the second argument. The exit code is 0, or 2 for
    wrong arguments, an invalid report, a missing package, or an ExportError.
    """
    if len(arguments) != 2:
        print(f"usage: python -m dltrain.integrations.{package} report.json {target}", file=sys.stderr)  # noqa: T201
        return 2
    path = Path(arguments[0])
    try:
        document = Document.parse(path.read_bytes())
    except (OSError, ValueError) as error:
        print(f"report: found {path} ({error}); expected report.json of a run", file=sys.stderr)  # noqa: T201
        return 2
    if importlib.util.find_spec(package) is None:
        text = f"{package}: found no such package; expected it beside dltrain. Install it: pip install {package}"
        print(text, file=sys.stderr)  # noqa: T201
        return 2
    try:
        export(path, document, arguments[1])
    except ExportError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 2
    return 0
