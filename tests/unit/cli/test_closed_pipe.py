"""Tests of commands whose reader closes the pipe, such as ``dljob plan job.yaml | head -1``."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from support.specs.small_specs import JOB


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "job.yaml", "--cluster", "cluster.yaml"]])
def test_pipe_that_is_closed_early_is_no_error(arguments: list[str], tmp_path: Path) -> None:
    """Fixed bug: Python found the closed pipe on exit, printed ``BrokenPipeError`` and ended with exit code 120."""
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump({"nodes": [{"count": 3, "cpu": 4}]}))
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run(
        [sys.executable, "-m", "dljob.cli", *arguments], cwd=tmp_path, stdout=writing, stderr=subprocess.PIPE, text=True
    )
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_full_disk_is_one_line_and_not_the_exit_code_of_an_impossible_plan(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump({"nodes": [{"count": 3, "cpu": 4}]}))
    with Path("/dev/full").open("wb") as full:
        arguments = ["plan", "job.yaml", "--cluster", "cluster.yaml"]
        ended = subprocess.run(
            [sys.executable, "-m", "dljob.cli", *arguments],
            cwd=tmp_path,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert ended.returncode == 2
    assert ended.stderr == "dljob: the output was not written: No space left on device. Write it elsewhere\n"


def test_terminal_without_utf_8_shows_help(tmp_path: Path) -> None:
    """Fixed bug: an ellipsis in the help was a traceback."""
    ended = subprocess.run(
        [sys.executable, "-m", "dljob.cli", "plan", "--help"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, cwd=tmp_path,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, b"") and b"cluster.yaml" in ended.stdout
