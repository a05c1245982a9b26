"""apiextensions-apiserver, the part of Kubernetes that serves custom resources, from Debian unstable's packages.

Debian ships Kubernetes' newest libraries as Go source packages, and the server's main package is among them. Compiler
and sources are unpacked into a folder of their own: nothing is installed on this machine.
"""

import hashlib
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from devcluster.embedded.packages import debian_mirror
from devcluster.errors import ClusterError
from devcluster.paths import cache_root
from devcluster.progress import Progress
from devcluster.shell import run

SOURCE = "golang-k8s-apiextensions-apiserver-dev"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_IMPORT = "k8s.io/apiextensions-apiserver"


def server(progress: Progress, *, refresh: bool = False) -> Path:
    """The server's binary: the cached one, else, or with ``refresh``, built from what unstable has today.

    Raises ClusterError when packages cannot be had or the build fails: unstable moves.
    """
    folder = cache_root() / "crd-current"
    if not refresh and (built := sorted(folder.glob("*/apiextensions-apiserver"), key=lambda p: p.stat().st_mtime)):
        return built[-1]
    apt = _Apt(folder / "apt")
    with progress.step("reading the package lists of Debian unstable"):
        apt.update()
    uris = apt.closure([SOURCE, "golang-go"])
    digest = hashlib.sha256("\n".join(sorted(uris)).encode()).hexdigest()[:12]
    binary = folder / digest / "apiextensions-apiserver"
    if not binary.exists():
        work = folder / "build"
        shutil.rmtree(work, ignore_errors=True)  # of an earlier, interrupted build
        with progress.step(f"fetching {len(uris)} packages"):
            _unpack(apt.download(uris), work / "root")
        with progress.step("building the server, once (about two minutes on two cores)"):
            _build(work, binary)
        shutil.rmtree(work)
        shutil.rmtree(folder / "apt" / "archives")
    return binary


def version(binary: Path) -> str:
    """Version of Kubernetes' libraries in the binary, as their package gave it."""
    return (binary.parent / "version").read_text().strip()


class _Apt:
    """apt with lists, sources and an empty status of its own; the machine's stay as they are."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for part in ("lists/partial", "archives/partial"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        (folder / "status").write_text("")
        (folder / "sources.list").write_text(f"deb [signed-by={KEYRING}] {debian_mirror()} unstable main\n")
        settings = {
            "Dir::Etc::SourceList": folder / "sources.list",
            "Dir::Etc::SourceParts": "/dev/null",
            "Dir::Etc::Preferences": "/dev/null",
            "Dir::Etc::PreferencesParts": "/dev/null",
            "Dir::State::Lists": folder / "lists",
            "Dir::State::Status": folder / "status",
            "Dir::Cache::Archives": folder / "archives",
            "Dir::Cache::PkgCache": "",
            "Dir::Cache::SrcPkgCache": "",
            "APT::Sandbox::User": "root",
            "APT::Default-Release": "",
            "APT::Install-Recommends": "false",
        }
        self._options = [f"-o{name}={value}" for name, value in settings.items()]

    def update(self) -> None:
        if not KEYRING.exists():
            raise ClusterError(f"{KEYRING} is missing; expected Debian's keys: apt-get install debian-archive-keyring")
        run(["apt-get", *self._options, "update"], timeout_s=300)

    def closure(self, packages: Sequence[str]) -> list[str]:
        """URIs of the packages and of all they depend on."""
        told = run(["apt-get", *self._options, "--yes", "--print-uris", "install", *packages], timeout_s=120).stdout
        uris = re.findall(r"^'([^']+\.deb)'", told, re.MULTILINE)
        if not uris:
            raise ClusterError(f"apt named no packages for {' '.join(packages)}:\n{told[-2000:]}")
        return [uri for uri in uris if re.search(r"/golang-[^/]+\.deb$", uri)]

    def download(self, uris: Sequence[str]) -> list[Path]:
        """The packages' files. apt fetches them, and checks them against the signed lists."""
        names = [re.sub(r"_.*", "", uri.rsplit("/", 1)[1]) for uri in uris]
        folder = self._folder / "archives"
        run(["apt-get", *self._options, "download", *names], cwd=folder, timeout_s=1200)
        return [next(folder.glob(f"{name}_*.deb")) for name in names]


def _unpack(files: Sequence[Path], root: Path) -> None:
    root.mkdir(parents=True)
    for file in files:
        run(["dpkg", "-x", file, root], timeout_s=300)


def _build(work: Path, binary: Path) -> None:
    root = work / "root"
    compilers = sorted((root / "usr/lib").glob("go-*"), key=lambda p: [int(n) for n in re.findall(r"\d+", p.name)])
    if not compilers:
        raise ClusterError(f"no Go compiler among the packages of unstable in {root}")
    goroot = compilers[-1]
    _materialize(goroot, root)
    env = {
        "GOROOT": str(goroot),
        "GOPATH": str(root / "usr/share/gocode"),
        "GO111MODULE": "off",
        "GOTOOLCHAIN": "local",
        "GOFLAGS": "",
        "GOCACHE": str(work / "cache"),
        "CGO_ENABLED": "0",
    }
    binary.parent.mkdir(parents=True, exist_ok=True)
    run(
        [goroot / "bin/go", "build", "-o", binary.with_suffix(".new"), "."],
        cwd=root / "usr/share/gocode/src" / _IMPORT, env=env, timeout_s=1800, nice=True,
    )  # fmt: skip
    package = next((work.parent / "apt" / "archives").glob(f"{SOURCE}_*.deb"))
    (binary.parent / "version").write_text(package.name.split("_")[1])
    binary.with_suffix(".new").rename(binary)


def _materialize(goroot: Path, root: Path) -> None:
    """Debian splits Go over /usr/lib and /usr/share and joins them by absolute links: point them into ``root``."""
    for link in [path for path in goroot.iterdir() if path.is_symlink()]:
        target = link.readlink()
        inside = root / str(target).lstrip("/") if target.is_absolute() else (goroot / target)
        link.unlink()
        link.symlink_to(inside.resolve())
