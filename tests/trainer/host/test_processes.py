"""Tests of the detection of processes that get too little processor time, or that do not end after SIGKILL."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dltrain.host.processes import KILLED_S, Exit, KilledProcesses, Process, StarvedProcesses
from support.trainer.debugger import debugging

BUSY = "import os\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nprint(flush=True)\nwhile True: pass"
LOADING = """
import signal
from torch.utils.data import DataLoader
loader = iter(DataLoader(range(100), batch_size=1, num_workers=2))
next(loader)
signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
stopped = []
print("ready", flush=True)
while not stopped:
    signal.pause()
print(sum(1 for _ in loader), flush=True)
"""
"""A script that reads on after SIGTERM, more than the loader has fetched ahead."""
WITHIN_S = 240.0


def poll_until(starved: StarvedProcesses, process: Process, waited: bool) -> dict[Process, float]:
    """Poll until the process is reported (``waited``), or until 20 polls in a row have not reported it."""
    deadline_s, clean = time.monotonic() + WITHIN_S, 0
    while time.monotonic() < deadline_s:
        time.sleep(0.05)
        found = starved.poll([process], time.monotonic())
        clean = 0 if found else clean + 1
        if (waited and found) or (not waited and clean == 20):
            return found
    raise AssertionError(f"not within {WITHIN_S:.0f} s")


def test_process_that_shares_a_processor_starves_and_a_sleeping_one_does_not() -> None:
    async def main() -> None:
        asleep = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
        busy = [subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE) for _ in range(3)]
        try:
            for each in busy:
                assert each.stdout is not None and each.stdout.readline() == b"\n"
            ended: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
            one, other, gone = (Process(pid, ended) for pid in (busy[0].pid, asleep.pid, 2**22 - 1))
            starved = StarvedProcesses()
            waited_s = poll_until(starved, one, waited=True)[one]
            assert 0 < waited_s < WITHIN_S
            assert poll_until(StarvedProcesses(), other, waited=False) == {}
            assert starved.poll([gone], time.monotonic()) == {}
        finally:
            for each in (*busy, asleep):
                each.kill()
                each.communicate()

    assert Path(f"/proc/{os.getpid()}/schedstat").exists(), "the kernel counts waits"
    asyncio.run(main())


def test_process_that_does_not_end_after_sigkill_is_reported_at_intervals() -> None:
    """Until a debugger has seen the end of its process, the parent does not see it."""

    async def main() -> None:
        asleep = subprocess.Popen(["sleep", "3600"], start_new_session=True)
        debugger = debugging(asleep.pid)
        try:
            ended: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
            process, killed = Process(asleep.pid, ended), KilledProcesses()
            assert killed.poll([process], 0.0) == killed.poll([process], KILLED_S) == {}
            process.kill()
            deadline_s = time.monotonic() + WITHIN_S
            while Path(f"/proc/{asleep.pid}/stat").read_text().split()[2] != "Z":
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
            assert os.waitpid(asleep.pid, os.WNOHANG) == (0, 0), "the parent does not know of the end"
            polls = [
                killed.poll([process], 100.0 + seconds) for seconds in (0.0, KILLED_S - 0.1, KILLED_S, KILLED_S + 1)
            ]
            assert polls == [{}, {}, {process: "Z"}, {}]
            assert killed.poll([process], 100.0 + 2 * KILLED_S) == {process: "Z"}
            ended.set_result(Exit(signal=9))
            assert killed.poll([process], 1000.0) == killed.poll([process], 2000.0) == {}
        finally:
            debugger.kill()
            debugger.wait()
            asleep.wait()

    asyncio.run(main())


def test_sigterm_is_sent_once() -> None:
    """Regression: a second one killed scripts that were exiting with code 0, so that their last checkpoint was lost."""

    async def main() -> None:
        code = "import signal; print(sum(signal.sigwait({15, 10}) == 15 for _ in range(2)), flush=True)"
        blocked = (
            f"import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {{15, 10}}); print('ready', flush=True); {code}"
        )
        started = subprocess.Popen(
            [sys.executable, "-c", blocked], start_new_session=True, stdout=subprocess.PIPE, text=True
        )
        try:
            assert started.stdout is not None and started.stdout.readline() == "ready\n"
            process = Process(started.pid, asyncio.get_running_loop().create_future())
            process.terminate()
            await asyncio.to_thread(_until_pending_is_taken, started.pid)
            process.terminate()
            process.send_alone(10)
            assert started.stdout.readline() == "1\n"
        finally:
            process.kill()
            started.communicate()

    asyncio.run(main())


def _until_pending_is_taken(pid: int) -> None:
    """Wait until the process has taken SIGTERM, so that a second one would not be merged with it."""
    deadline_s = time.monotonic() + 60
    while any(
        int(line.split()[1], 16) & 1 << 14
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith(("SigPnd", "ShdPnd"))
    ):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.mark.parametrize("prefix", [(), ("sh", "-c", '"$@"; true', "sh")], ids=["", "in a shell"])
def test_sigterm_leaves_a_script_the_processes_of_its_data_loader(prefix: tuple[str, ...]) -> None:
    async def main() -> None:
        started = subprocess.Popen(
            [*prefix, sys.executable, "-c", LOADING], start_new_session=True, stdout=subprocess.PIPE, text=True
        )
        try:
            assert started.stdout is not None and started.stdout.readline() == "ready\n"
            process = Process(started.pid, asyncio.get_running_loop().create_future())
            process.terminate()
            assert started.stdout.readline() == "99\n"
        finally:
            process.kill()
            started.communicate()

    asyncio.run(main())
