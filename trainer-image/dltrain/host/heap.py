"""Settings of the C library's heap that keep freed memory for the next step.

By default, glibc returns free memory at the end of the heap to the kernel, and allocates large blocks directly from it.
A training step frees what its forward pass allocated, so, depending on the heap's layout, each step requests the same
pages again. The resulting 2,000 page faults took a tenth of a step's CPU time (docs/design/0010).
"""

import ctypes
from contextlib import suppress

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt, from malloc.h."""
_NEVER = -1
_LARGEST_NBYTES = 32 * 2**20
"""The maximum that glibc accepts. Its dynamic threshold also rises to this value once such a block is freed."""


def retain_freed_memory() -> None:
    """Keep freed memory in the heap, except blocks above 32 MiB. Do nothing with another C library than glibc."""
    with suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_TRIM_THRESHOLD, _NEVER)
        mallopt(_MMAP_THRESHOLD, _LARGEST_NBYTES)
