"""Laws of back-fill: a job that overtakes does not delay the first in line."""

from dataclasses import replace
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from dljob.cluster import ClusterView, Node
from dljob.scheduling import Reservation, RunningJob, Shadow, StartSearch, in_order_of_ends, shadow, start_in_s
from dljob.scheduling.backfill import START_UP_S

NODE = Node("n0", "gpu", 4, 4, 16.0, 16.0, 2**34, is_gpu=True)
RUNNING = st.builds(
    RunningJob,
    key=st.tuples(st.just("team"), st.text("abc", min_size=1)),
    left_s=st.none() | st.floats(-10, 1e6),
)


def free(*devices: int) -> ClusterView:
    """Return a cluster with these numbers of free devices by node."""
    return ClusterView(tuple(replace(NODE, name=f"n{i}", free_devices=each) for i, each in enumerate(devices)))


def devices_of(view: ClusterView) -> list[int]:
    return [node.free_devices for node in view.nodes]


@given(st.lists(RUNNING))
def test_start_is_later_the_more_jobs_must_end(jobs: list[RunningJob]) -> None:
    ends = in_order_of_ends(jobs)
    starts = [start_in_s(ends, needed) for needed in range(len(ends) + 1)]
    assert starts == sorted(starts) and starts[0] == 0
    assert all((start == inf) == any(job.left_s is None for job in ends[:n]) for n, start in enumerate(starts))


@given(st.integers(0, 100), st.data())
def test_search_finds_the_first_possible_start(jobs: int, data: st.DataObject) -> None:
    needed = data.draw(st.integers(0, jobs))
    search, asked = StartSearch(0, jobs), 0
    while not search.done:
        search, asked = search.after(feasible=search.probe >= needed), asked + 1
    assert search.possible == needed and asked <= jobs.bit_length()


def test_job_may_overtake_if_it_ends_before_the_shadow() -> None:
    first = Shadow(1000.0, free(4))
    assert first.after(100.0, 900.0 - START_UP_S)
    assert not first.after(100.0, 901.0 - START_UP_S)
    assert not first.after(100.0, None), "its run time is unknown"
    assert not Shadow(inf, free(4)).after(0.0, 1.0), "the start of the first is unknown, and may be soon"


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=6), st.data())
def test_what_is_taken_beside_the_shadow_leaves_the_first_its_devices(
    nodes: list[tuple[int, int]], data: st.DataObject
) -> None:
    now, released = [each[0] for each in nodes], [min(each[1], 4 - each[0]) for each in nodes]
    later = [n + r for n, r in zip(now, released, strict=True)]
    needs = Reservation("gpu", data.draw(st.integers(1, len(nodes))), data.draw(st.integers(1, 4)), 0.0, 0)
    if sum(each >= needs.devices for each in later) < needs.nodes:
        return  # The first in line cannot start then.
    beside = devices_of(shadow(10.0, free(*later), (needs,), free(*now)).beside(free(*now)))
    assert all(0 <= left <= mine for left, mine in zip(beside, now, strict=True))
    taken = [data.draw(st.integers(0, left)) for left in beside]
    assert sum(n - t >= needs.devices for n, t in zip(later, taken, strict=True)) >= needs.nodes


def test_nodes_that_are_new_since_the_forecast_are_not_used() -> None:
    assert devices_of(Shadow(0.0, free(2)).beside(free(4, 4))) == [2]


def test_first_in_line_gets_the_nodes_that_become_free_for_it() -> None:
    """What is free now stays free for jobs that start before it."""
    needs = Reservation("gpu", 2, 1, 0.0, 0)
    first = shadow(10.0, free(1, 1, 1), (needs,), now=free(1, 0, 0))
    assert devices_of(first.beside(free(1, 0, 0))) == [1, 0, 0]


def test_job_that_holds_devices_keeps_them_and_takes_no_others_from_the_first_in_line() -> None:
    """It holds two devices of n0 and one of n2. The first in line needs all that is left of n0 and n1."""
    first = Shadow(10.0, free(0, 0, 3))
    assert devices_of(first.beside(free(1, 2, 3), own=free(3, 2, 4))) == [2, 0, 4]
    assert devices_of(first.beside(free(), own=free(3))) == [3], "the only node with room for others is gone"
