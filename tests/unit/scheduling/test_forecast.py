"""Laws and examples of the forecast of the queue."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dljob.cluster import ClusterView, Node, cluster_view
from dljob.scheduling import UNKNOWN, Forecast, Holder, Interval, Reservation, Use, Waiter, forecast, interval


def gpus(count: int, free: int = 1, each: int = 1) -> ClusterView:
    """Return nodes n0, n1, … with one kind of GPU."""
    entry = {"name": "n", "count": count, "device": "T4", "gpu": True, "devices": each, "free": free, "cpu": 8}
    return cluster_view({"nodes": [entry]})


def need(nodes: int, devices: int = 1) -> tuple[Reservation, ...]:
    return (Reservation("T4", nodes, devices, 1.0, 2**20),)


def waiter(name: str, run_s: float, nodes: int, devices: int = 1, ratio: float = 1.0) -> Waiter:
    return Waiter(("team", name), interval(run_s, ratio), need(nodes, devices))


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


def test_start_has_the_interval_of_what_runs_before() -> None:
    found = forecast(gpus(1, free=0), [holder(interval(1000, 2.0), "n-0")], [waiter("next", 100, 1, ratio=1.5)])
    [only] = found.values()
    assert only.start == Interval(500, 1000, 2000)
    assert only.end.p90 == 2000 + 150


def test_unknown_end_gives_an_unknown_start() -> None:
    found = forecast(gpus(2, free=0), [holder(UNKNOWN, "n-0"), holder(interval(60, 1.0), "n-1")], [
        waiter("big", 10, 2), waiter("small", 10, 1),
    ])  # fmt: skip
    assert starts(found) == {"big": inf, "small": 60}, "a job that ends before the first in line starts may overtake it"


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


def test_reserved_pods_of_a_running_job_count() -> None:
    running = Holder(("team", "starting"), interval(500, 1.0), needs=need(1))
    assert starts(forecast(gpus(1), [running], [waiter("next", 10, 1)])) == {"next": 500}


def test_nodes_without_gpus_share_their_cpus() -> None:
    view = cluster_view({"nodes": [{"name": "a", "cpu": 4}]})
    line = [Waiter(("team", str(n)), interval(10, 1.0), (Reservation("cpu", 1, 4, 2.0, 2**20),)) for n in range(3)]
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
