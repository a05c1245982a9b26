"""Check that messages of a rank arrive if it saves and exits while its agent is busy and before it is asked to stop.

Argument: a folder. With RANK set, the program is the rank, otherwise the part of the agent that manages ranks.
"""

import asyncio
import os
import sys
import time
from functools import partial
from pathlib import Path
from ssl import create_default_context

from dlcontract import AGENT_PORT, CheckpointMark, ModelRef, RankMeasure
from dltrain.agent.member.local_ranks import Event, LocalRanks
from dltrain.agent.member.tunnel import Tunnel
from dltrain.host.processes import Reaper
from dltrain.protocol.agent_messages import PodMemoryPeak, RankEnded, RankStarved, RankUp, RankUpdate
from dltrain.protocol.rank_messages import EXIT_STOPPED, Checkpointed, Hello, Step
from dltrain.protocol.reporter import RankReporter
from support.trainer.plans import make_plan

FOLDER = Path(sys.argv[1])


def rank() -> int:
    reporter = RankReporter.open()
    reporter.send(Hello(rank=0, pid=os.getpid()))
    measure = RankMeasure(rank=0, device="cpu", share=1)
    step = Step(rank=0, step=1, steps=9, step_s=1, samples_per_s=1, world_size=1, measure=measure)
    reporter.send(step)
    while not (FOLDER / "end").exists():
        time.sleep(0.01)
    reporter.send(Checkpointed(rank=0, mark=CheckpointMark(step=1, unix_s=time.time()), duration_s=0, nbytes=0))
    return EXIT_STOPPED


async def agent() -> None:
    events: asyncio.Queue[Event] = asyncio.Queue()
    env = dict(os.environ) | {"DLTRAIN_IMPORT_AHEAD": "off"}
    local = LocalRanks(
        pod="digits-cpu-0", pod_ip="127.0.0.1", run_dir=FOLDER, memory=FOLDER, env=env, reaper=Reaper(),
        emit=events.put_nowait, tunnel=partial(Tunnel, context=create_default_context(), agent_port=AGENT_PORT, pod_ip="127.0.0.1"),
    )  # fmt: skip
    await local.listen()
    await local.begin("1.1", make_plan(model=ModelRef(command=(sys.executable, *sys.argv), framework="Torchrun")))
    local.start_all()
    pid = 0
    while True:
        event = await events.get()
        if isinstance(event, RankUp):
            pid = event.pid
        if isinstance(event, RankUpdate) and isinstance(event.message, Step):
            break
    (FOLDER / "end").touch()
    while Path(f"/proc/{pid}").exists():
        time.sleep(0.01)  # blocking, so that the agent reads nothing meanwhile
    local.stop(10.0, progressed=True)
    received = []
    while not isinstance(event := await events.get(), RankEnded):
        # The agent sends these by itself: when the peak has grown, and when others keep the processors busy.
        if isinstance(event, PodMemoryPeak | RankStarved):
            continue
        received.append(event.message.type if isinstance(event, RankUpdate) else event.type)
    print(received, event.exit_code, flush=True)
    os._exit(0)


if "RANK" in os.environ:
    code = rank()
    sys.stdout.flush()
    os._exit(code)
asyncio.run(agent())
