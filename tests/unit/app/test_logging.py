"""Tests of the log formats: one line per message, whatever users write into it."""

import json
import logging
import sys

import pytest

from dljob.app.logging import JsonFormatter, TextFormatter


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("dljob", logging.INFO, "file", 1, "a job says %s", (text,), None)


def test_users_cannot_forge_lines() -> None:
    forged = "ok\n2026-01-01 00:00:00 I dljob: the cluster is fine\r"
    text = TextFormatter("%(message)s").format(record(forged))
    assert text.splitlines() == ["a job says ok\\n2026-01-01 00:00:00 I dljob: the cluster is fine\\r"]
    (line,) = JsonFormatter().format(record(forged)).splitlines()
    assert json.loads(line)["message"] == f"a job says {forged}"


FORGED = "2026-01-01 00:00:00 I dljob: the cluster is fine"
SEPARATORS = ["\n", "\r\n", "\r", "\v", "\f", "\x1c", "\x85", "\u2028", "\u2029"]
"""What ``str.splitlines`` takes for the end of a line. Terminals and collectors of logs know some of them."""


@pytest.mark.parametrize("separator", SEPARATORS, ids=ascii)
def test_users_cannot_forge_lines_through_exceptions(separator: str) -> None:
    """Fixed bug: the message was escaped, but the text of the exception after it was not."""

    def failing() -> None:
        raise ValueError(f"spec: found {separator}{FORGED}{separator}\x1b[2K")

    failed = record("ok")
    try:
        failing()
    except ValueError:
        failed.exc_info = sys.exc_info()
    failed.stack_info = f"Stack:{separator}{FORGED}"
    text = TextFormatter("%(asctime)s I dljob: %(message)s").format(failed)
    first, *others = text.splitlines()
    assert first.endswith("I dljob: a job says ok") and len(others) > 5
    assert all(line.startswith(TextFormatter.CONTINUED) for line in others) and "\x1b" not in text
    assert any("ValueError: spec: found" in line for line in others)
    (line,) = JsonFormatter().format(failed).splitlines()
    assert FORGED in json.loads(line)["exception"]


@pytest.mark.parametrize("separator", SEPARATORS, ids=ascii)
def test_no_separator_in_a_message_ends_the_line(separator: str) -> None:
    assert len(TextFormatter("%(message)s").format(record(f"ok{separator}{FORGED}")).splitlines()) == 1


def test_lines_about_a_job_have_its_uid_plan_and_attempt() -> None:
    about = {"job": "team-a/digits", "uid": "6f1c", "plan": 2, "attempt": 3}
    line = record("ok")
    line.__dict__ |= about
    text = TextFormatter("%(message)s").format(line)
    assert text == "a job says ok [job=team-a/digits uid=6f1c plan=2 attempt=3]"
    assert json.loads(JsonFormatter().format(line)).items() >= about.items()
