"""Build Kubernetes from its Go modules: one program whose name at the call selects the component that it runs."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

from devcluster.errors import ClusterError
from devcluster.kubernetes.release import CLIENT, MODULE, PROGRAMS, STORE, Release, default_release
from devcluster.paths import cache_root
from devcluster.progress import Progress
from devcluster.shell import find, run

NEEDED_NBYTES = 6 << 30
"""Disk space of a build: compiled packages (3.2 GB), modules (0.8 GB), the program (0.2 GB), and some reserve."""
_TAGS = "providerless"  # the build tag of upstream's releases, which excludes cloud providers
COMPILED = "gocache"
"""Folder of compiled packages in the cache. An interrupted build continues from it; a finished build removes it."""
_UNREACHABLE = re.compile(r"forbidden|refused|no such host|timeout|\b40\d\b", re.IGNORECASE)
_LIMIT_S = 3600
_COMPILER_FLAGS = "-gcflags=all=-dwarf=false -c=1"
"""Flags that omit debug information, which the linker would strip anyway, and run each compiler in a single thread.

Go already starts one compiler for each processor. Together with `_memory_settings`, these flags save 28 % of the
processor time (149 s instead of 206 s for client-go and the endpoints of the API server)."""
_MOST_MEMORY_NBYTES = 2 << 30
_RECIPE = 1  # increase it if a change of the build steps below changes the built program


def digest(release: Release) -> str:
    """Return the key of a build in the cache: 16 hexadecimal digits of a hash of all inputs of the build."""
    inputs = [str(release), _RECIPE, _TAGS, (MODULE / "main.go").read_text()]
    if release == default_release():
        inputs += [(MODULE / name).read_text() for name in ("go.mod", "go.sum")]
    return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:16]


def build(release: Release, work: Path, progress: Progress) -> Path:
    """Build `release` below `work`; return the folder with the programs. It takes four to five minutes on two cores.

    Raise ClusterError with a message of one line if Go is missing or too old, or if a module cannot be downloaded.
    """
    module = work / "module"
    module.mkdir()
    for name in ("main.go", "go.mod", "go.sum"):
        shutil.copy(MODULE / name, module / name)
    _check_go(module)
    if release != default_release():
        _check_go_version(write_module(module, release))
        with progress.step(f"resolving the modules of Kubernetes {release}", expected_s=30):
            tidy(module)
    with progress.step("downloading the modules of Kubernetes", expected_s=25):
        _go(module, "mod", "download")
    folder = work / "bin"
    folder.mkdir()
    with progress.step(f"building Kubernetes {release}, once", expected_s=280):
        _go(
            *(module, "build", "-trimpath", "-mod=readonly", "-tags", _TAGS, _COMPILER_FLAGS),
            *("-ldflags", linker_flags(release), "-o", str(folder / "kubernetes"), "."),
        )
    for name in (*PROGRAMS, CLIENT, STORE):
        (folder / name).symlink_to("kubernetes")
    return folder


def write_module(module: Path, release: Release) -> str:
    """Write a go.mod for `release` and an empty go.sum into `module`; return the Go version that upstream asks for.

    Upstream's go.mod requires its staging modules as v0.0.0 and replaces them by folders of its own tree. Here they
    are replaced by the versions that upstream publishes of them, such as v0.36.3 for Kubernetes 1.36.3.
    """
    listed = json.loads(_go(module, "mod", "download", "-json", f"k8s.io/kubernetes@v{release}"))
    upstream = json.loads(_go(module, "mod", "edit", "-json", listed["GoMod"]))
    staging = [one["Path"] for one in upstream["Require"] if one["Version"] == "v0.0.0"]
    settings = [f"godebug {one['Key']}={one['Value']}" for one in upstream.get("Godebug") or []]
    published = f"v0.{release.minor}.{release.patch}"
    lines = [
        *("module dljob.dev/hack/kubernetes", "", f"go {upstream['Go']}", "", *settings, ""),
        *(f"require k8s.io/kubernetes v{release}", "", "replace ("),
        *(f"\t{path} => {path} {published}" for path in staging),
        ")",
    ]
    (module / "go.mod").write_text("\n".join(lines) + "\n")
    (module / "go.sum").write_text("")
    return str(upstream["Go"])


def tidy(module: Path) -> None:
    """Run `go mod tidy` in the folder `module`, which completes its go.mod and go.sum.

    Go checks each module against its checksum database.
    """
    _go(module, "mod", "tidy")


def linker_flags(release: Release) -> str:
    """Return the linker flags that write the version into the program, as in the official build of Kubernetes."""
    facts = {
        "gitVersion": f"v{release}",
        "gitMajor": str(release.major),
        "gitMinor": str(release.minor),
        "gitTreeState": "clean",
    }
    places = ("client-go/pkg/version", "component-base/version")
    stamps = [f"-X k8s.io/{place}.{key}={value}" for place in places for key, value in facts.items()]
    return " ".join(["-s", "-w", *stamps])


def _check_go(module: Path) -> None:
    match = re.search(r"^go (\S+)$", (module / "go.mod").read_text(), re.MULTILINE)
    assert match
    if not find("go"):
        raise ClusterError(
            f"Go: found none on PATH; expected {match[1]} or newer to build Kubernetes. "
            "Install it (https://go.dev/dl), or pass --kubernetes DIR with Kubernetes' programs"
        )
    _check_go_version(match[1])


def _check_go_version(wanted: str) -> None:
    # From 1.21 on, Go downloads the Go release that a module requires, unless GOTOOLCHAIN forbids this.
    said = run(["go", "env", "GOVERSION", "GOTOOLCHAIN"], check=False).stdout.split()
    found = said[0].removeprefix("go") if said else "unknown"
    fetches = len(said) > 1 and said[1] not in ("", "local") and _numbers(found) >= (1, 21)
    if _numbers(found) < _numbers(wanted) and not fetches:
        raise ClusterError(
            f"Go: found {found}; expected {wanted} or newer to build Kubernetes. Install it (https://go.dev/dl), "
            "or pass --kubernetes DIR with Kubernetes' programs"
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _memory_settings() -> dict[str, str]:
    """Return environment variables with which a Go process collects garbage only near its memory limit.

    Go runs one compiler per processor. The limit of each is a quarter of the machine's memory divided by the number of
    processors, or less. Variables that the user has set are not returned.
    """
    total_nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    each_nbytes = min(_MOST_MEMORY_NBYTES, total_nbytes // 4 // (os.cpu_count() or 1))
    settings = {"GOGC": "off", "GOMEMLIMIT": str(each_nbytes)}
    return {name: value for name, value in settings.items() if name not in os.environ}


def _go(module: Path, *words: str) -> str:
    """Run the go command in `module` and return its output. Raise ClusterError with Go's error message if it fails."""
    folder = cache_root() / "kubernetes"
    env = {"CGO_ENABLED": "0", "GO111MODULE": "on", "GOFLAGS": "", "GOWORK": "off", "PWD": str(module)}
    env |= {"GOCACHE": str(folder / COMPILED), **_memory_settings()}
    done = run(["go", *words], cwd=module, env=env, timeout_s=_LIMIT_S, nice=True, check=False)
    if done.returncode:
        log = folder / "build.log"
        log.write_text(done.stdout + done.stderr)
        raise ClusterError(f"go {' '.join(words[:2])} failed: {_reason(done.stderr)} (its whole output: {log})")
    return done.stdout


def _reason(errors: str) -> str:
    """Return the line of Go's output with the cause of the failure, and the remedy for the most common cause."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(("#", "go: downloading"))]
    for line in lines:
        if _UNREACHABLE.search(line):
            proxy = os.environ.get("GOPROXY") or "Go's own default"
            return f"{line}. The module proxy (GOPROXY: {proxy}) refuses it: allow it there, or pass --kubernetes DIR"
    return lines[-1] if lines else "no reason given"
