"""Why a world ended: facts in, one ``Failure`` out, in the words a user needs. Pure.

One death has many echoes: survivors leave with EXIT_PEER_LOST, others are killed. The order of the rules is the
order of belief in what was the cause.
"""

import re
from dataclasses import dataclass, field

from dlcontract import MAX_LOG_TAIL, Failure, Outcome, Plan, Rank, reasons
from dltrain.host.processes import Exit
from dltrain.protocol.agent_messages import RankEnded
from dltrain.protocol.rank_messages import (
    EXIT_BAD_INPUT,
    EXIT_DIVERGED,
    EXIT_OK,
    EXIT_PARAMETERS_DIVERGED,
    EXIT_PEER_LOST,
    EXIT_STOPPED,
)

SIGKILL = 9


@dataclass
class Attempt:
    """What is known of one run of the ranks, in the order in which it became known."""

    plan: Plan
    name: str
    started_s: float = 0.0
    up: set[int] = field(default_factory=set)
    ended: dict[int, RankEnded] = field(default_factory=dict)
    failures: list[tuple[int, Failure]] = field(default_factory=list)
    lost: dict[str, str] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)
    hung: tuple[int, float] | None = None
    """A rank, and for how long it was silent."""
    logs: dict[int, str] = field(default_factory=dict)
    """How the logs of running ranks end, once one was found to hang."""
    launcher_runs: bool = False
    launcher: Exit | None = None
    launcher_tail: str = ""
    outcome: Outcome | None = None
    progressed: bool = False
    """A step was made since the launch."""
    absent: set[int] = field(default_factory=set)
    """Ranks that the others say they go on without."""
    handled: set[int] = field(default_factory=set)
    """Of these, those whose end has been told."""
    shrunk_s: float = 0.0
    """When the others said so last, on the clock of ``started_s``."""

    @property
    def all_ended(self) -> bool:
        return len(self.ended.keys() | self.absent) == len(self.plan.ranks)

    def missing(self, plan: Plan) -> int:
        """Ranks of the whole plan that do not take part."""
        return len(plan.ranks) - len(self.plan.ranks) + len(self.absent)

    @property
    def deaths(self) -> list[RankEnded]:
        """Ranks that ended badly, but those that the others could go on without."""
        return [end for n, end in self.ended.items() if end.exit_code != EXIT_OK and not self._survived(n)]

    @property
    def losses(self) -> list[RankEnded]:
        """Ranks that the others go on without, and whose end was not told yet."""
        return [self.ended[n] for n in sorted(self.absent - self.handled) if n in self.ended and self._survived(n)]

    @property
    def survivable(self) -> bool:
        """Whether the ranks that are left may say that they go on: nothing happened but that some were killed."""
        left = len(self.plan.ranks) - len(self.ended.keys() | self.absent)
        return bool(
            self.plan.min_ranks <= left
            and self.plan.model.framework == "DLTrain"
            and self.progressed
            and not (self.failures or self.lost or self.left or self.hung or self.launcher)
            and all(killed(end) for end in self.ended.values())
        )

    def _survived(self, number: int) -> bool:
        return number in self.absent and killed(self.ended[number])

    @property
    def over(self) -> bool:
        """Nothing of it is left: ranks and mpirun, and with mpirun its daemons, ended by themselves."""
        return self.all_ended and not self.launcher_runs

    def gone(self, rank: Rank) -> bool:
        """Whether a rank's process does not run any more, or never did, as far as can be known."""
        return rank.rank in self.ended or rank.rank not in self.up or rank.pod in self.lost

    @property
    def succeeded(self) -> bool:
        """Every rank is through, and what trains by ``dltrain`` also said its result; another command need not."""
        if not self.all_ended:
            return False
        if self.outcome is not None:
            return True
        return bool(self.plan.model.command) and not self.deaths and not self.progressed

    @property
    def over_or_troubled(self) -> bool:
        """Whether there is nothing more to wait for."""
        return self.succeeded or self.troubled or self.outcome is not None

    @property
    def troubled(self) -> bool:
        """Whether it cannot end well."""
        if self.outcome is not None:
            return False
        return bool(
            self.failures
            or self.lost
            or self.left
            or self.hung
            or self.deaths
            or (self.launcher is not None and not self.succeeded)
        )


def diagnose(attempt: Attempt) -> Failure:
    """The cause, of what is known. ``counts`` is false where the job is not to blame (a pod left or was lost)."""
    for number, failure in attempt.failures:
        if failure.reason != "PeerLost":
            return _completed(failure, number, attempt)
    for end in attempt.deaths:
        if end.out_of_memory:
            return _of_rank(
                attempt,
                end,
                "OutOfMemory",
                "was killed by the kernel for memory; raise the memory limit or lower the batch",
            )
    if attempt.hung is not None:
        return _of_hung(attempt, *attempt.hung)
    if attempt.left:
        pods = ", ".join(sorted(attempt.left))
        return Failure(reason="PodStopped", message=f"told to stop: {pods}", host=min(attempt.left), counts=False)
    if attempt.lost:
        pod, why = next(iter(attempt.lost.items()))
        message = f"no contact with the agent of pod {pod}: {why}"
        return Failure(reason="PodLost", message=message, host=pod, counts=False)
    for end in attempt.deaths:
        if end.exit_code not in (EXIT_PEER_LOST, EXIT_STOPPED):
            return failure_of_exit(attempt, end)
    if attempt.launcher is not None and not attempt.all_ended:
        return Failure(
            reason="LaunchFailed",
            message=f"mpirun ended with {attempt.launcher} before the ranks did",
            exit_code=attempt.launcher.shell_code,
            log_tail=attempt.launcher_tail,
        )
    for end in attempt.deaths:
        if end.exit_code == EXIT_PEER_LOST:
            return _of_rank(attempt, end, "PeerLost", "lost contact with another rank")
        if end.exit_code == EXIT_STOPPED:
            return _of_rank(attempt, end, reasons.RANK_STOPPED, "ended as if asked to stop, which nobody did")
    return Failure(reason=reasons.NO_RESULT, message=_NO_RESULT)


def _of_hung(attempt: Attempt, number: int, silent_s: float) -> Failure:
    """Where one rank hangs the others wait for it, and any of them may have been silent for longest."""
    stacks = {n: text.rpartition("hread 0x")[2] for n, text in attempt.logs.items() if "hread 0x" in text}
    if _WAITS.search(stacks.get(number, "")):
        number = next((n for n, where in sorted(stacks.items()) if not _WAITS.search(where)), number)
    pod = attempt.plan.ranks[number].pod
    return Failure(
        reason="Hung",
        message=f"rank {number} in pod {pod} was silent for {silent_s:.0f} s; what takes longer than ten steps and 5 s "
        "in a script, such as an evaluation, it announces by t.busy(what, seconds)",
        rank=number,
        host=pod,
        log_tail=attempt.logs.get(number, "")[-MAX_LOG_TAIL:],
    )


_WAITS = re.compile(r"/dltrain/comm/(?!process_group\.py)")
"""On the stack of whoever waits for other ranks. A process group also starts and ends MPI, which is no such wait."""

_NO_RESULT = (
    "all ranks ended with exit code 0, but rank 0 told no result: a script that trains goes through t.steps to its "
    "end, or calls t.finish()"
)
_ECHOES = frozenset({"PeerLost", reasons.RANK_STOPPED, "LaunchFailed", reasons.NO_RESULT})


def explained(attempt: Attempt) -> bool:
    """Whether the cause is known, so that nothing needs to be waited for: no mere echo, and its rank has ended."""
    failure = diagnose(attempt)
    if failure.reason == "Hung":
        return len(attempt.logs.keys() | attempt.ended.keys()) >= len(attempt.up)
    settled = failure.rank is None or failure.rank in attempt.ended
    return failure.reason not in _ECHOES and settled


def killed(end: RankEnded) -> bool:
    """By a signal, and not because the pod's memory is too small: as good as a pod that was taken away."""
    return end.signal is not None and not end.out_of_memory


def failure_of_exit(attempt: Attempt, end: RankEnded) -> Failure:
    """Of one rank, by its exit status alone."""
    exit_ = _exit_of(end)
    if end.exit_code == EXIT_BAD_INPUT:
        return _of_rank(
            attempt, end, reasons.BAD_INPUT, "found its input unusable; see the end of its log", retry=False
        )
    if end.exit_code == EXIT_DIVERGED:
        return _of_rank(attempt, end, "Diverged", "found a loss that is not finite; lower the learning rate")
    if end.exit_code == EXIT_PARAMETERS_DIVERGED:
        return _of_rank(attempt, end, reasons.PARAMETERS_DIVERGED, "found that ranks hold different parameters")
    if end.exit_code == 127:
        return _of_rank(attempt, end, reasons.COMMAND_NOT_FOUND, "could not start its command")
    if exit_.shell_code == 128 + SIGKILL:
        return _of_rank(attempt, end, "RankKilled", f"was killed ({exit_})")
    if end.signal is not None:
        return _of_rank(attempt, end, reasons.RANK_CRASHED, f"crashed ({exit_})")
    return _of_rank(attempt, end, reasons.RANK_FAILED, f"ended with {exit_}; see the end of its log")


def _of_rank(attempt: Attempt, end: RankEnded, reason: str, what: str, *, retry: bool = True) -> Failure:
    pod = attempt.plan.ranks[end.rank].pod
    return Failure(
        reason=reason,
        message=f"rank {end.rank} in pod {pod} {what}",
        rank=end.rank,
        host=pod,
        exit_code=_exit_of(end).shell_code,
        log_tail=end.tail,
        retry=retry,
    )


def _completed(failure: Failure, number: int, attempt: Attempt) -> Failure:
    """A rank's own words, with what only its agent knows."""
    end = attempt.ended.get(number)
    exit_code = failure.exit_code
    if exit_code is None and end is not None:
        exit_code = _exit_of(end).shell_code
    return failure.model_copy(
        update={
            "rank": number if failure.rank is None else failure.rank,
            "host": failure.host or attempt.plan.ranks[number].pod,
            "exit_code": exit_code,
            "log_tail": (failure.log_tail or (end.tail if end is not None else ""))[-MAX_LOG_TAIL:],
        }
    )


def _exit_of(end: RankEnded) -> Exit:
    return Exit(code=end.exit_code, signal=end.signal)


def delay_s(fruitless: int) -> float:
    """Seconds before the next launch after so many launches in a row that made no step: 0, 1, 2, 4, 8, 10, 10…"""
    return 0.0 if fruitless == 0 else min(10.0, 2.0 ** (fruitless - 1))
