"""Reproduce table 1 of "Caffe on the Sunway TaihuLight" (2020): final accuracy of one process, server and ring.

    python -m benchmarks.papers.cifar10 --data URI                  CIFAR-10: the authors' binary archive
    python -m benchmarks.papers.cifar10 [--iterations 400]          bundled digits, which are not CIFAR-10

Caffe's net for CIFAR-10 (``cifar10_net``) is trained by one process, by a layered parameter server (rank 0 serves and
does not train) and by a ring over all ranks, with the same global batches, initial weights and learning rates, over
several seeds. The table has the accuracy on held-out images, and the paired difference to one process with its standard
error. Published: server and ring 0.1 and 0.2 points below one node, after 40,000 iterations; no standard errors are
known.

``--data`` takes http, https, s3 and file URIs. The archive is downloaded once and verified with ``--sha256``. On two
cores, 40,000 iterations of five seeds take days, so that without ``--data`` the net is trained on 8 x 8 images of
scikit-learn's digits. There, the net ``full`` does not leave its start within some hundred iterations, because Caffe
starts its first layer with a deviation of 0.0001. The default is then ``quick``, with Caffe's learning rate of 0.001,
and of 0.0001 in the last tenth.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from benchmarks.lib.figures import machine
from benchmarks.lib.local_ranks import PYTHONPATH, local_plan, mpirun
from benchmarks.papers.cifar10_net import CIFAR10_SHA256, read_cifar10
from benchmarks.papers.cifar10_ranks import SETTINGS_ENV

from dlcontract import DatasetRef, ModelRef, OptimizerRef
from dltrain.batch.shares import apportion
from dltrain.data.fetch import check, fetch
from dltrain.protocol.rank_messages import PLAN_ENV

ALONE, SERVER, RING = "one process", "layered server", "ring"
WAYS = (ALONE, SERVER, RING)
BATCH = 100
PUBLISHED = {SERVER: -0.1, RING: -0.2}
"""Published difference of accuracy to one node, in points."""


@dataclass(frozen=True)
class Difference:
    """Mean of paired differences, in points, and its standard error (None with one pair)."""

    points: float
    error: float | None

    @classmethod
    def of(cls, accuracies: Sequence[float], alone: Sequence[float]) -> "Difference":
        found = [100 * (a - b) for a, b in zip(accuracies, alone, strict=True)]
        return cls(fmean(found), stdev(found) / math.sqrt(len(found)) if len(found) > 1 else None)

    @property
    def text(self) -> str:
        return f"{self.points:+.2f}" + ("" if self.error is None else f" ± {self.error:.2f}")


def shares_of(way: str, ranks: int) -> Sequence[int]:
    """Return the local batch sizes. The layered server is rank 0 and has none."""
    if way == ALONE:
        return [BATCH]
    return [0, *apportion(BATCH, [1] * (ranks - 1))] if way == SERVER else apportion(BATCH, [1] * ranks)


def accuracy(way: str, seed: int, dataset: DatasetRef, options: argparse.Namespace, folder: Path) -> float:
    """Train once and return the accuracy on the held-out images. Raise SystemExit if the ranks fail."""
    shares = shares_of(way, options.ranks)
    plan = local_plan(
        shares, model=ModelRef(name="digits-cnn"), dataset=dataset, steps=options.iterations, seed=seed,
        collective="LayeredServer" if way == SERVER else "Ring",
        optimizer=OptimizerRef(learning_rate=options.rate, momentum=0.9),
    )  # fmt: skip
    path = folder / "plan.json"
    path.write_text(plan.to_json(), encoding="utf-8")
    settings = {"net": options.net, "lowered": options.iterations // 10}
    here = {PLAN_ENV: str(path), "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1", SETTINGS_ENV: json.dumps(settings)}
    command = [
        *(mpirun(len(shares)) if len(shares) > 1 else ()),
        sys.executable,
        "-m",
        "benchmarks.papers.cifar10_ranks",
    ]
    done = subprocess.run(command, env=os.environ | here, capture_output=True, text=True, timeout=options.deadline)
    if done.returncode:
        raise SystemExit(f"{way}, seed {seed}: {done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return found["accuracy"]


def data_of(options: argparse.Namespace, folder: Path) -> tuple[DatasetRef, str]:
    """Return the data set for the plan and its description. Download CIFAR-10 if a URI is given, and verify it."""
    if options.data is None:
        return DatasetRef(name="digits"), "digits of scikit-learn, 8 x 8 pixels: NOT CIFAR-10"
    if options.data.startswith("file://"):
        archive = Path(options.data.removeprefix("file://"))
        check(archive, options.sha256)
    else:
        archive = Path(options.cache, "cifar-10-binary.tar.gz")
        archive.parent.mkdir(parents=True, exist_ok=True)
        fetch(options.data, archive, options.sha256)
    arrays: Mapping[str, Any] = read_cifar10(archive)
    np.savez(folder / "cifar10.npz", **arrays)
    return DatasetRef(path=str(folder / "cifar10.npz")), "CIFAR-10"


def known(path: Path | None, about: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return the accuracies by way in a file of an earlier run, in the order of seeds; none if there is no such file.

    Raise ValueError if the file has another net, data, number of iterations or of ranks, or learning rate.
    """
    if path is None or not path.exists():
        return {way: [] for way in WAYS}
    stored = json.loads(path.read_text())
    if stored["about"] != about:
        raise ValueError(f"{path}: found {stored['about']}; expected {dict(about)}. Choose another file")
    found: dict[str, list[float]] = stored["accuracies"]
    return found


def show(found: Mapping[str, Sequence[float]], what: str) -> None:
    print(f"\n{what}; {len(found[ALONE])} seeds\n")
    print("| way | accuracy, % | difference to one process, points ± standard error | published difference |")
    print("|---|---|---|---|")
    for way in WAYS:
        difference = "-" if way == ALONE else Difference.of(found[way], found[ALONE]).text
        published = "-" if way == ALONE else f"{PUBLISHED[way]:+.1f}"
        print(f"| {way} | {100 * fmean(found[way]):.2f} | {difference} | {published} |")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", metavar="URI", help="CIFAR-10's binary archive. Default: bundled digits")
    parser.add_argument("--sha256", default=CIFAR10_SHA256, help="checksum of the archive (default: %(default)s)")
    parser.add_argument("--cache", default="/tmp/dljob-cifar10", help="folder for the archive (default: %(default)s)")
    parser.add_argument("--net", choices=("full", "quick"), help="default: full for CIFAR-10, quick for digits")
    parser.add_argument("--ranks", type=int, default=4, help="ranks, of which one is the server (default: 4)")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--iterations", type=int, help="default: 40000 for CIFAR-10, 400 for digits")
    parser.add_argument("--rate", type=float, default=0.001, help="learning rate (default: %(default)s, as in Caffe)")
    parser.add_argument("--deadline", type=float, help="seconds for each run (default: none with --data, else 600)")
    parser.add_argument("--json", type=Path, help="file for all accuracies. Runs that it contains are not repeated")
    options = parser.parse_args(arguments)
    options.iterations = options.iterations or (400 if options.data is None else 40_000)
    options.net = options.net or ("quick" if options.data is None else "full")
    options.deadline = options.deadline or (600.0 if options.data is None else None)
    if not (4 <= options.ranks <= 16 and options.seeds >= 1 and options.iterations >= 10):
        parser.error(
            f"found --ranks {options.ranks}, --seeds {options.seeds}, --iterations {options.iterations}; expected 4 to "
            "16 ranks, 1 seed or more, and 10 iterations or more"
        )
    about = {
        "net": options.net, "data": options.data and options.sha256, "iterations": options.iterations,
        "rate": options.rate, "ranks": options.ranks,
    }  # fmt: skip
    try:
        found = known(options.json, about)
    except ValueError as error:
        parser.error(f"--json: {error}")
    with tempfile.TemporaryDirectory() as name:
        dataset, what = data_of(options, Path(name))
        print(
            f"Caffe's net {options.net}, {options.iterations} iterations of {BATCH} images, {options.ranks} ranks; "
            f"{what}; {machine()}",
            flush=True,
        )
        for seed in range(options.seeds):
            for way in WAYS:
                if len(found[way]) <= seed:
                    found[way].append(accuracy(way, seed, dataset, options, Path(name)))
                    if options.json:
                        options.json.write_text(json.dumps({"about": about, "accuracies": found}))
            print(f"seed {seed}: " + ", ".join(f"{way} {found[way][seed]:.4f}" for way in WAYS), flush=True)
    show({way: found[way][: options.seeds] for way in WAYS}, what)
    return 0


if __name__ == "__main__":
    sys.exit(main())
