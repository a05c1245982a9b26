"""Look at the processes of a pod at intervals: stopped, starved and unkillable ones, and the memory that they need."""

import logging
import time
from collections.abc import Callable, Mapping

from dltrain.host.pod_memory import PodMemory
from dltrain.host.processes import KilledProcesses, Process, StarvedProcesses, StoppedProcesses
from dltrain.protocol.agent_messages import PodMemoryPeak, RankStarved, RankStopped, StillEnding

log = logging.getLogger(__name__)
Watched = RankStopped | RankStarved | PodMemoryPeak | StillEnding
GROWTH = 1.02
"""Factor by which the peak of the pod's memory must have grown before it is reported again while ranks run."""


class RankWatch:
    """What the agent sees of the ranks of its pod from outside. ``poll`` reads a few small files for each rank."""

    def __init__(self, emit: Callable[[Watched], None]) -> None:
        """``emit``: called with what must be reported to the coordinator."""
        self._emit = emit
        self._stopped, self._starved, self._killed = StoppedProcesses(), StarvedProcesses(), KilledProcesses()
        self.memory = PodMemory()
        self._numbers: dict[int, int] = {}
        """Process id of a rank → its number."""
        self._reported: tuple[int, Mapping[int, int]] = 0, {}
        """The peaks that were reported last: that of the pod, and that of each rank."""

    def begin(self) -> None:
        """Forget the memory of the ranks of an earlier attempt."""
        self.memory.begin()
        self._numbers.clear()
        self._reported = 0, {}

    def poll(self, attempt: str, ranks: Mapping[Process, int], helpers: Mapping[Process | None, str]) -> None:
        """Report ranks that SIGSTOP has stopped or that get too little processor time, and a larger peak of memory.

        Report also processes that have not ended long after SIGKILL: no rank can start before they have. Kill a
        stopped process of ``helpers`` (process → name), which ends the attempt.
        """
        now_s = time.monotonic()
        for process, waited_s in self._starved.poll(ranks, now_s).items():
            self._emit(RankStarved(attempt=attempt, rank=ranks[process], waited_s=waited_s))
        known = [process for process in (*ranks, *helpers) if process is not None]
        for process, stopped_s in self._stopped.poll(known, now_s).items():
            if process in ranks:
                self._emit(RankStopped(attempt=attempt, rank=ranks[process], stopped_s=stopped_s))
            else:
                log.warning("SIGSTOP stopped %s %.0f s ago; killing it, so all ranks end", helpers[process], stopped_s)
                process.kill()
        if lasting := self._killed.poll(known, now_s):
            names = {each: f"rank {ranks[each]}" if each in ranks else helpers[each] for each in lasting}
            listed = [f"{names[each]} (process {each.pid}, state {state or '?'})" for each, state in lasting.items()]
            self._emit(StillEnding(processes=", ".join(listed[:8])))
            log.warning("killed processes have not ended: %s", ", ".join(listed))
        if ranks:
            self._numbers |= {process.pid: rank for process, rank in ranks.items()}
            self.memory.look(process.pid for process in ranks)
            self.report_memory(attempt, GROWTH)

    def report_memory(self, attempt: str, growth: float = 1.0) -> None:
        """Report the peak of the memory of the pod and of its ranks.

        Do nothing if none of them is more than ``growth`` times the last reported one.
        """
        peak, before = self.memory.peak_nbytes, self._reported
        of_ranks = {self._numbers[pid]: nbytes for pid, nbytes in self.memory.of_ranks.items()}
        if peak > growth * before[0] or any(n > growth * before[1].get(rank, 0) for rank, n in of_ranks.items()):
            self._reported = peak, of_ranks
            self._emit(PodMemoryPeak(attempt=attempt, nbytes=peak, ranks=of_ranks))
