"""The C library's heap in a rank: what a step frees stays for the next one.

glibc gives free memory at the end of the heap back to the kernel, and takes large blocks straight from it. A training
step frees what its forward pass took, so that, as chance lays out the heap, every step asks for the same pages again:
the kernel's work on 2,000 page faults was a tenth of a step's CPU time (docs/design/0010).
"""

import ctypes
from contextlib import suppress

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""malloc.h's names for mallopt's parameters."""
_NEVER = -1
_LARGEST_NBYTES = 32 * 2**20
"""What glibc accepts; it comes to this by itself for whoever frees such a block."""


def keep() -> None:
    """From now on, keep what is freed, but for blocks above 32 MiB. Nothing on another C library."""
    with suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_TRIM_THRESHOLD, _NEVER)
        mallopt(_MMAP_THRESHOLD, _LARGEST_NBYTES)
