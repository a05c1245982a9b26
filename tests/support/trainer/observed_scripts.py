"""Scripts that the observer observes, in processes of their own as rank 0 starts them.

In a pod, rank 0 is a fork of the zygote, which starts the observer in it. Here it is a fork of the tests' zygote. In
images of users without dltrain, and in processes that a script starts, a new interpreter starts the observer
(``fresh``).
"""

import os
import subprocess
import sys
from pathlib import Path

from dlcontract import Structure
from dltrain.launch.rank_environment import STARTUP
from dltrain.protocol.rank_messages import SOCKET_ENV, Observed
from dltrain.protocol.rank_variables import OBSERVE_ENV
from support.trainer.listener import Listener
from support.trainer.ranks import run_apart

WITHIN_S = 300
LOOP = """
import torch
from torch import nn
torch.manual_seed(0)
{model}
opt = torch.optim.{optimizer}
for step in range({steps}):
    {batch}
    opt.zero_grad()
    {loss}.backward()
    opt.step()
    {after}
print("parameters", float(sum(p.detach().double().sum() for p in model.parameters())))
"""
MLP = "model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))"
BATCH = "x = torch.randn(32, 20); y = torch.randint(2, (32,))"
LOSS = "nn.functional.cross_entropy(model(x), y)"


def loop(
    model: str = MLP,
    optimizer: str = "SGD(model.parameters(), lr=0.1, momentum=0.9)",
    batch: str = BATCH,
    loss: str = LOSS,
    after: str = "pass",
    steps: int = 30,
) -> str:
    return LOOP.format(model=model, optimizer=optimizer, batch=batch, loss=loss, after=after, steps=steps)


def variables(path: str | None, **more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "DLTRAIN_", "RANK", "WORLD"))}
    observed = {SOCKET_ENV: path, OBSERVE_ENV: "on"} if path else {}
    return kept | {"PYTHONPATH": str(STARTUP), "OMP_NUM_THREADS": "1", **observed, **more}


def python(script: str, path: str | None, *, fresh: bool = False, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a script as the Python of a rank would, with the observer unless ``path`` is None."""
    env = variables(path, **more)
    if fresh:
        command = [sys.executable, "-c", script]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=WITHIN_S, check=False)
    return run_apart("-c", script, env=env, timeout_s=WITHIN_S)


def observed(
    folder: Path, script: str, *, fresh: bool = False, **more: str
) -> tuple[list[Structure], subprocess.CompletedProcess[str]]:
    """Return the structures that the agent gets of a script, and its end, which must be a success."""
    with Listener(folder) as agent:
        ended = python(script, agent.path, fresh=fresh, **more)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        if "dljob: observed a step" in ended.stderr:
            agent.wait_for(Observed, 2)
            agent.wait_for_ends()
        # Each message has a connection of its own, and so a thread that reads it.
        return sorted((message.structure for message in agent.of(Observed)), key=lambda each: each.steps), ended
