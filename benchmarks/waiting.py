"""Ranks under CPU quotas, without a cluster: what waiting costs them, and how near a step comes to the best possible.

    python benchmarks/waiting.py --quotas 0.8,0.2,0.2 [--shares 160,40,40] [--rebalance]

As root, on cgroup v1 or v2: real MPI ranks of the built-in trainer over TCP, each in a cgroup with its quota. Without
``--shares`` the batch is split evenly. ``throttled``: part of the 100 ms periods in which the kernel stopped the rank
because its quota was used up. Minutes shorter than ``uneven.py``, which does the same on a real cluster.
"""

import argparse
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in ("operator", "trainer-image", "hack")]

from devcluster.embedded import cgroups  # noqa: E402 (the development cluster makes its nodes slow in the same way)
from dljob.contract import CheckpointRef, DatasetRef, ModelRef, Plan, Rank  # noqa: E402
from dltrain.messages import PLAN_ENV, SOCKET_ENV  # noqa: E402
from dltrain.shares import apportion  # noqa: E402

CGROUP_ENV = "WAITING_CGROUP"


def rank() -> None:
    """A rank: throttled from its first step on, not while it imports."""
    from dltrain import rank, session

    name = f"{os.environ[CGROUP_ENV]}/r{os.environ['OMPI_COMM_WORLD_RANK']}"
    for folder in cgroups.detect().trees(name):
        (folder / "cgroup.procs").write_text(str(os.getpid()))
    session.leave(rank.main())


def planned(options: argparse.Namespace) -> Plan:
    n = len(options.quotas)
    shares = options.shares or apportion(options.batch, [1] * n)
    return Plan(
        job="waiting",
        namespace="local",
        uid="local",
        number=1,
        ranks=tuple(
            Rank(rank=r, pod=f"r{r}", host="127.0.0.1", group="cpu", device="cpu", share=share)
            for r, share in enumerate(shares)
        ),
        global_batch=options.batch,
        model=ModelRef(name=options.model),
        dataset=DatasetRef(name="digits"),
        steps=options.steps,
        min_ranks=options.min_ranks or n,
        checkpoint=CheckpointRef(enabled=False),
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


def listen(server: socket.socket, said: list[dict[str, Any]], name: str) -> None:
    """Collect news of all ranks; with the first and last step of each rank what its cgroup counts."""

    def read(connection: socket.socket) -> None:
        with connection, connection.makefile(encoding="utf-8") as lines:
            for line in lines:
                news = json.loads(line)
                if news["type"] == "step":
                    news["periods"], news["throttled"] = throttled(f"{name}/r{news['rank']}")
                said.append(news)

    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        threading.Thread(target=read, args=(connection,), daemon=True).start()


def train(todo: Plan, quotas: list[float], timeout_s: float, tolerant: bool) -> list[dict[str, Any]]:
    """What the ranks said of a run to its end. SystemExit when it fails."""
    groups, name = cgroups.detect(), f"dljob-waiting-{os.getpid()}"
    said: list[dict[str, Any]] = []
    try:
        for r, quota in enumerate(quotas):
            groups.create(f"{name}/r{r}", quota, None)
        preferred(name)
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
            path = Path(folder, "plan.json")
            path.write_text(todo.to_json(), encoding="utf-8")
            server.bind(f"{folder}/agent")
            server.listen(len(quotas))
            threading.Thread(target=listen, args=(server, said, name), daemon=True).start()
            faults = ["--with-ft", "ulfm"] if tolerant else []
            placed = [
                "--map-by",
                ":OVERSUBSCRIBE",
                "--bind-to",
                "none",
                "--mca",
                "btl",
                "self,tcp",
                "--mca",
                "pml",
                "ob1",
            ]
            mpirun = [str(Path(sys.prefix, "bin", "mpirun")), "--allow-run-as-root", *faults, *placed]
            paths = os.pathsep.join(sys.path[:3])
            env = os.environ | {
                PLAN_ENV: str(path),
                SOCKET_ENV: f"{folder}/agent",
                CGROUP_ENV: name,
                "PYTHONPATH": paths,
            }
            command = [*mpirun, "-n", str(len(quotas)), sys.executable, __file__, "rank"]
            process = subprocess.Popen(command, env=env, start_new_session=True)
            try:
                code = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                raise SystemExit(f"not done after {timeout_s:g} s") from None
        if code:
            raise SystemExit(f"the ranks ended with code {code}")
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
