"""Inject faults at random times and check that training recovers and ends with the result of an undisturbed run.

    sudo hack/env python -m benchmarks.training.kills [--rounds 200] [--seed 1]

Real agents and ranks run in namespaces of one machine (``support.trainer.pods``; needs root). Faults are injected one
after another while a job trains: processes are killed or stopped, links cut, pods killed or evicted, checkpoints and
the pods' copies damaged, a third of them while a checkpoint is written. When the job has succeeded, its parameters and
optimizer state are compared with those of an undisturbed job with the same plan. The next job runs in the same pods.

Two thirds of the jobs are fixed: two pods, and the result must be bit-identical. The others are elastic: three pods, of
which two are enough. Sums over other ranks round differently, so the relative norm of the difference is printed and
must stay below 1e-3.

All random choices follow from ``--seed``, which is printed; timing depends on the machine. Exit code 1 on a failure.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from safetensors.torch import load_file

from dlcontract import CheckpointRef, ModelRef, Plan, Report, RunPhase
from dltrain.checkpoint.store import MODEL, OPTIMIZER
from dltrain.protocol.volume_layout import TERM as TERM_FILE
from dltrain.protocol.volume_layout import job_directory, step_name
from dltrain.record.run_report.files import JSON
from support.trainer.pods import KILL, STOP, TERM, Job, Pod, job, process, rank_process

STEPS = 300
TOLERANCE = 1e-3
SAVE_S = 0.25
"""Interval between checkpoints; it is short so that many faults occur during a checkpoint."""
START_S, RESUME_S = 120.0, 90.0


def damage(folders: list[Path], chance: random.Random) -> str:
    """Flip a bit of, truncate or remove a file of, or beside, the newest checkpoint in some folders.

    Return a description. The checkpoint of the last step is left intact, because no later one would replace it.
    """
    done = []
    for folder in folders:
        newest = max(folder.glob("**/step-*"), default=None)
        if newest is None or newest.name == step_name(STEPS):
            continue
        beside = [path for path in (newest.parent / TERM_FILE, newest.parent / JSON) if path.exists()]
        files = [*sorted(newest.iterdir()), *beside] if newest.exists() else beside
        if not files or chance.random() < 0.4:
            continue
        file, how = chance.choice(files), chance.choice(["flip", "cut", "remove"])
        try:
            content = bytearray(file.read_bytes())
            if how == "remove":
                file.unlink()
            elif how == "cut":
                file.write_bytes(content[: len(content) // 2])
            else:
                content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
                file.write_bytes(content)
        except (FileNotFoundError, ValueError):
            continue  # pruned meanwhile
        done.append(f"{how} {file.name}")
    return ", ".join(done) or "nothing"


def strike(made: Job, fault: str, chance: random.Random) -> str:
    """Inject ``fault`` and describe its target. Raise LookupError, OSError or ValueError if there is no target."""
    index = chance.randrange(len(made.pods))
    pod = made.pods[index]
    match fault:
        case "kill rank":
            os.kill(rank_process(pod), KILL)
        case "stop rank":
            os.kill(rank_process(pod), STOP)
        case "kill mpirun":
            os.kill(process(made.pods[0], "prterun"), KILL)
            return "of pod 0"
        case "kill daemon":
            os.kill(process(made.pods[1], "prted"), KILL)
            return "of pod 1"
        case "damage":
            done = damage([made.checkpoints, *(p.directory / "memory" for p in made.pods)], chance)
            os.kill(rank_process(pod), KILL)
            return f"{done}; then kill rank of pod {index}"
        case "cut link":
            index = chance.randrange(1, len(made.pods))
            made.pods[index].link("down")
            time.sleep(chance.uniform(5.5, 8))
            made.pods[index].link("up")
        case "kill pod":
            pod.kill()
            time.sleep(chance.uniform(0, 2))
            begin(pod)
        case "evict pod":
            pod.signal(TERM)
            pod.wait(30)
            begin(pod)
    return f"of pod {index}"


WEIGHTS = {"kill rank": 8, "kill mpirun": 4, "kill daemon": 4, "damage": 6, "stop rank": 3, "cut link": 1,
           "kill pod": 2, "evict pod": 2}  # fmt: skip


def begin(pod: Pod) -> None:
    pod.start(DLTRAIN_RETURN_AFTER_S="1")


def equal(a: Path, b: Path) -> bool:
    return all(
        hashlib.sha256((a / name).read_bytes()).digest() == hashlib.sha256((b / name).read_bytes()).digest()
        for name in (MODEL, OPTIMIZER)
    )


def distance(a: Path, b: Path) -> float:
    """Return the largest relative norm of the difference over the parameters."""
    ours, theirs = load_file(a / MODEL), load_file(b / MODEL)
    return max(float((ours[name] - theirs[name]).norm() / theirs[name].norm()) for name in theirs)


@dataclass
class Campaign:
    """Jobs in the same pods, one after another. ``min_ranks``: ranks that a job needs to continue."""

    made: Job
    min_ranks: int
    reference: Path
    """State at the end of the undisturbed job."""
    chance: random.Random
    struck: Counter[str] = field(default_factory=Counter)
    jobs: int = 0
    farthest: float = 0.0
    number: int = 0

    def plan(self) -> Plan:
        """Return a plan for the same training with a new number."""
        self.number += 1
        checkpoint = CheckpointRef(directory=str(self.made.checkpoints), interval_s=SAVE_S, keep=3)
        return self.made.plan(
            model=ModelRef(name="mlp"), steps=STEPS, min_ranks=self.min_ranks, number=self.number, rebalance=False,
            checkpoint=checkpoint, backoff_limit=1_000_000, grace_s=20 + self.number / 1000,
        )  # fmt: skip

    def until(self, condition: Callable[[Report], Any], within_s: float) -> Report:
        number = self.number
        return self.made.until(lambda r: r.plan_number == number and condition(r), within_s)

    def clear(self) -> None:
        for folder in (self.made.checkpoints, *(pod.directory / "memory" for pod in self.made.pods)):
            for entry in folder.iterdir():
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    def train(self, faults: int) -> int:
        """Run one job from the beginning to its end with at most ``faults`` faults. Return their number."""
        self.clear()
        plan = self.plan()
        self.made.put(plan)
        whole = len(plan.ranks)
        report = self.until(lambda r: r.phase in (RunPhase.RUNNING, RunPhase.SUCCEEDED), START_S)
        rounds = 0
        while rounds < faults and report.phase is not RunPhase.SUCCEEDED:
            fault = self.chance.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
            saving = self.chance.random() < 1 / 3
            wait_s = self.chance.uniform(0, 1.5)
            time.sleep(wait_s)
            if saving:
                deadline_s = time.monotonic() + 2 * SAVE_S
                while time.monotonic() < deadline_s and not list(self.made.checkpoints.glob("*/.step-*")):
                    pass
            before = self.made.report
            assert before is not None
            try:
                target = strike(self.made, fault, self.chance)
            except (LookupError, OSError, ValueError):
                target = ""
            if not target:  # between two attempts, or finished
                report = self.until(lambda r: r.phase in (RunPhase.RUNNING, RunPhase.SUCCEEDED), RESUME_S)
                continue
            began = time.monotonic()

            def again(r: Report, before: Report = before) -> bool:
                restarted = sum(r.restarts.values()) > sum(before.restarts.values()) or r.term > before.term
                return r.phase is RunPhase.SUCCEEDED or bool(
                    restarted and r.phase is RunPhase.RUNNING and r.world_size >= min(self.min_ranks, whole)
                )

            report = self.until(again, RESUME_S)
            rounds += 1
            self.struck[fault] += 1
            saved = " while saving" if saving else ""
            print(
                f"{sum(self.struck.values()):4} {fault} {target}{saved}, at step {before.step}: "
                f"{report.phase} at step {report.step} after {time.monotonic() - began:.1f} s",
                flush=True,
            )
        self.until(lambda r: r.phase is RunPhase.SUCCEEDED, START_S + RESUME_S)
        final = job_directory(plan) / step_name(STEPS)
        if not self.reference.exists():
            shutil.copytree(final, self.reference)
            return rounds
        self.jobs += 1
        if not equal(final, self.reference):
            self.farthest = max(self.farthest, distance(final, self.reference))
            bound = 0.0 if self.min_ranks == whole else TOLERANCE
            assert self.farthest <= bound, f"parameters are {self.farthest} away, expected at most {bound}"
        return rounds


def campaign(pods: int, min_ranks: int, rounds: int, chance: random.Random) -> dict[str, Any]:
    with job(pods) as made:
        run = Campaign(made, min_ranks, made.directory / "undisturbed", chance)
        run.number = 1
        made.put(made.plan(model=ModelRef(name="mlp"), steps=1, min_ranks=min_ranks))
        for pod in made.pods:
            begin(pod)
        made.until(lambda r: r.phase is RunPhase.SUCCEEDED, START_S)
        began = time.monotonic()
        try:
            run.train(0)
            while sum(run.struck.values()) < rounds:
                run.train(rounds - sum(run.struck.values()))
        except AssertionError:
            print(made.logs(), file=sys.stderr)
            raise
        return {
            "pods": pods, "elastic": min_ranks < pods, "rounds": sum(run.struck.values()), "jobs_compared": run.jobs,
            "faults": dict(run.struck), "farthest": run.farthest, "seconds": round(time.monotonic() - began),
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=["fixed", "elastic"], help="run only jobs of this kind")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    chance = random.Random(options.seed)
    fixed = {"fixed": options.rounds, "elastic": 0}.get(options.only, round(options.rounds * 2 / 3))
    for pods, min_ranks, rounds in ((2, 2, fixed), (3, 2, options.rounds - fixed)):
        if rounds:
            print(json.dumps(campaign(pods, min_ranks, rounds, chance)), flush=True)


if __name__ == "__main__":
    main()
