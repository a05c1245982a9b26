"""Compile the library of ``dltrain/launch/loopback.c`` when dltrain is built.

Zig's C compiler comes from PyPI and compiles for all processors, so one wheel fits them all.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

LAUNCH = Path(__file__).parent / "dltrain/launch"
GLIBC = "2.17"
"""The oldest version of the C library with which the result works, the one of manylinux2014."""


def compile_loopback(folder: Path) -> None:
    """Put the compiled library for each processor into ``folder``. Raise CalledProcessError if the compiler fails."""
    folder.mkdir(parents=True, exist_ok=True)
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
        if folder != LAUNCH:
            shutil.copy2(made, folder)


def build() -> None:
    """Build dltrain as setuptools does, and add the library to it."""
    from setuptools import setup
    from setuptools.command.build_py import build_py

    class BuildWithLibrary(build_py):
        def run(self) -> None:
            super().run()
            compile_loopback(Path(self.build_lib) / "dltrain/launch")

    setup(cmdclass={"build_py": BuildWithLibrary})


if __name__ == "__main__":
    if sys.argv[1:] == ["loopback"]:
        compile_loopback(LAUNCH)  # For a checkout, whose modules are used in place. It needs no setuptools.
    else:
        build()
