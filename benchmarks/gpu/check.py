"""Check the trainer's GPU code in a minute: ``python benchmarks/gpu_check.py``.

It starts a rank on each GPU of this machine (two ranks if there is only one GPU), with the trainer's code for devices,
process groups, streams, gradients, checkpoints and energy, and prints a line for each check:

    devices      device names are in the catalogue; one GPU per rank with NCCL (gloo on a shared GPU)
    exactness    uneven local batches give the gradient of one process, and equal parameters on all ranks
    ddp          the same with collective DDP, and the number of times that a step waits for its GPU
    sharded      strategy Sharded equals one process in float32, and is close to it in bfloat16 with recomputed layers
    batches      batches that are copied while the GPU computes arrive complete
    resume       resuming from a checkpoint gives bit-identical parameters at the end
    memory       running out of memory is reported as OutOfMemory and leaves the device usable; a step's peak memory is
                 at most the predicted one
    reading      number of times that a step waits for its GPU
    step         measured computing and waiting add up to the elapsed time; compared with plain DDP and no communication
    ddp_step     the same with collective DDP
    energy       joules measured by NVML

``--device cpu`` runs the checks that are possible on CPUs (gloo). Exit codes: 0 all passed, 1 some missed (marked
MISSED), 2 no GPU. Times depend on the machine and its load, so the thresholds are wide.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.figures import machine
from benchmarks.lib.local_ranks import PYTHONPATH, local_plan, mpirun

from dlcontract import CheckpointRef, ModelRef, Plan, Rank
from dltrain.batch.shares import apportion
from dltrain.device.rank_device import gpu_missing_reason, product_label
from dltrain.protocol.rank_messages import PLAN_ENV

TIMEOUT_S = 600
PER_RANK = 24
"""Average local batch size."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpu_check", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: run only the checks that need no GPU"
    )
    parser.add_argument("--ranks", type=int, help="default: one per GPU, at least 2")
    parser.add_argument("--steps", type=int, default=40, help="timed steps per variant (default: 40)")
    options = parser.parse_args(arguments)
    import torch

    on_gpu = options.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        print(
            f"gpu_check: found no GPU: {gpu_missing_reason()}; --device cpu runs the checks without one",
            file=sys.stderr,
        )
        return 2
    gpus = torch.cuda.device_count() if on_gpu else 0
    count = options.ranks or max(2, gpus)
    names = [product_label(torch.cuda.get_device_name(r % gpus)) if on_gpu else "cpu" for r in range(count)]
    print(f"{count} ranks on {', '.join(dict.fromkeys(names))}; {machine()}")
    missed = 0
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        for name, text, passed in checks(plan_for(names, on_gpu, folder), options.steps, Path(folder)):
            missed += not passed
            print(f"{name:<12} {'' if passed else 'MISSED '}{text}")
    return 1 if missed else 0


def plan_for(names: Sequence[str], on_gpu: bool, folder: str) -> Plan:
    """Return a plan with one rank per device and local batch sizes in proportion 1, 2, 3, …"""
    shares = apportion(PER_RANK * len(names), range(1, len(names) + 1))
    ranks = tuple(
        Rank(
            rank=r, pod="here", host="127.0.0.1", group="all", device=name, gpu=on_gpu, local_rank=r, share=shares[r]
        )
        for r, name in enumerate(names)
    )  # fmt: skip
    saving = CheckpointRef(enabled=False, directory=folder)
    model = ModelRef(name="mlp")  # required by the plan; check_ranks.py builds its own models
    return local_plan(shares, ranks=ranks, model=model, collective="Torch", steps=1, checkpoint=saving)


def checks(todo: Plan, steps: int, folder: Path) -> list[tuple[str, str, bool]]:
    """Run the ranks and return (name, finding, passed) of each check. Raise SystemExit on a timeout."""
    path = folder / "plan.json"
    path.write_text(todo.to_json(), encoding="utf-8")
    env = {
        PLAN_ENV: str(path),
        "PYTHONPATH": PYTHONPATH,
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # makes cuBLAS deterministic
    }
    worker = [sys.executable, "-m", "benchmarks.gpu.check_ranks", str(steps)]
    command = [*mpirun(len(todo.ranks)), *worker]
    try:
        done = subprocess.run(command, env=os.environ | env, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise SystemExit(f"gpu_check: {len(todo.ranks)} ranks did not finish within {TIMEOUT_S} s") from None
    found: list[Any] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')]
    if done.returncode:
        found.append(("the ranks", f"exited with code {done.returncode} after {len(found)} checks, see above", False))
    return [(name, text, passed) for name, text, passed in found]


if __name__ == "__main__":
    sys.exit(main())
