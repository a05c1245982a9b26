"""Check that no rank goes on if an attempt ends while its ranks start. Argument: a folder."""

import asyncio
import os
import sys
from functools import partial
from pathlib import Path
from ssl import create_default_context

from dlcontract import AGENT_PORT, ModelRef
from dltrain.agent.member.local_ranks import Event, LocalRanks
from dltrain.agent.member.tunnel import Tunnel
from dltrain.host.processes import Reaper
from dltrain.protocol.agent_messages import RankUp
from support.trainer.plans import make_plan

FOLDER = Path(sys.argv[1])
TURNS = 8
WAIT_S = 20.0


async def turn(count: int) -> None:
    """Let the event loop go on for so many turns."""
    for _ in range(count):
        await asyncio.sleep(0)


async def agent() -> None:
    events: asyncio.Queue[Event] = asyncio.Queue()
    local = LocalRanks(
        pod="digits-cpu-0", pod_ip="127.0.0.1", run_dir=FOLDER, memory=FOLDER, env=dict(os.environ), reaper=Reaper(),
        emit=events.put_nowait, tunnel=partial(Tunnel, context=create_default_context(), agent_port=AGENT_PORT, pod_ip="127.0.0.1"),
    )  # fmt: skip
    plan = make_plan(model=ModelRef(command=("sleep", "1000"), framework="Torchrun"))
    for turns in range(TURNS):
        await local.begin(f"1.{turns}", plan)
        local.start_all()
        await turn(turns)
        await asyncio.wait_for(local.end(), WAIT_S)
        await turn(TURNS)
        assert not local.busy, f"after {turns} turns"
    pids = list[int]()
    while not events.empty():
        if isinstance(event := events.get_nowait(), RankUp):
            pids.append(event.pid)
    assert pids and not any(Path(f"/proc/{pid}").exists() for pid in pids), pids
    print("no rank runs", flush=True)
    os._exit(0)


asyncio.run(agent())
