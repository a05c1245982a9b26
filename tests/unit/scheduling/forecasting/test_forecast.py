"""Laws and examples of the forecast of the queue."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from math import inf

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dljob.cluster import ClusterView, Node, cluster_view
from dljob.cluster.domains import Domain, Requirement
from dljob.scheduling import (
    UNKNOWN,
    Forecast,
    Holder,
    Interval,
    PossiblePlan,
    QueuedJob,
    QueuePolicy,
    Recent,
    Requests,
    Reservation,
    Shares,
    Use,
    Waiter,
    forecast,
    interval,
    start_up,
)
from dljob.scheduling.forecasting.forecast import MAX_ARRIVALS, WINDOW_S, WINDOWS, expected_arrivals
from dljob.scheduling.forecasting.times import MIN_STARTS, START_UP


def gpus(count: int, free: int = 1, each: int = 1) -> ClusterView:
    """Return nodes n0, n1, … with one kind of GPU."""
    entry = {"name": "n", "count": count, "device": "T4", "gpu": True, "devices": each, "free": free, "cpu": 8}
    return cluster_view({"nodes": [entry]})


def need(nodes: int, devices: int = 1) -> tuple[Reservation, ...]:
    return (Reservation("T4", nodes, devices, 1.0, 2**20),)


def waiter(name: str, run_s: float, nodes: int, devices: int = 1, ratio: float = 1.0) -> Waiter:
    return Waiter(("team", name), (PossiblePlan(interval(run_s, ratio), need(nodes, devices)),))


def holder(left: Interval, *nodes: str) -> Holder:
    return Holder(("team", f"on-{nodes[0]}"), left, tuple(Use(node, 1, 1.0, 2**20) for node in nodes))


def starts(found: dict[tuple[str, str], Forecast]) -> dict[str, float]:
    return {name: each.start.p50 for (_, name), each in found.items()}


def test_example_of_the_documentation() -> None:
    """``big`` waits for both nodes, ``long`` waits behind it, and ``short`` ends before it starts."""
    view = cluster_view(
        {
            "nodes": [
                {"name": "used", "device": "T4", "gpu": True, "free": 0},
                {"name": "free", "device": "T4", "gpu": True, "cpu": 8},
            ]
        }
    )
    running = holder(interval(7200, 1.0), "used")
    line = [waiter("big", 3600, 2), waiter("long", 18000, 1), waiter("short", 1800, 1)]
    assert starts(forecast(view, [running], line)) == {"big": 7200, "long": 10800, "short": 0}


def test_jobs_hold_their_devices_while_their_pods_start() -> None:
    """Fixed bug: short jobs that run one after another were predicted to start much too early."""
    running = [holder(interval(100, 1.0), "n-0")]
    line = [waiter(str(n), 60, 1) for n in range(3)]
    found = forecast(gpus(1, free=0), running, line, start_up=Interval(10, 20, 60))
    assert starts(found) == {"0": 100, "1": 180, "2": 260}
    last = found["team", "2"]
    assert last.start == Interval(240, 260, 340) and last.end == Interval(310, 340, 460)


def test_job_whose_pods_start_too_late_does_not_overtake() -> None:
    """Fixed bug: a job was predicted to overtake the first in line, but the operator counts the start of its pods."""
    view = ClusterView((*gpus(1, free=0).nodes, replace(gpus(1).nodes[0], name="free")))
    running, line = [holder(interval(7200, 1.0), "n-0")], [waiter("big", 3600, 2), waiter("short", 7190, 1)]
    assert starts(forecast(view, running, line)) == {"big": 7200, "short": 0}
    found = forecast(view, running, line, start_up=Interval(10, 20, 60))
    assert starts(found) == {"big": 7200, "short": 7200 + 20 + 3600}


def test_time_of_a_start_follows_from_measured_starts() -> None:
    assert start_up([]) == start_up([5.0] * (MIN_STARTS - 1)) == START_UP
    assert start_up([5.0] * MIN_STARTS) == Interval(5, 5, 5)
    assert start_up(range(0, 101, 10)) == Interval(10, 50, 90)


def test_start_has_the_interval_of_what_runs_before() -> None:
    found = forecast(gpus(1, free=0), [holder(interval(1000, 2.0), "n-0")], [waiter("next", 100, 1, ratio=1.5)])
    [only] = found.values()
    assert only.start == Interval(500, 1000, 2000)
    assert only.end.p90 == 2000 + 150


def test_unknown_end_gives_an_unknown_start() -> None:
    """Fixed bug: ``small`` was predicted to start at once, but the operator lets it wait behind ``big``."""
    running, line = [holder(UNKNOWN, "n-0"), holder(interval(60, 1.0), "n-1")], [waiter("small", 10, 1)]
    assert starts(forecast(gpus(2, free=0), running, line)) == {"small": 60}
    line = [waiter("big", 10, 2), *line]
    assert starts(forecast(gpus(2, free=0), running, line)) == {"big": inf, "small": inf}
    beside = ClusterView((*gpus(2, free=0).nodes, replace(gpus(1).nodes[0], name="other")))
    unknown = [holder(UNKNOWN, "n-0"), holder(UNKNOWN, "n-1")]
    assert starts(forecast(beside, unknown, line)) == {"big": inf, "small": 0}, "it leaves what big needs"


def test_job_that_can_never_start_blocks_nobody() -> None:
    found = forecast(gpus(2), [], [waiter("huge", 10, 3), waiter("small", 1e9, 1)])
    assert starts(found) == {"huge": inf, "small": 0}


def test_job_beside_the_first_in_line_starts() -> None:
    free = tuple(replace(node, name=f"free-{node.name}") for node in gpus(3).nodes)
    view = ClusterView(gpus(2, free=0).nodes + free)
    line = [waiter("big", 10, 4), waiter("long", 1e6, 1)]
    one, two = holder(interval(60, 1.0), "n-0"), holder(interval(60, 1.0), "n-1")
    assert starts(forecast(view, [one], line)) == {"big": 60, "long": 70}
    assert starts(forecast(view, [one, two], line)) == {"big": 60, "long": 0}


def test_job_that_waits_for_other_devices_does_not_hide_the_first_one_for_these() -> None:
    """Fixed bug: only the first of all jobs was not overtaken, so that ``large`` started after ``small``."""
    nodes = [("n0", "T4", 0), ("n1", "T4", 1), ("a", "A100", 0)]
    view = cluster_view(
        {
            "nodes": [
                {"name": name, "device": device, "gpu": True, "free": free, "cpu": 8} for name, device, free in nodes
            ]
        }
    )
    other = Waiter(("team", "first"), (PossiblePlan(interval(100.0, 1.0), (Reservation("A100", 1, 1, 1.0, 2**20),)),))
    line = [other, waiter("large", 500.0, 2), waiter("small", 5000.0, 1)]
    found = forecast(view, [holder(interval(1000.0, 1.0), "a"), holder(interval(100.0, 1.0), "n0")], line)
    assert starts(found) == pytest.approx({"first": 1000.0, "large": 100.0, "small": 600.0})


def test_reserved_pods_of_a_running_job_count() -> None:
    running = Holder(("team", "starting"), interval(500, 1.0), needs=need(1))
    assert starts(forecast(gpus(1), [running], [waiter("next", 10, 1)])) == {"next": 500}


def test_nodes_without_gpus_share_their_cpus() -> None:
    view = cluster_view({"nodes": [{"name": "a", "cpu": 4}]})
    plan = PossiblePlan(interval(10, 1.0), (Reservation("cpu", 1, 4, 2.0, 2**20),))
    line = [Waiter(("team", str(n)), (plan,)) for n in range(3)]
    assert starts(forecast(view, [], line)) == {"0": 0, "1": 0, "2": 10}


def test_interval_is_ordered() -> None:
    assert interval(10, 0.5) == Interval(10, 10, 10)
    with pytest.raises(ValueError, match="expected p10 <= p50 <= p90"):
        Interval(2, 1, 3)


JOBS = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 1000)), max_size=8)


@settings(max_examples=150)
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=4), JOBS, st.floats(1.0, 3.0))
def test_laws(running: list[int], jobs: list[tuple[int, int, int]], ratio: float) -> None:
    """Every job that the cluster can run starts; intervals are ordered; with one node each, jobs keep their order."""
    view = gpus(len(running), free=0, each=2)
    holders = [
        Holder(("team", f"on-{n}"), interval(s, ratio), (Use(f"n-{n}", 2, 1.0, 2**20),)) for n, s in enumerate(running)
    ]
    line = [waiter(str(n), run_s, nodes, devices, ratio) for n, (nodes, devices, run_s) in enumerate(jobs)]
    found = forecast(view, holders, line)
    assert list(found) == [job.key for job in line]
    for job, (nodes, devices, _) in zip(line, jobs, strict=True):
        each = found[job.key]
        assert each.start.p10 <= each.start.p50 <= each.start.p90
        assert (each.start.p90 < inf) == (nodes <= len(running) and devices <= 2)
        assert each.start.p10 >= min(h.left.p10 for h in holders)


@settings(max_examples=100)
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=3), JOBS.filter(bool))
@example([1, 2], [(2, 1, 1), (1, 1, 2), (1, 2, 2)])
def test_first_in_line_is_not_delayed_by_the_others(running: list[int], jobs: list[tuple[int, int, int]]) -> None:
    view = gpus(len(running), free=0, each=3)
    holders = [
        Holder(("team", f"on-{n}"), interval(s, 1.0), (Use(f"n-{n}", 3, 1.0, 2**20),)) for n, s in enumerate(running)
    ]
    line = [waiter(str(n), run_s, nodes, devices) for n, (nodes, devices, run_s) in enumerate(jobs)]
    assert forecast(view, holders, line)[line[0].key] == forecast(view, holders, line[:1])[line[0].key]


def test_view_of_a_node_that_is_gone_is_ignored() -> None:
    assert isinstance(gpus(1).nodes[0], Node)
    gone = holder(interval(10, 1.0), "gone")
    assert starts(forecast(gpus(1), [gone], [waiter("next", 10, 1)])) == {"next": 0}


def elastic(name: str, *sizes: tuple[int, float]) -> Waiter:
    """Return a job with plans of these numbers of nodes and run times in seconds, the best at first."""
    return Waiter(("team", name), tuple(PossiblePlan(interval(run_s, 1.0), need(nodes)) for nodes, run_s in sizes))


def test_job_starts_with_the_best_plan_for_which_there_is_room() -> None:
    running = [holder(interval(100, 1.0), "n-0"), holder(interval(1e6, 1.0), "n-1")]
    [found] = forecast(gpus(2, free=0), running, [elastic("next", (2, 50), (1, 80))]).values()
    assert (found.start.p50, found.end.p50) == (100, 180)


def queued(namespace: str, name: str, created_s: float, priority: int = 0) -> Waiter:
    created = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=created_s)
    place = QueuedJob((namespace, name), name, priority, 0.0, created)
    return Waiter(place.key, (PossiblePlan(interval(100, 1.0), need(1)),), place)


SHARES = Shares(Requests(8000, 2**30, 2), QueuePolicy())


def test_order_follows_the_shares_at_each_start() -> None:
    """Team a gets the first node. From then on, team b holds less, so that its job comes before the second of team a."""
    running = [holder(interval(10, 1.0), "n-0"), holder(interval(20, 1.0), "n-1")]
    line = [queued("a", "a1", 1), queued("a", "a2", 2), queued("b", "b1", 3)]
    found = forecast(gpus(2, free=0), running, line, SHARES)
    assert starts(found) == {"a1": 10, "b1": 20, "a2": 110}
    assert starts(forecast(gpus(2, free=0), running, line)) == {"a1": 10, "a2": 20, "b1": 110}


def test_jobs_that_come_again_delay_others() -> None:
    running = [Holder(("a", "a0"), interval(5000, 1.0), (Use("n-0", 1, 1.0, 2**20),))]
    running.append(Holder(("a", "long"), interval(1e6, 1.0), (Use("n-1", 1, 1.0, 2**20),)))
    last = queued("a", "a1", 0)
    recent = [Recent(60 * n, queued("b", f"b{n}", -60 * n)) for n in range(1, 20)]
    [alone] = forecast(gpus(2, free=0), running, [last], SHARES).values()
    [found] = forecast(gpus(2, free=0), running, [last], SHARES, recent).values()
    assert alone.start == Interval(5000, 5000, 5000)
    assert found.start.p10 == 5000 and found.start.p50 > 5000, "team b holds less, and its new jobs pass"


@given(st.lists(st.floats(0, 3599), max_size=80), st.floats(0, 0.99))
def test_expected_arrivals_repeat_the_last_window(ages: list[float], shift: float) -> None:
    recent = [Recent(age, queued("a", f"a{n}", -age)) for n, age in enumerate(ages)]
    found = expected_arrivals(recent, shift)
    assert len(found) == WINDOWS * min(len(ages), MAX_ARRIVALS // WINDOWS)
    assert [each.in_s for each in found] == sorted(each.in_s for each in found)
    assert all(0 <= each.in_s <= WINDOWS * WINDOW_S for each in found)
    assert len({each.job.key for each in found}) == len(found)
    for each in found:
        assert each.job.queued is not None and each.job.queued.created.timestamp() == pytest.approx(
            datetime(2026, 1, 1, tzinfo=UTC).timestamp() + each.in_s, abs=1
        )


def test_pods_start_only_where_they_may_run() -> None:
    nodes = tuple(replace(node, labels={"zone": zone}) for node, zone in zip(gpus(2).nodes, "ab", strict=True))
    zone = Domain(terms=((Requirement("zone", "In", ("c",)),),))
    here = Waiter(("team", "here"), (PossiblePlan(interval(10, 1.0), need(1)),))
    there = Waiter(("team", "there"), (PossiblePlan(interval(10, 1.0), (replace(need(1)[0], domain=zone),)),))
    assert starts(forecast(ClusterView(nodes), [], [there, here])) == {"there": inf, "here": 0}
