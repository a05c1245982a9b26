"""Root file systems that were not made from the trainer image, and pods that run the injected agent in them."""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

from devcluster.embedded import packages
from devcluster.locks import locked
from devcluster.paths import cache_root
from devcluster.progress import Progress
from support.trainer.pods import UID, Job, Pod

ROOT = Path(__file__).resolve().parents[3]
AGENT = "/var/lib/dljob/agent"
TREE = ROOT / "trainer-image/injection/tree.py"
_PYTHON_3_9 = (
    "libc6", "libgcc-s1", "python3-minimal", "python3.9-minimal", "libpython3.9-minimal", "libpython3.9-stdlib", "zlib1g",
    "libexpat1", "libffi7", "libssl1.1", "libbz2-1.0", "liblzma5", "libcrypt1", "libuuid1", "libmpdec3",
)  # fmt: skip
"""Packages of Debian 11: Python 3.9 and what it needs. None of them contains a shell or a program like env."""
_PYTHON = ("python3-minimal", "libpython3-stdlib")
_FOLDERS = ("tmp", "proc", "dev", "etc", "var/lib/dljob/agent")


def injected_agent(folder: Path) -> Path:
    """Build the files of the injected agent from this checkout in a new folder below ``folder``, and return it."""
    launcher, tree = folder / "launcher", folder / "agent"
    environ = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": str(cache_root() / "zig")}
    for arguments in (["launcher", str(launcher)], ["tree", str(tree), "--launcher", str(launcher)]):
        subprocess.run([sys.executable, str(TREE), *arguments], check=True, env=environ)
    return tree


def debian_11() -> Path:
    """Return a root file system with glibc 2.31 and Python 3.9, without a shell. The first call downloads it."""
    return _debian("bullseye", _PYTHON_3_9)


def debian_12() -> Path:
    """Return a root file system with glibc 2.36, Python 3.11 and a shell. The first call downloads it."""
    return _debian("bookworm", ())


def compiler() -> Path:
    """Return the folder usr of Debian 12 with what inductor needs: g++, Python's headers and openssl."""
    return _debian("bookworm", (), ("g++", "libpython3-dev", "openssl")) / "usr"


def _debian(suite: str, names: tuple[str, ...], more: tuple[str, ...] = ()) -> Path:
    """Return a root file system with packages of a release of Debian.

    ``names``: the packages, all by name; empty for Python, the base packages, ``more``, and what these need.
    """
    # Another list of packages makes another root file system.
    listed = names + more
    kind = f"{suite}-{zlib.crc32(' '.join(listed).encode()):08x}" if listed else suite
    made = cache_root() / "images" / f"rootfs-{kind}-{platform.machine()}"
    with locked("rootfs"):
        if not made.is_dir():
            packages.install(packages.IMAGE_BUILD, Progress(quiet=True))
            made.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=made.parent, prefix="rootfs-") as folder:
                _unpack(suite, names, (*_PYTHON, *more), Path(folder, "packages"), Path(folder, "new"))
                Path(folder, "new").rename(made)
    return made


def _unpack(suite: str, names: tuple[str, ...], wanted: tuple[str, ...], archives: Path, target: Path) -> None:
    options = ["--variant=minbase", "--download-only", f"--include={','.join(wanted)}"]
    mirror = packages.debian_mirror()
    subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "debootstrap", *options, suite, archives, mirror],
        check=True, stdout=subprocess.DEVNULL, timeout=600,
    )  # fmt: skip
    target.mkdir()
    found = archives / "var/cache/apt/archives"
    for archive in sorted(path for name in names or ("*",) for path in found.glob(f"{name}_*.deb")):
        subprocess.run(["dpkg-deb", "--extract", archive, target], check=True)
    _add_folders(target)


def empty(folder: Path) -> Path:
    """Create a root file system in ``folder`` without any file: no program, no library, no user."""
    folder.mkdir()
    _add_folders(folder)
    return folder


def _add_folders(rootfs: Path) -> None:
    for name in _FOLDERS:
        (rootfs / name).mkdir(parents=True, exist_ok=True)


def inject(job: Job, tree: Path, rootfs: Path) -> None:
    """Make the pods of a job, which are not started yet, run the injected agent ``tree`` in the image ``rootfs``.

    As in a pod of the operator, the root file system is read-only, the agent's files are a read-only volume, and the
    user has no name and no privileges.
    """
    for pod in job.pods:
        _inject(job, pod, tree, rootfs)


def _inject(job: Job, pod: Pod, tree: Path, rootfs: Path) -> None:
    # A scratch folder in memory is the mount point, so that pods can share one root file system.
    mounts = f"""set -e
    new={pod.directory}/root
    mount --bind {rootfs} $new && mount -o remount,bind,ro $new
    mount -t proc proc $new/proc && mount --rbind /dev $new/dev
    mount -t tmpfs tmpfs $new/tmp && mkdir $new{job.directory} && mount --rbind {job.directory} $new{job.directory}
    chmod 1777 $new/tmp
    mount --bind {tree} $new{AGENT} && mount -o remount,bind,ro $new{AGENT}
    exec {shutil.which("chroot")} --userspec={UID}:0 --groups= $new "$@"
    """
    (pod.directory / "root").mkdir()
    at = pod.command.index("setpriv")
    pod.command[at:] = [shutil.which("sh") or "sh", "-c", mounts, "sh", f"{AGENT}/bin/agent"]
    pod.environ["PATH"] = "/usr/local/bin:/usr/bin:/bin"
    del pod.environ["PYTHONPATH"]
