"""Measure the memory of messages that arrive before their receive is posted, by transport and size of the messages.

    hack/env python -m benchmarks.training.early_messages

Rank 0 sends 64 MiB to rank 1, which makes progress without a receive, as a rank does whose peers are a step's backward
pass ahead. Printed is the growth of anonymous and of shared memory of both until rank 1 posts its receives, and of
shared memory until all has arrived. A second time, nothing grows: MPI uses the same memory again.

Plans count ``EARLY_MESSAGE`` bytes of a rank's memory for each byte (``dljob/perf/resources/memory.py``). It must be at
least what messages of 56 KiB take over TCP, and /dev/shm must have room for what ranks of a pod take.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.lib.goals import Figure, table
from benchmarks.lib.local_ranks import PYTHONPATH, mpirun

from dljob.perf.resources.memory import EARLY_MESSAGE, SHM_PER_RANK_NBYTES

MIB, TOTAL_NBYTES = 2**20, 64 * 2**20
CASES = (("tcp", 56), ("tcp", 128), ("sm", 56), ("sm", 128))
"""Transport of Open MPI, and size of the messages in KiB: plans on several nodes have 56, others 128."""


def memory_nbytes() -> dict[str, int]:
    """Return the anonymous and the shared memory of this process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    found = dict(line.split(":", 1) for line in lines)
    return {kind: 1024 * int(found[kind].split()[0]) for kind in ("RssAnon", "RssShmem")}


def rank(segment_nbytes: int, wait_s: float) -> None:
    """Send or receive once, and print this rank's growth as JSON."""
    from dltrain.comm.process_group import ProcessGroup

    process_group = ProcessGroup.start()
    comm = process_group.comm
    sends, count = comm.Get_rank() == 0, TOTAL_NBYTES // segment_nbytes
    data = np.ones((count, segment_nbytes), np.uint8)  # written, so that receives add no pages
    comm.sendrecv(b"", 1 - comm.Get_rank())  # connects both
    before = memory_nbytes()
    requests = [comm.Isend(row, 1) for row in data] if sends else []
    end = time.monotonic() + wait_s
    while time.monotonic() < end:
        comm.Iprobe(tag=9)  # makes progress, and finds nothing
        time.sleep(0.01)
    early = memory_nbytes()
    requests = requests or [comm.Irecv(row, 0) for row in data]
    for request in requests:
        request.Wait()
    comm.Barrier()
    after = memory_nbytes()
    row = {"rank": comm.Get_rank(), "early": early["RssAnon"] - before["RssAnon"]}
    print("row", json.dumps(row | {"shared": after["RssShmem"] - before["RssShmem"]}), flush=True)
    process_group.close()


def measured(transport: str, segment_nbytes: int, wait_s: float) -> list[dict[str, Any]]:
    """Return the growth of the sender and of the receiver."""
    command = [*mpirun(2), sys.executable, "-m", "benchmarks.training.early_messages"]
    settings = {
        "OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": f"self,{transport}", "OMPI_MCA_btl_sm_single_copy_mechanism": "none",
        "PYTHONPATH": PYTHONPATH,
    }  # fmt: skip
    arguments = ["--rank", str(segment_nbytes), "--wait", str(wait_s)]
    done = subprocess.run(
        [*command, *arguments], env={**os.environ, **settings}, capture_output=True, text=True, timeout=600, check=True
    )
    rows = [json.loads(line.split("row ", 1)[1]) for line in done.stdout.splitlines() if "row " in line]
    return sorted(rows, key=lambda row: int(row["rank"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wait", type=float, default=3.0, help="seconds until receives are posted")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(options.rank, options.wait)
        return
    figures = []
    for transport, segment_KiB in CASES:
        sender, receiver = measured(transport, 1024 * segment_KiB, options.wait)
        print(
            f"{transport:4} messages of {segment_KiB:3} KiB: sender {sender['early'] / MIB:5.1f} MiB, receiver "
            f"{receiver['early'] / MIB:5.1f}, shared {receiver['shared'] / MIB:5.1f} of {TOTAL_NBYTES / MIB:.0f} MiB"
        )
        if transport == "tcp":
            value = receiver["early"] / TOTAL_NBYTES
            figures.append(Figure(f"tcp, {segment_KiB} KiB: early / sent", value, high=EARLY_MESSAGE))
        else:
            value = receiver["shared"] / SHM_PER_RANK_NBYTES
            figures.append(Figure(f"sm, {segment_KiB} KiB: shared / room", value, high=1.0))
    print(table(figures))


if __name__ == "__main__":
    main()
