"""Compile the libraries that dltrain has in C when it is built, and add a file to Python's search path.

Zig's C compiler comes from PyPI and compiles for all processors, so one wheel fits them all. The file
``dltrain-compatibility.pth`` makes Python look for packages in ``dltrain/compatibility``, after all other places.
"""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = (HERE / "dltrain/launch/loopback.c", HERE / "dltrain/host/reusable_blocks.c")
PTH, COMPATIBILITY = "dltrain-compatibility.pth", "dltrain/compatibility"
GLIBC = "2.17"
"""The oldest version of the C library with which the result works, the one of manylinux2014."""


def compile_libraries() -> None:
    """Compile each library for each processor, beside its source. Raise CalledProcessError if the compiler fails."""
    sys.path.insert(0, str(HERE / "dltrain/launch"))
    from loopback import MACHINES

    for source in SOURCES:
        for machine in MACHINES:
            made = source.with_name(f"{source.stem}-{machine}.so")
            if not made.is_file() or made.stat().st_mtime < source.stat().st_mtime:
                new = made.with_suffix(f".{os.getpid()}.so")
                compiler = [sys.executable, "-m", "ziglang", "cc", "-target", f"{machine}-linux-gnu.{GLIBC}"]
                options = ["-shared", "-fPIC", "-O2", "-s", "-Wall", "-Wextra", "-Werror"]
                subprocess.run([*compiler, *options, "-o", str(new), str(source)], check=True)
                new.replace(made)


def build() -> None:
    """Build dltrain as setuptools does, and add the libraries to it."""
    from setuptools import setup
    from setuptools.command.build_py import build_py

    class BuildWithLibraries(build_py):
        def run(self) -> None:
            compile_libraries()
            super().run()
            (Path(self.build_lib) / PTH).write_text(f"{COMPATIBILITY}\n")

    setup(cmdclass={"build_py": BuildWithLibraries})


if __name__ == "__main__":
    if sys.argv[1:] == ["libraries"]:
        compile_libraries()  # For a checkout, whose modules are used in place. It needs no setuptools.
    else:
        build()
