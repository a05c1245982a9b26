"""For all trainer tests: ranks that run in this process leave it as it was."""

import signal
from collections.abc import Iterator

import pytest

from support.trainer.ranks import zygote


def pytest_collection_finish(session: pytest.Session) -> None:
    """Where there will be ranks, what they are forked from imports torch during the tests before."""
    if any(item.get_closest_marker("mpi") for item in session.items) and not session.config.option.collectonly:
        zygote()


@pytest.fixture(autouse=True)
def undisturbed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No MPI around, and this process's signal handler and threads as they were."""
    import torch  # not above: the process that only hands tests to others needs none

    monkeypatch.delenv("OMPI_COMM_WORLD_SIZE", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # hack/test's, for this process; ranks choose as in a pod
    handler, threads = signal.getsignal(signal.SIGTERM), torch.get_num_threads()
    yield
    signal.signal(signal.SIGTERM, handler)
    torch.set_num_threads(threads)
