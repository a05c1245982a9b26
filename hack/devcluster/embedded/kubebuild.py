"""Kubernetes from Debian's source package, built once and cached: the five programs that a cluster runs.

Debian ships only the client as a binary, but its source package holds the whole tree with `vendor/`. Built with
plain `go build` in GOPATH mode; of the generated files only the OpenAPI definitions are not in the tree, and their
generator is. Cloud providers and dockershim are left out by upstream's own build tags.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path

from devcluster.embedded import packages
from devcluster.errors import ClusterError
from devcluster.locks import locked
from devcluster.paths import cache_root
from devcluster.progress import Progress
from devcluster.shell import run

VERSION = "1.20.2"
PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy")

_SOURCE = "kubernetes=1.20.5+really1.20.2-1.1+deb12u1"
_ORIG_SHA256 = "b83c0780efb182d928dc63d46488a847f161f04e40a94b96bf5247dd671ecdfc"
_COMMIT = "faecb196815e248d3ecfb03c680a4507229c2a56"
_TAGS = "providerless dockerless"
_REFLECT2 = Path("/usr/share/gocode/src/github.com/modern-go/reflect2")
_GENERATOR = "vendor/k8s.io/kube-openapi/cmd/openapi-gen"
_CHANGES = (
    # Kubelets before 1.22 race with themselves: often a dead container of a deleted pod, and with it the pod, stays
    # until the collector comes round. Once a minute is what real clusters of that age do; this one need not wait.
    ("pkg/kubelet/kubelet.go", "ContainerGCPeriod = time.Minute", "ContainerGCPeriod = 2 * time.Second"),
    # Whether a value is null is asked by comparing addresses. Since Go 1.18 all empty texts share one with the zero
    # value, and every "" in a custom resource is refused as null: upstream's binaries, of Go 1.15, take them.
    (
        "vendor/k8s.io/kube-openapi/pkg/validation/validate/type.go",
        "if data == nil || reflect.DeepEqual(reflect.Zero(reflect.TypeOf(data)), reflect.ValueOf(data)) {",
        "if data == nil {",
    ),
)
"""(file, text, what stands there instead) in the source."""
_RECIPE = 1  # raise it when the steps below change what comes out


def binaries(progress: Progress) -> Path:
    """The folder with the programs; builds them where the cache lacks them (about three minutes on two cores)."""
    folder = cache_root() / "kubernetes" / _digest()
    if not folder.exists():
        packages.install(packages.KUBERNETES_BUILD, progress)
        with locked("kubernetes"):
            if not folder.exists():  # or somebody else built it meanwhile
                _make(folder, progress)
    return folder


def _make(folder: Path, progress: Progress) -> None:
    work = folder.parent / "build"
    for leftover in work.iterdir() if work.exists() else ():  # of an interrupted build: what it compiled is kept
        if leftover.is_dir() and leftover.name != "gocache":
            shutil.rmtree(leftover)
        elif leftover.is_file():
            leftover.unlink()
    work.mkdir(parents=True, exist_ok=True)
    with progress.step("fetching the source of Kubernetes"):
        tree = _unpack(_fetch(work), work)
    with progress.step(f"building Kubernetes {VERSION}, once (3 to 5 minutes on two cores)"):
        _build(tree, work)
    (work / "bin").rename(folder)
    shutil.rmtree(work)


def _digest() -> str:
    inputs = [_RECIPE, _SOURCE, _ORIG_SHA256, _COMMIT, _TAGS, _CHANGES, PROGRAMS, platform.machine()]
    return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:16]


def _fetch(work: Path) -> Path:
    """Downloads the source package, by apt (it checks signatures), with lists of its own: the machine keeps its."""
    uri, suite = packages.debian_mirror(), packages.SUITE
    (work / "lists" / "partial").mkdir(parents=True)
    (work / "sources.list").write_text(f"deb-src [signed-by={packages.KEYRING}] {uri} {suite} main\n")
    options = [
        "-oDir::Etc::SourceList=" + str(work / "sources.list"),
        "-oDir::Etc::SourceParts=/dev/null",
        "-oDir::State::Lists=" + str(work / "lists"),
        "-oAPT::Sandbox::User=root",
    ]
    run(["apt-get", *options, "update"], timeout_s=300)
    # Any revision of the package will do: of it only the upstream archive is used, and that one is pinned by hash.
    run(["apt-get", *options, "source", "--download-only", _SOURCE.split("=")[0]], cwd=work, timeout_s=900)
    found = list(work.glob("kubernetes_*.orig.tar.gz"))
    if len(found) != 1 or _sha256(found[0]) != _ORIG_SHA256:
        raise ClusterError(f"{_SOURCE}: expected one .orig.tar.gz with sha256 {_ORIG_SHA256}, found {found}")
    return found[0]


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _unpack(archive: Path, work: Path) -> Path:
    """Unpacks into a GOPATH and replaces the vendored reflect2.

    Version 1.0.1 corrupts memory with Go 1.18 and later (the API server dies at the first custom object); Debian's
    package of it is newer.
    """
    parent = work / "go" / "src" / "k8s.io"
    parent.mkdir(parents=True)
    with tarfile.open(archive) as tar:
        tar.extractall(parent)
    (parent / f"kubernetes-{VERSION}").rename(parent / "kubernetes")
    tree = parent / "kubernetes"
    for path, before, after in _CHANGES:
        text = (tree / path).read_text()
        if text.count(before) != 1:
            raise ClusterError(f"{path}: found {text.count(before)} times '{before}', expected it once; see _CHANGES")
        (tree / path).write_text(text.replace(before, after))
    vendored = tree / "vendor" / "github.com" / "modern-go" / "reflect2"
    shutil.rmtree(vendored)
    shutil.copytree(_REFLECT2, vendored, ignore=shutil.ignore_patterns("*_test.go", "go.mod"))
    return tree


def _build(tree: Path, work: Path) -> None:
    env = {
        "GOPATH": str(work / "go"),
        "GO111MODULE": "off",
        "CGO_ENABLED": "0",
        "GOCACHE": str(work / "gocache"),
        "GOFLAGS": "",
        "PWD": str(tree),
    }
    run(["go", "build", "-o", work / "openapi-gen", f"./{_GENERATOR}"], cwd=tree, env=env, timeout_s=600, nice=True)
    inputs = ",".join(_openapi_packages(tree))
    run(
        [
            *(work / "openapi-gen", "-i", inputs, "-p", "k8s.io/kubernetes/pkg/generated/openapi"),
            *("-O", "zz_generated.openapi", "-h", "vendor/k8s.io/code-generator/hack/boilerplate.go.txt"),
            *("-r", work / "violations"),
        ],
        cwd=tree,
        env=env,
        timeout_s=600,
        nice=True,
    )
    run(
        ["go", "build", "-trimpath", "-tags", _TAGS, "-ldflags", _linker_flags(), "-o", f"{work / 'bin'}{os.sep}"]
        + [f"./cmd/{program}" for program in PROGRAMS],
        cwd=tree,
        env=env,
        timeout_s=3600,
        nice=True,
    )


def _linker_flags() -> str:
    facts = {
        "gitVersion": f"v{VERSION}",
        "gitMajor": VERSION.split(".")[0],
        "gitMinor": VERSION.split(".")[1],
        "gitTreeState": "clean",
        "gitCommit": _COMMIT,
    }
    places = ("client-go/pkg/version", "component-base/version")
    stamps = [
        f"-X k8s.io/kubernetes/vendor/k8s.io/{place}.{key}={value}" for place in places for key, value in facts.items()
    ]
    return " ".join(["-s", "-w", *stamps])


def _openapi_packages(tree: Path) -> Iterator[str]:
    """Import paths of the packages that upstream's Makefile hands to the generator: those with its tag."""
    tag = re.compile(rb"\+k8s:openapi-gen=")
    left_out = ("/code-generator/", "/sample-apiserver/", "/kube-openapi/")
    found: set[str] = set()
    for top in ("pkg", "cmd", "plugin", "staging/src/k8s.io"):
        for path in (tree / top).rglob("*.go"):
            relative = str(path.parent.relative_to(tree))
            if relative in found or path.name.startswith("zz_generated") or path.name.endswith("_test.go"):
                continue
            if not any(part in f"/{relative}/" for part in left_out) and tag.search(path.read_bytes()):
                found.add(relative)
    yield from sorted("k8s.io/kubernetes/" + re.sub(r"^staging/src/", "vendor/", folder) for folder in found)
