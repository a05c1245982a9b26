"""Export a run report to Weights & Biases: ``python -m dltrain.integrations.wandb report.json FOLDER``.

FOLDER gets an offline run, without an account or a network. ``wandb sync FOLDER/wandb/offline-run-*`` uploads it later.
The export needs the package ``wandb``.
"""

import os
import shutil
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

from dltrain.integrations.exported_report import ExportError, curves, run, settings
from dltrain.record.run_report.document import Document

PROJECT = "dljob"
"""Name of the project, unless the variable WANDB_PROJECT names another."""


def export(document: Document, started: Any) -> None:
    """Write the run report ``document`` to ``started``, a run of W&B: curves, and the result in its summary.

    W&B accepts one set of values for each step, in the order of steps.
    """
    found = sorted(curves(document), key=lambda value: value.step)
    for step, values in groupby(found, key=lambda value: value.step):
        same = list(values)
        started.log({v.name: v.value for v in same} | {"_timestamp": max(v.unix_s for v in same)}, step=step)
    started.summary["phase"] = document.phase.value
    for finding in document.findings:
        started.summary[f"finding/{finding.name}"] = finding.message


def main(arguments: list[str]) -> int:
    """Export a run report to an offline run of W&B. Return the exit code of the process.

    ``arguments``: the path of report.json, and the folder to write to. The exit code is 0, or 2 for wrong arguments, an
    invalid report, a missing package, or a folder that W&B cannot write.
    """
    return run(arguments, "wandb", "FOLDER", _write)


def _write(path: Path, document: Document, folder: str) -> None:
    import wandb

    Path(folder).mkdir(parents=True, exist_ok=True)
    try:
        started = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            name=document.job,
            id=document.uid,
            dir=folder,
            config=settings(document),
            mode="offline",
            settings=wandb.Settings(console="off", disable_git=True, disable_code=True, x_disable_stats=True),
        )
    except (wandb.Error, OSError) as error:
        raise ExportError(f"wandb: found {folder} ({error}); expected a folder that can be written") from error
    export(document, started)
    shutil.copy(path, started.dir)  # A link, which ``save`` would make, breaks if the report moves.
    started.finish()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
