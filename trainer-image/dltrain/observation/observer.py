"""Observe a training script from inside its process: count the costs of one step, and time the others.

The script stays as it is. A hook after each update of an optimizer counts the steps. In one of the first steps, hooks
of all modules count the operations of the forward passes and the memory that they keep. Then the hooks are removed,
except the one that counts steps. The observer sends what it found to the agent of the pod as messages
(``protocol.rank_messages.Observed``), each over a connection of its own. If anything goes wrong, it gives up with one
line in the log; it never raises an error in the script.

This package must run in the Python of any image. It therefore needs the standard library of Python 3.8 only, imports
nothing else of dltrain, and never imports torch: it waits until the script does. Its imports are relative, because
``startup/path/sitecustomize.py`` loads it without dltrain.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import random
import socket
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping
from statistics import median
from typing import Any

from .host_counting import FunctionCounts
from .observed_step import COMPILED, ObservedStep, is_compiled

OBSERVE_ENV, SOCKET_ENV = "DLTRAIN_OBSERVE", "DLTRAIN_SOCKET"
"""Variables that the agent sets for the observed rank, as in ``protocol.rank_variables``."""
WARM_UP = 2
"""Number of steps before the observed one. In the first steps, scripts and libraries still initialize themselves."""
MAX_TRIES = 5
"""Number of steps that are observed in vain, such as because of an evaluation between two updates, before giving up."""
SAMPLE, FIRST_TIMES, LEAST_TIMES = 256, 20, 5
"""Maximum number of step times of which the median is sent, the number of them with which it is sent at once, and the
number with which it is sent at the usual interval."""
INTERVAL_S = 10.0
"""Minimum seconds between two messages with step times."""
SEND_S = 1.0
"""Maximum seconds for which a message may delay the script."""
LIMIT_S = 30.0
"""Seconds for which a step is observed, if the step before did not last a third of it or more."""
GAVE_UP = "did not observe the structure of this script"
"""Beginning of the line in the log that says why there is no structure."""
ALONE = (
    "found {} ranks, and rank 0 updates its model without a process group; expected one, because otherwise each rank "
    "trains a model of its own. Call torch.distributed.init_process_group and reduce the gradients, for example with "
    "DistributedDataParallel, or start one rank"
)
"""Line in the log about a script that is not distributed although the job has several ranks."""
_OPTIMIZERS = "torch.optim.optimizer"

_started = False


def start(environ: MutableMapping[str, str], after_import: Callable[[str, Callable[[Any], None]], None]) -> None:
    """Observe this process if the agent asks for it. Do it once, also if this function is called again.

    The first process that imports torch is the rank's own. It writes its process id to the variable with which the
    agent asks, so that the processes that it starts do not report, too. A program that replaces it (``exec``) has the
    same id. ``environ``: the environment variables of the rank. ``after_import``: ``startup.imports.after_import``.
    """
    global _started
    path = environ.get(SOCKET_ENV)
    if _started or not path or environ.get(OBSERVE_ENV) not in ("on", str(os.getpid())):
        return
    _started = True
    observer = Observer(path, environ)

    def install(module: Any) -> None:
        environ[OBSERVE_ENV] = str(os.getpid())
        observer.install(module)

    after_import(_OPTIMIZERS, install)


class _StepTimes:
    """A random sample of the times of all steps so far, in seconds. Every step has the same chance to be in it.

    The last steps alone may be disturbed together, above all if a step takes milliseconds. Every n-th step may be one
    that logs or evaluates. The sample has a random generator of its own, so that the script's numbers stay the same.
    """

    def __init__(self) -> None:
        self.sample: list[float] = []
        self.count = 0
        self._random = random.Random(0)

    def add(self, step_s: float) -> None:
        self.count += 1
        if len(self.sample) < SAMPLE:
            self.sample.append(step_s)
            return
        place = int(self._random.random() * self.count)  # Vitter 1985, "Random sampling with a reservoir", algorithm R.
        if place < SAMPLE:
            self.sample[place] = step_s


class Observer:
    """Count the steps of this process, observe one of them, and send what was found to the agent.

    ``path``: the agent's socket. Steps are the updates of the optimizer that is updated first.
    """

    def __init__(self, path: str, environ: Mapping[str, str]) -> None:
        self._path = path
        self._rank = _number(environ, "RANK", "OMPI_COMM_WORLD_RANK", default=0)
        self._world_size = _number(environ, "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", default=1)
        self._torchrun = "TORCHELASTIC_RUN_ID" in environ
        self._pid = os.getpid()
        self._off = False
        """True once the observer has given up. Its hook stays, because torch iterates over the hooks that it calls."""
        self._main: int | None = None
        """The id of the optimizer whose updates count as steps."""
        self._steps = self._tries = 0
        self._last_s: float | None = None
        self._times = _StepTimes()
        self._functions: FunctionCounts | None = None
        """The calls of functions in the last step of the warm-up."""
        self._calls: tuple[int, int] | None = None
        self._step: ObservedStep | None = None
        self._ending: list[ObservedStep] = []
        """Ended steps whose hooks are still to be removed."""
        self._found: dict[str, Any] | None = None
        self._send_at_s = float("inf")

    def install(self, module: Any) -> None:
        """Count the updates of all optimizers from now on. ``module``: torch.optim.optimizer."""
        try:
            module.register_optimizer_step_post_hook(self._after_update)
            atexit.register(self._end)
        except Exception as error:  # noqa: BLE001 - the script must continue
            self._give_up("this release of torch has no hooks for optimizers (%r)" % (error,))  # noqa: UP031

    def _after_update(self, optimizer: Any, *_: Any) -> None:
        if os.getpid() != self._pid:  # A fork is not the rank.
            return
        if self._off:
            self._ending = [step for step in self._ending if not step.end()]
            return
        try:
            if not _is_part_of_update(optimizer, sys._getframe(1)):
                self._updated(optimizer, time.monotonic())
        except Exception as error:  # noqa: BLE001 - the script must continue
            self._give_up(repr(error))

    # If the script compiles the update, torch.compile must not trace the hook.
    _after_update._torchdynamo_disable = True  # type: ignore[attr-defined]

    def _updated(self, optimizer: Any, now_s: float) -> None:
        if self._main is None:
            self._main = id(optimizer)
        if self._step is not None:
            if self._step.is_hopeless:
                self._give_up(self._step.problem() or "")
                return
            self._step.updated(optimizer)
        if id(optimizer) != self._main:
            return
        self._steps += 1
        profiled, self._functions = self._functions, None
        if profiled is not None:
            self._calls = profiled.end()
        observed, self._step = self._step, None
        self._ending = [step for step in self._ending if not step.end()]
        if observed is not None:
            if not observed.end():
                self._ending.append(observed)
            self._take(observed)
            if self._off:
                return
        elif self._last_s is not None and profiled is None:
            self._times.add(now_s - self._last_s)
        before_s, self._last_s = self._last_s, time.monotonic()
        if self._steps == WARM_UP and self._torchrun and self._world_size > 1 and not _has_process_group():
            self._say(ALONE.format(self._world_size))
        if self._steps == WARM_UP - 1:
            self._functions = FunctionCounts()
        if self._found is None and self._steps >= WARM_UP:
            if is_compiled():
                self._give_up(COMPILED)
                return
            self._tries += 1
            self._step = ObservedStep(max(LIMIT_S, 3 * max([now_s - (before_s or now_s), *self._times.sample])))
        elif self._times.count == FIRST_TIMES or (now_s >= self._send_at_s and self._times.count >= LEAST_TIMES):
            self._send()

    def _take(self, observed: ObservedStep) -> None:
        problem = observed.problem()
        if problem is None:
            self._found = observed.structure(self._calls)
            self._say(
                "observed a step: {parameters:,} parameters, {samples} samples and {flops:.4g} operations on this "
                "rank. dljob plan uses this; DLJOB_OBSERVE=off switches it off".format(**self._found)
            )
            self._send()
        elif self._tries >= MAX_TRIES:
            self._give_up(problem)

    def _send(self) -> None:
        if self._found is None:
            return
        times = list(self._times.sample)
        structure = dict(self._found, steps=self._steps, world_size=self._world_size)
        if len(times) >= LEAST_TIMES:
            structure["step_s"] = median(times)
        self._send_at_s = time.monotonic() + INTERVAL_S
        message = {"type": "observed", "rank": self._rank, "structure": structure}
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(SEND_S)
            connection.connect(self._path)
            connection.sendall(json.dumps(message).encode() + b"\n")

    def _end(self) -> None:
        if os.getpid() == self._pid:
            with contextlib.suppress(Exception):
                # After an error of the script, its traceback stays the end of the log.
                if self._found is None and not self._off and not hasattr(sys, "last_type"):
                    self._give_up("it ended after %d updates by optimizers of torch.optim" % self._steps)  # noqa: UP031
                self._send()

    def _give_up(self, reason: str) -> None:
        step, self._step = self._step, None
        if self._functions is not None:
            self._functions.end()
        if step is not None and not step.end():
            self._ending.append(step)
        self._off, self._found = True, None
        self._say("%s: %s. The script is not affected" % (GAVE_UP, reason))  # noqa: UP031

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            print("dljob: " + text, file=sys.stderr, flush=True)  # noqa: T201


def _is_part_of_update(optimizer: Any, hooked: Any) -> bool:
    """Return True if this update is a part of another update of ``optimizer``, after which a hook follows, too.

    This is so if the ``step`` of a class calls that of its base class, and both have hooks: torch adds hooks to the
    ``step`` of a class when the first optimizer of exactly this class is made. ``hooked``: the frame of torch's
    function that calls the hook.
    """
    frame = hooked.f_back
    while frame is not None:
        if frame.f_code is hooked.f_code and any(value is optimizer for value in frame.f_locals.values()):
            return True
        frame = frame.f_back
    return False


def _has_process_group() -> bool:
    distributed: Any = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _number(environ: Mapping[str, str], *names: str, default: int) -> int:
    return next((int(environ[name]) for name in names if environ.get(name, "").isdecimal()), default)
