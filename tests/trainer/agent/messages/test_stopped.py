"""Tests of a coordinator that stops: it stores the output of the ranks before it publishes the phase Stopped."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dlcontract import Plan, Report, RunPhase
from dltrain.agent.coordinator.coordinator import Coordinator
from dltrain.agent.coordinator.observed_job import ObservedJob
from dltrain.agent.job import exchange
from dltrain.agent.job.exchange import Files, ReportWriter
from dltrain.record.job_logs import RankOutput
from dltrain.record.run_report import files
from support.trainer.plans import make_plan

STORED = "stored"


class RecordingExchange(Files):
    """Record the phases that agents could read, and when output was stored. ``fault``: what storing does instead."""

    def __init__(self, folder: Path, fault: str) -> None:
        super().__init__(folder / "plan.json", folder / "report.json")
        self.events: list[str] = []
        self._fault = fault

    async def write_outputs(self, files: Mapping[str, bytes], attempt: str) -> None:
        match self._fault:
            case "hangs":
                await asyncio.Event().wait()
            case "refused":
                raise OSError("connection refused")
            case "unreadable":
                raise ValueError("Expecting value: line 1 column 1")
        self.events.append(STORED)


class Running:
    """A coordinator whose ranks have ended, and whose pod then receives SIGTERM."""

    def __init__(self, folder: Path, fault: str, monkeypatch: pytest.MonkeyPatch, plan: Plan) -> None:
        monkeypatch.setattr(exchange, "OUTPUTS_S", 0.01)
        settings: Any = SimpleNamespace(
            pod="digits-cpu-0", pod_ip="127.0.0.1", agent_port=1, hang_min_s=5.0, run_dir=folder
        )
        identity: Any = SimpleNamespace(client=None, tunnel=None)
        reaper: Any = None
        self.exchange = RecordingExchange(folder, fault)
        reporter = ReportWriter(self.exchange)
        self.job = ObservedJob(settings, identity, reaper, {}, reporter, plan, None)
        monkeypatch.setattr(self.job.membership, "call", lambda plan: None)
        monkeypatch.setattr(self.job.membership, "publish", lambda phase: self.exchange.events.append(phase))
        self.job.attempts, self.job.ended_attempt = 1, "1.1"
        self.job.outputs = {0: RankOutput("the last line", failed=False)}
        self.coordinator = Coordinator(self.job, None)

    def stop(self) -> list[str]:
        """Return the phases that were published to members, and ``STORED``, in order."""
        self.coordinator.leave()
        asyncio.run(self.coordinator.run())
        return self.exchange.events


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("", [RunPhase.WAITING, STORED, RunPhase.STOPPED]),
        ("hangs", [RunPhase.WAITING, RunPhase.STOPPED]),
        ("refused", [RunPhase.WAITING, RunPhase.STOPPED]),
        ("unreadable", [RunPhase.WAITING, RunPhase.STOPPED]),
    ],
    ids=["stored", "hangs", "refused", "unreadable"],
)
def test_output_is_stored_before_the_phase_says_stopped(
    fault: str, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that acts on Stopped may delete the pods, and members no longer store their output themselves."""
    running = Running(tmp_path, fault, monkeypatch, make_plan(3))
    assert running.stop() == expected
    assert running.job.ledger.phase is RunPhase.STOPPED


def test_output_is_stored_if_the_run_report_takes_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed bug: nothing limited the time to render and pack the report, so that the pod could be killed before."""

    async def hangs(*_: Any) -> dict[str, bytes]:
        await asyncio.Event().wait()
        return {}

    monkeypatch.setattr(files, "LIMIT_S", 0.01)
    running = Running(tmp_path, "", monkeypatch, make_plan(3))
    monkeypatch.setattr(running.job.account, "packed", hangs)
    assert running.stop() == [RunPhase.WAITING, STORED, RunPhase.STOPPED]


@pytest.mark.parametrize("phase", [RunPhase.SUCCEEDED, RunPhase.FAILED])
def test_job_that_is_over_keeps_its_phase(phase: RunPhase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(3)
    running = Running(tmp_path, "", monkeypatch, plan)
    over = Report(
        job=plan.job, uid=plan.uid, plan_number=1, plan_digest=plan.digest(), term=1, phase=phase, unix_s=1.0, steps=9
    )
    running.coordinator = Coordinator(running.job, over)
    assert running.stop() == [phase, phase]
