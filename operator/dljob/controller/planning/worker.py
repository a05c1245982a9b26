"""The process that makes plans: ``python -m dljob.controller.planning.worker``, started by ``PlannerProcess``.

It reads questions (jobs to plan) from its standard input and writes answers (plans) to its standard output, one after
another, until the input ends. Each message is a frame: its length in 8 bytes, and the pickled message. The process
imports only the pure core, which does no I/O.
"""

import os
import pickle
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO

from dljob.cluster import ClusterView, Node
from dljob.job.plan.stored import StoredPlan
from dljob.planner import Infeasible, Learned
from dljob.reconcile.parsed import ParsedJob
from dljob.reconcile.planning.make_plan import decide
from dljob.render import RenderConfig

LENGTH_NBYTES = 8
NICENESS = 5
"""Value that is added to the process's niceness, so that planning yields the processor to the operator's main process,
which starts and fences pods."""


@dataclass(frozen=True)
class Task:
    """A question (a job to plan), with what has changed in the cluster since the previous question."""

    question: ParsedJob
    nodes: tuple[Node, ...] = ()
    """New and changed nodes."""
    gone: tuple[str, ...] = ()
    """Names of nodes that the process knows and that the job may not use, for example because they were deleted."""
    profiles: Mapping[tuple[str, str], Learned] | None = None
    """The profiles (measurements of earlier runs); None: those of the previous question are still valid."""
    config: RenderConfig | None = None
    """The configuration; None except for the first question of a process."""


@dataclass
class State:
    """The worker's knowledge from earlier questions (jobs to plan): nodes, profiles and configuration."""

    nodes: dict[str, Node] = field(default_factory=dict)
    profiles: Mapping[tuple[str, str], Learned] = field(default_factory=dict)
    config: RenderConfig | None = None

    def answer(self, task: Task) -> StoredPlan | Infeasible:
        for name in task.gone:
            self.nodes.pop(name, None)
        self.nodes.update((node.name, node) for node in task.nodes)
        self.profiles = self.profiles if task.profiles is None else task.profiles
        self.config = task.config or self.config
        assert self.config is not None, "the first question has the configuration"
        view = ClusterView(tuple(self.nodes[name] for name in sorted(self.nodes)))
        observed = replace(task.question.observed, view=view, learned=self.profiles)
        return decide(replace(task.question, observed=observed), self.config)


def frame(message: Any) -> bytes:
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return len(data).to_bytes(LENGTH_NBYTES) + data


def serve(questions: BinaryIO, answers: BinaryIO) -> None:
    state = State()
    while len(head := questions.read(LENGTH_NBYTES)) == LENGTH_NBYTES:
        task = pickle.loads(questions.read(int.from_bytes(head)))
        found: StoredPlan | Infeasible | str
        try:
            found = state.answer(task)
        except Exception as error:  # noqa: BLE001 - the operator reports it in the job's conditions
            found = f"{type(error).__name__}: {error}"
        answers.write(frame(found))
        answers.flush()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The operator ends this process.
    os.nice(NICENESS)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # What a library prints must not end up between the answers.
    serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
