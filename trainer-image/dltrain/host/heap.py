"""Settings of the C library's heap, so that it keeps freed memory for the next step, and tensors fit into it.

By default, glibc returns free memory at the end of the heap to the kernel, and allocates large blocks directly from the
kernel. A training step frees what its forward pass allocated. Depending on the heap's layout, each step then requests
the same pages again. The resulting 2,000 page faults took a tenth of a step's CPU time (docs/design/0010).

The block of a freed tensor is too small for the next tensor of the same size, see ``reusable_blocks.c``. The lost
memory was up to 0.9 times the activations that a step keeps (docs/design/0016).
"""

import ctypes
import platform
from contextlib import suppress
from pathlib import Path

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt, from malloc.h."""
_NEVER = -1
_LARGEST_NBYTES = 32 * 2**20
"""The largest mmap threshold that glibc accepts, in bytes. The dynamic threshold that glibc uses by default also rises
to this value when the process frees a block of this size."""
_TORCH_ALLOCATOR = b"libc10.so"
"""File name of the library in which torch allocates the memory of tensors on CPUs."""


def retain_freed_memory() -> None:
    """Make glibc keep freed memory for reuse, except blocks above 32 MiB. Do nothing with another C library."""
    with suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_TRIM_THRESHOLD, _NEVER)
        mallopt(_MMAP_THRESHOLD, _LARGEST_NBYTES)


def allocate_reusable_blocks() -> bool:
    """Make torch allocate tensors on CPUs in blocks that a later tensor of the same size can reuse.

    Call it after ``retain_freed_memory`` and after torch is imported. Only torch's own calls change: neither the rest
    of this process nor its children see another function. Return False, and change nothing, with another C library or
    allocator than glibc's, on a processor without this library, and if torch brings an allocator of its own.
    """
    made = Path(__file__).with_name(f"reusable_blocks-{platform.machine()}.so")
    with suppress(AttributeError, OSError):
        process, glibc = ctypes.CDLL(None), ctypes.CDLL("libc.so.6")
        if glibc.gnu_get_libc_version and _address(process.malloc) == _address(glibc.malloc):
            return bool(ctypes.CDLL(str(made)).replace_memalign(_TORCH_ALLOCATOR))
    return False


def _address(function: "ctypes._FuncPointer") -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value
