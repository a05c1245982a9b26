"""Tests of the measured memory of a pod: no page cache, peaks between two looks, cgroup v1 and v2."""

import mmap
import subprocess
import sys
from pathlib import Path

import pytest

from dltrain.host.pod_memory import PodMemory, held_nbytes, recorded_peak_nbytes

MIB = 2**20


def v1(root: Path, *, rss: int, shmem: int = 0, cache: int = 0, peak: int | None = None) -> Path:
    """Write the files of cgroup v1, as a container sees them. The numbers are in MiB."""
    folder = root / "memory"
    folder.mkdir(exist_ok=True)
    lines = {"cache": cache, "rss": 1, "shmem": 1, "total_cache": cache, "total_rss": rss, "total_shmem": shmem}
    (folder / "memory.stat").write_text("".join(f"{name} {value * MIB}\n" for name, value in lines.items()))
    if peak is not None:
        (folder / "memory.max_usage_in_bytes").write_text(f"{peak * MIB}\n")
    return root


def v2(root: Path, *, anon: int, shmem: int = 0, file: int = 0, kernel: int = 0, peak: int | None = None) -> Path:
    """Write the files of cgroup v2. The numbers are in MiB."""
    lines = {"anon": anon, "file": file, "kernel": 900, "kernel_stack": kernel, "shmem": shmem, "slab_reclaimable": 800}
    (root / "memory.stat").write_text("".join(f"{name} {value * MIB}\n" for name, value in lines.items()))
    if peak is not None:
        (root / "memory.peak").write_text(f"{peak * MIB}\n")
    return root


def process(proc: Path, pid: int, *, peak: int, anon: int, file: int, shmem: int = 0) -> None:
    """Write the status of a process. The numbers are in MiB."""
    folder = proc / str(pid)
    folder.mkdir(parents=True, exist_ok=True)
    lines = {"VmHWM": peak, "VmRSS": anon + file + shmem, "RssAnon": anon, "RssFile": file, "RssShmem": shmem}
    text = "Name:\tpython\nState:\tS (sleeping)\n"
    (folder / "status").write_text(text + "".join(f"{name}:\t{value * 1024} kB\n" for name, value in lines.items()))


def test_page_cache_does_not_count(tmp_path: Path) -> None:
    for name in ("one", "two", "none"):
        (tmp_path / name).mkdir()
    assert held_nbytes(v1(tmp_path / "one", rss=300, shmem=50, cache=2000)) == 350 * MIB
    assert held_nbytes(v2(tmp_path / "two", anon=300, shmem=50, file=2000, kernel=3)) == 353 * MIB
    assert held_nbytes(tmp_path / "none") is None and recorded_peak_nbytes(tmp_path / "none") is None
    assert PodMemory(tmp_path / "none").look([1]) == 0, "nothing is known"


@pytest.mark.parametrize("version", [v1, v2])
def test_peak_is_the_largest_until_the_next_start(version: object, tmp_path: Path) -> None:
    def held(amount: int) -> None:
        if version is v1:
            v1(tmp_path, rss=amount)
        else:
            v2(tmp_path, anon=amount)

    memory = PodMemory(tmp_path, tmp_path / "proc")
    for amount, peak in ((300, 300), (900, 900), (400, 900)):
        held(amount)
        assert memory.look([]) == peak * MIB
    memory.begin()
    assert memory.peak_nbytes == 0 and memory.look([]) == 400 * MIB


def test_peaks_of_ranks_between_two_looks_count(tmp_path: Path) -> None:
    proc = tmp_path / "proc"
    memory = PodMemory(v2(tmp_path, anon=500, file=400, peak=2500), proc)
    for pid in (7, 8):
        process(proc, pid, peak=300, anon=200, file=100)
    assert memory.look([7, 8, 9]) == 500 * MIB, "a process that has ended, and no peak above the present"
    process(proc, 7, peak=1100, anon=200, file=60)
    assert memory.look([7, 8]) == 1300 * MIB, "the files that it had mapped do not count"
    process(proc, 8, peak=1300, anon=200, file=100)
    assert memory.look([7, 8]) == 2300 * MIB
    v2(tmp_path, anon=500, file=400, peak=2100)
    again = PodMemory(tmp_path, proc)
    assert again.look([7, 8]) == 2100 * MIB, "no part of a container has more than all of it"


def test_peak_of_each_rank_is_known(tmp_path: Path) -> None:
    proc = tmp_path / "proc"
    memory = PodMemory(v2(tmp_path, anon=500), proc)
    process(proc, 7, peak=300, anon=150, shmem=50, file=100)
    process(proc, 8, peak=900, anon=200, file=100)
    memory.look([7, 8])
    assert memory.of_ranks == {7: 200 * MIB, 8: 800 * MIB}, "without the files that they have mapped"
    process(proc, 7, peak=400, anon=100, file=100)
    process(proc, 8, peak=900, anon=100, file=100)
    memory.look([7, 8])
    assert memory.of_ranks == {7: 300 * MIB, 8: 800 * MIB}
    memory.begin()
    assert not memory.of_ranks


def test_real_process_shows_what_it_has_freed_but_not_what_it_has_mapped(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.write_bytes(bytes(120 * MIB))
    script = (
        "import mmap, sys\n"
        f"file = open({str(data)!r}, 'rb')\n"
        "area = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)\n"
        f"sum(area[i] for i in range(0, len(area), {mmap.PAGESIZE}))\n"
        "print('mapped', flush=True); sys.stdin.readline()\n"
        f"held = bytearray(b'x') * (200 << 20); del held\n"
        "print('freed', flush=True); sys.stdin.readline()\n"
    )
    memory = PodMemory(v1(tmp_path, rss=50))
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdin is not None and run.stdout is not None
        assert run.stdout.readline() == "mapped\n"
        assert memory.look([run.pid]) < 60 * MIB
        run.stdin.write("\n")
        run.stdin.flush()
        assert run.stdout.readline() == "freed\n"
        assert 240 * MIB < memory.look([run.pid]) < 270 * MIB
        run.stdin.write("\n")
