"""Laws of the queue's order."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from dljob.scheduling import NOTHING, QueuedJob, QueuePolicy, Requests, dominant_share, latest_start

START = datetime(2026, 1, 1, tzinfo=UTC)
JOBS = st.builds(
    QueuedJob,
    key=st.just(("team", "job")),
    uid=st.uuids().map(str),
    priority=st.integers(-(2**31), 10**9),
    share=st.floats(0, 1),
    created=st.integers(0, 5).map(lambda s: START + timedelta(seconds=s)),
    latest_start=st.none() | st.integers(0, 5).map(lambda s: START + timedelta(hours=s)),
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


def test_deadline_is_after_priority_and_before_share() -> None:
    soon, later = START + timedelta(hours=1), START + timedelta(hours=2)
    line = [
        replace(JOB, uid="z", priority=1, share=1.0),
        replace(JOB, uid="y", share=1.0, latest_start=soon),
        replace(JOB, uid="x", share=0.9, latest_start=later),
        replace(JOB, share=0.1),
    ]
    places = [job.place for job in line]
    assert places == sorted(places)


def test_latest_start_is_the_deadline_less_the_run_time() -> None:
    end = START + timedelta(hours=3)
    assert latest_start(None, 60.0, START) is None
    assert latest_start(end, 3600.0, START) == START + timedelta(hours=2)
    assert latest_start(end, None, START) == end, "an unknown run time counts as 0"
    assert latest_start(end, 3 * 3600.0, START) == START
    assert latest_start(end, 3 * 3600.0 + 1, START) is None, "the deadline can no longer be met"
    assert latest_start(end, 1e300, START) is None


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6))
def test_order_by_latest_start_is_that_by_slack(end_s: int, run_s: int, now_s: int) -> None:
    """While both deadlines can be met, the order does not change as time passes."""
    now, other = START + timedelta(seconds=now_s), START + timedelta(seconds=500_000)
    mine, others = (latest_start(START + timedelta(seconds=end_s), run_s, now), latest_start(other, 1000.0, now))
    if mine is not None and others is not None:
        slack = end_s - now_s - run_s, 500_000 - now_s - 1000
        assert (mine < others) == (slack[0] < slack[1])


def test_weight_divides_the_share() -> None:
    policy = QueuePolicy(weights={"team-a": 2.0})
    assert (policy.weighted("team-a", 0.5), policy.weighted("team-b", 0.5)) == (0.25, 0.5)


def test_dominant_share_is_that_of_the_scarcest_resource() -> None:
    total = Requests(cpu_m=64_000, memory_nbytes=2**40, devices=8)
    assert dominant_share(Requests(cpu_m=32_000, devices=2), total) == 0.5
    assert dominant_share(Requests(devices=6, cpu_m=1000), total) == 0.75
    assert dominant_share(Requests(devices=6), NOTHING) == 0.0
