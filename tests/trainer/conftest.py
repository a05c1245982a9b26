"""Fixtures of the trainer tests, which restore the state of this process after each test."""

import signal
from collections.abc import Iterator

import pytest

from support.trainer.ranks import zygote


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the zygote early if tests need ranks, so that it imports torch while other tests run."""
    if any(item.get_closest_marker("mpi") for item in session.items) and not session.config.option.collectonly:
        zygote()


@pytest.fixture(autouse=True)
def restored_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hide MPI variables from the test, and restore the signal handler and the number of threads after it."""
    import torch  # not at module level: the controller of pytest-xdist does not need torch

    monkeypatch.delenv("OMPI_COMM_WORLD_SIZE", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # hack/test sets it for this process; ranks choose as in a pod
    handler, threads = signal.getsignal(signal.SIGTERM), torch.get_num_threads()
    yield
    signal.signal(signal.SIGTERM, handler)
    torch.set_num_threads(threads)
