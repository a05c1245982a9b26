"""Repeat operations on a volume that fail with transient errors, such as those of a network file system.

A volume may return an error for seconds: a server restarts, a connection is replaced, or a node mounts the volume late.
The caller repeats the operation with growing pauses before it reports the error.
"""

import errno
import sys
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")

PAUSES_S = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds to wait before each repetition: 16 s together, which covers the failover of common storage servers."""
_OF_INPUT = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP, errno.EINVAL,
    errno.ENAMETOOLONG, errno.ENOTSUP, errno.ENOENT, errno.EXDEV,
}  # fmt: skip
"""Errors that paths and permissions cause. A repetition has the same result, and the user must correct the input."""
_OF_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def is_input_error(error: OSError) -> bool:
    """Return True if a wrong path, missing permissions or a read-only volume caused the error."""
    return error.errno in _OF_INPUT


def is_transient(error: OSError) -> bool:
    """Return True if the same operation may succeed a few seconds later.

    Errors of a wrong path, missing permissions or a full volume are not transient. All other errors of a volume are.
    """
    return error.errno is not None and error.errno not in _OF_INPUT | _OF_SPACE


def retry(operation: Callable[[], T], what: str, pauses_s: Iterable[float] | None = None) -> T:
    """Return the result of ``operation``. Repeat it with pauses while it fails with a transient OSError.

    ``what``: the path, for the message of each repetition. ``pauses_s``: seconds to wait before each repetition; None:
    ``PAUSES_S``. Several operations can share one iterator, so that their repetitions together do not exceed its
    pauses. Raise the OSError of ``operation`` if it is not transient, or if no pause is left.
    """
    pauses = iter(PAUSES_S if pauses_s is None else pauses_s)
    while True:
        try:
            return operation()
        except OSError as error:
            pause_s = next(pauses, None) if is_transient(error) else None
            if pause_s is None:
                raise
            text = f"{what}: {error.strerror or error}; trying again in {pause_s:g} s"
            print(f"dltrain: {text}", file=sys.stderr, flush=True)  # noqa: T201
            time.sleep(pause_s)
