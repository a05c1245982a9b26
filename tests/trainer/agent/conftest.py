"""Fixtures of the tests of agents: jobs whose pods are namespaces of this machine."""

from collections.abc import Iterator

import pytest

from support.trainer.pods import Job, job


@pytest.fixture
def two() -> Iterator[Job]:
    with job(2) as made:
        yield made


@pytest.fixture
def three() -> Iterator[Job]:
    with job(3) as made:
        yield made
