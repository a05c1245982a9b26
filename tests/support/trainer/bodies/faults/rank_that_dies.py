"""Run ``dltrain.builtin.rank``, but kill a rank: ``rank_that_dies.py RANK MOMENT COUNT``.

The rank dies the COUNT-th time it reaches MOMENT, which is ``loss`` (after the forward pass), ``agree`` (after it has
reduced its gradient, but before it confirms that) or ``evaluate``.
"""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import dltrain.builtin.rank
from dltrain.comm.process_group import ProcessGroup
from dltrain.train import session
from dltrain.train.steps.step import Step

MOMENTS = {"loss": (Step, "log"), "agree": (ProcessGroup, "agree"), "evaluate": (dltrain.builtin.rank, "evaluate")}


def kill_at_call(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    calls = 0

    def called(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **named)

    return called


for rank, moment, count in zip(*[iter(sys.argv[1:])] * 3, strict=True):
    if os.environ["OMPI_COMM_WORLD_RANK"] == rank:
        place, name = MOMENTS[moment]
        setattr(place, name, kill_at_call(getattr(place, name), int(count)))
session.leave(dltrain.builtin.rank.main())
