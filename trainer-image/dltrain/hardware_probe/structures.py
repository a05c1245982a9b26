"""Measure the step time, memory and power of random networks (``dlcontract.structures``) on one core of a CPU."""

import multiprocessing
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from dlcontract.hardware import MeasuredStructures, ReferenceNet
from dlcontract.structures import structures
from dltrain.device import energy
from dltrain.hardware_probe.networks import training_step

BUDGET_S, FEWEST_STEPS, WARM_UP_STEPS = 0.4, 4, 2
"""CPU seconds of the timed steps of a network, their minimum number, and the number of steps before them."""
LIMIT_S = 60.0
"""Maximum seconds for one network, including the start of its process."""
NO_POWER = "power: found no readable counter of the CPU packages (RAPL); not measured"

Row = tuple[float, int, float | None]
"""CPU seconds of a step, growth of memory in KiB, and power in watts, or None without a counter."""
NOTHING: Row = (0.0, 0, None)


def measured(count: int, limit_s: float) -> tuple[MeasuredStructures, str | None]:
    """Return the measurements of the first ``count`` random networks, and a note if some are missing.

    Each network trains in its own process, a fork of this one, whose peak memory shows what the network needs. Call
    this function before PyTorch computes anything here, because its threads do not survive a fork. ``limit_s``: seconds
    after which no further network starts.
    """
    torch.set_num_threads(1)
    prepare()
    end, rows = time.monotonic() + limit_s, list[Row]()
    for net in structures(count):
        rows.append(in_own_process(partial(first_step, net)) if time.monotonic() < end else NOTHING)
    missing = sum(not seconds for seconds, *_ in rows)
    note = f"structures: {missing} of {count} networks were not measured: no time or memory was left"
    found = MeasuredStructures(
        s=tuple(s for s, *_ in rows),
        grown_KiB=tuple(KiB for _, KiB, _ in rows),
        watts=watts_of([watts for *_, watts in rows]),
    )
    return found, note if missing else None


def watts_of(found: Sequence[float | None]) -> tuple[float, ...]:
    """Return the power of each network in watts, 0 for one without a measurement; () if no network has one."""
    return tuple(each or 0.0 for each in found) if any(found) else ()


def first_step(net: ReferenceNet) -> Callable[[], None]:
    """Return a function that makes a training step of a random network with its only batch size."""
    return training_step(net, net.batches[0], torch.device("cpu"), "FP32")


def in_own_process(make: Callable[[], Callable[[], None]]) -> Row:
    """Return the measurements of a network, or ``NOTHING`` if the process fails or is killed.

    ``make``: a function that builds a model and returns a function that makes a training step of it.
    """
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(make, theirs))
    process.start()
    theirs.close()
    try:
        return mine.recv() if mine.poll(LIMIT_S) else NOTHING
    except EOFError:
        return NOTHING
    finally:
        process.kill()
        process.join()


def _measure(make: Callable[[], Callable[[], None]], answer: Connection) -> None:
    """Send the lower quartile of the CPU seconds of steps, the growth of this process's memory, and the power.

    CPU times exclude other processes, and what remains of a disturbance only lengthens a step.
    """
    torch.manual_seed(0)
    before_KiB = resident_KiB("VmRSS")
    step = make()
    for _ in range(WARM_UP_STEPS):
        step()
    times = list[float]()
    power = Power()
    while len(times) < FEWEST_STEPS or sum(times) < BUDGET_S:
        begin = time.process_time()
        step()
        times.append(time.process_time() - begin)
    seconds = sorted(times)[len(times) // 4]
    answer.send((float(f"{max(seconds, 1e-7):.4g}"), max(1, resident_KiB("VmHWM") - before_KiB), power.watts()))


class Power:
    """The mean power of the CPU packages due to this pod, since the object was created."""

    def __init__(self) -> None:
        self._meter = energy.meter(torch.device("cpu"), 0)
        self._begin = time.perf_counter()

    def watts(self) -> float | None:
        """Return the power in watts, or None if no counter is readable. It is never estimated."""
        used = None if self._meter is None else self._meter.used()
        if used is None or used.joules <= 0:
            return None
        return float(f"{used.joules / (time.perf_counter() - self._begin):.3g}")


def prepare() -> None:
    """Make the first step of the optimizer here, so that its imports do not count for a network."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter], lr=0.1, momentum=0.9).step()


def resident_KiB(field: str, status: Path = Path("/proc/self/status")) -> int:  # noqa: N802 - the unit is part of it
    """Return the memory of this process in KiB: its present one (``VmRSS``), or its peak (``VmHWM``)."""
    lines = status.read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))
