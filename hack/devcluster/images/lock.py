"""Pin what environments and images hold: `hack/lock` resolves pyproject.toml with uv, with hashes of every file."""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from devcluster.errors import ClusterError
from devcluster.images.torch_build import requirement
from devcluster.paths import REPOSITORY
from devcluster.shell import run
from requirements import requirements

_PYTHON = "3.11"  # the oldest version that the project supports; the base image has it too
# PyTorch, and packages that only some builds of PyTorch need. Locks omit them, because users choose the build, and each
# build has different hashes.
_BUILD_DEPENDENT = re.compile(r"(torch|triton|nvidia-.*|cuda-.*)==")


@dataclass(frozen=True)
class Lock:
    """One file of pinned packages.

    `wanted`: dependency groups and distributions whose requirements it resolves. `beside`: name of a lock whose
    packages are there already, so that this one leaves them out.
    """

    path: str
    wanted: tuple[str, ...]
    beside: str = ""


LOCKS = {
    "dev": Lock("hack/locks/dev.txt", ("dev", "bench")),
    "quickstart": Lock("hack/locks/quickstart.txt", ("quickstart",)),
    "operator": Lock("operator/requirements.txt", ("dljob[operator,tasks]",)),
    "trainer": Lock("trainer-image/requirements.txt", ("dltrain[parquet]",)),
    "exports": Lock("hack/locks/exports.txt", ("exports",), beside="dev"),
    "s3-server": Lock("hack/locks/s3-server.txt", ("s3-server",), beside="trainer"),
    "programs": Lock("examples/programs/requirements.txt", ("programs",), beside="trainer"),
}


def write(name: str, upgrade: bool) -> None:
    """Resolve the lock `name` (a key of LOCKS) for all platforms, and write its file.

    `upgrade`: True to pin the newest versions that pyproject.toml allows. False to keep existing pins that still
    satisfy pyproject.toml.
    """
    lock = LOCKS[name]
    target = REPOSITORY / lock.path
    there = versions((REPOSITORY / LOCKS[lock.beside].path).read_text()) if lock.beside else {}
    with tempfile.TemporaryDirectory(prefix="dljob-lock-") as folder:
        resolved, fixed = Path(folder, "resolved.txt"), Path(folder, "fixed.txt")
        fixed.write_text("\n".join([requirement(), *(f"{name}=={version}" for name, version in there.items()), ""]))
        if target.exists() and not upgrade:
            resolved.write_text(target.read_text())  # uv keeps the pins that it finds in its output file
        run(
            [
                *("uv", "pip", "compile", "--quiet", "--universal", "--python-version", _PYTHON, "--generate-hashes"),
                *("--no-header", "--no-annotate", "--constraint", str(fixed), "--output-file", str(resolved)),
                "-",
            ],
            input_text="\n".join(requirements(*lock.wanted)),
            timeout_s=600,
        )
        pins = without_builds(resolved.read_text(), there)
    if not pins:
        raise ClusterError(
            f"{lock.path}: found no packages after uv resolved {', '.join(lock.wanted)}; expected at least one. "
            "Check their requirements in pyproject.toml"
        )
    head = f"# What `{name}` holds, with the SHA-256 of every file. Made by: hack/lock\n"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(head + pins)


def without_builds(text: str, there: Collection[str] = ()) -> str:
    """Return the lock `text` without PyTorch, and without packages that only some PyTorch builds need (CUDA).

    Packages with the names `there` are left out, too.
    """
    entries = re.split(r"^(?=[a-zA-Z0-9])", text, flags=re.MULTILINE)
    return "".join(
        entry
        for entry in entries
        if entry[:1].isalnum() and not _BUILD_DEPENDENT.match(entry) and entry.partition("==")[0] not in there
    )


def versions(text: str) -> dict[str, str]:
    """Return {package name: pinned version} for the lock `text`."""
    return dict(re.findall(r"^([A-Za-z0-9._-]+)==([^\s;]+)", text, re.MULTILINE))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog="hack/lock", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"lock to write: {', '.join(LOCKS)} (default: all)")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that pyproject.toml allows")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.names) - set(LOCKS)):
        print(f"hack/lock: found {', '.join(unknown)}; expected some of {', '.join(LOCKS)}", file=sys.stderr)
        return 2
    try:
        for name in options.names or LOCKS:
            write(name, options.upgrade)
            print(f"{LOCKS[name].path}: {len(versions((REPOSITORY / LOCKS[name].path).read_text()))} packages")
    except ClusterError as failure:
        print(f"hack/lock: {failure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
