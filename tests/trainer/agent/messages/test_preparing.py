"""Tests of the time between a launch and its ranks: pods prepare it, which may take long or fail."""

import asyncio
import errno
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dlcontract import Plan, reasons
from dltrain.agent.coordinator.coordinator import Coordinator
from dltrain.agent.coordinator.observed_job import ObservedJob
from dltrain.agent.coordinator.waits import LAUNCH_LIMIT_S, launch_failure
from dltrain.agent.member.member import Member
from dltrain.agent.member.staged_checkpoints import StagedCheckpoints
from dltrain.protocol import agent_messages as proto
from dltrain.protocol.rank_messages import Failed
from support.trainer.plans import make_plan

POD = "digits-cpu-0"


def test_time_in_which_pods_prepare_is_no_time_of_the_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed bug: after a copy of checkpoints that took five minutes, mpirun had no time to start its ranks."""
    settings: Any = SimpleNamespace(pod=POD, pod_ip="127.0.0.1", agent_port=1, hang_min_s=5.0, run_dir=tmp_path)
    identity: Any = SimpleNamespace(client=None, tunnel=None)
    reaper: Any = None
    reporter: Any = SimpleNamespace(compose=None, urge=lambda: None)
    plan = make_plan(3)
    job = ObservedJob(settings, identity, reaper, {}, reporter, plan, None)
    coordinator = Coordinator(job, None)
    monkeypatch.setattr(ObservedJob, "launchable", plan)
    monkeypatch.setattr(coordinator, "_start_mpirun", lambda attempt: None)

    async def prepared(*_: Any, **__: Any) -> None:
        assert job.attempt is not None
        job.attempt.started_s -= LAUNCH_LIMIT_S + 1
        job.prepared.update(plan.pods)

    monkeypatch.setattr(coordinator, "_until", prepared)

    attempt = asyncio.run(coordinator._launch())
    assert attempt.launched_s <= time.monotonic() and launch_failure(attempt, time.monotonic()) is None


class Channel:
    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, line: Any) -> None:
        self.sent.append(line)


def obey(member: Member, line: proto.Line) -> list[Any]:
    channel: Any = Channel()
    asyncio.run(member._obey(line, channel))
    sent: list[Any] = channel.sent
    return sent


def test_full_disk_is_a_failure_with_its_reason(tmp_path: Path) -> None:
    """Fixed bug: the connection ended, so that all ranks restarted without a limit because of a lost pod."""

    async def begin(attempt: str, plan: Plan) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "plan.new"))

    member = Member(POD, "uid")
    member.plan, member.term = make_plan(3), 1
    member.local = SimpleNamespace(begin=begin, run_dir=tmp_path, attempt="1.1")  # type: ignore[assignment]
    [update] = obey(member, proto.Prepare(attempt="1.1", pods=member.plan.pods, faults=0, trained_s=0.0))
    assert update.attempt == "1.1" and isinstance(update.message, Failed)
    failure = update.message.failure
    assert failure.reason == reasons.LAUNCH_FAILED and failure.counts and failure.retry and failure.host == POD
    assert f"pod {POD}: found the error [Errno 28] No space left on device" in failure.message


def test_copy_that_cannot_be_started_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed bug: nobody learned of it, and the launch waited for this pod without a limit."""
    sent: list[Any] = []

    def start(*_: Any, **__: Any) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    reaper: Any = SimpleNamespace(start=start)
    staged = StagedCheckpoints(reaper, {}, POD, tmp_path / "plan.json", sent.append)
    assert asyncio.run(staged.restore("1.1", make_plan(3))) is False
    [update] = sent
    assert update.message.failure.reason == reasons.CHECKPOINT_FAILED
    assert "Resource temporarily unavailable" in update.message.failure.message
