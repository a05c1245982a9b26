"""Compile the library of ``dltrain/launch/loopback.c`` when dltrain is built, and add a file to Python's search path.

Zig's C compiler comes from PyPI and compiles for all processors, so one wheel fits them all. The file
``dltrain-compatibility.pth`` makes Python look for packages in ``dltrain/compatibility``, after all other places.
"""

import os
import subprocess
import sys
from pathlib import Path

LAUNCH = Path(__file__).parent / "dltrain/launch"
PTH, COMPATIBILITY = "dltrain-compatibility.pth", "dltrain/compatibility"
GLIBC = "2.17"
"""The oldest version of the C library with which the result works, the one of manylinux2014."""


def compile_loopback() -> None:
    """Compile the library for each processor, beside its source. Raise CalledProcessError if the compiler fails."""
    sys.path.insert(0, str(LAUNCH))
    from loopback import MACHINES

    source = LAUNCH / "loopback.c"
    for machine in MACHINES:
        made = LAUNCH / f"loopback-{machine}.so"
        if not made.is_file() or made.stat().st_mtime < source.stat().st_mtime:
            new = made.with_suffix(f".{os.getpid()}.so")
            compiler = [sys.executable, "-m", "ziglang", "cc", "-target", f"{machine}-linux-gnu.{GLIBC}"]
            options = ["-shared", "-fPIC", "-O2", "-s", "-Wall", "-Wextra", "-Werror"]
            subprocess.run([*compiler, *options, "-o", str(new), str(source)], check=True)
            new.replace(made)


def build() -> None:
    """Build dltrain as setuptools does, and add the library to it."""
    from setuptools import setup
    from setuptools.command.build_py import build_py

    class BuildWithLibrary(build_py):
        def run(self) -> None:
            compile_loopback()
            super().run()
            (Path(self.build_lib) / PTH).write_text(f"{COMPATIBILITY}\n")

    setup(cmdclass={"build_py": BuildWithLibrary})


if __name__ == "__main__":
    if sys.argv[1:] == ["loopback"]:
        compile_loopback()  # For a checkout, whose modules are used in place. It needs no setuptools.
    else:
        build()
