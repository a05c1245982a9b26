"""Run whole jobs on one GPU with real agents: to the end, with a killed rank, on a shared GPU, and out of memory.

    python -m benchmarks.gpu.agents [--case killed] [--device cpu]

Each job has its agents in namespaces of their own, as pods have (``tests/support/trainer/pods.py``), so the program
needs root and iproute2. A line shows the seconds from agents to the first step, the measured parts of a step and the
power of each rank. Exit code 1 if a job ends otherwise than expected, 2 without a GPU. ``--device cpu`` tests this
program without a GPU; the case ``memory`` needs one.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.gpu.device import add_option, chosen

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from dlcontract import DatasetRef, ModelRef, Plan, Report, RunPhase
from support.trainer.pods import KILL, Job, job, rank_process

WITHIN_S = 180.0
STEPS, KILL_AT = 600, 200
TOO_LARGE = """
import torch, dltrain
t = dltrain.init(batch=8, epochs=1)
kept = []
while True:
    kept.append(torch.empty(2**33, dtype=torch.uint8, device=t.device))
"""


def planned(made: Job, device: str, shares: list[int], command: list[str] | None = None) -> Plan:
    """Return the plan of a job with a rank in each pod. ``shares``: local batch sizes."""
    on_gpu = device != "cpu"
    model = ModelRef(name="resnet18" if on_gpu else "digits-cnn")
    data = DatasetRef(name="synthetic-images" if on_gpu else "digits")
    plan = made.plan(command, ranks=len(shares), steps=STEPS)
    if command is None:
        plan = plan.model_copy(update={"model": model, "dataset": data})
    ranks = tuple(
        rank.model_copy(update={"device": device, "gpu": on_gpu, "share": share})
        for rank, share in zip(plan.ranks, shares, strict=True)
    )
    return plan.model_copy(update={"ranks": ranks, "global_batch": sum(shares)})


def text(report: Report) -> str:
    """Return the figures of a report in a line."""
    marks = report.startup
    parts = [f"{report.phase.name.lower()} at step {report.step}"]
    if marks.agents_up_unix_s and marks.first_step_unix_s:
        parts.append(f"first step {marks.first_step_unix_s - marks.agents_up_unix_s:.1f} s after the agents")
    for rank in report.ranks:
        power = "" if rank.power_W is None else f", {rank.power_W:.0f} W"
        parts.append(
            f"rank {rank.rank}: computing {1e3 * rank.compute_s:.2f} ms, waiting {1e3 * rank.comm_s:.2f}{power}"
        )
    if report.failure is not None:
        parts.append(f"{report.failure.reason}: {report.failure.message[:200]}")
    return "; ".join(parts)


def ended(report: Report) -> bool:
    return report.phase in (RunPhase.SUCCEEDED, RunPhase.FAILED)


def alone(device: str) -> tuple[str, bool]:
    with job(1) as made:
        made.start(planned(made, device, [256]))
        report = made.until(ended, WITHIN_S)
        return text(report), report.phase is RunPhase.SUCCEEDED


def shared(device: str) -> tuple[str, bool]:
    with job(2) as made:
        made.start(planned(made, device, [96, 160]))
        report = made.until(ended, WITHIN_S)
        return text(report), report.phase is RunPhase.SUCCEEDED


def killed(device: str) -> tuple[str, bool]:
    with job(1) as made:
        made.start(planned(made, device, [256]))
        made.until(lambda report: report.step >= KILL_AT, WITHIN_S)
        os.kill(rank_process(made.pods[0]), KILL)
        began = time.monotonic()
        made.until(lambda report: report.failures > 0 or sum(report.restarts.values()) > 0 or ended(report), WITHIN_S)
        noticed_s = time.monotonic() - began
        report = made.until(ended, WITHIN_S)
        found = f"{text(report)}; killed after step {KILL_AT}, noticed after {noticed_s:.2f} s"
        return found, report.phase is RunPhase.SUCCEEDED and "resumed from step" in made.pods[0].text()


def memory(device: str) -> tuple[str, bool]:
    with job(1) as made:
        script = made.directory / "large.py"
        script.write_text(TOO_LARGE, encoding="utf-8")
        script.chmod(0o644)
        made.start(planned(made, device, [8], [sys.executable, str(script)]))
        report = made.until(lambda report: report.failure is not None or ended(report), WITHIN_S)
        return text(report), report.failure is not None and report.failure.reason == "OutOfMemory"


CASES: dict[str, Callable[[str], tuple[str, bool]]] = {
    "alone": alone, "killed": killed, "shared": shared, "memory": memory,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, help="default: all")
    add_option(parser)
    options = parser.parse_args()
    device = chosen(options.device)
    if device is None:
        return 2
    on_gpu = device != "cpu"
    missed = 0
    for name in (options.case,) if options.case else [name for name in CASES if on_gpu or name != "memory"]:
        try:
            found, passed = CASES[name](device)
        except AssertionError as error:
            found, passed = str(error), False
        missed += not passed
        print(f"{name:<8} {'' if passed else 'MISSED '}{found}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
