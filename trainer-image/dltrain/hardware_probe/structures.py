"""Measure the step time and the memory of random networks (``dlcontract.structures``) on one core of a CPU."""

import multiprocessing
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from dlcontract.hardware import MeasuredStructures, ReferenceNet
from dlcontract.structures import structures
from dltrain.hardware_probe.networks import training_step

BUDGET_S, FEWEST_STEPS, WARM_UP_STEPS = 0.4, 4, 2
"""CPU seconds of the timed steps of a network, their minimum number, and the number of steps before them."""
LIMIT_S = 60.0
"""Maximum seconds for one network, including the start of its process."""


def measured(count: int, limit_s: float) -> tuple[MeasuredStructures, str | None]:
    """Return the measurements of the first ``count`` random networks, and a note if some are missing.

    Each network trains in its own process, a fork of this one, whose peak memory shows what the network needs. Call
    this function before PyTorch computes anything here, because its threads do not survive a fork. ``limit_s``: seconds
    after which no further network starts.
    """
    torch.set_num_threads(1)
    prepare()
    end, rows = time.monotonic() + limit_s, list[tuple[float, int]]()
    for net in structures(count):
        rows.append(in_own_process(partial(first_step, net)) if time.monotonic() < end else (0.0, 0))
    missing = sum(not seconds for seconds, _ in rows)
    note = f"structures: {missing} of {count} networks were not measured: no time or memory was left"
    found = MeasuredStructures(s=tuple(s for s, _ in rows), grown_KiB=tuple(KiB for _, KiB in rows))
    return found, note if missing else None


def first_step(net: ReferenceNet) -> Callable[[], None]:
    """Return a function that makes a training step of a random network with its only batch size."""
    return training_step(net, net.batches[0], torch.device("cpu"), "FP32")


def in_own_process(make: Callable[[], Callable[[], None]]) -> tuple[float, int]:
    """Return (CPU seconds of a step, growth of memory in KiB), or (0, 0) if the process fails or is killed.

    ``make``: a function that builds a model and returns a function that makes a training step of it.
    """
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(make, theirs))
    process.start()
    theirs.close()
    try:
        return mine.recv() if mine.poll(LIMIT_S) else (0.0, 0)
    except EOFError:
        return 0.0, 0
    finally:
        process.kill()
        process.join()


def _measure(make: Callable[[], Callable[[], None]], answer: Connection) -> None:
    """Send the lower quartile of the CPU seconds of steps, and the growth of this process's memory, to ``answer``.

    CPU times exclude other processes, and what remains of a disturbance only lengthens a step.
    """
    torch.manual_seed(0)
    before_KiB = resident_KiB("VmRSS")
    step = make()
    for _ in range(WARM_UP_STEPS):
        step()
    times = list[float]()
    while len(times) < FEWEST_STEPS or sum(times) < BUDGET_S:
        begin = time.process_time()
        step()
        times.append(time.process_time() - begin)
    seconds = sorted(times)[len(times) // 4]
    answer.send((float(f"{max(seconds, 1e-7):.4g}"), max(1, resident_KiB("VmHWM") - before_KiB)))


def prepare() -> None:
    """Make the first step of the optimizer here, so that its imports do not count for a network."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter], lr=0.1, momentum=0.9).step()


def resident_KiB(field: str, status: Path = Path("/proc/self/status")) -> int:  # noqa: N802 - the unit is part of it
    """Return the memory of this process in KiB: its present one (``VmRSS``), or its peak (``VmHWM``)."""
    lines = status.read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))
