"""Laws of lines: they have the order that sorting all jobs again would give."""

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from dljob.scheduling import QueuedJob, latest_start
from dljob.scheduling.line import Line

START = datetime(2026, 1, 1, tzinfo=UTC)
NAMESPACES = "abcd"


@dataclass(frozen=True)
class Job:
    namespace: str
    number: int
    priority: int
    created: int
    due_s: int | None


@dataclass
class Pool:
    """What places depend on."""

    now: datetime = START
    shares: dict[str, float] = field(default_factory=dict)
    run_s: dict[str, float] = field(default_factory=dict)
    raised: int = 0
    """Added to the priority of odd jobs, as by a changed PriorityClass."""

    def look(self, job: Job) -> QueuedJob:
        name = f"{job.number}"
        due = None if job.due_s is None else START + timedelta(seconds=job.due_s)
        return QueuedJob(
            (job.namespace, name),
            name,
            job.priority + self.raised * (job.number % 2),
            self.share(job.namespace),
            START + timedelta(seconds=job.created),
            latest_start(due, self.run_s.get(name), self.now),
        )

    def share(self, namespace: str) -> float:
        return self.shares.get(namespace, 0.0)


JOBS = st.builds(
    Job,
    st.sampled_from(NAMESPACES),
    st.integers(0, 9),
    st.integers(0, 1),
    st.integers(0, 3),
    st.none() | st.integers(0, 100),
)
CHANGES = st.one_of(
    st.tuples(st.just("put"), JOBS),
    st.tuples(st.just("remove"), st.integers(0, 9)),
    st.tuples(st.just("share"), st.sampled_from(NAMESPACES), st.floats(0.0, 1.0)),
    st.tuples(st.just("run"), st.integers(0, 9), st.none() | st.floats(0.0, 100.0)),
    st.tuples(st.just("wait"), st.integers(-5, 40)),
    st.tuples(st.just("raise"), st.integers(0, 2)),
    st.tuples(st.just("clear")),
)


@given(st.lists(CHANGES, max_size=30))
def test_order_is_that_of_sorting_all_jobs_again(changes: list[tuple]) -> None:  # type: ignore[type-arg]
    pool = Pool()
    line = Line[Job](pool.look, pool.share, lambda: pool.now, lambda: pool.raised)
    jobs: dict[tuple[str, str], Job] = {}
    for what, *values in changes:
        match what:
            case "put":
                [job] = values
                key = pool.look(job).key
                jobs.pop(key, None)
                jobs[key] = job
                line.put(key, job)
            case "remove":
                for namespace in NAMESPACES:
                    jobs.pop((namespace, f"{values[0]}"), None)
                    line.remove((namespace, f"{values[0]}"))
            case "share":
                pool.shares[values[0]] = values[1]
            case "run":
                name, run_s = f"{values[0]}", values[1]
                pool.run_s |= {name: run_s} if run_s is not None else {}
                if run_s is None:
                    pool.run_s.pop(name, None)
                for namespace in NAMESPACES:
                    line.look_again((namespace, name))
            case "wait":
                pool.now += timedelta(seconds=values[0])
            case "raise":
                [pool.raised] = values
            case "clear":
                jobs.clear()
                line.clear()
        expected = sorted(
            ((pool.look(job), job) for job in jobs.values()), key=lambda each: (each[0].place, each[0].key)
        )
        assert list(line.in_order()) == expected
        for namespace in NAMESPACES:
            assert list(line.in_order(namespace)) == [each for each in expected if each[1].namespace == namespace]
        assert dict(line) == jobs and list(line) == list(jobs) and len(line) == len(jobs)
        assert [line.place_of(each.key) for each, _ in expected] == list(range(1, len(jobs) + 1))


def test_a_result_does_not_change_with_the_line() -> None:
    pool = Pool()
    line = Line[Job](pool.look, pool.share, lambda: pool.now)
    jobs = [Job("a" if i % 2 else "b", i, 0, i, None) for i in range(6)]
    for job in jobs:
        line.put(pool.look(job).key, job)
    found = line.in_order()
    first = next(found)[1]
    line.remove(("a", "1"))
    line.put(("a", "9"), Job("a", 9, 1, 0, None))
    pool.shares["a"] = 1.0
    assert [first, *(job for _, job in found)] == jobs
    assert [job.number for _, job in line.in_order()] == [9, 0, 2, 4, 3, 5]


def test_only_changed_jobs_are_looked_at_again() -> None:
    pool, looks = Pool(), list[int]()

    def look(job: Job) -> QueuedJob:
        looks.append(job.number)
        return pool.look(job)

    line = Line[Job](look, pool.share, lambda: pool.now)
    for i in range(100):
        line.put(("a", f"{i}"), Job("a", i, 0, i, 1000 + i))
        pool.shares["a"] = i / 100
        assert next(line.in_order())[1].number == 0
    assert looks == list(range(100))
