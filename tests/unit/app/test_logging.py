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


def test_lines_about_a_job_have_its_uid_plan_and_attempt() -> None:
    about = {"job": "team-a/digits", "uid": "6f1c", "plan": 2, "attempt": 3}
    line = record("ok")
    line.__dict__ |= about
    text = TextFormatter("%(message)s").format(line)
    assert text == "a job says ok [job=team-a/digits uid=6f1c plan=2 attempt=3]"
    assert json.loads(JsonFormatter().format(line)).items() >= about.items()
