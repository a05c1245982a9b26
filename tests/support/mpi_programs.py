"""The MPI programs of ``examples/scripts`` with the line that makes them report their progress."""

from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "examples/scripts"


@dataclass(frozen=True)
class MpiProgram:
    """A program of the examples, which is unmodified there.

    ``steps``: environment variable with the number of its steps. ``after``: its line after each step. ``report``: the
    line that reports the step.
    """

    script: str
    steps: str
    after: str
    report: str

    @property
    def text(self) -> str:
        """Return the program with an import and its line for dljob."""
        text = (SCRIPTS / self.script).read_text()
        for line, more in (("import os\n", "import dltrain\n"), (self.after, self.report)):
            assert text.count(line) == 1, f"{self.script}: found {text.count(line)} lines {line!r}; expected one"
            text = text.replace(line, line + more)
        return text


MPI_PROGRAMS = {
    "mpi": MpiProgram(
        "train_mpi4py.py", "STEPS", "    weights -= 0.5 * gradient / len(x)\n",
        "    dltrain.report(step=step + 1, steps=STEPS, loss=float((error**2).mean()))\n",
    ),
    "horovod": MpiProgram(
        "train_horovod.py", "EPOCHS", '    mean = hvd.allreduce(loss, name="loss")\n',
        "    dltrain.report(step=epoch + 1, steps=EPOCHS, loss=mean.item())\n",
    ),
}  # fmt: skip
"""Name of the example → its program. The Horovod script reports each epoch, as it writes its checkpoints."""
