"""Tests of the end of a coordinator whose pod received SIGTERM."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from dlcontract import RunPhase
from dltrain.agent.coordinator.coordinator import Coordinator


def test_stop_is_published_if_the_run_report_cannot_be_rendered() -> None:
    phases: list[RunPhase] = []

    async def store_outputs(*_: Any, **__: Any) -> None:
        raise ValueError("cannot render")

    async def stopped(_: float) -> None:
        pass

    coordinator: Any = Coordinator.__new__(Coordinator)
    coordinator._stop_attempt = stopped
    coordinator.job = SimpleNamespace(
        plan=SimpleNamespace(grace_s=5.0),
        ledger=SimpleNamespace(phase=RunPhase.RUNNING),
        outputs={0: "output"},
        store_outputs=store_outputs,
        set_phase=phases.append,
    )
    with pytest.raises(ValueError, match="cannot render"):
        asyncio.run(coordinator._stop_job())
    assert phases == [RunPhase.STOPPED]
