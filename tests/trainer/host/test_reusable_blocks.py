"""Tests of the blocks for tensors that later tensors of the same size reuse, and of who gets them."""

import ctypes
import errno
import os
import platform
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from devcluster.paths import cache_root
from dltrain.host import heap
from support.trainer.ranks import ROOT, alone, run

LIBRARY = ctypes.CDLL(str(ROOT / f"trainer-image/dltrain/host/reusable_blocks-{platform.machine()}.so"))
LIBC = ctypes.CDLL(None)
LIBC.realloc.restype = ctypes.c_void_p
LIBC.realloc.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
LIBC.malloc_usable_size.restype = ctypes.c_size_t
LIBC.malloc_usable_size.argtypes = LIBC.free.argtypes = (ctypes.c_void_p,)
for _function in (LIBRARY.allocate_reusable, LIBC.posix_memalign):
    _function.argtypes = (ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_size_t)
LARGEST = 32 * 2**20 - 2 * 4096
"""Largest block in bytes that the library does not leave to posix_memalign."""
SIZES = [0, 1, 63, 64, 1023, 1024, 1025, 1080, 4096, 4097, 10**6, 2**20, LARGEST, LARGEST + 1, 2**25, 10**8]


def allocate(n: int, alignment: int = 64) -> int:
    """Return the address of a new block of ``n`` bytes, or fail."""
    block = ctypes.c_void_p()
    assert LIBRARY.allocate_reusable(block, alignment, n) == 0
    assert block.value is not None
    return block.value


@pytest.mark.parametrize("n", SIZES)
def test_blocks_are_aligned_writable_and_known_to_the_heap(n: int) -> None:
    blocks = [allocate(n) for _ in range(3)]
    for i, block in enumerate(blocks):
        assert block % 64 == 0
        assert LIBC.malloc_usable_size(block) >= n
        ctypes.memset(block, i, n)
    for i, block in enumerate(blocks):
        assert ctypes.string_at(block, n) == bytes([i]) * n
        LIBC.free(block)


@pytest.mark.parametrize("n", [1024, 100_000, LARGEST])
@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_blocks_can_be_reallocated(n: int, factor: float) -> None:
    block, size = allocate(n), int(factor * n)
    ctypes.memset(block, 7, n)
    moved = LIBC.realloc(block, size)
    assert ctypes.string_at(moved, min(n, size)) == b"\x07" * min(n, size)
    LIBC.free(moved)


@pytest.mark.parametrize("alignment", [8, 16, 32, 64, 128, 4096, 2**21])
@pytest.mark.parametrize("n", [0, 1000, 100_000])
def test_every_power_of_two_is_an_alignment(alignment: int, n: int) -> None:
    block = allocate(n, alignment)
    assert block % alignment == 0 and LIBC.malloc_usable_size(block) >= n
    LIBC.free(block)


@pytest.mark.parametrize(
    ("alignment", "n", "code"),
    [(alignment, n, errno.EINVAL) for alignment in (0, 3, 4, 48, 65, 72) for n in (0, 4096, 2**40)]
    + [(alignment, n, errno.ENOMEM) for alignment in (64, 4096) for n in (2**64 - 1, 2**64 - 64, 2**63, 2**60)],
)
def test_errors_are_those_of_posix_memalign_and_leave_the_pointer(alignment: int, n: int, code: int) -> None:
    for function in (LIBC.posix_memalign, LIBRARY.allocate_reusable):
        block = ctypes.c_void_p(42)
        assert function(block, alignment, n) == code
        assert block.value == 42


LIMITED = """
import ctypes, errno, resource, sys
library, pages = ctypes.CDLL(sys.argv[1]), []
library.allocate_reusable.argtypes = ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_size_t
held = 4096 * int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (held + 2**28,) * 2)
for _ in range(100):
    block = ctypes.c_void_p(42)
    if code := library.allocate_reusable(block, 64, 2**24):
        break
print(code == errno.ENOMEM and block.value == 42)
"""


def test_no_memory_is_an_error() -> None:
    ended = subprocess.run([sys.executable, "-c", LIMITED, LIBRARY._name], capture_output=True, text=True, check=True)
    assert ended.stdout == "True\n"


def exercise(seed: int) -> None:
    """Allocate, reallocate and free blocks of random sizes. Check that no other block overwrites them."""
    drawn, blocks = random.Random(seed), dict[int, bytes]()
    for _ in range(2000):
        action, n = drawn.random(), int(2 ** drawn.uniform(0, 16))
        if action < 0.5 or not blocks:
            block = allocate(n)
        else:
            block = drawn.choice(list(blocks))
            filled = blocks.pop(block)
            assert ctypes.string_at(block, len(filled)) == filled
            if action < 0.9:
                LIBC.free(block)
                continue
            block = LIBC.realloc(block, n)
        blocks[block] = drawn.randbytes(n)
        ctypes.memmove(block, blocks[block], n)
    for block in blocks:
        LIBC.free(block)


def test_threads_share_no_block() -> None:
    with ThreadPoolExecutor(4) as threads:
        for ended in [threads.submit(exercise, seed) for seed in range(4)]:
            ended.result()


FORKING = """
import ctypes, os, sys, threading
library, libc, running = ctypes.CDLL(sys.argv[1]), ctypes.CDLL(None), True

def pass_through(n):
    block = ctypes.c_void_p()
    assert not library.allocate_reusable(ctypes.byref(block), ctypes.c_size_t(64), ctypes.c_size_t(n))
    ctypes.memset(block, 1, n)
    libc.free(block)

def allocate():
    while running:
        pass_through(100_000)

thread = threading.Thread(target=allocate)
thread.start()
for _ in range(50):
    if not (child := os.fork()):
        for n in range(1024, 200_000, 9999):
            pass_through(n)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
running = False
thread.join()
print("done")
"""


def test_forks_allocate_while_a_thread_of_the_parent_does() -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKING, LIBRARY._name],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.stdout == "done\n", ended.stderr


HOLES = """
import os
import torch
from dltrain.host import heap

def tensors(n, count):
    return [torch.empty(n, dtype=torch.uint8) for _ in range(count)]

def part(n, kind):
    count = min(400, 4 * 10**8 // n // 2 * 2)
    heap.retain_freed_memory()
    assert kind == "plain" or heap.allocate_reusable_blocks()
    others = tensors(n, count)  # They fill the holes that the process has left before.
    kept = tensors(n, count)
    highest = max(each.data_ptr() for each in kept)
    del kept[::2]  # Each hole is between two tensors.
    later = tensors(n, count // 2)
    return sum(each.data_ptr() < highest for each in later) / len(later)

for n in {sizes}:
    for kind in ("reusable", "plain"):
        if not (child := os.fork()):
            print(n, kind, part(n, kind), flush=True)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
"""
SIZES_OF_TENSORS = (4096, 262_144, 3_000_001)


@pytest.fixture(scope="module")
def parts_in_holes() -> dict[tuple[int, str], float]:
    """Return the part of the later tensors that fit into holes, by size and kind of the blocks.

    A new interpreter has few holes of its own, and so have its forks. Forks of the zygote have holes of many sizes.
    """
    ended = run([sys.executable, "-c", HOLES.format(sizes=SIZES_OF_TENSORS)])
    assert ended.code == 0, ended.output
    lines = [line.split() for line in ended.output.splitlines()]
    return {(int(n), kind): float(part) for n, kind, part in lines}


@pytest.mark.parametrize("n", SIZES_OF_TENSORS)
def test_blocks_of_freed_tensors_fit_later_tensors_of_the_same_size(
    n: int, parts_in_holes: dict[tuple[int, str], float]
) -> None:
    """With glibc's blocks, most of the later tensors do not fit, and the heap grows."""
    reusable, plain = parts_in_holes[n, "reusable"], parts_in_holes[n, "plain"]
    assert reusable > 0.9 and plain < 0.5, parts_in_holes


RANK = """
import ctypes
import torch
import dltrain

dltrain.init(batch=4, epochs=1)
libc, other = ctypes.CDLL(None), ctypes.c_void_p()
assert not libc.posix_memalign(ctypes.byref(other), ctypes.c_size_t(64), ctypes.c_size_t(4096))
tensor = torch.empty(4096, dtype=torch.uint8)
# posix_memalign's block has 4104 bytes, or up to 4136 if it fills a hole.
print(*(libc.malloc_usable_size(ctypes.c_void_p(each)) >= 4152 for each in (tensor.data_ptr(), other.value)))
"""


def test_ranks_allocate_tensors_so_and_nothing_else(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(RANK)
    ended = run(alone(script))
    assert ended.code == 0 and "True False\n" in ended.output, ended.output


CALLER = """
#include <stdlib.h>
int (*address)(void **, size_t, size_t) = posix_memalign;
int call(void **block, size_t n) { return posix_memalign(block, 64, n); }
"""
REPLACED = """
import ctypes, sys
from pathlib import Path

def parts():
    return [line.split()[:2] for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(sys.argv[2])]

caller, library = ctypes.CDLL(sys.argv[2]), ctypes.CDLL(sys.argv[1])
def usable():
    block = ctypes.c_void_p()
    assert caller.call(ctypes.byref(block), ctypes.c_size_t(4096)) == 0
    return ctypes.CDLL(None).malloc_usable_size(block) >= 4152

before, found = parts(), usable()
first, again = (library.replace_memalign(Path(sys.argv[2]).name.encode()) for _ in range(2))
print(found, first, again, usable(), parts() == before, library.replace_memalign(b"libnone.so"))
"""


def compiled(source: str, made: Path, *options: str) -> Path:
    """Compile the C ``source`` to the shared library ``made``."""
    file = made.with_suffix(".c")
    file.write_text(source)
    environ = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": str(cache_root() / "zig")}
    command = [sys.executable, "-m", "ziglang", "cc", "-shared", "-fPIC", "-O1", *options, "-o", str(made), str(file)]
    subprocess.run(command, check=True, env=environ)
    return made


@pytest.mark.parametrize(
    "options", [("-Wl,-z,lazy",), ("-Wl,-z,now", "-Wl,-z,relro"), ("-Wl,-z,now", "-Wl,-z,relro", "-fno-plt")]
)
def test_calls_of_a_library_are_replaced_however_it_is_linked(options: tuple[str, ...], tmp_path: Path) -> None:
    """Pages that the dynamic linker made read-only are so afterwards."""
    caller = compiled(CALLER, tmp_path / "libcaller.so", *options)
    ended = subprocess.run(
        [sys.executable, "-I", "-c", REPLACED, LIBRARY._name, str(caller)], capture_output=True, text=True, check=False
    )
    assert ended.stdout == "False 1 1 True True 0\n", ended.stderr


OTHER_MALLOC = """
#include <stddef.h>
extern void *__libc_malloc(size_t);
void *malloc(size_t n) { return __libc_malloc(n); }
"""
ASKED = "import torch; from dltrain.host import heap; print(heap.allocate_reusable_blocks())"


def test_nothing_changes_with_another_allocator(tmp_path: Path, parts_in_holes: dict[tuple[int, str], float]) -> None:
    """Without it, the interpreter of ``parts_in_holes`` allocates reusable blocks."""
    other = compiled(OTHER_MALLOC, tmp_path / "libother.so")
    ended = run([sys.executable, "-c", ASKED], LD_PRELOAD=str(other))
    assert (ended.code, ended.output) == (0, "False\n") and parts_in_holes


def test_nothing_changes_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "__file__", str(tmp_path / "heap.py"))
    assert not heap.allocate_reusable_blocks()
