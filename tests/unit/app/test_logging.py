"""Tests of the log formats: one line per message, whatever users write into it."""

import json
import logging

from dljob.app.logging import JsonFormatter, TextFormatter


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("dljob", logging.INFO, "file", 1, "a job says %s", (text,), None)


def test_users_cannot_forge_lines() -> None:
    forged = "ok\n2026-01-01 00:00:00 I dljob: the cluster is fine\r"
    text = TextFormatter("%(message)s").format(record(forged))
    assert text.splitlines() == ["a job says ok\\n2026-01-01 00:00:00 I dljob: the cluster is fine\\r"]
    (line,) = JsonFormatter().format(record(forged)).splitlines()
    assert json.loads(line)["message"] == f"a job says {forged}"
