"""Tests of the files with the output of ranks."""

import asyncio
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dltrain.host import log_files
from dltrain.host.log_files import LogFiles, append

FLUSH_S = 30.0


@pytest.fixture(autouse=True)
def room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write files however full the disk of this machine is."""
    monkeypatch.setattr(log_files, "LEAST_FREE", 0.0)


def written(files: LogFiles) -> None:
    asyncio.run(files.flush(FLUSH_S))


def test_each_rank_has_its_own_file_which_later_attempts_continue(tmp_path: Path) -> None:
    files = LogFiles()
    for attempt in (1, 2):
        files.begin(tmp_path / "job" / "logs", 2)
        for rank in (0, 1):
            files.write(rank, f"attempt {attempt} of rank {rank}\n".encode())
    written(files)
    for rank in (0, 1):
        text = (tmp_path / "job" / "logs" / f"rank-{rank}.log").read_text()
        assert text == f"attempt 1 of rank {rank}\nattempt 2 of rank {rank}\n"


def test_job_without_a_volume_has_no_files(tmp_path: Path) -> None:
    files = LogFiles()
    files.write(0, b"before the first attempt")
    files.begin(None, 1)
    files.write(0, b"lost")
    written(files)
    assert list(tmp_path.iterdir()) == []


@given(parts=st.lists(st.binary(max_size=300), max_size=30), limit=st.integers(2, 400))
@pytest.mark.hypothesis
def test_files_hold_the_end_of_the_output_within_the_limit(
    parts: list[bytes], limit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("logs") / "rank-0.log"
    for part in parts:
        append(path, part, limit)
    older = path.with_suffix(".1.log")
    found = b"".join(file.read_bytes() for file in (older, path) if file.exists())
    whole = b"".join(parts)
    assert len(found) <= limit
    assert whole.endswith(found)
    assert len(found) >= min(len(whole), limit // 2 - 300) and (found or not whole)


def test_slow_volume_delays_nothing_and_the_file_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, began = threading.Event(), threading.Event()

    def slow(path: Path, data: bytes, limit_nbytes: int) -> None:
        began.set()
        assert answers.wait(FLUSH_S)
        append(path, data, limit_nbytes)

    monkeypatch.setattr(log_files, "append", slow)
    files = LogFiles()
    files.begin(tmp_path, 1)
    files.write(0, b"first\n")
    assert began.wait(FLUSH_S)
    lost = b"x" * (log_files.WAITING_NBYTES + 1)
    files.write(0, lost)
    answers.set()
    written(files)
    files.write(0, b"last\n")
    written(files)
    text = (tmp_path / "rank-0.log").read_text()
    assert text == f"first\n\n... {len(lost)} bytes left out, because the volume was slow ...\nlast\n"


def test_volume_that_cannot_be_written_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    files = LogFiles()
    files.begin(tmp_path / "file" / "logs", 1)
    for _ in range(3):
        files.write(0, b"line\n")
        written(files)
    assert len([r for r in caplog.records if "cannot write the output of rank 0" in r.message]) == 1


def test_nearly_full_volume_is_left_to_the_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(log_files, "LEAST_FREE", 1.1)
    files = LogFiles()
    files.begin(tmp_path, 1)
    files.write(0, b"line\n")
    written(files)
    assert not list(tmp_path.iterdir()) and "checkpoints need this space" in caplog.text
