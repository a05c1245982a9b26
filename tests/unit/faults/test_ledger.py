"""Tests of the record of node faults: what counts, for whom a node is left out, for how long, and the bounds."""

from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dljob.faults import (
    Fault,
    FaultKind,
    FaultPolicy,
    Ledger,
    LeftOut,
    active,
    expired,
    forgiven,
    left_out_nodes,
    recorded,
)
from dljob.faults.ledger import MAX_FAULTS, MAX_NODES
from dljob.faults.stored import data, parse

START = datetime(2026, 3, 1, 12, tzinfo=UTC)
POLICY = FaultPolicy()
DEVICE, NETWORK, NOT_READY = FaultKind.DEVICE, FaultKind.NETWORK, FaultKind.NOT_READY
HOUR_S = 3600.0


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def fault(
    seconds: float, namespace: str = "a", kind: FaultKind = DEVICE, node: str = "n1", key: str | None = None
) -> Fault:
    """Return a fault. Without ``key``, it is one of its own."""
    return Fault(node=node, kind=kind, key=key or f"{kind}/{seconds}", at=at(seconds), namespace=namespace)


def after(*faults: Fault, policy: FaultPolicy = POLICY) -> Ledger:
    """Return the ledger after faults that were recorded when they occurred."""
    ledger: Ledger = {}
    for item in faults:
        ledger = recorded(ledger, item, policy, item.at)
    return ledger


def out(ledger: Ledger, namespace: str, seconds: float) -> bool:
    return "n1" in left_out_nodes(ledger, namespace, at(seconds))


CASES: dict[str, tuple[list[Fault], set[str]]] = {
    # faults, namespaces (among a, b and c) for which the node is left out afterwards
    "one fault": ([fault(0)], set()),
    "two attempts of one namespace": ([fault(0), fault(20)], {"a"}),
    "one attempt, reported by several ranks": ([fault(0, key="x"), fault(1, key="x"), fault(2, key="x")], set()),
    "two namespaces": ([fault(0), fault(20, "b")], {"a", "b", "c"}),
    "two times NotReady": ([fault(0, "", NOT_READY), fault(900, "", NOT_READY)], {"a", "b", "c"}),
    "a namespace and NotReady": ([fault(0), fault(900, "", NOT_READY)], {"a"}),
    "outside of the window": ([fault(0), fault(HOUR_S)], set()),
    "just within the window": ([fault(0), fault(HOUR_S - 1)], {"a"}),
    "a node that dies": ([fault(0, kind=NETWORK), fault(45, "", NOT_READY)], set()),
    "a node that dies, as two namespaces see it": (
        [fault(0, kind=NETWORK), fault(1, "b", NETWORK), fault(45, "", NOT_READY)], set(),
    ),
    "a network that fails again": ([fault(0, kind=NETWORK), fault(301, kind=NETWORK)], {"a"}),
    "device and network": ([fault(0), fault(5, kind=NETWORK)], {"a"}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_faults_leave_a_node_out_for_those_whom_they_convince(case: tuple[list[Fault], set[str]]) -> None:
    faults, namespaces = case
    ledger = after(*faults)
    last_s = (faults[-1].at - START).total_seconds()
    assert {namespace for namespace in ("a", "b", "c") if out(ledger, namespace, last_s + 1)} == namespaces


def test_fault_is_known_on_every_node() -> None:
    """A late report may name a pod that the scheduler has placed on another node since."""
    ledger = after(fault(0, key="x"), fault(1, key="x", node="n2"))
    assert set(ledger) == {"n1"}


def test_each_repetition_doubles_the_time_up_to_a_limit() -> None:
    ledger: Ledger = {}
    seconds, hours = 0.0, []
    for _ in range(7):
        for _ in range(2):
            ledger = recorded(ledger, fault(seconds), POLICY, at(seconds))
            seconds += 10
        [entry] = active(ledger, at(seconds))
        hours.append((entry.until - entry.since).total_seconds() / HOUR_S)
        seconds = (entry.until - START).total_seconds() + 60
    assert hours == [1, 2, 4, 8, 16, 24, 24]


def test_repetition_counts_from_one_again_after_a_quiet_time() -> None:
    ledger = after(fault(0), fault(10))
    [first] = active(ledger, at(11))
    late_s = (first.until - START).total_seconds() + POLICY.longest_s + 1
    for seconds in (late_s, late_s + 10):
        ledger = recorded(ledger, fault(seconds), POLICY, at(seconds))
    [entry] = active(ledger, at(late_s + 11))
    assert entry.times == 1


def test_faults_before_the_return_do_not_count_again() -> None:
    """A job that had no other node goes on where it is, and its faults must not leave the node out twice at once."""
    policy = FaultPolicy(window_s=7200, first_s=600)
    ledger = after(fault(0), fault(10), fault(300), fault(400), policy=policy)
    ledger = recorded(ledger, fault(700), policy, at(700))
    assert not out(ledger, "a", 701)
    assert out(recorded(ledger, fault(720), policy, at(720)), "a", 721)


def test_one_namespace_does_not_lengthen_what_counts_for_all() -> None:
    ledger = after(fault(0, "b"), fault(1, "c"), fault(2, "a"), fault(3, "a"))
    assert {item.namespace for item in active(ledger, at(4))} == {""}


def test_forgiven_node_starts_anew() -> None:
    ledger = forgiven(after(fault(0), fault(10), fault(5, node="n2")), ["n1", "unknown"])
    assert set(ledger) == {"n2"}
    assert not out(recorded(ledger, fault(20), POLICY, at(20)), "a", 21)


def test_expired_parts_are_removed() -> None:
    ledger = after(fault(0), fault(10), fault(0, node="n2"))
    assert set(expired(ledger, POLICY, at(HOUR_S))) == {"n1"}
    later = expired(ledger, POLICY, at(2 * HOUR_S))
    assert later["n1"].faults == () and len(later["n1"].left_out) == 1, "the repetition is remembered"
    assert expired(later, POLICY, at(11 + HOUR_S + POLICY.longest_s)) == {}


def test_description_names_node_end_and_faults() -> None:
    kinds = (DEVICE, NOT_READY, DEVICE, NETWORK, NOT_READY)
    entry = LeftOut(node="n1", since=at(0), until=at(HOUR_S), kinds=kinds)
    text = "n1 until 2026-03-01T13:00Z (2 device faults, 1 network fault, 2 times NotReady)"
    assert str(entry) == text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("not JSON", "{"), ("a list", "[]"), ("a wrong kind", '{"faults": [{"kind": "Boredom", "key": "k", "at": 0}]}'),
        ("no time", '{"faults": [{"kind": "DeviceFailed", "key": "k"}]}'), ("a text", '{"faults": "many"}'),
        ("too long", '{"x": "' + "y" * 70_000 + '"}'), ("too deep", "[" * 60_000),
        ("a time without a zone", '{"left_out": [{"since": "2026-03-01T12:00:00", "until": "2026-03-01T12:00:00"}]}'),
    ],
)  # fmt: skip
def test_edited_entries_count_as_deleted(name: str, text: str) -> None:
    good = after(fault(0))
    assert parse({**data(good), "n2": text}) == good, name


faults_ = st.builds(
    fault,
    st.floats(0, 20 * HOUR_S),
    st.sampled_from(["", "a", "b", "c"]),
    st.sampled_from(FaultKind),
    st.sampled_from(["n1", "n2"]),
)
policies = st.builds(FaultPolicy, st.integers(1, 4), st.floats(60, 7200), st.floats(60, 7200), st.floats(7200, 86400))


class TestLaws:
    @given(st.lists(faults_, max_size=40), policies)
    def test_stored_record_reads_back(self, faults: list[Fault], policy: FaultPolicy) -> None:
        ledger = after(*sorted(faults, key=lambda item: item.at), policy=policy)
        assert parse(data(ledger)) == ledger

    @given(st.lists(faults_, max_size=40), policies)
    def test_repeated_faults_change_nothing(self, faults: list[Fault], policy: FaultPolicy) -> None:
        ordered = sorted(faults, key=lambda item: item.at)
        twice = after(*(item for item in ordered for _ in range(2)), policy=policy)
        assert twice == after(*ordered, policy=policy)

    @given(st.lists(faults_, max_size=40), policies)
    def test_one_namespace_cannot_take_nodes_from_others(self, faults: list[Fault], policy: FaultPolicy) -> None:
        mine = sorted((item for item in faults if item.namespace == "a"), key=lambda item: item.at)
        ledger: Ledger = {}
        for item in mine:
            ledger = recorded(ledger, item, policy, item.at)
            assert left_out_nodes(ledger, "b", item.at) == {}

    @given(st.lists(faults_, max_size=40), policies)
    def test_node_is_left_out_only_after_enough_faults_and_never_too_long(
        self, faults: list[Fault], policy: FaultPolicy
    ) -> None:
        ordered = sorted(faults, key=lambda item: item.at)
        ledger: Ledger = {}
        for n, item in enumerate(ordered, 1):
            ledger = recorded(ledger, item, policy, item.at)
            for entry in active(ledger, item.at):
                assert sum(other.node == entry.node for other in ordered[:n]) >= policy.limit
                assert timedelta(0) < entry.until - entry.since <= timedelta(seconds=policy.longest_s)

    @given(st.lists(faults_, max_size=30), policies)
    def test_everything_expires(self, faults: list[Fault], policy: FaultPolicy) -> None:
        ledger = after(*sorted(faults, key=lambda item: item.at), policy=policy)
        assert expired(ledger, policy, at(40 * 86400)) == {}

    @given(st.integers(1, 1000), policies)
    def test_repetitions_never_shorten_the_time(self, times: int, policy: FaultPolicy) -> None:
        assert all(policy.lasts(a) <= policy.lasts(b) for a, b in pairwise(range(times, times + 3)))


def test_record_fits_into_a_config_map_and_no_namespace_displaces_others() -> None:
    ledger: Ledger = {}
    policy = FaultPolicy(limit=8)
    long = "x" * 60
    names = [f"ip-10-0-{n // 250}-{n % 250}.eu-central-1.compute.internal" for n in range(MAX_NODES + 20)]
    for n, name in enumerate(names):
        ledger = recorded(ledger, fault(n, "victim", node=name, key=f"v-{n}"), POLICY, at(n))
        for i in range(3 * MAX_FAULTS):
            key = f"6f1c2f36-0a4e-4b0a-9d5c-1f2e3d4c5b6a/DeviceFailed/{n}/{i}"
            ledger = recorded(ledger, fault(n, f"{long}{i % 11}", node=name, key=key), policy, at(n))
    assert len(ledger) == MAX_NODES and all(len(record.faults) <= MAX_FAULTS for record in ledger.values())
    assert sum(len(name) + len(text.encode()) for name, text in data(ledger).items()) < 2**20
    flooded: Ledger = recorded({}, fault(0, "victim"), policy, at(0))
    for i in range(50):
        flooded = recorded(flooded, fault(1, "loud", key=f"l-{i}"), policy, at(1))
    assert "victim" in {item.namespace for item in flooded["n1"].faults}
