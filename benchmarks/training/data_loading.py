"""Measure the time that data loading adds to a training step, and how much of it workers hide.

    python -m benchmarks.training.data_loading

    waits     2 ranks; each sample arrives after 2 ms, as from a network volume; 2 workers per rank
    decodes   1 rank; each sample is decompressed (zlib) and cropped on a CPU; 1 worker, because the other core trains

Name a case to run only that one. In every round these variants take turns in the same processes, with 16 samples per
rank and step and one thread: only computing; only preparing batches; the trainer that prepares batches between steps;
the trainer with workers; DDP (gloo) with torch's DataLoader, without and with as many workers. The first steps of a
variant are not counted, because its queues filled while others ran. Times are medians over rounds of the slowest
rank's step. Ratios are medians of the rounds' ratios with their 95 % interval. The bound is
max(computing, preparing / workers) of the same round.

Threshold: the trainer with workers takes at most 1.05 times the time of DDP with workers.
"""

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as distributed
from benchmarks.lib.figures import at_most, machine, ratio, text
from benchmarks.lib.local_ranks import PYTHONPATH, mpirun
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, default_collate

from dltrain.comm.process_group import ProcessGroup
from dltrain.protocol.reporter import RankReporter
from dltrain.train import session
from dltrain.train.trainer import Trainer

SAMPLES, BATCH, STEPS, FIRST = 4096, 16, 24, 8
"""Samples of the dataset; local batch size; steps of a turn; uncounted first steps of a turn."""
CASES = {"waits": (2, 2), "decodes": (1, 1)}
"""Ranks, and workers per rank."""
COMPUTING, PREPARING, OURS, OURS_WORKERS, DDP, DDP_WORKERS = VARIANTS = (
    "computing", "preparing", "dljob, between steps", "dljob, workers", "DDP", "DDP, workers",
)  # fmt: skip
LATENCY_S = 2e-3
Step = Callable[[], None]


class Pictures(Dataset[tuple[Tensor, int]]):
    """Compressed images of 256 x 256, randomly cropped to 64 x 64 and flipped."""

    def __init__(self, latency_s: float) -> None:
        noise = np.random.default_rng(0).integers(0, 16, (16, 3, 256, 256), np.uint8)
        self.packed = [zlib.compress(picture.tobytes()) for picture in noise]
        self.small = torch.rand(3, 64, 64)
        self.latency_s = latency_s

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self.latency_s:
            time.sleep(self.latency_s)
            return self.small + torch.rand(1), index % 10
        whole = np.frombuffer(zlib.decompress(self.packed[index % 16]), np.uint8).reshape(3, 256, 256)
        x, y = random.randrange(193), random.randrange(193)
        cut = torch.from_numpy(whole[:, x : x + 64, y : y + 64].astype(np.float32) / 255)
        return cut.flip(2) if random.random() < 0.5 else cut, index % 10


def rank(case: str, rounds: int) -> None:
    """Run the variants on one rank. Rank 0 prints the times."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    workers = CASES[case][1]
    process_group = ProcessGroup.start()
    dataset = Pictures(LATENCY_S if case == "waits" else 0.0)
    batch = tuple(default_collate([dataset[i] for i in range(BATCH)]))
    indices = itertools.cycle(range(SAMPLES))

    def make() -> None:
        default_collate([dataset[next(indices)] for _ in range(BATCH)])

    store = (
        distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        if process_group.rank == 0
        else None
    )
    port = int(process_group.broadcast(str(store.port if store else 0).encode()))
    store = store or distributed.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=process_group.rank, world_size=process_group.size)
    candidates: dict[str, Step] = {
        COMPUTING: plain(network(), itertools.repeat(batch)),
        PREPARING: make,
        OURS: ours(process_group, dataset, 0),
        OURS_WORKERS: ours(process_group, dataset, workers),
        DDP: plain(DistributedDataParallel(network()), torchs(process_group, dataset, 0)),
        DDP_WORKERS: plain(DistributedDataParallel(network()), torchs(process_group, dataset, workers)),
    }
    found: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for turn in range(-1, rounds):  # the first one warms up
        for variant in VARIANTS[turn % len(VARIANTS) :] + VARIANTS[: turn % len(VARIANTS)]:
            process_group.sum([0.0])
            for _ in range(FIRST):
                candidates[variant]()
            began = time.perf_counter()
            for _ in range(STEPS - FIRST):
                candidates[variant]()
            spent_s = (time.perf_counter() - began) / (STEPS - FIRST)
            slowest_s = max(row[0] for row in process_group.gather([spent_s]))
            if turn >= 0:
                found[variant].append(slowest_s)
    if process_group.rank == 0:
        print(json.dumps(found), flush=True)
    process_group.close()
    session.leave(0)  # workers and loaders never end by themselves


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(),
        nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip


def ours(process_group: ProcessGroup, dataset: Pictures, workers: int) -> Step:
    """Return a training step as in a user's script, but without progress messages."""
    plan = session.local_plan(
        process_group.size, batch=BATCH * process_group.size, epochs=10**6, seed=0, collective="Ring", checkpoints=None
    )
    silent = RankReporter(None)
    silent.rank = 1
    trainer = Trainer(plan, process_group, silent, torch.device("cpu"), "cpu")
    net = network()
    net, opt = trainer.wrap(net, torch.optim.SGD(net.parameters(), 0.01))
    steps = trainer.steps(trainer.loader(dataset, workers=workers))

    def step() -> None:
        x, y = next(steps)
        cross_entropy(net(x), y).backward()  # type: ignore[no-untyped-call]
        opt.step()

    return step


def torchs(process_group: ProcessGroup, dataset: Pictures, workers: int) -> Iterator[Any]:
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, process_group.size, process_group.rank)
    loader = DataLoader(
        dataset, BATCH, sampler=sampler, num_workers=workers, persistent_workers=workers > 0, drop_last=True
    )
    while True:
        yield from loader


def plain(net: nn.Module, source: Iterator[Any]) -> Step:
    opt = torch.optim.SGD(net.parameters(), 0.01)

    def step() -> None:
        x, y = next(source)
        opt.zero_grad()
        cross_entropy(net(x), y).backward()  # type: ignore[no-untyped-call]
        opt.step()

    return step


def run(case: str, rounds: int) -> dict[str, np.ndarray[Any, Any]]:
    path = PYTHONPATH
    command = [
        *mpirun(CASES[case][0]),
        sys.executable,
        "-m",
        "benchmarks.training.data_loading",
        "--rank",
        case,
        "--rounds",
        str(rounds),
    ]
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return {variant: np.array(times) for variant, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="*", help=f"{', '.join(CASES)} (default: all)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rank", choices=list(CASES), help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="file for the raw times")
    options = parser.parse_args()
    if options.rank:
        rank(options.rank, options.rounds)
    if unknown := set(options.case) - set(CASES):
        parser.error(f"found {', '.join(sorted(unknown))}; expected {', '.join(CASES)}")
    host, results = machine(), {}
    print(f"{options.rounds} rounds of {STEPS - FIRST} steps, {BATCH} samples per rank; {host}\n")
    columns = ("ms per step", *VARIANTS, "bound", "dljob, workers / bound", "dljob, workers / DDP, workers")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for case in options.case or CASES:
        ranks, workers = CASES[case]
        found = results[case] = run(case, options.rounds)
        bound = np.maximum(found[COMPUTING], found[PREPARING] / workers)
        figures = " | ".join(f"{1e3 * float(np.median(times)):.1f}" for times in (*(found[s] for s in VARIANTS), bound))
        verdict = at_most(ratio(found[OURS_WORKERS], found[DDP_WORKERS]), 1.05)
        print(f"| {case}, ranks x workers: {ranks} x {workers} | {figures} | ", end="")
        print(f"{text(ratio(found[OURS_WORKERS], bound))} | {verdict} |", flush=True)
    if options.json:
        raw = {case: {variant: times.tolist() for variant, times in found.items()} for case, found in results.items()}
        options.json.write_text(json.dumps({"machine": host, "seconds": raw}))


if __name__ == "__main__":
    main()
