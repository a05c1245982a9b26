"""Tests of what an agent reports about the memory of its pod."""

from pathlib import Path

from dltrain.agent.member.rank_watch import RankWatch
from dltrain.host.pod_memory import PodMemory
from dltrain.host.processes import Process
from dltrain.protocol.agent_messages import PodMemoryPeak, RankStarved, RankStopped


class Ended:
    pid = 2**22 + 1
    """More than any process id: this process has ended."""


def test_growth_is_reported_and_the_exact_peak_at_the_end(tmp_path: Path) -> None:
    sent: list[RankStopped | RankStarved | PodMemoryPeak] = []
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
