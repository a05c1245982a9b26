"""Diagnose why an attempt ended: derive one ``Failure`` from its recorded events. No I/O.

The death of one rank has many consequences: surviving ranks exit with EXIT_PEER_LOST, and others are killed. The rules
therefore begin with the events that are most likely a cause, and end with those that are usually a consequence.
"""

import re
from dataclasses import dataclass, field
from math import inf

from dlcontract import MAX_LOG_TAIL, Failure, Outcome, Plan, Rank, StoppedEarly, matching, reasons
from dltrain.host.command_errors import CANNOT_START, NOT_FOUND
from dltrain.host.processes import Exit
from dltrain.launch.spawn import EXIT_CANNOT_START
from dltrain.protocol.agent_messages import RankEnded
from dltrain.protocol.errors import log_names_device_fault
from dltrain.protocol.rank_messages import (
    EXIT_BAD_INPUT,
    EXIT_DIVERGED,
    EXIT_OK,
    EXIT_PARAMETERS_DIVERGED,
    EXIT_PEER_LOST,
    EXIT_STOPPED,
)

SIGABRT, SIGKILL = 6, 9


@dataclass
class Attempt:
    """The recorded events of one attempt, which is one launch of the ranks of ``plan``.

    ``up``: numbers of the ranks whose process has started. ``heard``: numbers of those that have sent a message.
    ``ended``: the exit record of each ended rank, by rank. ``failures``: (rank, failure) for each reported failure, in
    order of arrival. ``lost``: why the connection to a pod was lost, by pod. ``left``: pods that received SIGTERM.
    ``launcher``: how mpirun has ended, or None. ``outcome``: the result of the lowest rank that is left.

    ``started_s``: time of the launch, in seconds of the monotonic clock. ``launched_s``: the same once all pods are
    prepared; infinity before. ``launcher_runs``: True while mpirun runs. ``launcher_tail``: its last output, once it
    has ended.
    """

    plan: Plan
    name: str
    started_s: float = 0.0
    launched_s: float = inf
    up: set[int] = field(default_factory=set)
    heard: set[int] = field(default_factory=set)
    ended: dict[int, RankEnded] = field(default_factory=dict)
    failures: list[tuple[int, Failure]] = field(default_factory=list)
    lost: dict[str, str] = field(default_factory=dict)
    unreachable: set[str] = field(default_factory=set)
    """The lost pods whose kernel did not answer any more. If only a pod's agent ends, its kernel still answers."""
    left: set[str] = field(default_factory=set)
    hung: tuple[int, float] | None = None
    """(hung rank, seconds since its last message or since SIGSTOP stopped it), or None if no rank hangs."""
    logs: dict[int, str] = field(default_factory=dict)
    """The last lines that each running rank logged, by rank. They are collected when a rank hangs."""
    launcher_runs: bool = False
    launcher: Exit | None = None
    launcher_tail: str = ""
    outcome: Outcome | None = None
    progressed: bool = False
    """True if a step was completed in this attempt."""
    good_enough: tuple[int, StoppedEarly] | None = None
    """(step, reason) if the training met ``spec.until`` at that step, so that it need not continue; else None."""
    only_reports: bool = False
    """True if the ranks run a script that calls ``dltrain.report``, but not ``dltrain.init``."""
    stopping: bool = False
    """True if the coordinator has asked the ranks to stop."""
    absent: set[int] = field(default_factory=set)
    """Numbers of the lost ranks. The other ranks have reported that they continue without them."""
    handled: set[int] = field(default_factory=set)
    """The ranks in ``absent`` whose loss the coordinator has reported."""
    shrunk_s: float = 0.0
    """Time of the launch or of the last shrinking of the process group, in seconds of the monotonic clock."""

    @property
    def all_ended(self) -> bool:
        return len(self.ended.keys() | self.absent) == len(self.plan.ranks)

    def missing(self, plan: Plan) -> int:
        """Return how many ranks of the complete plan ``plan`` were not launched in this attempt, or were lost since."""
        return len(plan.ranks) - len(self.plan.ranks) + len(self.absent)

    @property
    def deaths(self) -> list[RankEnded]:
        """The exit records of the ranks that failed.

        A killed rank is excluded if the other ranks have reported that they continue to train without it.
        """
        return [end for n, end in self.ended.items() if end.exit_code != EXIT_OK and not self._survived(n)]

    @property
    def failed_to_stop(self) -> bool:
        """True if a failed rank or a lost pod prevents the ranks from stopping together with a checkpoint.

        Only the ranks of a script with ``dltrain.init`` stop together. For other scripts, the value is always False.
        """
        if self.plan.model.framework != "DLTrain" or self.only_reports:
            return False
        return bool(self.failures or self.lost) or any(end.exit_code != EXIT_STOPPED for end in self.deaths)

    @property
    def losses(self) -> list[RankEnded]:
        """The exit records of killed ranks without which the other ranks continue to train.

        Ranks whose loss the coordinator has already reported are excluded.
        """
        return [self.ended[n] for n in sorted(self.absent - self.handled) if n in self.ended and self._survived(n)]

    @property
    def survivable(self) -> bool:
        """True if the other ranks may be able to continue to train without the ranks that have ended.

        A signal must have killed every ended rank, nothing else may have failed, and a step must have been completed.
        The script must use ``dltrain.init``, and at least ``plan.min_ranks`` ranks must remain.
        """
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
        """True if mpirun has ended, and all ranks have ended or are lost."""
        return self.all_ended and not self.launcher_runs

    def gone(self, rank: Rank) -> bool:
        """Return True if a rank does not run, as far as is known: it ended, has not started, or is in a lost pod."""
        return rank.rank in self.ended or rank.rank not in self.up or rank.pod in self.lost

    @property
    def succeeded(self) -> bool:
        """True if every rank ended and rank 0 reported a result.

        A custom command without ``dltrain.init``, such as a script for torchrun or an MPI program, needs no result. It
        succeeds if no rank failed or reported a failure. The exit code alone does not tell: ``python train.py | tee
        log`` exits with 0 although the script has failed. A failure after the result does not matter.
        """
        if not self.all_ended:
            return False
        if self.outcome is not None:
            return True
        if self.deaths or self.failures:
            return False
        return bool(self.plan.model.command) and (self.only_reports or not self.progressed)

    @property
    def over_or_troubled(self) -> bool:
        """True if the attempt succeeded, cannot succeed any more, or rank 0 has reported the result of the training."""
        return self.succeeded or self.troubled or self.outcome is not None

    @property
    def troubled(self) -> bool:
        """True if the attempt cannot succeed any more.

        The reason is a rank that failed or hangs, a pod that was lost or received SIGTERM, or an early end of mpirun.
        Always False once rank 0 has reported the result of the training.
        """
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
    """Return the failure that most likely ended the attempt.

    ``counts`` of the failure is True if it counts towards the job's back-off limit. It is False if a pod received
    SIGTERM or was lost, because the job did not cause that.
    """
    if not attempt.left and (broken := _of_device(attempt)) is not None:
        return broken
    for number, failure in attempt.failures:
        if failure.reason != reasons.PEER_LOST:
            return _completed(failure, number, attempt)
    for end in attempt.deaths:
        if end.out_of_memory:
            return _of_rank(
                attempt,
                end,
                reasons.OUT_OF_MEMORY,
                "ran out of memory and was killed by the kernel. Raise the memory limit or lower the batch size",
            )
    if attempt.hung is not None:
        return _of_hung(attempt, *attempt.hung)
    if attempt.left:
        pods = ", ".join(sorted(attempt.left))
        message = f"pods received SIGTERM: {pods}"
        return Failure(reason=reasons.POD_STOPPED, message=message, host=min(attempt.left), counts=False)
    if attempt.lost:
        pod, why = next(iter(attempt.lost.items()))
        message = f"lost contact with the agent of pod {pod}: {why}"
        # If several pods are lost at once, the cause may be this pod's own network.
        alone = attempt.lost.keys() == {pod} and pod in attempt.unreachable
        return Failure(reason=reasons.POD_LOST, message=message, host=pod, counts=False, unreachable=alone)
    for end in attempt.deaths:
        if end.exit_code != EXIT_STOPPED and not _lost_peer(attempt, end):
            return failure_of_exit(attempt, end)
    if attempt.launcher is not None and not attempt.all_ended:
        return Failure(
            reason=reasons.LAUNCH_FAILED,
            message=f"mpirun ended with {attempt.launcher} before all ranks had ended",
            exit_code=attempt.launcher.shell_code,
            log_tail=attempt.launcher_tail,
        )
    for end in attempt.deaths:
        if _lost_peer(attempt, end):
            return _of_rank(attempt, end, reasons.PEER_LOST, "lost contact with another rank")
        if end.exit_code == EXIT_STOPPED:
            what = f"exited with code {EXIT_STOPPED}, as after a request to stop, but received no such request"
            return _of_rank(attempt, end, reasons.RANK_STOPPED, what)
    return Failure(reason=reasons.NO_RESULT, message=_NO_RESULT)


_MPI_PEER_LOST = re.compile(r"MPI_ERR_(PROC_FAILED|REVOKED)")
"""Matches what an MPI program logs if an operation failed because another rank had ended."""


def _lost_peer(attempt: Attempt, end: RankEnded) -> bool:
    """Return True if a rank ended only because another rank had ended.

    The rank then has the exit code EXIT_PEER_LOST. For an MPI program, the end of its log is searched as well.
    """
    in_log = attempt.plan.model.framework == "MPI" and _MPI_PEER_LOST.search(end.tail) is not None
    return end.exit_code == EXIT_PEER_LOST or in_log


def _of_device(attempt: Attempt) -> Failure | None:
    """Return the first failure of a device (such as a GPU) that ranks reported or logged; None without one.

    A device failure is never a consequence of another failure. Failures of other ranks may arrive earlier, because a
    failed device makes a collective fail on all ranks.
    """
    for number, failure in attempt.failures:
        if failure.reason == reasons.DEVICE_FAILED:
            return _completed(failure, number, attempt)
    reported = {number for number, _ in attempt.failures}
    found = (failure_of_exit(attempt, end) for end in attempt.deaths if end.rank not in reported)
    return next((failure for failure in found if failure.reason == reasons.DEVICE_FAILED), None)


def _of_hung(attempt: Attempt, number: int, silent_s: float) -> Failure:
    """Return the failure of the rank that hangs. ``number``: the rank that sent no message for ``silent_s`` seconds.

    All other ranks wait for the hung rank, so the rank ``number`` may be one that waits: for a rank that has not called
    ``dltrain.init`` or, if its stack shows a wait, for the first rank whose stack shows none. The failure names that.
    """
    outside = sorted(attempt.up - attempt.heard - attempt.ended.keys())
    stacks = {n: text.rpartition("hread 0x")[2] for n, text in attempt.logs.items() if "hread 0x" in text}
    what = f"was silent for {silent_s:.0f} s. {_BUSY}"
    if attempt.plan.model.framework == "DLTrain" and not attempt.progressed and attempt.heard and outside:
        what = f"has not reached dltrain.init, and rank {number} has waited for it for {silent_s:.0f} s. See its log"
        number = outside[0]
    elif _WAITS.search(stacks.get(number, "")):
        number = next((n for n, where in sorted(stacks.items()) if not _WAITS.search(where)), number)
    pod = attempt.plan.ranks[number].pod
    return Failure(
        reason=reasons.HUNG,
        message=f"rank {number} in pod {pod} {what}",
        rank=number,
        host=pod,
        log_tail=attempt.logs.get(number, "")[-MAX_LOG_TAIL:],
    )


_BUSY = (
    "If the script does something that takes longer than ten steps and 30 s, such as an upload, call t.busy(what, "
    "seconds) before it, or dltrain.busy in a script without dltrain.init. The next attempt waits three times as long"
)
_WAITS = re.compile(r"/dltrain/comm/(?!process_group\.py)")
"""Matches the stack of a rank that waits for other ranks in a module of ``dltrain.comm``.

The module process_group.py does not match, because a rank that starts or ends MPI is also in this module."""

_NO_RESULT = (
    "all ranks ended with exit code 0, but rank 0 reported no result. A training script must iterate t.steps to its "
    "end or call t.finish()"
)
_CONSEQUENCES = frozenset({reasons.PEER_LOST, reasons.RANK_STOPPED, reasons.LAUNCH_FAILED, reasons.NO_RESULT})


def explained(attempt: Attempt) -> bool:
    """Return True if the cause of a failed attempt is certain, so that waiting for more events is useless.

    The failure that ``diagnose`` returns must not be a typical consequence of another failure, such as a lost peer. If
    it names a rank, this rank must have ended. A hung rank does not end, so the logs of all running ranks must have
    arrived instead.
    """
    failure = diagnose(attempt)
    if failure.reason == reasons.HUNG:
        return len(attempt.logs.keys() | attempt.ended.keys()) >= len(attempt.up)
    settled = failure.rank is None or failure.rank in attempt.ended
    return failure.reason not in _CONSEQUENCES and settled


def killed(end: RankEnded) -> bool:
    """Return True if a signal ended the rank, but not because memory ran out.

    The loss of a pod ends ranks in this way.
    """
    return end.signal is not None and not end.out_of_memory


def failure_of_exit(attempt: Attempt, end: RankEnded) -> Failure:
    """Return the failure of one rank, derived from its exit code or signal and from the end of its log.

    This is for ranks that ended without reporting a failure themselves.
    """
    exit_ = _exit_of(end)
    if end.exit_code == EXIT_BAD_INPUT:
        return _of_rank(attempt, end, reasons.BAD_INPUT, "rejected its input; see the end of its log", retry=False)
    if end.exit_code == EXIT_DIVERGED:
        return _of_rank(attempt, end, reasons.DIVERGED, "found a loss that is not finite. Lower the learning rate")
    if end.exit_code == EXIT_PARAMETERS_DIVERGED:
        return _of_rank(attempt, end, reasons.PARAMETERS_DIVERGED, "found that ranks hold different parameters")
    if end.exit_code == NOT_FOUND and end.rank not in attempt.up:
        return _of_command(attempt, end)
    if end.exit_code == NOT_FOUND:
        return _of_rank(attempt, end, reasons.COMMAND_NOT_FOUND, "could not start its command")
    if end.exit_code == EXIT_CANNOT_START:
        return _of_rank(attempt, end, reasons.LAUNCH_FAILED, "could not be started; see the end of its log")
    # A script for torchrun reports no exceptions, and NCCL's watchdog aborts the process.
    if exit_.shell_code in (1, 128 + SIGABRT) and log_names_device_fault(end.tail):
        return _of_rank(attempt, end, reasons.DEVICE_FAILED, f"ended with {exit_} after an error of its device")
    if exit_.shell_code == 128 + SIGKILL:
        return _of_rank(attempt, end, reasons.RANK_KILLED, f"was killed ({exit_})")
    if end.signal is not None:
        return _of_rank(attempt, end, reasons.RANK_CRASHED, f"crashed ({exit_})")
    return _of_rank(attempt, end, reasons.RANK_FAILED, f"ended with {exit_}; see the end of its log")


def _of_command(attempt: Attempt, end: RankEnded) -> Failure:
    """Return the failure of a rank whose agent could not start the command, and never can.

    A restart cannot help, unless a failure rule of the job asks for one. The end of a shell with code 127 is different:
    the process has started, and what it has not found may be there at the next attempt.
    """
    failure = _of_rank(attempt, end, reasons.COMMAND_NOT_FOUND, "could not start its command", retry=False)
    text, asked = end.tail.removeprefix(CANNOT_START), matching(attempt.plan.failure_rules, failure)
    return failure.model_copy(update={"message": f"{text} ({failure.message})", "log_tail": "", "retry": asked})


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
    """Return a failure that a rank reported, completed with what its agent knows: rank, pod, exit code and log.

    ``number``: the rank.
    """
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


def delay_s(failed_in_a_row: int) -> float:
    """Return the seconds to wait before the next launch of the ranks, so that quick failures do not repeat quickly.

    ``failed_in_a_row``: number of consecutive launches that failed before a step was completed. The result is 0 s for
    0, and 1, 2, 4, 8, 10, 10… s for 1, 2, 3, 4, 5, 6… such launches.
    """
    return 0.0 if failed_in_a_row == 0 else min(10.0, 2.0 ** (failed_in_a_row - 1))
