"""Tests of the agent's log: each line has the job's uid and the numbers of plan and attempt, and cannot be forged."""

import logging
import os
import re
import shutil
import signal
import sys

import pytest
from pydantic import ValidationError

from dlcontract import RunPhase
from dltrain.agent.log_lines import CONTINUED, LogLines
from dltrain.protocol.rank_messages import invalid_message, rank_message_adapter
from support.trainer.pods import JOB_UID, Job, logged_rank
from support.trainer.ranks import speaking

NO_TORCH = {"DLTRAIN_IMPORT_AHEAD": "off"}
LINE = re.compile(r"^\[agent\] [\d-]+ [\d:,]+ [A-Z]+ .* \[uid=(\w+) plan=(\d+) attempt=(\S+)\]$")


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("dltrain.agent", logging.INFO, "file", 1, "rank 0: %s", (text,), None)


def test_line_has_the_uid_and_the_numbers_of_plan_and_attempt() -> None:
    lines = LogLines()
    assert lines.format(record("ok")).endswith(" INFO rank 0: ok"), "the settings are not read yet"
    lines.uid = JOB_UID
    assert lines.format(record("ok")).endswith(" rank 0: ok [uid=5f0c9a52 plan=0 attempt=none]")
    lines.running = lambda: (3, "1.2")
    assert lines.format(record("ok")).endswith(" rank 0: ok [uid=5f0c9a52 plan=3 attempt=1.2]")


@pytest.mark.parametrize(
    ("line", "field"), [(b"{", "JSON"), (b'{"type": "hello", "rank": 0, "pid": 1, "x": 2}', "hello.x")]
)
def test_invalid_message_of_a_rank_is_described_in_one_line(line: bytes, field: str) -> None:
    with pytest.raises(ValidationError) as caught:
        rank_message_adapter.validate_json(line)
    text = invalid_message(caught.value)
    assert field in text
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize("separator", ["\n", "\r", "\r\n", "\x85", "\u2028"], ids=ascii)
def test_ranks_cannot_forge_lines(separator: str) -> None:
    forged = f"died{separator}[agent] 2026-01-01 00:00:00,000 INFO all is well"
    failed = record(forged)
    try:
        raise ValueError(forged)
    except ValueError:
        failed.exc_info = sys.exc_info()
    first, *others = LogLines().format(failed).splitlines()
    assert first.startswith("[agent] ") and others and all(line.startswith(CONTINUED) for line in others)


@pytest.mark.mpi
@pytest.mark.skipif(os.getuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2 for namespaces")
def test_agents_say_to_which_plan_and_attempt_each_line_belongs(two: Job) -> None:
    two.start(two.plan(speaking("400", "mpi=1")), **NO_TORCH)
    two.until(lambda r: r.step >= 1)
    os.kill(logged_rank(two.pods[1], 1), signal.SIGKILL)
    two.until(lambda r: r.restarts and r.phase is RunPhase.RUNNING)
    for pod in two.pods:
        found = [line for line in pod.log.read_text().splitlines() if line.startswith("[agent]")]
        fields = [LINE.match(line) for line in found]
        assert found and all(fields), found
        assert {each[1] for each in fields if each} == {JOB_UID[:8]}
        assert {each[2] for each in fields if each} >= {"1"}
    lines = two.pods[0].log.read_text()
    [killed] = re.findall(r"RankKilled: .* plan=1 attempt=(\S+)\]$", lines, re.MULTILINE)
    assert killed in ("none", "1.1") and "attempt=1.2]" in lines
