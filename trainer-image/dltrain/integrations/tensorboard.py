"""Export a run report to TensorBoard: ``python -m dltrain.integrations.tensorboard report.json FOLDER``.

It needs the package ``tensorboard`` beside PyTorch.
"""

import sys
from pathlib import Path
from typing import Protocol

from dltrain.record.run_report.document import MEANS, Document


class Writer(Protocol):
    """The part of ``torch.utils.tensorboard.SummaryWriter`` that the export uses."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, walltime: float) -> None: ...


def export(document: Document, writer: Writer) -> None:
    """Write the curves of the run report ``document`` to ``writer``, by step and with the times of the values.

    Tags: ``run/`` for values of steps, ``evaluation/accuracy``, and ``logged/`` for metrics of the script.
    """
    for point in document.points:
        for name in (*MEANS, "world_size", "noise_samples"):
            if (value := getattr(point, name)) is not None:
                writer.add_scalar(f"run/{name}", value, point.step, point.unix_s)
    for entry in document.evaluations:
        writer.add_scalar("evaluation/accuracy", entry.accuracy, entry.step, entry.unix_s)
    for logged in document.metrics:
        for name, value in logged.values.items():
            writer.add_scalar(f"logged/{name}", value, logged.step, logged.unix_s)


def main(arguments: list[str]) -> int:
    """Export a run report to event files of TensorBoard. Return the exit code of the process.

    ``arguments``: the path of report.json, and the folder to write to. The exit code is 0, or 2 for wrong arguments or
    an invalid report.
    """
    if len(arguments) != 2:
        print("usage: python -m dltrain.integrations.tensorboard report.json FOLDER", file=sys.stderr)  # noqa: T201
        return 2
    try:
        document = Document.parse(Path(arguments[0]).read_bytes())
    except (OSError, ValueError) as error:
        print(f"report: found {arguments[0]} ({error}); expected report.json of a run", file=sys.stderr)  # noqa: T201
        return 2
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(arguments[1])
    export(document, writer)
    writer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
