"""Export a run report to TensorBoard: ``python -m dltrain.integrations.tensorboard report.json FOLDER``.

It needs the package ``tensorboard`` beside PyTorch.
"""

import sys
from pathlib import Path
from typing import Protocol

from dltrain.integrations.exported_report import curves, run
from dltrain.record.run_report.document import Document


class Writer(Protocol):
    """The part of ``torch.utils.tensorboard.SummaryWriter`` that the export uses."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, walltime: float) -> None: ...


def export(document: Document, writer: Writer) -> None:
    """Write the curves of the run report ``document`` to ``writer``, by step and with the times of the values."""
    for name, value, step, unix_s in curves(document):
        writer.add_scalar(name, value, step, unix_s)


def main(arguments: list[str]) -> int:
    """Export a run report to event files of TensorBoard. Return the exit code of the process.

    ``arguments``: the path of report.json, and the folder to write to. The exit code is 0, or 2 for wrong arguments, an
    invalid report or a missing package.
    """
    return run(arguments, "tensorboard", "FOLDER", _write)


def _write(_: Path, document: Document, folder: str) -> None:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(folder)
    export(document, writer)
    writer.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
