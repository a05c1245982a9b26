"""Tests of downloading and building the programs of Kubernetes, and of error messages in one line."""

import hashlib
import io
import os
import shutil
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from devcluster import cli
from devcluster.errors import ClusterError
from devcluster.kubernetes import archive, build, provide
from devcluster.kubernetes.provide import Kubernetes
from devcluster.kubernetes.release import (
    CLIENT,
    MODULE,
    PROGRAMS,
    STORE,
    Release,
    architecture,
    check_folder,
    default_release,
    parse_release,
)
from devcluster.paths import cache_root
from devcluster.progress import Progress, remaining
from support.servers.files import FileServer, serving

RELEASE = Release(1, 35, 4)
ARCHIVE = f"/v{RELEASE}/kubernetes-server-linux-{architecture()}.tar.gz"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty cache, without a server of archives."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("DLJOB_KUBERNETES_ARCHIVES", "http://127.0.0.1:9")
    return cache_root() / "kubernetes"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    with serving() as found:
        monkeypatch.setenv("DLJOB_KUBERNETES_ARCHIVES", found.uri)
        yield found


def program(version: str = str(RELEASE)) -> bytes:
    """Return a program that prints a version. It must really run, so an ELF header is not enough."""
    return f"#!/bin/sh\necho Kubernetes v{version}\n".encode()


def packed(version: str = str(RELEASE)) -> bytes:
    """Return an archive with the layout of upstream and with additional files."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as tar:
        for name in (*PROGRAMS, CLIENT, "kubeadm", "kube-apiserver.tar"):
            member = tarfile.TarInfo(f"kubernetes/server/bin/{name}")
            content = program(version)
            member.size, member.mode = len(content), 0o755
            tar.addfile(member, io.BytesIO(content))
    return data.getvalue()


def publish(server: FileServer, content: bytes, digest: str | None = None) -> None:
    server.files[ARCHIVE] = content
    server.files[f"{ARCHIVE}.sha512"] = (digest or hashlib.sha512(content).hexdigest()).encode() + b"\n"


@pytest.fixture
def any_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept shell scripts as programs of this machine."""
    monkeypatch.setattr("devcluster.kubernetes.release._elf_architecture", lambda _: architecture())


def remnants(cache: Path) -> list[str]:
    return sorted(one.name for one in cache.iterdir()) if cache.exists() else []


@pytest.mark.usefixtures("any_program")
def test_release_archive_is_downloaded_once(
    server: FileServer, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(server, packed())
    folder, release = provide.provide(Kubernetes(release=RELEASE), Progress())
    assert release == RELEASE
    assert sorted(one.name for one in folder.iterdir()) == sorted((*PROGRAMS, CLIENT))
    assert provide.store(folder) is None, "an archive has no etcd, so that the package of Debian is used"
    assert "official release archive, SHA-512 checked" in capsys.readouterr().err
    assert remnants(cache) == [folder.name]
    server.files.clear()
    assert provide.provide(Kubernetes(release=RELEASE), Progress()) == (folder, RELEASE)
    assert f"Kubernetes {RELEASE}: from the cache" in capsys.readouterr().err


@pytest.mark.usefixtures("any_program")
def test_archive_with_a_wrong_checksum_is_rejected(server: FileServer, cache: Path) -> None:
    publish(server, packed(), digest="0" * 128)
    with pytest.raises(ClusterError, match=r"found a download with SHA-512 .*; expected 0000"):
        provide.provide(Kubernetes(release=RELEASE), Progress(quiet=True))
    assert remnants(cache) == []


@pytest.mark.usefixtures("any_program")
def test_archive_of_another_release_is_rejected(server: FileServer, cache: Path) -> None:
    publish(server, packed("1.35.3"))
    with pytest.raises(ClusterError, match=r"found Kubernetes 1\.35\.3; expected 1\.35\.4"):
        provide.provide(Kubernetes(release=RELEASE), Progress(quiet=True))
    assert remnants(cache) == []


def test_programs_are_built_if_no_archive_is_available(server: FileServer, tmp_path: Path) -> None:
    assert archive.fetch(RELEASE, tmp_path, Progress(quiet=True)) is None
    server.files[f"{ARCHIVE}.sha512"] = b"<html>not found</html>"  # a proxy that answers every request
    assert archive.fetch(RELEASE, tmp_path, Progress(quiet=True)) is None


def test_archive_for_another_architecture_is_rejected(server: FileServer, cache: Path) -> None:
    publish(server, packed())  # shell scripts have no architecture
    with pytest.raises(ClusterError, match=f"found kube-apiserver for no Linux program; expected {architecture()}"):
        provide.provide(Kubernetes(release=RELEASE), Progress(quiet=True))
    assert remnants(cache) == []


def test_folder_without_a_program_is_rejected(tmp_path: Path) -> None:
    for name in PROGRAMS[1:]:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(
        ClusterError, match="found no kube-apiserver in this folder; expected the programs kube-apiserver, "
    ):
        check_folder(tmp_path)


@pytest.mark.parametrize(("machine", "found"), [(183, "arm64"), (243, "ELF machine 243"), (62, "amd64")])
def test_program_for_another_machine_is_rejected(tmp_path: Path, machine: int, found: str) -> None:
    header = b"\x7fELF\x02\x01" + b"\0" * 12 + machine.to_bytes(2, "little")
    for name in PROGRAMS:
        (tmp_path / name).write_bytes(header)
    if found == architecture():
        check_folder(tmp_path)
        return
    with pytest.raises(ClusterError, match=f"found kube-apiserver for {found}; expected {architecture()}"):
        check_folder(tmp_path)


@pytest.mark.usefixtures("any_program")
def test_folder_of_the_user_has_priority(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    for name in PROGRAMS:
        (folder / name).write_bytes(program("1.33.2"))
        (folder / name).chmod(0o755)
    assert provide.provide(Kubernetes(folder=folder), Progress()) == (folder, Release(1, 33, 2))
    assert f"Kubernetes 1.33.2: from {folder}" in capsys.readouterr().err
    assert provide.client(folder) is None


@pytest.mark.parametrize("text", ["1.20.2", "1.29.9", "2.0.0", "1.36", "newest", "v1.36.x", ""])
def test_unknown_version_is_reported_in_one_line(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"^--kubernetes-version: found .*; expected "):
        parse_release(text)
    if text:
        assert cli.main(["up", "--kubernetes-version", text]) == 1
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_version_and_folder_together_are_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["up", "--kubernetes", str(tmp_path), "--kubernetes-version", "1.36.3"]) == 1
    assert "found both; expected one of them" in capsys.readouterr().err


@pytest.mark.parametrize("gates", ["A", "A=yes", "A=true,,B", "A=true B=true", "=true"])
def test_feature_gates_are_checked_before_the_start(gates: str, capsys: pytest.CaptureFixture[str]) -> None:
    if gates == "A=true,,B":
        gates = "A=true,,B=maybe"
    assert cli.main(["up", "--feature-gates", gates]) == 1
    assert "--feature-gates: found " in capsys.readouterr().err


def fake_go(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    folder.mkdir()
    (folder / "go").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "go").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_missing_go_is_reported_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(build, "find", lambda _: None)
    with pytest.raises(ClusterError, match=r"^Go: found none on PATH; expected 1\.\d+.*or pass --kubernetes DIR"):
        provide.provide(Kubernetes(release=default_release()), Progress(quiet=True))
    assert remnants(cache) == []


@pytest.mark.parametrize(
    ("output", "rejected"), [("go1.19 ", True), ("go1.25.1 local", True), ("go1.25.1 auto", False)]
)
def test_old_go_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path, output: str, rejected: bool
) -> None:
    # Since 1.21, Go downloads the release that a module requires, unless this is disabled.
    fake_go(
        tmp_path / "bin", monkeypatch, f'case $1 in env) printf "%s\\n" {output};; *) echo broken >&2; exit 1;; esac'
    )
    expected = r"^Go: found 1\..*; expected 1\." if rejected else "^go mod download failed: broken"
    with pytest.raises(ClusterError, match=expected):
        provide.provide(Kubernetes(release=default_release()), Progress(quiet=True))
    assert [one for one in remnants(cache) if one != "build.log"] == []


def test_rejected_module_is_reported_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    refusal = "go: k8s.io/api@v0.36.3: reading https://proxy.example/k8s.io/api: 403 Forbidden"
    script = f'case $1 in env) echo go9.9 local;; *) echo "go: downloading x" >&2; echo "{refusal}" >&2; exit 1;; esac'
    fake_go(tmp_path / "bin", monkeypatch, script)
    monkeypatch.setenv("GOPROXY", "https://proxy.example")
    with pytest.raises(ClusterError, match=r"403 Forbidden\. The module proxy \(GOPROXY: https://proxy.example\)"):
        provide.provide(Kubernetes(release=default_release()), Progress(quiet=True))
    assert [one for one in remnants(cache) if one != "build.log"] == []


def test_disk_space_is_checked_before_the_build(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    usage = shutil._ntuple_diskusage(10**12, 10**12, 10**8)  # type: ignore[attr-defined]
    monkeypatch.setattr(provide.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ClusterError, match=r"found 0\.1 GB free; expected 6\.\d GB for building Kubernetes"):
        provide.provide(Kubernetes(release=default_release()), Progress(quiet=True))
    assert remnants(cache) == []


def test_pinned_module_is_complete() -> None:
    """go.mod replaces each staging module by the published one of the same release."""
    text = (MODULE / "go.mod").read_text()
    release = default_release()
    replaced = [line.split() for line in text.splitlines() if " => " in line]
    assert len(replaced) > 20
    assert {words[-1] for words in replaced} == {f"v0.{release.minor}.{release.patch}"}
    assert f"k8s.io/kubernetes v{release}" in text
    assert "k8s.io/kubernetes" in (MODULE / "go.sum").read_text()


def test_remaining_time_is_that_of_the_slowest_step() -> None:
    assert remaining([("a", 10, 60), ("b", 100, 280)]) == "a: 10 of about 60 s; b: 100 of about 280 s; about 3 min left"
    assert remaining([("a", 70, 60)]).endswith("longer than usual")


def test_program_acts_by_its_name(tmp_path: Path) -> None:
    """The program in the cache acts by its name. Under another name, it lists the names that it supports."""
    assert sys.platform == "linux"
    source = (MODULE / "main.go").read_text()
    assert all(f'"{name}"' in source for name in (*PROGRAMS, CLIENT, STORE))
