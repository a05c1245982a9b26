"""The checkpoints of a script in an object store: run ``dltrain.object_store.stage`` beside the ranks of this pod.

A process of its own copies the files, so that hashing and large transfers never delay the heartbeats of the agent.
"""

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dlcontract import Failure, Plan, reasons
from dltrain.agent.member.upload_pipe import UploadPipe
from dltrain.host.output import Output
from dltrain.host.processes import Exit, Process, Reaper
from dltrain.host.tasks import Tasks
from dltrain.launch.injected import is_injected
from dltrain.object_store.staged_folder import scan
from dltrain.object_store.watching import LEFT_TO_OTHERS
from dltrain.protocol.agent_messages import RankUpdate
from dltrain.protocol.rank_messages import EXIT_BAD_INPUT, EXIT_NOT_FETCHED, EXIT_OK, EXIT_PEER_LOST, Busy, Failed
from dltrain.protocol.upload_messages import UploadMessage
from dltrain.protocol.volume_layout import job_directory

UPLOAD_S, UPLOAD_BPS = 60.0, 10e6
"""The slowest supported object store: latency in seconds, and bytes per second."""
MAX_BUSY_S = 86_400.0


def is_staged(plan: Plan) -> bool:
    """Return True if the plan's script has a checkpoint folder that is copied to an object store and back.

    Scripts that use ``dltrain.init`` and built-in models write to the object store themselves.
    """
    return plan.checkpoint.enabled and plan.checkpoint.uri is not None and plan.model.framework != "DLTrain"


class StagedCheckpoints:
    """The copies of the checkpoint folder of this pod's ranks. Jobs without such a folder never start a process."""

    def __init__(
        self, reaper: Reaper, env: dict[str, str], pod: str, plan_file: Path, emit: Callable[[RankUpdate], None]
    ) -> None:
        """Store what the processes need. ``env``: the container's environment. ``plan_file``: file with the plan.

        ``emit`` is called with the failure of a copy, with a message that the ranks wait for an upload, and in the pod
        of rank 0 with each commit, and with why nothing is uploaded.
        """
        self._reaper, self._env, self._pod, self._plan_file, self._emit = reaper, env, pod, plan_file, emit
        self.stopping = False
        """True if the ranks were asked to stop. Their folder is then uploaded even if they do not exit with 0."""
        self._finishes = False
        """True if the ranks of this pod have ended, and the process was asked to upload the folder a last time."""
        self._exited = True
        """False if a rank of this pod has not exited with code 0."""
        self._left_to_others = asyncio.Event()
        """An event that is set if the last commit waits for other pods, the last of which waits for the commit."""
        self._plan: Plan | None = None
        self._attempt = ""
        self._tasks: Tasks[None] = Tasks()
        self._process: Process | None = None
        self._output: Output | None = None
        self._pipe: UploadPipe | None = None
        self._trouble = ""
        """Why the process that copies could not be started; empty: it was started."""
        self._ended_unix_s: float | None = None
        """Time at which the last ranks of this pod ended; None: this agent has seen no end.

        Files that changed shortly before may be incomplete.
        """

    @property
    def _leads(self) -> bool:
        return self._plan is not None and self._plan.ranks[0].pod == self._pod

    async def restore(self, attempt: str, plan: Plan) -> bool:
        """Make this pod's folder equal to the checkpoint (a commit in the object store) with which the ranks continue.

        Then start to watch the folder. Return True if the ranks may start. Return False if the attempt has ended, or if
        copying failed and the failure was emitted.
        """
        self._attempt, self._plan, self.stopping, self._finishes = attempt, plan, False, False
        self._exited = True
        self._left_to_others.clear()
        ended = () if self._ended_unix_s is None else ("--ended", str(self._ended_unix_s))
        end = await self._run("restore", *ended)
        if attempt != self._attempt:
            return False
        if end.code != EXIT_OK:
            self._fail(attempt, end)
            return False
        if self._pod in plan.pods:
            try:
                watching = self._start("watch")
            except OSError as error:
                self._fail(attempt, self._not_started(error))
                return False
            self._tasks.spawn(self._report_early_end(attempt, watching))
        return True

    def _not_started(self, error: OSError) -> Exit:
        """Note why the process that copies cannot be started, such as a limit of processes. Return its exit status."""
        self._output, self._trouble = None, f"the copy of the checkpoints cannot be started: {error}"
        return Exit(code=EXIT_NOT_FETCHED)

    async def _report_early_end(self, attempt: str, process: Process) -> None:
        """Emit the failure of a ``process`` that gives up, such as after minutes of errors, while ranks run."""
        end = await self._ended(process)
        if self._process is process and not self._finishes and attempt == self._attempt and end.code != EXIT_OK:
            self._fail(attempt, end)

    async def rank_ended(self, attempt: str, rank: int, end: Exit, *, is_last: bool) -> Exit:
        """Upload the folder a last time after the last rank of this pod has ended with the exit status ``end``.

        ``is_last``: False if other ranks of this pod run. If the last rank failed, do nothing, because it may have left
        incomplete files: ``restore`` then decides about them. Return the exit status to report: ``end``, or a failure
        if the upload failed. ``attempt``: name of the launch of these ranks.
        """
        self._exited = self._exited and end.code == 0
        if not is_last:
            return end
        self._ended_unix_s = time.time()
        if self._plan is None or attempt != self._attempt:
            return end
        process = self._process
        if process is None or not (end.code == 0 or self.stopping):
            return end
        nbytes = sum(seen[0] for seen in scan(job_directory(self._plan)).values() if not isinstance(seen, str))
        limit_s = min(MAX_BUSY_S, UPLOAD_S + nbytes / UPLOAD_BPS)
        self._finishes = True
        self._emit(RankUpdate(attempt=attempt, message=Busy(rank=rank, what="upload of checkpoints", limit_s=limit_s)))
        process.send(signal.SIGTERM if self._exited else signal.SIGUSR1)
        left = asyncio.ensure_future(self._left_to_others.wait())
        either: set[asyncio.Future[Any]] = {left, process.ended}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        left.cancel()
        if not process.ended.done():
            self._finishes = False
            return end
        copied = await self._ended(process)
        if copied.signal in (signal.SIGTERM, signal.SIGUSR1) and attempt == self._attempt:  # It was still starting.
            copied = await self._run("upload", *(() if self._exited else ("--killed",)))
        if copied.code == EXIT_OK or attempt != self._attempt:
            return end
        self._fail(attempt, copied)
        return Exit(code=copied.code or EXIT_NOT_FETCHED)

    async def end(self) -> None:
        """Kill the process that copies, and wait until it has ended. Files that it has not committed are not a
        checkpoint.
        """
        self._attempt, self._plan = "", None
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            await process.ended

    def _start(self, mode: str, *arguments: str) -> Process:
        where = ("--attempt", self._attempt, "--pod", self._pod)
        read_fd, write_fd = os.pipe()
        command = (mode, "--plan", str(self._plan_file), *where, "--notices", str(write_fd), *arguments)
        try:
            self._process, self._output = _started(self._reaper, self._env, command, self._read, (write_fd,))
        except OSError:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
        attempt = self._attempt

        def emit(message: UploadMessage) -> None:
            self._emit(RankUpdate(attempt=attempt, message=message))

        self._pipe, self._trouble = UploadPipe(read_fd, emit), ""
        return self._process

    async def _ended(self, process: Process) -> Exit:
        """Wait until ``process`` has ended and its messages about uploads were emitted. Return its exit status."""
        pipe = self._pipe
        end = await process.ended
        if pipe is not None:
            await pipe.drained()
        return end

    def _read(self, _: bytes) -> None:
        if self._output is not None and LEFT_TO_OTHERS in self._output.tail:
            self._left_to_others.set()

    async def _run(self, mode: str, *arguments: str) -> Exit:
        try:
            process = self._start(mode, *arguments)
        except OSError as error:
            return self._not_started(error)
        end = await self._ended(process)
        if self._process is process:
            self._process = None
        return end

    def _fail(self, attempt: str, end: Exit) -> None:
        """Emit the failure of the process that copies, which has ended with the exit status ``end``."""
        lines = self._output.tail.strip().splitlines() if self._output is not None else []
        otherwise = self._trouble or f"the copy of the checkpoints ended with {end}"
        message = lines[-1].removeprefix("dltrain: ") if lines else otherwise
        if self._plan is None:
            return
        rank = next((each.rank for each in self._plan.ranks if each.pod == self._pod), 0)
        found = {EXIT_BAD_INPUT: reasons.BAD_INPUT, EXIT_PEER_LOST: reasons.COORDINATOR_LOST}
        reason = reasons.CHECKPOINT_FAILED if end.code is None else found.get(end.code, reasons.CHECKPOINT_FAILED)
        failure = Failure(
            reason=reason,
            message=message[:8192],
            rank=rank,
            host=self._pod,
            exit_code=end.code,
            retry=reason != reasons.BAD_INPUT,
            counts=reason != reasons.COORDINATOR_LOST,
        )
        self._emit(RankUpdate(attempt=attempt, message=Failed(rank=rank, failure=failure)))


async def claimed_term(reaper: Reaper, env: dict[str, str], plan: Plan, plan_file: Path) -> int:
    """Return the highest term that any run of this job has claimed in its object store; 0 without one, or on errors.

    ``plan_file``: a file to write for the process that asks the store. The ranks report errors of the store later.
    """
    if plan.checkpoint.uri is None or not plan.checkpoint.enabled:
        return 0
    plan_file.write_text(plan.to_json())
    process, output = _started(reaper, env, ("term", "--plan", str(plan_file), "--attempt", ""))
    end = await process.ended
    await output.drained()
    found = re.search(r"^term (\d+)$", output.tail, re.MULTILINE)
    return int(found[1]) if end.code == EXIT_OK and found is not None else 0


def _started(
    reaper: Reaper,
    env: dict[str, str],
    arguments: Sequence[str],
    read: Callable[[bytes], None] = lambda _: None,
    pass_fds: Sequence[int] = (),
) -> tuple[Process, Output]:
    """Start ``dltrain.object_store.stage`` with these arguments, and copy its output to the log of the agent.

    ``read``: a function that is called after each piece of the output. ``pass_fds``: descriptors that the process
    inherits.
    """
    read_fd, write_fd = os.pipe()
    isolated = ("-I",) if is_injected() else ()
    command = (sys.executable, *isolated, "-m", "dltrain.object_store.stage", *arguments)
    try:
        process = reaper.start(command, env=env, output=write_fd, pass_fds=pass_fds)
    except OSError:
        os.close(read_fd)
        raise
    finally:
        os.close(write_fd)
    return process, Output("[checkpoints] ", read_fd, read)
