"""Find out what a rank's process works on between two steps, from the stacks of its threads.

A thread of the rank does this, so training scripts need not announce work that libraries begin, such as compilation.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # Importing it would need pydantic, which a script that only reports may lack.
    from dltrain.protocol.rank_messages import Activity

_COMPILERS = ("/torch/_dynamo/convert_frame.py", "/torch/_inductor/async_compile.py", "/triton/compiler/")
"""Modules that are on a stack only while torch compiles, not while compiled code runs."""
_PLACES: tuple[tuple[str, Activity], ...] = (
    ("/dltrain/data/", "data"),
    ("/dltrain/batch/sampling.py", "data"),
    ("/dltrain/batch/sharding.py", "data"),
    ("/torch/utils/data/", "data"),
    ("/torchdata/stateful_dataloader/", "data"),
    ("/dltrain/checkpoint/", "checkpoint"),
    ("/torch/serialization.py", "checkpoint"),
)


def activity() -> Activity | None:
    """Return the work that this process does now: compilation, data or checkpoint; None if it does none of these.

    Compilation counts on every thread, because the backward pass on a GPU runs outside the main thread. Other work
    counts on the main thread.
    """
    frames = sys._current_frames()
    main = threading.main_thread().ident
    own = threading.get_ident()
    if any(_compiles(frame) for thread, frame in frames.items() if thread != own or thread == main):
        return "compilation"
    return of_stack(path for path, _ in _stack(frames.get(main or 0)))


def of_stack(paths: Iterator[str]) -> Activity | None:
    """Return the work of a thread, ``data`` or ``checkpoint``, from the source files on its stack; None for other work.

    ``paths``: the source files, innermost first. A thread that waits for other ranks does no work of its own, whatever
    function called the wait, so the result is then None.
    """
    for path in paths:
        if "/dltrain/comm/" in path:
            return None
        for part, found in _PLACES:
            if part in path:
                return found
    return None


def _compiles(frame: FrameType | None) -> bool:
    return any(
        any(part in path for part in _COMPILERS) or ("/torch/_inductor/compile_fx.py" in path and "compile" in name)
        for path, name in _stack(frame)
    )


def _stack(frame: FrameType | None) -> Iterator[tuple[str, str]]:
    """Yield (source file, name of the function) of each frame, innermost first."""
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_code.co_name
        frame = frame.f_back
