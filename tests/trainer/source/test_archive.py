"""Tests of scripts from archives and ConfigMaps: real archives, and those that try to leave the folder or fill the disk."""

import hashlib
import io
import lzma
import os
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from dltrain.data import download
from dltrain.protocol.errors import BadInputError
from dltrain.protocol.rank_messages import EXIT_BAD_INPUT, EXIT_NOT_FETCHED, EXIT_OK
from dltrain.source.archive import unpack
from dltrain.source.fetch import main
from dltrain.source.files import Files
from support.servers.files import serving

SCRIPT = b"print('trained')\n" * 500
Entry = tuple[str, bytes, bytes | str]  # name, type of tarfile, content or target of a link


def tar(path: Path, *entries: Entry, mode: str = "w") -> Path:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, kind, content in entries:
            member = tarfile.TarInfo(name)
            member.type, member.mode = kind, 0o4755
            if isinstance(content, str):
                member.linkname = content
            else:
                member.size = len(content)
            archive.addfile(member, io.BytesIO(content if isinstance(content, bytes) else b""))
    return path


def zipped(path: Path, *entries: tuple[str, int, bytes]) -> Path:
    """Write a zip archive with entries of (name, mode, content)."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, mode, content in entries:
            member = zipfile.ZipInfo(name)
            member.external_attr = mode << 16
            archive.writestr(member, content)
    return path


FILES: tuple[Entry, ...] = (
    ("project", tarfile.DIRTYPE, b""),
    ("project/train.py", tarfile.REGTYPE, SCRIPT),
    ("project/lib/deep/helper.py", tarfile.REGTYPE, b""),
    ("project/again.py", tarfile.SYMTYPE, "lib/../train.py"),
)
GOOD: dict[str, Callable[[Path], Path]] = {
    **{mode or "plain": lambda p, mode=mode: tar(p, *FILES, mode=f"w:{mode}") for mode in ("", "gz", "bz2", "xz")},  # type: ignore[misc]
    "xz of two streams": lambda p: in_two_streams(tar(p, *FILES)),
    "zip": lambda p: zipped(
        p, ("project/train.py", 0o100755, SCRIPT), ("project/lib/", 0o40755, b""), ("project/lib/deep/helper.py", 0, b""),
        ("project/again.py", 0o120777, b"lib/../train.py"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", GOOD)
def test_archive_is_unpacked_whatever_its_name(kind: str, tmp_path: Path) -> None:
    archive, target = GOOD[kind](tmp_path / "archive"), tmp_path / "source" / "files"
    assert main(["archive", f"file://{archive}", "--to", str(target), "--path=project"]) == EXIT_OK
    found = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
    assert found == {"project/train.py", "project/again.py", "project/lib/deep/helper.py"}
    assert (target / "project" / "again.py").read_bytes() == SCRIPT
    assert oct((target / "project" / "train.py").stat().st_mode & 0o7777) == "0o755", "without the setuid bit"
    assert not (target.parent / "work").exists()


SMALL: tuple[Entry, ...] = (("a.py", tarfile.REGTYPE, b"x"), ("b.py", tarfile.REGTYPE, b"x"))
"""Each has a header and a content of 512 bytes."""
BAD: dict[str, tuple[Callable[[Path], Path], str]] = {
    "parent": (lambda p: tar(p, ("../a", tarfile.REGTYPE, b"x")), "'../a'"),
    "parent in the middle": (lambda p: tar(p, ("a/../../b", tarfile.REGTYPE, b"x")), "'a/../../b'"),
    "absolute": (lambda p: tar(p, ("/etc/a", tarfile.REGTYPE, b"x")), "'/etc/a'"),
    "parent in a zip": (lambda p: zipped(p, ("../a", 0, b"x")), "'../a'"),
    "link outside": (lambda p: tar(p, ("a", tarfile.SYMTYPE, "../b")), "the link 'a' to '../b'"),
    "absolute link": (lambda p: tar(p, ("a", tarfile.SYMTYPE, "/etc/passwd")), "the link 'a' to '/etc/passwd'"),
    "absolute link in a zip": (lambda p: zipped(p, ("a", 0o120777, b"/etc/passwd")), "'/etc/passwd'"),
    "link over a link": (
        lambda p: tar(p, ("s/d", tarfile.SYMTYPE, ".."), ("e", tarfile.SYMTYPE, "s/d/../../outside")), "the link 'e'",
    ),
    "file through a link": (
        lambda p: tar(p, ("a", tarfile.SYMTYPE, "b"), ("a/c", tarfile.REGTYPE, b"x")), "as a folder and as a file or link",
    ),
    "link in place of a file": (
        lambda p: tar(p, ("a", tarfile.REGTYPE, b"x"), ("a", tarfile.SYMTYPE, "b")), "two entries with the name 'a'",
    ),
    "folder in place of a file": (
        lambda p: tar(p, ("a", tarfile.REGTYPE, b"x"), ("a/b", tarfile.REGTYPE, b"x")), "as a folder and as a file or link",
    ),
    "hard link": (lambda p: tar(p, ("a", tarfile.REGTYPE, b""), ("b", tarfile.LNKTYPE, "a")), "'b', a hard link"),
    "device": (lambda p: tar(p, ("a", tarfile.CHRTYPE, b"")), "'a', a device"),
    "pipe": (lambda p: tar(p, ("a", tarfile.FIFOTYPE, b"")), "'a', a device or another special file"),
    "nothing": (lambda p: tar(p), "an archive without files"),
    "only the top": (lambda p: tar(p, ("./", tarfile.DIRTYPE, b"")), "an archive without files"),
    "no archive": (lambda p: p.write_bytes(SCRIPT) and p, "cannot be unpacked"),  # type: ignore[dict-item]
    "empty file": (lambda p: p.write_bytes(b"") or p, "cannot be unpacked"),  # type: ignore[dict-item]
    "cut": (lambda p: cut(tar(p, *FILES, mode="w:gz")), "cannot be unpacked (EOFError"),
    "cut after an entry": (lambda p: at(tar(p, *SMALL), 1024), "a damaged or incomplete header"),
    "cut in a header": (lambda p: at(tar(p, *SMALL), 1124), "a damaged or incomplete header"),
    "damaged header": (lambda p: damaged(tar(p, *SMALL), 1024 + 10), "a damaged or incomplete header"),
    "damaged checksum": (lambda p: damaged(tar(p, *FILES, mode="w:gz"), -7), "cannot be unpacked (BadGzipFile: CRC"),
    "cut xz": (lambda p: cut(tar(p, *FILES, mode="w:xz")), "cannot be unpacked (EOFError"),
    "cut zip": (lambda p: cut(zipped(p, ("a", 0, SCRIPT))), "cannot be unpacked (BadZipFile"),
    "header bomb": (
        lambda p: tar(p, ("a", tarfile.XHDTYPE, bytes(2**21)), mode="w:gz"), "a header of",
    ),
}  # fmt: skip


def cut(path: Path) -> Path:
    return at(path, path.stat().st_size // 2)


def at(path: Path, nbytes: int) -> Path:
    """Cut a file off."""
    os.truncate(path, nbytes)
    return path


def damaged(path: Path, at: int) -> Path:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    return path


def in_two_streams(path: Path) -> Path:
    """Compress a file in two streams with zeros between them, as parallel compressors and ``cat`` do."""
    content = path.read_bytes()
    path.write_bytes(lzma.compress(content[:1500]) + bytes(8) + lzma.compress(content[1500:]) + bytes(4))
    return path


@pytest.mark.parametrize("case", BAD)
def test_bad_archive_is_refused(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, words = BAD[case]
    inside = tmp_path / "volume"
    inside.mkdir()
    archive, before = make(tmp_path / "archive"), set(tmp_path.iterdir())
    assert main(["archive", f"file://{archive}", "--to", str(inside / "files")]) == EXIT_BAD_INPUT
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("dltrain.data.fetch: spec.trainer.source.archive.uri: found ")
    assert words in last
    assert not (inside / "files").exists()
    assert set(tmp_path.iterdir()) == before, "nothing outside of the volume"


@pytest.mark.parametrize("make", [GOOD["gz"], GOOD["zip"]], ids=["tar", "zip"])
@pytest.mark.parametrize(
    ("limits", "words"),
    [({"max_nbytes": 8000}, "more than 7.8 KiB of files"), ({"max_entries": 3}, "more than 3 files and folders")],
    ids=["bytes", "entries"],
)
def test_bomb_is_refused_before_it_fills_the_disk(
    make: Callable[[Path], Path], limits: dict[str, int], words: str, tmp_path: Path
) -> None:
    files = Files(tmp_path / "files", "field", **limits)
    with pytest.raises(BadInputError, match=words):
        unpack(make(tmp_path / "archive"), files)
    assert sum(path.stat().st_size for path in files.root.rglob("*") if path.is_file()) <= 8500


def test_top_folder_that_repeats_has_a_limit(tmp_path: Path) -> None:
    archive = tar(tmp_path / "archive", *[("./", tarfile.DIRTYPE, b"")] * 50)
    with pytest.raises(BadInputError, match="more than 40 files and folders"):
        unpack(archive, Files(tmp_path / "files", "field", max_entries=40))


class TestFetched:
    def test_archive_is_fetched_and_checked(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        data = tar(tmp_path / "made", *FILES, mode="w:gz").read_bytes()
        with serving() as server:
            server.files["/v1.tar.gz"] = data
            sha256 = hashlib.sha256(data).hexdigest()
            target = tmp_path / "source" / "files"
            assert main(["archive", f"{server.uri}/v1.tar.gz", f"--sha256={sha256}", "--to", str(target)]) == EXIT_OK
        assert (target / "project" / "train.py").read_bytes() == SCRIPT
        assert [path.name for path in target.parent.iterdir()] == ["files"], "the archive does not remain"

    @pytest.mark.parametrize(
        ("answers", "more", "code", "words"),
        [
            ([-404], (), EXIT_BAD_INPUT, "spec.trainer.source.archive.uri: found nothing at"),
            ([-403], (), EXIT_BAD_INPUT, "credentials in spec.trainer.source.archive.secretName"),
            ([-503], (), EXIT_NOT_FETCHED, "spec.trainer.source.archive.uri: http"),
            ([], (f"--sha256={'0' * 64}",), EXIT_BAD_INPUT, "spec.trainer.source.archive.sha256: found checksum"),
            ([], ("--path=other",), EXIT_BAD_INPUT, "whose top folder has project. Correct the path"),
        ],
        ids=["missing", "forbidden", "broken", "wrong checksum", "no such folder"],
    )
    def test_failure_is_one_line_that_names_the_field(
        self, answers: list[int], more: tuple[str, ...], code: int, words: str, tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    ) -> None:  # fmt: skip
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setattr(download, "WAITS_S", (0.0,))
        with serving() as server:
            server.files["/a.tar"] = tar(tmp_path / "made", *FILES).read_bytes()
            server.answers = answers
            target = tmp_path / "source" / "files"
            assert main(["archive", f"{server.uri}/a.tar", "--to", str(target), *more]) == code
        assert words in capsys.readouterr().out.splitlines()[-1]
        assert not target.exists()

    def test_missing_file_on_a_claim(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["archive", f"file://{tmp_path}/a.tar", "--to", str(tmp_path / "files")]) == EXIT_BAD_INPUT
        assert "found no file a.tar on the claim" in capsys.readouterr().out

    def test_checksum_of_a_file_on_a_claim(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        archive = tar(tmp_path / "a.tar", *FILES)
        arguments = ["archive", f"file://{archive}", "--to", str(tmp_path / "files"), f"--sha256={'0' * 64}"]
        assert main(arguments) == EXIT_BAD_INPUT
        assert "spec.trainer.source.archive.sha256: found checksum" in capsys.readouterr().out


class TestConfigMap:
    def test_keys_become_files(self, tmp_path: Path) -> None:
        """The kubelet mounts keys as links into a folder whose name begins with two dots."""
        mounted = tmp_path / "mounted"
        (mounted / "..2026").mkdir(parents=True)
        (mounted / "..2026" / "train.py").write_bytes(SCRIPT)
        (mounted / "..data").symlink_to("..2026")
        (mounted / "train.py").symlink_to("..data/train.py")
        target = tmp_path / "files"
        assert main(["config-map", "scripts", "--input", str(mounted), "--to", str(target)]) == EXIT_OK
        assert {path.name: path.is_symlink() for path in target.iterdir()} == {"train.py": False}
        assert (target / "train.py").read_bytes() == SCRIPT

    def test_missing_one_is_tried_again(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "mounted").mkdir()
        arguments = ["config-map", "scripts", "--input", str(tmp_path / "mounted"), "--to", str(tmp_path / "files")]
        assert main(arguments) == EXIT_NOT_FETCHED
        assert "spec.trainer.source.configMap.name: found no ConfigMap 'scripts'" in capsys.readouterr().out
