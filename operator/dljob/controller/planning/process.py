"""Make plans in a process of their own, so that planning neither delays nor stops the operator."""

import asyncio
import logging
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from typing import Any

from dljob.cluster import ClusterView, Node
from dljob.controller.planning.answers import Decision, PlanningError
from dljob.controller.planning.parsed_objects import Profiles
from dljob.controller.planning.worker import LENGTH_NBYTES, Task, frame
from dljob.job.log_fields import log_fields
from dljob.job.plan.stored import StoredPlan
from dljob.kube import JobKey
from dljob.planner import Infeasible
from dljob.reconcile import ParsedJob
from dljob.render import RenderConfig

log = logging.getLogger("dljob")

LIMIT_S = 30.0
"""Seconds that one plan may take, including the start of the process. 10,000 nodes of eight device types take 1 s."""
COMMAND = (sys.executable, "-m", "dljob.controller.planning.worker")
ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""Environment of the process. More threads of numpy would take processor time and memory from the operator."""


class PlannerProcess:
    """The planner in a process of its own, which plans one job at a time.

    The process starts with the first question (a job to plan). After a crash or a hang, a new process starts with the
    next question.
    """

    def __init__(
        self,
        config: RenderConfig,
        failed: Callable[[], None] = lambda: None,
        limit_s: float = LIMIT_S,
        command: tuple[str, ...] = COMMAND,
        about: Callable[[JobKey], Mapping[str, object]] = lambda key: log_fields(key, None),
    ) -> None:
        """``failed``: called when a process has crashed or was stopped because of the time limit.

        ``limit_s``: seconds that one plan may take, including the start of the process. ``command``: command line of
        the process. ``about``: returns the fields of log lines about a job.
        """
        self._about = about
        self._config, self._failed, self._limit_s, self._command = config, failed, limit_s, command
        self._process: asyncio.subprocess.Process | None = None
        self._nodes: dict[str, Node] = {}
        """The nodes that the process knows from earlier questions, by name. Only changes are sent to it."""
        self._profiles: Profiles | None = None
        self._configured = False
        """True if the configuration was sent to the process."""
        self._starting = asyncio.Lock()

    async def plan(self, question: ParsedJob, view: ClusterView, profiles: Profiles) -> Decision:
        """Return a plan of the job, or why none is possible.

        ``view``: the nodes with what the job may use of them. ``profiles``: measurements of earlier runs. Raise
        PlanningError if the process fails, ends or takes too long.
        """
        ended = False
        try:
            async with asyncio.timeout(self._limit_s):
                found = await self._answer(question, view, profiles)
                ended = True
        except TimeoutError:
            raise self._broken(question, f"planning took longer than {self._limit_s:.0f} s and was stopped") from None
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise self._broken(question, f"the process that makes plans ended unexpectedly: {error!r}") from error
        finally:
            if not ended:
                await self.close()
        if not isinstance(found, StoredPlan | Infeasible):
            raise PlanningError(str(found))
        return found

    async def start(self) -> None:
        """Start the process, so that the first question does not wait for it."""
        try:
            await self._started()
        except OSError as error:
            log.warning("the process that makes plans did not start (%s); the next plan starts it again", error)

    async def close(self) -> None:
        """Kill the process, if there is one, and wait until it has ended. The next question starts a new one."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.kill()
        await process.wait()

    def _broken(self, question: ParsedJob, text: str) -> PlanningError:
        log.warning("%s", text, extra=self._about(question.observed.job.key))
        self._failed()
        return PlanningError(text)

    async def _answer(self, question: ParsedJob, view: ClusterView, profiles: Profiles) -> Any:
        process = await self._started()
        questions, answers = process.stdin, process.stdout
        assert questions is not None and answers is not None
        questions.write(frame(self._task(question, view, profiles)))
        await questions.drain()
        nbytes = int.from_bytes(await answers.readexactly(LENGTH_NBYTES))
        return pickle.loads(await answers.readexactly(nbytes))

    async def _started(self) -> asyncio.subprocess.Process:
        async with self._starting:
            if self._process is None or self._process.returncode is not None:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                    env={**os.environ, **ENVIRONMENT},
                )  # fmt: skip
                self._nodes, self._profiles, self._configured = {}, None, False
            return self._process

    def _task(self, question: ParsedJob, view: ClusterView, profiles: Profiles) -> Task:
        """Return the message for a question: it has only those nodes and profiles that the process does not know yet.

        From now on, they count as known.
        """
        nodes = {node.name: node for node in view.nodes}
        new = tuple(node for name, node in nodes.items() if self._nodes.get(name) is not node)
        gone = tuple(name for name in self._nodes if name not in nodes)
        changed = None if profiles is self._profiles else profiles
        config = None if self._configured else self._config
        self._nodes, self._profiles, self._configured = nodes, profiles, True
        return Task(question, new, gone, changed, config)
