"""Settings of the C library's heap, so that it keeps freed memory for the next step.

By default, glibc returns free memory at the end of the heap to the kernel, and allocates large blocks directly from the
kernel. A training step frees what its forward pass allocated. Depending on the heap's layout, each step then requests
the same pages again. The resulting 2,000 page faults took a tenth of a step's CPU time (docs/design/0010).
"""

import ctypes
from contextlib import suppress

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt, from malloc.h."""
_NEVER = -1
_LARGEST_NBYTES = 32 * 2**20
"""The largest mmap threshold that glibc accepts, in bytes. The dynamic threshold that glibc uses by default also rises
to this value when the process frees a block of this size."""


def retain_freed_memory() -> None:
    """Make glibc keep freed memory for reuse, except blocks above 32 MiB. Do nothing with another C library."""
    with suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_TRIM_THRESHOLD, _NEVER)
        mallopt(_MMAP_THRESHOLD, _LARGEST_NBYTES)
