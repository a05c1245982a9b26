"""Measure what each feature that survives faults costs while no fault occurs, on two real ranks of this machine.

    hack/env python -m benchmarks.training.survival_costs [--rounds 8] [--steps 1000] [--json FILE] [--feature NAME ...]

Each round trains once without any of the features, and once with each of them alone, in an order that changes from
round to round. The cost of a feature is the time of a step with it, divided by the time without it in the same round.
The table has the medians over the rounds, and the smallest and largest ratio. A ratio within the spread of *nothing*,
a second run without a feature, is no difference that this machine can show.

Two programs train. *loop* is the five lines of the dltrain API, over MPI with the settings of a job; its features are
those of the trainer. *script* is DistributedDataParallel over gloo, without dltrain; its features are those for scripts
for torchrun. In both, a thread of this program reads the messages of the ranks in the place of the agent.

*agent* is measured in another way: two real agents run a job in namespaces (needs root), and the table has the part of
a core that each of them uses. It includes heartbeats, hang detection, metrics and the report of the job.

The machine needs two idle cores.
"""

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from benchmarks.lib.figures import machine
from benchmarks.lib.local_ranks import PYTHONPATH, ROOT, local_plan, mpirun

from dlcontract import CheckpointRef, ModelRef, Plan, RunPhase
from dltrain.protocol.rank_messages import MEMORY_ENV, PLAN_ENV, SOCKET_ENV
from dltrain.protocol.rank_variables import OBSERVE_ENV

MODULE = ("-m", "benchmarks.training.survival_costs")
RESULT, STEPS, CALLS = "SURVIVAL_RESULT", "SURVIVAL_STEPS", "SURVIVAL_CALLS"
"""Variables of the ranks: the file for the result, the number of timed steps, and what to do in each step."""
WARM = 50
"""Steps before the timed ones. The observer of scripts observes one of the first steps."""
BATCH, WIDTH = 128, 1024
"""Samples of a step, and the width of the layers: 1.1 million parameters, 9 MB of state with momentum."""
CHECKPOINT_S = 5.0
"""Seconds between two checkpoints, the least that jobs choose: the cost of longer intervals is smaller."""
TIMEOUT_S = 600.0
AGENT_S = 10.0
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Feature:
    """A feature to switch on, and how: changes of the plan, variables of the ranks, options of mpirun.

    ``calls``: what the program itself does in each step.
    """

    what: str
    plan: Mapping[str, Any] = field(default_factory=dict)
    calls: tuple[str, ...] = ()
    messages: bool = False
    memory: bool = False
    checkpoints: bool = False
    observed: bool = False
    tolerant: bool = False


LOOP = {
    "nothing": Feature("a second run without a feature"),
    "messages": Feature("progress messages, from which hangs are detected", messages=True),
    "agreement": Feature("agreement in each step, to repeat it without a lost rank", {"min_ranks": 1}, tolerant=True),
    "norm": Feature("check that the gradient is finite", calls=("norm",), messages=True),
    "compare": Feature("comparison of parameters every 100 steps", {"compare_steps": 100}),
    "memory": Feature("copies of the state in memory, every 5 s", memory=True, messages=True),
    "checkpoints": Feature("checkpoints on a disk, written by a thread, every 5 s", checkpoints=True),
    "all": Feature(
        "all of these", {"min_ranks": 1, "compare_steps": 100}, ("norm",), True, True, True, tolerant=True
    ),
}  # fmt: skip
"""Features of the trainer: name → how to switch it on. The base has none of them."""
SCRIPT = {
    "nothing": Feature("a second run without a feature"),
    "report": Feature("dltrain.report in each step", calls=("report",), messages=True),
    "stop": Feature("dltrain.report and stop_requested in each step", calls=("report", "stop"), messages=True),
    "observer": Feature("observation of the script by rank 0", messages=True, observed=True),
}
"""Features for scripts for torchrun."""
PROGRAMS = {"loop": LOOP, "script": SCRIPT}


def timed(rank: int, began_s: float) -> None:
    """Write the seconds of a step since ``began_s``, if this is rank 0."""
    if rank == 0:
        step_s = (time.perf_counter() - began_s) / int(os.environ[STEPS])
        Path(os.environ[RESULT]).write_text(json.dumps({"step_s": step_s}))


def loop() -> None:
    """Train with the dltrain API. Without the call ``norm``, the norm of the gradient is a constant."""
    import torch

    import dltrain
    from dltrain.parallel.data_parallel import DataParallel

    if "norm" not in os.environ[CALLS]:
        DataParallel.gradient_norm = lambda self: 1.0  # type: ignore[method-assign]
    t = dltrain.init()
    digits = dltrain.data.load("digits")
    model, opt = network()
    model, opt = t.wrap(model, opt)
    began_s = 0.0
    for number, (x, y) in enumerate(t.steps(t.loader(digits))):
        if number == WARM:
            began_s = time.perf_counter()
        if number == WARM + int(os.environ[STEPS]):
            timed(t.rank, began_s)
        loss = torch.nn.functional.cross_entropy(model(x), y)
        t.log(loss=loss)
        loss.backward()  # type: ignore[no-untyped-call]
        opt.step()


def script() -> None:
    """Train with DistributedDataParallel over gloo, as a script for torchrun."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, size, steps = dist.get_rank(), dist.get_world_size(), int(os.environ[STEPS])
    model, opt = network()
    model = torch.nn.parallel.DistributedDataParallel(model)
    x, y = torch.rand(BATCH // size, 8, 8), torch.randint(10, (BATCH // size,))
    reports, stops = "report" in os.environ[CALLS], "stop" in os.environ[CALLS]
    if reports:
        import dltrain
    began_s = 0.0
    for number in range(WARM + steps):
        if number == WARM:
            began_s = time.perf_counter()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        opt.step()
        if reports:
            dltrain.report(step=number + 1, steps=WARM + steps, loss=loss)
        if stops and dltrain.stop_requested():
            break
    timed(rank, began_s)
    dist.destroy_process_group()


def network() -> tuple[Any, Any]:
    """Return the model and its optimizer, equal on all ranks."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = (nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
    model = nn.Sequential(nn.Flatten(), *layers)
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def planned(feature: Feature, folder: Path, steps: int) -> Plan:
    """Return the plan of the program *loop*. One more step than the timed ones stops the clock."""
    checkpoint = CheckpointRef(enabled=feature.checkpoints, directory=str(folder), interval_s=CHECKPOINT_S)
    fields = {
        "model": ModelRef(command=("train",)), "steps": WARM + steps + 1, "min_ranks": 2, "compare_steps": 0,
        "checkpoint": checkpoint, **feature.plan,
    }  # fmt: skip
    return local_plan([BATCH // 2] * 2, **fields)


def read(server: socket.socket) -> None:
    """Read the messages of all ranks until the server is closed, in the place of an agent."""
    with suppress(OSError):
        while True:
            connection, _ = server.accept()
            threading.Thread(target=lambda c: [None for _ in c.makefile("rb")], args=(connection,), daemon=True).start()


def step_s(program: str, feature: Feature, steps: int) -> float:
    """Train once and return the seconds of a step. Raise SystemExit if a rank fails."""
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        folder = Path(name)
        with socket.socket(socket.AF_UNIX) as server, socket.socket() as free:
            server.bind(f"{name}/agent")
            server.listen(8)
            threading.Thread(target=read, args=(server,), daemon=True).start()
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
            free.close()
            env = {
                **os.environ, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1", STEPS: str(steps),
                CALLS: ",".join(feature.calls), RESULT: f"{name}/result",
            }  # fmt: skip
            env |= {SOCKET_ENV: f"{name}/agent"} if feature.messages else {}
            if program == "loop":
                (folder / "plan.json").write_text(planned(feature, folder / "checkpoints", steps).to_json())
                env |= {PLAN_ENV: f"{name}/plan.json"} | ({MEMORY_ENV: memory} if feature.memory else {})
                tolerant = ["--with-ft", "ulfm"] if feature.tolerant else []
                run([[*mpirun(2, *tolerant, "--mca", "pml", "ob1"), sys.executable, *MODULE, "loop"]], [env], folder)
            else:
                startup = f"{PYTHONPATH}{os.pathsep}{ROOT}/trainer-image/dltrain/startup/path"
                env |= {"PYTHONPATH": startup} if feature.observed else {}
                own = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                ranks = [{**env, **own, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
                ranks[0] |= {OBSERVE_ENV: "on"} if feature.observed else {}
                run([[sys.executable, *MODULE, "script"]] * 2, ranks, folder)
        return float(json.loads((folder / "result").read_text())["step_s"])


def run(commands: Sequence[Sequence[str]], envs: Sequence[Mapping[str, str]], folder: Path) -> None:
    """Run processes at the same time, to their end. Raise SystemExit with the output of one that fails."""
    with (folder / "output").open("w+") as output:
        processes = [
            subprocess.Popen(command, env=env, cwd=ROOT, stdout=output, stderr=output)
            for command, env in zip(commands, envs, strict=True)
        ]
        try:
            codes = [process.wait(TIMEOUT_S) for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(codes):
            raise SystemExit(f"ranks exited with {codes}:\n{(folder / 'output').read_text()[-3000:]}")


def agent_cores(seconds: float) -> list[float]:
    """Return the part of a core that each of two agents uses while a job trains without a fault. Needs root."""
    from support.trainer.pods import job

    def used_s(pid: int) -> float:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / TICKS

    with job(2) as made:
        made.start(made.plan(model=ModelRef(name="mlp"), steps=1_000_000))
        made.until(lambda r: r.phase is RunPhase.RUNNING and r.step > WARM, 120)
        agents = [pod.pids()[0] for pod in made.pods]
        began_s, before = time.monotonic(), [used_s(pid) for pid in agents]
        time.sleep(seconds)
        after, passed_s = [used_s(pid) for pid in agents], time.monotonic() - began_s
        return [(end - start) / passed_s for start, end in zip(before, after, strict=True)]


def rotated(names: Sequence[str], by: int) -> list[str]:
    """Return the names from another one on, so that no feature always runs at the same place of a round."""
    by %= len(names)
    return [*names[by:], *names[:by]]


def measured(rounds: int, steps: int, chosen: Sequence[str]) -> dict[str, dict[str, list[float]]]:
    """Return program → feature → seconds of a step in each round. The base of a program is the feature ``base``."""
    found: dict[str, dict[str, list[float]]] = {}
    for number in range(rounds):
        for program, features in PROGRAMS.items():
            known = {"base": Feature("base"), **features}
            names = [name for name in known if name == "base" or not chosen or name in chosen]
            if names == ["base"]:
                continue
            for name in rotated(names, number):
                taken_s = step_s(program, known[name], steps)
                found.setdefault(program, {}).setdefault(name, []).append(taken_s)
                print(f"{number + 1}/{rounds} {program} {name}: {1e3 * taken_s:.3f} ms", file=sys.stderr, flush=True)
    return found


def rows(found: Mapping[str, Mapping[str, Sequence[float]]]) -> list[dict[str, Any]]:
    """Return a row for each feature: the median step in seconds, and the median, least and largest ratio to base."""
    made = []
    for program, times_s in found.items():
        for name, values in times_s.items():
            ratios = [with_it / without for with_it, without in zip(values, times_s["base"], strict=True)]
            figures = {"step_s": median(values), "ratio": median(ratios), "least": min(ratios), "largest": max(ratios)}
            made.append({"program": program, "feature": name, **figures})
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--feature", action="append", default=[], choices=sorted({*LOOP, *SCRIPT}), metavar="NAME")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    table = rows(measured(options.rounds, options.steps, options.feature))
    can_isolate = os.geteuid() == 0 and shutil.which("ip") is not None
    agents = agent_cores(AGENT_S) if can_isolate and not options.feature else []
    result = {"machine": machine(), "rounds": options.rounds, "steps": options.steps, "rows": table, "agents": agents}
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))
    print(f"{machine()}; {options.rounds} rounds of {options.steps} steps")
    print("| Program | Feature | Step | Times the step without it |\n|---|---|---|---|")
    for row in table:
        feature = PROGRAMS[row["program"]].get(row["feature"], Feature("none of the features"))
        spread = f"{row['ratio']:.3f} ({row['least']:.3f} to {row['largest']:.3f})"
        print(f"| {row['program']} | {feature.what} | {1e3 * row['step_s']:.2f} ms | {spread} |")
    for number, cores in enumerate(agents):
        print(f"agent of pod {number}: {100 * cores:.1f} % of a core")


if __name__ == "__main__":
    {"loop": loop, "script": script}.get(sys.argv[1] if sys.argv[1:] else "", main)()
