"""Laws of the queue's order."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from dljob.scheduling import NOTHING, QueuedJob, Requests, dominant_share

START = datetime(2026, 1, 1, tzinfo=UTC)
JOBS = st.builds(
    QueuedJob,
    key=st.just(("team", "job")),
    uid=st.uuids().map(str),
    priority=st.integers(-(2**31), 10**9),
    share=st.floats(0, 1),
    created=st.integers(0, 5).map(lambda s: START + timedelta(seconds=s)),
)
JOB = QueuedJob(("team", "job"), "b", 0, 0.5, START)


@given(JOBS, JOBS, JOBS)
def test_order_is_total(a: QueuedJob, b: QueuedJob, c: QueuedJob) -> None:
    assert (a.place < b.place) + (b.place < a.place) + (a.uid == b.uid) == 1 or a.uid == b.uid
    assert not (a.place < b.place < c.place) or a.place < c.place


@given(st.lists(JOBS, unique_by=lambda job: job.uid), st.randoms())
def test_order_does_not_depend_on_who_asks_first(jobs: list[QueuedJob], random: object) -> None:
    shuffled = list(jobs)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert sorted(jobs, key=lambda job: job.place) == sorted(shuffled, key=lambda job: job.place)


def test_priority_then_share_then_age_then_uid() -> None:
    late = START + timedelta(days=1)
    line = [
        replace(JOB, uid="z", priority=1, share=1.0, created=late),
        replace(JOB, uid="y", share=0.4, created=late),
        replace(JOB, uid="a"),
        JOB,
        replace(JOB, uid="a", created=late),
    ]
    places = [job.place for job in line]
    assert places == sorted(places)


def test_dominant_share_is_that_of_the_scarcest_resource() -> None:
    total = Requests(cpu_m=64_000, memory_nbytes=2**40, devices=8)
    assert dominant_share(Requests(cpu_m=32_000, devices=2), total) == 0.5
    assert dominant_share(Requests(devices=6, cpu_m=1000), total) == 0.75
    assert dominant_share(Requests(devices=6), NOTHING) == 0.0
