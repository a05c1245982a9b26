"""The implementation of ``dltrain.init``. It also ensures that the run ends when the script's interpreter exits."""

import atexit
import os
import signal
import sys
from functools import partial
from types import TracebackType

import torch

from dltrain.device import randomness
from dltrain.protocol.errors import MisuseError
from dltrain.protocol.reporter import RankReporter
from dltrain.reporting.script_reports import set_trainer
from dltrain.train import session
from dltrain.train.trainer import Trainer

_INTERRUPTED = 128 + signal.SIGINT


class _Script:
    """Handle the end of a user's script: report an uncaught exception, and end the run when the interpreter exits.

    A process that the script forks is not the rank, so that its end is its own. ``trainer``: the script's trainer, once
    it exists.
    """

    made = False

    def __init__(self, reporter: RankReporter) -> None:
        self.reporter = reporter
        self.trainer: Trainer | None = None
        self._pid, self._hook_before = os.getpid(), sys.excepthook
        sys.excepthook = self._uncaught
        atexit.register(self._at_exit)

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != self._pid:
            self._hook_before(kind, error, trace)
            return
        if kind is KeyboardInterrupt:
            trainer = self.trainer
            at = f" at {_reached(trainer)}" if trainer is not None and trainer.step else ""
            print(f"dltrain: interrupted{at}", file=sys.stderr, flush=True)  # noqa: T201
            code = _INTERRUPTED
        else:
            code = session.fail(error, self.reporter)
        if self.trainer is not None:
            self.trainer.abandon()
        self._end_report()
        session.leave(code)

    def _at_exit(self) -> None:
        trainer = self.trainer
        if trainer is None or os.getpid() != self._pid:
            return
        if trainer.stopped:
            session.end(trainer)
        elif trainer.complete:
            session.finish(trainer)
        else:
            # The script called sys.exit before its last step. The other ranks must not wait for this one, and the
            # script's exit code must not change.
            if trainer.step:
                text = f"the script exits after {_reached(trainer)} without t.finish()"
                print(f"dltrain: {text}", file=sys.stderr, flush=True)  # noqa: T201
            trainer.abandon()
            self._end_report()

    def _end_report(self) -> None:
        """Write the report of a run without an agent. An agent notices by itself that the rank has ended."""
        if not self.reporter.connected:
            self.reporter.close()


def _reached(trainer: Trainer) -> str:
    """Return the last completed step as text, with the number of all steps if it is known."""
    return f"step {trainer.step}" + (f" of {trainer.total_steps}" if trainer.total_steps else "")


def init_script(
    *,
    batch: int,
    epochs: int,
    steps: int | None,
    seed: int,
    collective: str,
    checkpoints: str | os.PathLike[str] | None,
    precision: str,
    activation_checkpointing: bool,
    strategy: str,
    deferred_init: bool,
) -> Trainer:
    """Implement ``dltrain.init``, which describes the arguments.

    After this call, an uncaught exception in the script is reported to the agent and ends the process. Raise
    MisuseError on a second call.
    """
    if _Script.made:
        raise MisuseError("dltrain.init: found a second call; expected one call per process")
    _Script.made = True
    script = _Script(RankReporter.open())
    make_plan = partial(
        session.local_plan,
        batch=batch,
        epochs=epochs,
        steps=steps,
        seed=seed,
        collective=collective,
        checkpoints=checkpoints,
        precision=precision,
        activation_checkpointing=activation_checkpointing,
        strategy=strategy,
        deferred_init=deferred_init,
    )
    trainer = session.start(script.reporter, make_plan)
    script.trainer = trainer
    set_trainer(trainer)
    torch.manual_seed(trainer.plan.seed)
    randomness.seed(trainer.plan.seed, everywhere=True)  # so that ranks split data alike with numpy and random, too
    return trainer
