"""Measure messages between two ranks on this node: ``mpirun -n 2 python -m dltrain.hardware_probe.node_link``.

Rank 0 prints the latency in seconds and the bandwidth in bytes per second. ``measure`` starts the two ranks.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from dlcontract.hardware import LinkRate

ROUND_TRIPS = 500
LARGE_NBYTES = 4 * 2**20
"""Bytes of a large message: that of a bucket of gradients."""
LARGE_MESSAGES = 20
LIMIT_S = 15.0


def measure(scratch: Path) -> tuple[LinkRate | None, str | None]:
    """Return the link between two MPI ranks on this node, or None and a note with the reason."""
    try:
        output = of_ranks(
            2, ["dltrain.hardware_probe.node_link"], scratch, LIMIT_S, {"OMPI_MCA_mpi_yield_when_idle": "0"}
        )
        latency_s, bandwidth_Bps = map(float, output.split()[-2:])
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return None, f"link within the node: {type(error).__name__}: {error!s:.120}; not measured"
    return LinkRate(latency_s=latency_s, Bps=bandwidth_Bps, peer="this node"), None


def of_ranks(
    ranks: int, arguments: Sequence[str], scratch: Path, limit_s: float, variables: Mapping[str, str] | None = None
) -> str:
    """Return what ``ranks`` MPI ranks on this node print, each with one core, as in jobs without a cluster.

    ``arguments``: module and arguments of each rank. ``scratch``: folder for temporary files. Raise OSError or
    SubprocessError if they do not start, fail, or take longer than ``limit_s`` seconds.
    """
    mpirun = Path(sys.executable).parent / "mpirun"
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        env = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": folder, **(variables or {})}
        command = [str(mpirun), *root, "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none", "-n", str(ranks)]
        command += [sys.executable, "-m", *arguments]
        ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=limit_s, check=True)
        return ran.stdout


def main() -> None:
    """Exchange messages with the other rank. Rank 0 then prints latency (seconds) and bandwidth (bytes per second)."""
    import numpy as np
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    other = 1 - world.rank

    def exchange_s(nbytes: int, times: int) -> float:
        mine, theirs = np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
        found = []
        for _ in range(times):
            begin = time.perf_counter()
            if world.rank == 0:
                world.Send(mine, other)
                world.Recv(theirs, other)
            else:
                world.Recv(theirs, other)
                world.Send(mine, other)
            found.append(time.perf_counter() - begin)
        return sorted(found)[len(found) // 4] / 2  # disturbances only add

    exchange_s(8, 50)
    latency_s, large_s = exchange_s(8, ROUND_TRIPS), exchange_s(LARGE_NBYTES, LARGE_MESSAGES)
    if world.rank == 0:
        bandwidth_Bps = LARGE_NBYTES / max(large_s - latency_s, large_s / 2)
        sys.stdout.write(f"{max(latency_s, 1e-9):.4g} {bandwidth_Bps:.4g}\n")


if __name__ == "__main__":
    main()
