"""Fixtures of the tests of data loading."""

import pytest

from dltrain.data.feeding import forking
from support.trainer.ranks import zygote


@pytest.fixture
def one_zygote(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork all workers from one zygote, as in a pod. ``test_worker_processes`` has ranks with zygotes of their own."""
    monkeypatch.setattr(forking, "_agents_zygote", lambda count: forking._connected(zygote(), count))
