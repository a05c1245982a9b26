"""Training on real ranks that is stopped in the middle and resumed to its end."""

from pathlib import Path
from typing import Any

from dlcontract import Plan
from dltrain.protocol import rank_messages
from dltrain.protocol.rank_messages import EXIT_STOPPED
from support.trainer.listener import Listener
from support.trainer.plans import write
from support.trainer.ranks import command, end, run_ranks, start


def stop_and_resume(plan: Plan, folder: Path, *, evaluations: int, steps: int) -> Listener:
    """Return the messages of both runs. The first is stopped after ``evaluations``; the second ends at ``steps``."""
    ranks = len(plan.ranks)
    with Listener(folder) as listener:
        environment: dict[str, Any] = {"DLTRAIN_PLAN": write(plan, folder), "DLTRAIN_SOCKET": listener.path}
        process = start(command(ranks, "-m", "dltrain.builtin.rank"), **environment)
        listener.wait_for(rank_messages.Evaluated, evaluations)
        listener.stop()
        assert end(process, 30).code == EXIT_STOPPED
        stopped = max(mark.mark.step for mark in listener.of(rank_messages.Checkpointed))
        again = run_ranks(ranks, "-m", "dltrain.builtin.rank", **environment)
        listener.wait_for(rank_messages.Finished, ranks)
    assert f"resumed from step {stopped}" in again.output and 0 < stopped < steps
    return listener
