"""Tests of what an agent reports about the memory of its pod, and about processes that do not end."""

import asyncio
from pathlib import Path

import pytest

from dltrain.agent.member import rank_watch
from dltrain.agent.member.rank_watch import RankWatch, Watched
from dltrain.host import processes
from dltrain.host.pod_memory import PodMemory
from dltrain.host.processes import Process
from dltrain.protocol.agent_messages import PodMemoryPeak, StillEnding


class Ended:
    pid = 2**22 + 1
    """More than any process id: this process has ended."""


def test_growth_is_reported_and_the_exact_peak_at_the_end(tmp_path: Path) -> None:
    sent: list[Watched] = []
    watch, rank = RankWatch(sent.append), Process(Ended.pid, None)  # type: ignore[arg-type]
    watch.memory = PodMemory(tmp_path)

    def poll(nbytes: int) -> list[int]:
        (tmp_path / "memory.stat").write_text(f"anon {nbytes}\nshmem 0\n")
        sent.clear()
        watch.poll("1.1", {rank: 0}, {None: "the zygote"})
        return [each.nbytes for each in sent if isinstance(each, PodMemoryPeak)]

    assert [poll(n) for n in (1000, 1010, 900, 1030, 1040)] == [[1000], [], [], [1030], []]
    watch.report_memory("1.1")
    watch.report_memory("1.1")
    assert sent == [PodMemoryPeak(attempt="1.1", nbytes=1040)]
    watch.begin()
    assert poll(500) == [500], "the next attempt"
    sent.clear()
    watch.poll("", {}, {None: "the zygote"})
    assert not sent, "no rank runs"


def test_peak_of_a_rank_is_reported_with_its_number(tmp_path: Path) -> None:
    """The memory of the pod may stay the same while that of a rank grows, because another one has freed some."""
    sent: list[Watched] = []
    watch, rank = RankWatch(sent.append), Process(7, None)  # type: ignore[arg-type]
    watch.memory = PodMemory(tmp_path, tmp_path / "proc")
    (tmp_path / "memory.stat").write_text("anon 9000000\nshmem 0\n")
    (tmp_path / "proc/7").mkdir(parents=True)
    for kib in (1000, 1010, 2000):
        text = f"VmHWM:\t{kib} kB\nRssAnon:\t{kib} kB\nRssFile:\t0 kB\nRssShmem:\t0 kB\n"
        (tmp_path / "proc/7/status").write_text(text)
        watch.poll("1.1", {rank: 3}, {None: "the zygote"})
    found = [each for each in sent if isinstance(each, PodMemoryPeak)]
    assert [each.ranks for each in found] == [{3: 1000 * 1024}, {3: 2000 * 1024}]
    assert {each.nbytes for each in found} == {9_000_000}


def test_killed_processes_that_last_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_state", lambda pid: {7: "D"}.get(pid, ""))
    now_s, sent = [100.0], list[Watched]()
    monkeypatch.setattr(rank_watch.time, "monotonic", lambda: now_s[0])

    async def main() -> None:
        future = asyncio.get_running_loop().create_future
        rank, daemon, other = Process(7, future()), Process(8, future()), Process(9, future())
        watch = RankWatch(sent.append)
        rank.killed = daemon.killed = True
        for _ in range(2):
            watch.poll("", {rank: 3, other: 4}, {daemon: "the MPI daemon", None: "the zygote"})
            now_s[0] += processes.KILLED_S

    asyncio.run(main())
    [found] = [each for each in sent if isinstance(each, StillEnding)]
    assert found.processes == "rank 3 (process 7, state D), the MPI daemon (process 8, state ?)"
