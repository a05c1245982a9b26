"""Let gloo's threads end before the Python interpreter of a rank does.

A thread of gloo drops its references to the tensors of a finished collective slightly late, and needs a turn of the
interpreter for it. If the interpreter is already exiting (CPython up to 3.13), it ends this thread inside a C++
function that must not be left, and the process aborts after the end of the script
(https://github.com/pytorch/pytorch/issues/190489).

This module must run in the Python of any image. It therefore needs the standard library of Python 3.8 only, and imports
nothing of dltrain: ``path/sitecustomize.py`` loads it without dltrain. It never imports torch.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
import time
import types
from typing import Any

THREAD = "pt_gloo_runloop"
"""Name that PyTorch 2.13 gives to each thread that runs collectives of gloo. PyTorch 2.0 gave them none."""
TURN_S = 0.1
"""Seconds for which gloo's threads get the interpreter if something still refers to their process group."""


def end_at_exit() -> None:
    """Let gloo's threads end after all exit handlers that are registered later, such as those of the script."""
    atexit.register(_end, os.getpid())


def _end(pid: int) -> None:
    if os.getpid() != pid:  # A fork has none of these threads, and would wait for them without end.
        return
    with contextlib.suppress(Exception):  # No error in here may reach the script.
        end_gloo_threads()


def end_gloo_threads() -> None:
    """Destroy the process groups over gloo, while their threads can still end. Do nothing in a script without gloo.

    This function also clears the main module, so that the last reference to the model disappears before the exit.
    Daemon threads of the script may still run, as they do until the very end of an interpreter. They may see the module
    without its variables, so their errors are not shown. Threads are not kept from running meanwhile: a model that is
    deleted may wait for a thread of gloo, which needs a turn to end.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not _uses_gloo(distributed):
        return
    import threading  # torch has imported it. A script without torch starts faster without it.

    if distributed.is_initialized():
        distributed.destroy_process_group()
    threading.excepthook = _ignore_daemon_threads
    clear_variables(sys.modules["__main__"].__dict__)
    if _has_threads():
        time.sleep(TURN_S)


def _uses_gloo(distributed: Any) -> bool:
    """Return True if the default process group runs over gloo alone, or threads of destroyed groups remain.

    A group that has NCCL, too, stays as it is, because all ranks would have to destroy it together.
    """
    if not distributed.is_initialized():
        return _has_threads()
    named = (
        getattr(distributed, "get_backend_config", None) or distributed.get_backend
    )  # The first from PyTorch 2.0 on.
    backends = named()
    return "gloo" in backends and "nccl" not in backends


def _has_threads() -> bool:
    """Return True if this process has threads that run collectives of gloo, and they have a name."""
    for task in os.listdir("/proc/self/task"):  # noqa: PTH208 - pathlib takes longer to import
        with contextlib.suppress(OSError), open("/proc/self/task/%s/comm" % task) as name:  # noqa: PTH123, UP031
            if name.read().strip() == THREAD:
                return True
    return False


def _ignore_daemon_threads(error: Any) -> None:
    import threading

    if error.thread is None or not error.thread.daemon:
        threading.__excepthook__(error)


def clear_variables(variables: dict[str, Any]) -> None:
    """Delete all global ``variables`` of a module, and the objects that only they refer to.

    Modules, functions, classes, and values such as numbers and strings are deleted last, and the other variables in the
    reverse order of their definition. A finalizer (``__del__``) can therefore still use what was defined before its
    object. The built-in functions stay, as they do when the interpreter clears a module.
    """
    for name in reversed(list(variables)):
        value = variables[name]  # Nothing else here may refer to it, so that its finalizer runs when it is deleted.
        if gc.is_tracked(value) and not isinstance(value, (types.ModuleType, types.FunctionType, type)):
            del variables[name]
        del value
    gc.collect()
    builtins = variables.get("__builtins__")
    variables.clear()
    variables["__builtins__"] = builtins
    gc.collect()
