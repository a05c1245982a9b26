"""Measure the cost of waiting for ranks under CPU quotas, without a cluster.

    python -m benchmarks.training.waiting --quotas 0.8,0.2,0.2 [--shares 160,40,40] [--rebalance]

The benchmark needs root and cgroup v1 or v2. It runs the built-in trainer as MPI ranks over TCP, each in a cgroup with
its quota. Without ``--shares`` the batch is split evenly. ``throttled``: fraction of the 100 ms periods in which the
kernel stopped the rank because its quota was used up. ``uneven.py`` measures a real cluster and takes minutes longer.
"""

import argparse
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("operator", "operator/contract", "trainer-image", "hack", ".")]

from benchmarks.lib.local_ranks import local_plan, mpirun, run_with_messages  # noqa: E402

from devcluster.embedded.nodes import cgroups  # noqa: E402 (the development cluster throttles its nodes in the same way)
from dlcontract import ModelRef, Plan  # noqa: E402
from dltrain.batch.shares import apportion  # noqa: E402

CGROUP_ENV = "WAITING_CGROUP"


def rank() -> None:
    """Run a rank. It enters its cgroup late, so that imports are not throttled."""
    from dltrain.builtin import rank
    from dltrain.train import session

    name = f"{os.environ[CGROUP_ENV]}/r{os.environ['OMPI_COMM_WORLD_RANK']}"
    for folder in cgroups.detect().trees(name):
        (folder / "cgroup.procs").write_text(str(os.getpid()))
    session.leave(rank.main())


def planned(options: argparse.Namespace) -> Plan:
    return local_plan(
        options.shares or apportion(options.batch, [1] * len(options.quotas)),
        global_batch=options.batch,
        model=ModelRef(name=options.model),
        steps=options.steps,
        min_ranks=options.min_ranks or len(options.quotas),
        rebalance=options.rebalance,
    )


def prioritize(name: str) -> None:
    """Give the ranks the highest CPU priority on this machine, so that only their quotas limit them."""
    for folder in cgroups.detect().trees(name):
        for weight, most in (("cpu.weight", "10000"), ("cpu.shares", "262144")):  # cgroup v2, v1
            if (folder / weight).exists():
                (folder / weight).write_text(most)


def throttled(name: str) -> tuple[int, int]:
    """Return the number of periods with work to do, and of those that were throttled."""
    for folder in cgroups.detect().trees(name):
        if (folder / "cpu.stat").exists():
            stat = dict(line.split() for line in (folder / "cpu.stat").read_text().splitlines())
            return int(stat["nr_periods"]), int(stat["nr_throttled"])
    raise SystemExit(f"cgroup {name}: found no cpu.stat; expected the cpu controller")


def train(todo: Plan, quotas: list[float], timeout_s: float, tolerant: bool) -> list[dict[str, Any]]:
    """Run the ranks to their end and return their messages. Raise SystemExit if they fail."""
    groups, name = cgroups.detect(), f"dljob-waiting-{os.getpid()}"
    messages: list[dict[str, Any]] = []

    def on_message(line: str) -> None:
        """Store a message. Add the counters of the rank's cgroup to step messages."""
        message = json.loads(line)
        if message["type"] == "step":
            message["periods"], message["throttled"] = throttled(f"{name}/r{message['rank']}")
        messages.append(message)

    try:
        for r, quota in enumerate(quotas):
            groups.create(f"{name}/r{r}", quota, None)
        prioritize(name)
        faults = ["--with-ft", "ulfm"] if tolerant else []
        launcher = mpirun(len(quotas), *faults, "--mca", "btl", "self,tcp", "--mca", "pml", "ob1")
        env = {CGROUP_ENV: name, "PYTHONPATH": os.pathsep.join(sys.path[:5])}
        command = [*launcher, sys.executable, "-m", "benchmarks.training.waiting", "rank"]
        run_with_messages(todo, command, on_message, timeout_s, env)
        return messages
    finally:
        cgroups.remove(groups, name)


def main() -> None:
    if sys.argv[1:] == ["rank"]:
        rank()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quotas", type=lambda s: [float(q) for q in s.split(",")], default=[0.8, 0.2, 0.2])
    parser.add_argument("--shares", type=lambda s: [int(b) for b in s.split(",")])
    parser.add_argument("--batch", type=int, default=240)
    parser.add_argument("--model", default="digits-cnn")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rebalance", action="store_true", help="let the ranks rebalance their local batch sizes")
    parser.add_argument("--min-ranks", type=int, help="if below the quotas, ranks agree on each step")
    parser.add_argument("--deadline", type=float, default=120.0, help="seconds")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    todo = planned(options)
    messages = train(todo, options.quotas, options.deadline, todo.min_ranks < len(options.quotas))
    rows = []
    for r, quota in enumerate(options.quotas):
        steps = [m for m in messages if m["type"] == "step" and m["rank"] == r]
        first, last = steps[len(steps) // 4], steps[-1]
        stopped = (last["throttled"] - first["throttled"]) / max(1, last["periods"] - first["periods"])
        rows.append({"quota": quota, "step_s": last["step_s"], "throttled": stopped, **last["measure"]})
    moved = [m for m in messages if m["type"] == "resharded" and m["rank"] == 0]
    samples_per_s = options.batch / rows[0]["step_s"]
    if options.json:
        print(json.dumps({"machine": platform.platform(), "samples_per_s": samples_per_s, "ranks": rows}))
        return
    for message in moved:
        print(f"local batches {message['shares']} from step {message['step']}: {message['reason']}")
    for row in rows:
        wait_s, comm_s, cpu_s = row["wait_s"], row["comm_s"], row["wait_cpu_s"]
        print(
            f"quota {row['quota']:.2f}, local batch {row['share']:4d}: computing {1e3 * row['compute_s']:6.2f} ms, "
            f"waiting {1e3 * wait_s:6.2f} and communicating {1e3 * comm_s:6.2f} ms at {1e3 * cpu_s:.2f} ms of CPU "
            f"({cpu_s / max(wait_s + comm_s, 1e-9):.0%}); throttled {row['throttled']:.0%}"
        )
    print(f"step {1e3 * rows[0]['step_s']:.2f} ms, {samples_per_s:.0f} samples/s")


if __name__ == "__main__":
    main()
