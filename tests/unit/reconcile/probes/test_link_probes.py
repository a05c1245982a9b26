"""Decisions about measurements of links: two idle nodes of a type, a server and then a client, which end together."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dljob.calibrate.learned import Learned
from dljob.cluster import ClusterView
from dljob.cluster.hardware import KEY, Hardware
from dljob.cluster.machines import neighbours
from dljob.job.probes.links import Ends
from dljob.reconcile.probes import (
    MAX_PODS,
    MAX_STARTS,
    RETRY_S,
    UNBOUND_S,
    Action,
    Connect,
    Ending,
    ProbePod,
    Remove,
    Start,
    Starts,
    Store,
    Subject,
    decide,
)
from dljob.reconcile.probes.links import AFTER_S
from support.planner_questions import T4, view

POOL = view({"count": 2, "cpu": 4, "device": "a"}, {"count": 2, "cpu": 8, "device": "b"})
KNOWN = {(KEY, device): Learned(hardware=Hardware()) for device in ("a", "b", "c", T4)}
SERVER = ProbePod("p", "a", "n0-1", "Running", "", 5.0, link="server", client_node="n0-0", address="10.0.0.7")
CLIENT = ProbePod("p-client", "a", "n0-0", "Running", "", 2.0, link="client")


def decided(
    pods: tuple[ProbePod, ...] = (),
    unmeasured: tuple[str | Ends, ...] = ("a",),
    pool: ClusterView = POOL,
    starts: dict[Subject, Starts] | None = None,
    busy: tuple[str, ...] = (),
    waiting: bool = False,
    **options: Any,
) -> tuple[Action, ...]:
    links = {(each, each) if isinstance(each, str) else each for each in unmeasured}
    return decide(pool, KNOWN, pods, starts or {}, busy, waiting, unmeasured_links=links, **options)


def pairs(*arguments: Any, **options: Any) -> list[tuple[str, str | None]]:
    """Return the nodes of the links that ``decide`` starts to measure."""
    found = [action for action in decided(*arguments, **options) if isinstance(action, Start)]
    assert all(start.link for start in found)
    return [(start.target.node, start.target.peer) for start in found]


def test_links_of_two_types_are_measured_at_once() -> None:
    assert pairs((), ("a", "b")) == [("n0-0", "n0-1"), ("n1-0", "n1-1")]
    assert pairs((), ()) == []
    assert pairs((SERVER,), ("a", "b")) == [("n1-0", "n1-1")]
    assert MAX_PODS == 4, "the third link waits for one of the two"
    three = view(*({"count": 2, "cpu": 4, "device": device} for device in "abc"))
    assert pairs((), ("a", "b", "c"), three) == [("n0-0", "n0-1"), ("n1-0", "n1-1")]


@pytest.mark.parametrize(
    ("entries", "found"),
    [
        ([{"count": 1, "cpu": 4, "device": "a"}], []),
        ([{"count": 3, "cpu": 4, "device": "a", "bandwidth": "12.5G"}], []),
        ([{"count": 2, "cpu": 4, "device": "a", "machine": "host-1"}], [("n0-0", "n0-1")]),
        (
            [{"count": 2, "cpu": 4, "device": "a", "machine": "host-1"}, {"name": "z", "cpu": 4, "device": "a"}],
            [("n0-0", "z")],
        ),
    ],
    ids=["one node", "the administrator knows the bandwidth", "one machine", "another machine comes first"],
)
def test_which_nodes_are_measured(entries: list[dict[str, Any]], found: list[tuple[str, str]]) -> None:
    assert pairs((), ("a",), view(*entries)) == found


def test_links_between_two_types_are_measured_after_those_within_them() -> None:
    assert pairs((), (("a", "b"), "a", "b")) == [("n0-0", "n0-1"), ("n1-0", "n1-1")]
    assert pairs((), (("a", "b"), "b")) == [("n1-0", "n1-1")], "of each type, one thing is measured at a time"
    assert pairs((), (("a", "b"),)) == [("n0-0", "n1-0")]
    assert pairs((), (("a", "b"),), busy=("n1-0",)) == [("n0-0", "n1-1")]
    assert pairs((), (("a", "b"),), starts={Subject("a", link=True, other="b"): Starts(MAX_STARTS, 1e9)}) == []
    assert pairs((), (("a", "b"),), starts={Subject("b"): Starts(1, AFTER_S - 1)}) == []


@pytest.mark.parametrize(("annotated", "found"), [("ab", []), ("a", [("n0", "n1")]), ("", [("n0", "n1")])])
def test_annotations_of_both_types_tell_the_link_between_them(annotated: str, found: list[tuple[str, str]]) -> None:
    """One node of each type is enough, of which no link within the type can be measured."""
    bandwidth = {"bandwidth": "12.5G"}
    pool = view(*({"cpu": 4, "device": each} | (bandwidth if each in annotated else {}) for each in "ab"))
    assert pairs((), (("a", "b"), "a", "b"), pool) == found


def test_pods_between_two_types_belong_together() -> None:
    server = replace(SERVER, node="n1-0", client_node="n0-0", other="b")
    client = replace(CLIENT, other="b")
    (connect,) = decided((server,), (("a", "b"),))
    assert isinstance(connect, Connect)
    assert (connect.target.device, connect.target.other) == ("a", "b")
    assert (connect.target.node, connect.target.peer) == ("n0-0", "n1-0")
    assert decided((server, client), (("a", "b"), "b")) == (), "a node of type b is in use"
    done = replace(client, phase="Succeeded")
    assert Store(done) in decided((server, done), (("a", "b"),))
    assert {type(action) for action in decided((server, client), ("a",))} == {Remove}


def test_links_of_gpu_nodes_are_measured_only_if_the_administrator_wants_it() -> None:
    pool = view({"count": 2, "cpu": 8, "device": T4, "devices": 4})
    assert pairs((), (T4,), pool) == [("n0-0", "n0-1")]
    assert pairs((), (T4,), pool, gpus=False) == []


@pytest.mark.parametrize("busy", ["n0-0", "n0-1"])
def test_no_link_is_measured_beside_a_job(busy: str) -> None:
    assert pairs(busy=(busy,)) == []
    assert pairs(waiting=True) == []
    assert pairs(busy=("n1-0",)) == [("n0-0", "n0-1")]


@pytest.mark.parametrize(
    ("starts", "begins"),
    [
        ({Subject("a", link=True): Starts(1, RETRY_S)}, True),
        ({Subject("a", link=True): Starts(1, RETRY_S - 1)}, False),
        ({Subject("a", link=True): Starts(MAX_STARTS, 1e9)}, False),
        ({Subject("a"): Starts(MAX_STARTS, AFTER_S)}, True),
        ({Subject("a"): Starts(1, AFTER_S - 1)}, False),
    ],
    ids=["again", "not at once", "a few times", "after the hardware", "jobs that waited for the hardware start first"],
)
def test_tries_of_links_are_bounded(starts: dict[Subject, Starts], begins: bool) -> None:
    assert bool(pairs(starts=starts)) == begins


def test_the_client_starts_when_the_server_runs() -> None:
    assert decided((replace(SERVER, phase="Pending", address=""),)) == ()
    assert decided((replace(SERVER, address=""),)) == ()
    (connect,) = decided((SERVER,))
    assert isinstance(connect, Connect) and connect.pod == SERVER
    assert (connect.target.node, connect.target.peer, connect.target.is_gpu) == ("n0-0", "n0-1", False)
    assert decided((SERVER, CLIENT)) == ()


def test_both_pods_end_with_the_measurement() -> None:
    done = replace(CLIENT, phase="Succeeded")
    stored, removed = decided((SERVER, done))
    assert stored == Store(done)
    assert isinstance(removed, Remove) and (removed.pod, removed.ending) == (SERVER, Ending.NOT_NEEDED)
    assert decided((done,)) == (Store(done),), "the profile was refused before"


@pytest.mark.parametrize(
    ("pods", "options", "why", "endings"),
    [
        ((SERVER, CLIENT), {"unmeasured": ()}, "needs no measurement", [Ending.NOT_NEEDED] * 2),
        ((SERVER, CLIENT), {"busy": ("n0-0",)}, "job began", [Ending.GAVE_WAY, Ending.NOT_NEEDED]),
        ((SERVER,), {"busy": ("n0-0",)}, "job began", [Ending.GAVE_WAY]),
        ((SERVER, CLIENT), {"waiting": True}, "jobs wait", [Ending.GAVE_WAY, Ending.NOT_NEEDED]),
        ((SERVER, replace(CLIENT, phase="Failed")), {}, "failed", [Ending.FAILED, Ending.NOT_NEEDED]),
        ((replace(SERVER, phase="Succeeded"),), {}, "no pod connected", [Ending.FAILED]),
        ((replace(SERVER, alone=True),), {}, "other pod", [Ending.NOT_NEEDED]),
        ((replace(SERVER, client_node="gone"),), {}, "node gone is gone", [Ending.GAVE_WAY]),
        (
            (replace(SERVER, phase="Pending", bound=False, age_s=UNBOUND_S + 1),), {}, "no scheduler", [Ending.FAILED]
        ),
    ],
)  # fmt: skip
def test_one_pod_says_why_and_the_other_goes_with_it(
    pods: tuple[ProbePod, ...], options: dict[str, Any], why: str, endings: list[Ending]
) -> None:
    found = decided(pods, **options)
    assert {action.pod for action in found if isinstance(action, Remove)} == set(pods)
    assert [action.ending for action in found if isinstance(action, Remove)] == endings
    assert isinstance(found[0], Remove) and why in found[0].why


@given(
    phases=st.lists(
        st.tuples(st.sampled_from("ab"), st.sampled_from(["", "server", "client"]), st.booleans()), max_size=4
    ),
    busy=st.sets(st.sampled_from(["n0-0", "n0-1", "n1-0", "n1-1"])),
    unmeasured=st.sets(st.sampled_from("ab")),
    known=st.sets(st.sampled_from("ab")),
)
def test_links_and_hardware_share_the_machines(
    phases: list[tuple[str, str, bool]], busy: set[str], unmeasured: set[str], known: set[str]
) -> None:
    pods = [
        ProbePod(f"p{i}", d, f"n{'ab'.index(d)}-{i % 2}", "Running" if runs else "Pending", "", 5.0, link=link)
        for i, (d, link, runs) in enumerate(phases)
    ]
    learned = {key: each for key, each in KNOWN.items() if key[1] in known}
    actions = decide(
        POOL, learned, pods, {}, busy, False, unmeasured_links={(each, each) for each in unmeasured & known}
    )
    begun = [action for action in actions if isinstance(action, Start)]
    nodes = [node for start in begun for node in (start.target.node, start.target.peer if start.link else None) if node]
    assert len(set(nodes)) == len(nodes)
    assert not set(nodes) & neighbours(POOL.nodes, busy | {pod.node for pod in pods})
    assert len(nodes) + len(pods) <= max(MAX_PODS, len(pods))
    assert not {start.target.device for start in begun} & {pod.device for pod in pods}
