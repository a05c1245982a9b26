"""Tests of fetching data by URI from a server that drops connections, rejects requests and changes files."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dltrain.data import download, remote_sources
from dltrain.data.fetch import check, fetch, main, read_sums
from dltrain.protocol.errors import BadInputError
from dltrain.protocol.rank_messages import EXIT_BAD_INPUT, EXIT_NOT_FETCHED, EXIT_OK, EXIT_STOPPED
from support.servers.files import FileServer, serving

CHUNK = 2**16
DATA = np.random.Generator(np.random.Philox(7)).bytes(9 * CHUNK + 4321)
SUM = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(remote_sources, "CHUNK_NBYTES", CHUNK)
    monkeypatch.setattr(download, "WAITS_S", (0.0,) * 4)
    with serving() as found:
        found.files["/data/train.npz"] = DATA
        yield found


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "dataset" / "train.npz"


def run(server: FileServer, target: Path, *more: str, name: str = "train.npz") -> int:
    return main([f"{server.uri}/data/{name}", "--to", str(target), *more])


def suffixes_of_notes(target: Path) -> set[str]:
    return {path.suffix for path in (target.parent / ".dljob").iterdir()}


@pytest.mark.parametrize("more", [(), ("--sha256", SUM)], ids=["unchecked", "checked"])
def test_file_is_fetched_in_chunks(
    server: FileServer, target: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...]
) -> None:
    assert run(server, target, *more) == EXIT_OK
    assert target.read_bytes() == DATA
    assert sorted(server.gets) == [("/data/train.npz", begin) for begin in range(0, len(DATA), CHUNK)]
    assert suffixes_of_notes(target) == {".json", ""}, "only a note and the lock remain"
    assert f"sha256 {SUM}, {'as expected' if more else 'not verified'}" in capsys.readouterr().out


@pytest.mark.parametrize("cuts", [1, 9])
def test_dropped_connections_only_repeat_chunks_in_transfer(server: FileServer, target: Path, cuts: int) -> None:
    server.cuts = cuts
    assert run(server, target, "--sha256", SUM) == EXIT_OK
    assert target.read_bytes() == DATA
    assert server.cuts == 0
    assert server.sent_nbytes <= len(DATA) + cuts * remote_sources.STREAMS * CHUNK


def test_file_is_fetched_although_every_long_transfer_is_dropped(server: FileServer, target: Path) -> None:
    server.longest_nbytes = CHUNK // 5
    assert run(server, target, "--sha256", SUM) == EXIT_OK
    assert target.read_bytes() == DATA


def test_stopped_download_is_resumed(server: FileServer, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first of two processes is stopped in the middle, as when an init container is restarted."""
    server.files["/data/train.npz"] = big = DATA * 40  # many chunks of the default size
    server.gate = threading.Event()
    command = [sys.executable, "-m", "dltrain.data.fetch", f"{server.uri}/data/train.npz", "--to", str(target)]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 120
        while not any(part.stat().st_size for part in target.parent.glob(".dljob/*.part")):
            assert time.monotonic() < deadline and first.poll() is None
            time.sleep(0.01)
        first.send_signal(signal.SIGTERM)
        assert first.wait(120) == EXIT_STOPPED
    finally:
        first.kill()
        first.communicate()
    assert not target.exists()
    server.gate.set()
    before = len(server.gets)
    assert run(server, target) == EXIT_OK
    assert target.read_bytes() == big
    assert "resuming at" in capsys.readouterr().out
    assert min(begin for _, begin in server.gets[before:]) > 0


def interrupted(target: Path) -> Path:
    """Create the files of a killed download, with four chunks of the file."""
    notes = target.parent / ".dljob"
    notes.mkdir(parents=True)
    key = hashlib.sha256(target.name.encode()).hexdigest()[:16]
    part = notes / f"{key}.part"
    part.write_bytes(DATA[: 4 * CHUNK])
    version = f'"{SUM[:8]}"'
    (notes / f"{key}.json").write_text(json.dumps({"version": version, "of_nbytes": len(DATA)}))
    return part


def test_partial_download_is_resumed(server: FileServer, target: Path) -> None:
    interrupted(target)
    assert run(server, target, "--sha256", SUM) == EXIT_OK
    assert target.read_bytes() == DATA
    assert min(begin for _, begin in server.gets) == 4 * CHUNK


def test_partial_download_of_another_version_is_discarded(server: FileServer, target: Path) -> None:
    interrupted(target)
    server.files["/data/train.npz"] = other = bytes(reversed(DATA))
    assert run(server, target) == EXIT_OK
    assert target.read_bytes() == other


def test_damaged_partial_download_is_fetched_again(server: FileServer, target: Path) -> None:
    part = interrupted(target)
    part.write_bytes(b"?" + DATA[1 : 4 * CHUNK])
    assert run(server, target, "--sha256", SUM) == EXIT_OK
    assert target.read_bytes() == DATA
    assert min(begin for _, begin in server.gets) == 0


# State of the server, more arguments, exit code, and words of the last line.
FAILURES: dict[str, tuple[dict[str, object], tuple[str, ...], int, tuple[str, ...]]] = {
    "missing": ({"files": {}}, (), EXIT_BAD_INPUT, ("spec.dataset.uri", "/data/train.npz", "404", "Correct the URI")),
    "forbidden": ({"answers": [-403]}, (), EXIT_BAD_INPUT, ("no permission", "403", "spec.dataset.secretName")),
    "no login": ({"authorization": "Bearer x"}, (), EXIT_BAD_INPUT, ("no permission", "401", "spec.dataset.secretName")),
    "bad request": ({"answers": [-400]}, (), EXIT_BAD_INPUT, ("spec.dataset.uri", "refused", "400")),
    "always busy": ({"answers": [-503]}, (), EXIT_NOT_FETCHED, ("spec.dataset.uri", "/data/train.npz", "503")),
    "wrong checksum": ({}, ("--sha256", "0" * 64), EXIT_BAD_INPUT, ("spec.dataset.sha256", SUM, "0" * 64)),
    "no room": ({}, ("--room", "100000"), EXIT_BAD_INPUT, ("spec.dataset.size", "97.7 KiB", "580.2 KiB", "Raise spec.dataset.size")),
    "no room, detected during the download": (
        {"ranges": False, "files": {"/data/train.npz": DATA}}, ("--room", "500000"), EXIT_BAD_INPUT, ("spec.dataset.size",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FAILURES)
def test_failure_is_explained_in_one_line(
    server: FileServer, target: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    state, more, code, words = FAILURES[case]
    for name, value in state.items():
        setattr(server, name, value)
    assert run(server, target, *more) == code
    last = capsys.readouterr().out.splitlines()[-1]
    assert all(word in last for word in words), last
    assert not target.exists()


def test_refused_connection_is_reported(
    target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(download, "WAITS_S", (0.0,))
    assert main(["http://127.0.0.1:1/a.npz", "--to", str(target)]) == EXIT_NOT_FETCHED
    assert "ConnectionRefusedError" in capsys.readouterr().out.splitlines()[-1]


def test_temporarily_busy_server_is_retried(server: FileServer, target: Path) -> None:
    server.answers = [503] * 6  # each attempt sends HEAD and GET
    assert run(server, target, "--sha256", SUM) == EXIT_OK


def test_server_without_ranges_is_supported(
    server: FileServer, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.ranges, server.cuts = False, 2
    assert run(server, target, "--sha256", SUM) == EXIT_OK
    assert target.read_bytes() == DATA
    assert "supports no range requests" in capsys.readouterr().out


def test_full_disk_is_reported(server: FileServer, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part = interrupted(target)
    part.unlink()
    part.symlink_to("/dev/full")
    assert run(server, target) == EXIT_NOT_FETCHED
    last = capsys.readouterr().out.splitlines()[-1]
    assert "is full: No space left on device" in last and "spec.dataset.size" in last


def test_error_reports_folder_that_cannot_be_created(
    server: FileServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert run(server, tmp_path / "file" / "train.npz") == EXIT_NOT_FETCHED
    assert "Not a directory" in capsys.readouterr().out.splitlines()[-1]


def test_replaced_copy_is_noticed_by_its_checksum(
    server: FileServer, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every job that names a cache claim can write to it: the data, its time, and the note about both."""
    assert run(server, target, "--sha256", SUM) == EXIT_OK
    before = target.stat()
    target.write_bytes(bytes(reversed(DATA)))
    os.utime(target, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert run(server, target, "--sha256", SUM) == EXIT_OK
    assert target.read_bytes() == DATA
    assert "Fetching the file again" in capsys.readouterr().out


def test_existing_file_is_not_fetched_again(server: FileServer, target: Path) -> None:
    assert run(server, target, "--sha256", SUM) == EXIT_OK
    server.gets.clear()
    server.heads = 0
    assert run(server, target, "--sha256", SUM) == EXIT_OK
    assert (server.gets, server.heads) == ([], 0)
    assert run(server, target) == EXIT_OK
    assert (server.gets, server.heads) == ([], 1), "without a checksum, one HEAD request checks for a change"
    server.files["/data/train.npz"] = DATA[1:]
    assert run(server, target) == EXIT_OK
    assert target.read_bytes() == DATA[1:]
    server.answers = [-500]
    assert run(server, target) == EXIT_OK, "if the server fails, the existing file is used"


def test_pods_with_a_shared_folder_fetch_once(server: FileServer, target: Path) -> None:
    threads = [threading.Thread(target=fetch, args=(f"{server.uri}/data/train.npz", target, SUM)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert target.read_bytes() == DATA
    assert server.sent_nbytes == len(DATA)


def test_credentials_are_not_sent_to_another_server(
    server: FileServer, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_AUTHORIZATION", "Bearer secret")
    server.authorization = "Bearer secret"
    with serving() as other:
        other.files["/elsewhere"] = DATA
        server.redirects["/data/train.npz"] = f"{other.uri}/elsewhere"
        assert run(server, target, "--sha256", SUM) == EXIT_OK
        assert server.seen_authorizations == {"Bearer secret"}
        assert other.seen_authorizations == {None}


def sums(**files: bytes) -> bytes:
    return "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in files.items()).encode()


def test_folder_is_fetched_and_checked_by_its_checksum_list(server: FileServer, tmp_path: Path) -> None:
    parts = {"a/1 of 2.bin": DATA[:CHUNK], "b.bin": DATA[CHUNK:]}
    listed = sums(**parts)
    server.files = {
        "/data/SHA256SUMS": listed,
        "/data/a/1%20of%202.bin": parts["a/1 of 2.bin"],
        "/data/b.bin": parts["b.bin"],
    }
    target = tmp_path / "SHA256SUMS"
    digest = hashlib.sha256(listed).hexdigest()
    assert run(server, target, "--sha256", digest, name="SHA256SUMS") == EXIT_OK
    assert {name: (tmp_path / name).read_bytes() for name in parts} == parts
    check(target, digest)
    (tmp_path / "b.bin").write_bytes(b"else")
    with pytest.raises(BadInputError, match=r"b\.bin"):
        check(target, digest)


@pytest.mark.parametrize(
    "line",
    ["../../etc/passwd", "/etc/passwd", "a/../../b", ".dljob/lock", "SHA256SUMS", "."],
)
def test_checksum_list_may_only_name_files_in_its_folder(tmp_path: Path, line: str) -> None:
    path = tmp_path / "SHA256SUMS"
    path.write_text(f"{SUM}  fine.bin\n{SUM}  {line}\n")
    with pytest.raises(BadInputError, match="line 2"):
        read_sums(path)


@pytest.mark.parametrize("text", ["", "no checksums\n", f"{SUM[:-1]}  a\n", "\xff"])
def test_invalid_checksum_list_is_rejected(tmp_path: Path, text: str) -> None:
    path = tmp_path / "SHA256SUMS"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(BadInputError, match="sha256sum"):
        read_sums(path)


def test_mounted_file_is_checked_in_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.npz"
    assert main([f"file://{path}", "--sha256", SUM]) == EXIT_BAD_INPUT
    assert f"found no file {path}" in capsys.readouterr().out
    path.write_bytes(DATA)
    assert main([f"file://{path}", "--sha256", SUM]) == EXIT_OK
    assert main([f"file://{path}", "--sha256", "0" * 64]) == EXIT_BAD_INPUT
