"""Cost of waiting for ranks under CPU quotas, without a cluster.

    python -m benchmarks.training.waiting --quotas 0.8,0.2,0.2 [--shares 160,40,40] [--rebalance]

It needs root and cgroup v1 or v2, and starts real MPI ranks of the built-in trainer over TCP, each in a cgroup with its
quota. Without ``--shares`` the batch is split evenly. ``throttled``: fraction of the 100 ms periods in which the kernel
stopped the rank because its quota was used up. ``uneven.py`` does the same on a real cluster and takes minutes longer.
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

from benchmarks.lib.local_ranks import heard, local_plan, mpirun  # noqa: E402

from devcluster.embedded import cgroups  # noqa: E402 (the development cluster makes its nodes slow in the same way)
from dlcontract import ModelRef, Plan  # noqa: E402
from dltrain.batch.shares import apportion  # noqa: E402

CGROUP_ENV = "WAITING_CGROUP"


def rank() -> None:
    """A rank: throttled from its first step on, not while it imports."""
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


def preferred(name: str) -> None:
    """Let the ranks have the CPUs before all else on this machine: only their quotas stop them."""
    for folder in cgroups.detect().trees(name):
        for weight, most in (("cpu.weight", "10000"), ("cpu.shares", "262144")):  # cgroup v2, v1
            if (folder / weight).exists():
                (folder / weight).write_text(most)


def throttled(name: str) -> tuple[int, int]:
    """Periods with something to run, and those that ended throttled."""
    for folder in cgroups.detect().trees(name):
        if (folder / "cpu.stat").exists():
            stat = dict(line.split() for line in (folder / "cpu.stat").read_text().splitlines())
            return int(stat["nr_periods"]), int(stat["nr_throttled"])
    raise SystemExit(f"cgroup {name}: found no cpu.stat, expected the cpu controller")


def train(todo: Plan, quotas: list[float], timeout_s: float, tolerant: bool) -> list[dict[str, Any]]:
    """What the ranks said of a run to its end. SystemExit when it fails."""
    groups, name = cgroups.detect(), f"dljob-waiting-{os.getpid()}"
    said: list[dict[str, Any]] = []

    def take(line: str) -> None:
        """With a step of a rank goes what its cgroup counts."""
        news = json.loads(line)
        if news["type"] == "step":
            news["periods"], news["throttled"] = throttled(f"{name}/r{news['rank']}")
        said.append(news)

    try:
        for r, quota in enumerate(quotas):
            groups.create(f"{name}/r{r}", quota, None)
        preferred(name)
        faults = ["--with-ft", "ulfm"] if tolerant else []
        launcher = mpirun(len(quotas), *faults, "--mca", "btl", "self,tcp", "--mca", "pml", "ob1")
        env = {CGROUP_ENV: name, "PYTHONPATH": os.pathsep.join(sys.path[:5])}
        heard(todo, [*launcher, sys.executable, "-m", "benchmarks.training.waiting", "rank"], take, timeout_s, env)
        return said
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
    parser.add_argument("--rebalance", action="store_true", help="let the ranks move shares")
    parser.add_argument("--min-ranks", type=int, help="fewer than quotas: every step is agreed on, as in elastic jobs")
    parser.add_argument("--deadline", type=float, default=120.0, help="seconds")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    todo = planned(options)
    said = train(todo, options.quotas, options.deadline, todo.min_ranks < len(options.quotas))
    rows = []
    for r, quota in enumerate(options.quotas):
        steps = [news for news in said if news["type"] == "step" and news["rank"] == r]
        first, last = steps[len(steps) // 4], steps[-1]
        stopped = (last["throttled"] - first["throttled"]) / max(1, last["periods"] - first["periods"])
        rows.append({"quota": quota, "step_s": last["step_s"], "throttled": stopped, **last["measure"]})
    moved = [news for news in said if news["type"] == "resharded" and news["rank"] == 0]
    samples_per_s = options.batch / rows[0]["step_s"]
    if options.json:
        print(json.dumps({"machine": platform.platform(), "samples_per_s": samples_per_s, "ranks": rows}))
        return
    for news in moved:
        print(f"shares {news['shares']} from step {news['step']}: {news['reason']}")
    for row in rows:
        wait_s, comm_s, cpu_s = row["wait_s"], row["comm_s"], row["wait_cpu_s"]
        print(
            f"quota {row['quota']:.2f} share {row['share']:4d}: compute {1e3 * row['compute_s']:6.2f} ms, waiting "
            f"{1e3 * wait_s:6.2f} and communicating {1e3 * comm_s:6.2f} ms at {1e3 * cpu_s:.2f} ms of CPU "
            f"({cpu_s / max(wait_s + comm_s, 1e-9):.0%}); throttled {row['throttled']:.0%}"
        )
    print(f"step {1e3 * rows[0]['step_s']:.2f} ms, {samples_per_s:.0f} samples/s")


if __name__ == "__main__":
    main()
