"""Tests of the slowest link between ranks on nodes of several types of devices."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dljob.cluster.hardware import Hardware, LinkSpeed
from dljob.perf.step.communication import ETHERNET_BANDWIDTH_Bps
from dljob.planner import FixedChoice, Learned, Request
from dljob.planner.candidates.evaluate import Part, evaluate
from dljob.planner.candidates.node_layout import Layout
from dljob.planner.candidates.options import Option, link_of, message_link_of, options
from dljob.planner.candidates.pools import eligible
from dljob.planner.candidates.request_workload import workload_of
from dljob.planner.search.screen import Screen
from dljob.planner.types import Choice
from support.planner_questions import A100, RESNET, T4, decided, view

Known = dict[tuple[str, str], Learned]
REQUEST = replace(RESNET, global_batch=512)
FAST_LINK = LinkSpeed(2e-5, 20e9)
RUN = {("resnet50", A100): Learned(link_latency_s=FAST_LINK.latency_s, link_bandwidth_Bps=FAST_LINK.bandwidth_Bps)}
PROBE = {("hardware", A100): Learned(hardware=Hardware(far=FAST_LINK))}


@pytest.mark.parametrize("known", [RUN, PROBE])
def test_a_measured_link_does_not_hide_the_slower_network_of_other_nodes(known: Known) -> None:
    """Fixed bug: the link that one type of device had measured counted instead of the other nodes' annotation."""
    cluster = view(
        {"count": 1, "device": A100, "devices": 1, "cpu": 16, "memory": "128Gi", "bandwidth": "25G"},
        {"count": 6, "device": T4, "devices": 1, "cpu": 16, "memory": "128Gi", "bandwidth": "125M"},
    )
    both = replace(REQUEST, fixed=(FixedChoice(A100, 1), FixedChoice(T4, 5)))
    mixed, stated = (decided(both, cluster, each).chosen.prediction for each in (known, {}))
    assert mixed.step_s == pytest.approx(stated.step_s)
    assert "over the network, 1 Gbit/s" in mixed.bottleneck
    assert [group.device for group in decided(REQUEST, cluster, known).chosen.groups] == [A100]


def test_an_annotation_counts_only_for_its_nodes() -> None:
    """Fixed bug: nodes without an annotation were as fast as the annotated ones of another type beside them."""
    found = mixed_options({A100: "25G", T4: None}, {})
    link, _ = link_of(found, [1, 1])
    assert (link.bandwidth_Bps, link.name) == (ETHERNET_BANDWIDTH_Bps, "an assumed network")


def test_annotation_takes_precedence_over_the_probe_but_not_over_runs() -> None:
    """The probe uses TCP on one network card. An administrator may know more."""
    for known, name in ((PROBE, "the network"), (PROBE | RUN, "the measured network")):
        (annotated, _) = mixed_options({A100: "25G", T4: None}, known)
        assert link_of([annotated], [2])[0].name == name
    (probed, _) = mixed_options({A100: None, T4: None}, PROBE)
    assert link_of([probed], [2])[0].name == "the network measured by the probe"


def mixed_options(annotated: dict[str, str | None], known: Known, gpus: int = 1) -> list[Option]:
    """Return an option for each type of device. ``annotated``: bandwidth in its nodes' annotations."""
    cluster = view(
        *(
            {"count": 4, "device": device, "devices": gpus, "cpu": 16, "memory": "128Gi"}
            | ({} if bandwidth is None else {"bandwidth": bandwidth})
            for device, bandwidth in annotated.items()
        )
    )
    pools, workload = eligible(REQUEST, cluster).pools, workload_of(REQUEST)
    return [options(pool, Layout(gpus, 1.0), workload, REQUEST, known)[0] for pool in pools]


speeds = st.one_of(st.none(), st.builds(LinkSpeed, st.floats(1e-6, 1e-2), st.floats(1e7, 5e10)))
sources = st.tuples(st.sampled_from([None, "125M", "25G"]), speeds, speeds)


@settings(max_examples=40, deadline=None)
@given(sources, sources, st.sampled_from([1, 4]))
def test_link_of_a_mixed_plan_is_the_slowest_of_its_nodes(
    one: tuple[str | None, LinkSpeed | None, LinkSpeed | None],
    other: tuple[str | None, LinkSpeed | None, LinkSpeed | None],
    gpus: int,
) -> None:
    """The screen of many candidates at once finds the same link, and predicts the same step."""
    known: Known = {}
    for device, (_, probed, measured) in ((A100, one), (T4, other)):
        if probed is not None:
            known["hardware", device] = Learned(hardware=Hardware(far=probed))
        if measured is not None:
            known["resnet50", device] = Learned(
                link_latency_s=measured.latency_s, link_bandwidth_Bps=measured.bandwidth_Bps
            )
    found = mixed_options({A100: one[0], T4: other[0]}, known, gpus)
    (link, spread), alone = link_of(found, [2, 3]), [link_of([option], [2]) for option in found]
    assert link.bandwidth_Bps == min(each.bandwidth_Bps for each, _ in alone)
    assert link.latency_s == max(each.latency_s for each, _ in alone)
    assert spread == max(each for _, each in alone)

    assert_screened(found, (2, 3), REQUEST)


def assert_screened(found: list[Option], nodes: tuple[int, ...], request: Request) -> None:
    """Fail if the screen of many candidates at once predicts another step for these options than the planner."""
    workload = workload_of(request)
    screen = Screen(found, request, workload)
    screened = screen.screen(screen.types.rows([dict(enumerate(nodes))]))
    parts = [Part(option, count) for option, count in zip(found, nodes, strict=True)]
    exact = evaluate(parts, screen.collectives[screened.collective[0]], request, workload)
    assert isinstance(exact, Choice)
    assert screened.step_s[0] == pytest.approx(exact.prediction.step_s, rel=0.03)
    assert screened.step_p90_s[0] == pytest.approx(exact.prediction.step_p90_s, rel=0.03)


def between(link: LinkSpeed, known: Known | None = None) -> Known:
    """Return ``known`` with a measured link between nodes of both types."""
    old = (known or {}).get(("hardware", A100), Learned(hardware=Hardware())).hardware or Hardware()
    return {**(known or {}), ("hardware", A100): Learned(hardware=replace(old, between=((T4, link),)))}


@pytest.mark.parametrize(("nodes", "Bps"), [([1, 1], 5e9), ([1, 2], 1.25e9), ([2, 1], 1.25e9), ([3, 3], 1.25e9)])
def test_measured_link_between_two_types_replaces_assumptions_about_it(nodes: list[int], Bps: float) -> None:
    """Links between nodes of the same type remain assumed, and count if the plan has two of them."""
    found = mixed_options({A100: None, T4: None}, between(LinkSpeed(1e-5, 5e9)))
    link, _ = link_of(found, nodes)
    assert link.bandwidth_Bps == Bps
    assert ("between" in link.name) is (Bps == 5e9)


def test_slow_link_between_two_types_limits_plans_with_both() -> None:
    """The nodes of each type are in a rack of their own."""
    known = between(LinkSpeed(5e-4, 1e8), PROBE)
    annotated = mixed_options({A100: "25G", T4: None}, known)
    link, _ = link_of(annotated, [2, 2])
    assert (link.latency_s, link.bandwidth_Bps) == (5e-4, 1e8)
    assert link.name == f"the measured network between {A100} and {T4}"
    assert link_of(annotated[:1], [2])[0].bandwidth_Bps == 25e9


def test_annotation_of_one_type_bounds_the_measured_link_to_another() -> None:
    found = mixed_options({A100: "5G", T4: None}, between(LinkSpeed(1e-5, 5e11)))
    assert link_of(found, [1, 1])[0].bandwidth_Bps == 5e9


def test_annotations_of_both_types_take_precedence_over_the_measured_link_between_them() -> None:
    """An administrator knows RDMA and several network cards, which the probe does not use."""
    found = mixed_options({A100: "25G", T4: "5G"}, between(LinkSpeed(5e-4, 1e8)))
    assert link_of(found, [1, 1])[0].bandwidth_Bps == 5e9


@settings(max_examples=40, deadline=None)
@given(sources, speeds, st.tuples(st.integers(1, 3), st.integers(1, 3)))
def test_screen_knows_measured_links_between_types(
    own: tuple[str | None, LinkSpeed | None, LinkSpeed | None],
    pair: LinkSpeed | None,
    nodes: tuple[int, int],
) -> None:
    annotated, probed, measured = own
    known: Known = {}
    if probed is not None:
        known["hardware", A100] = Learned(hardware=Hardware(far=probed))
    if measured is not None:
        known["resnet50", A100] = Learned(link_latency_s=measured.latency_s, link_bandwidth_Bps=measured.bandwidth_Bps)
    known = known if pair is None else between(pair, known)
    found = mixed_options({A100: annotated, T4: None}, known)
    assert_screened(found, nodes, REQUEST)


@pytest.mark.parametrize(("pair_Bps", "bounds"), [(1e7, True), (2e9, False)])
def test_server_of_other_nodes_is_behind_the_measured_link(pair_Bps: float, bounds: bool) -> None:
    """With the slow link, the server is busy all the time. The workers are on nodes of the other type, too."""
    found = mixed_options({A100: None, T4: None}, between(LinkSpeed(1e-4, pair_Bps)), gpus=1)
    request = replace(REQUEST, synchronization="Asynchronous", collective="ParameterServer")
    link, _ = message_link_of(found, [2, 1])
    assert (link.bandwidth_Bps < 1.01e7) is bounds
    screen = Screen(found, request, workload_of(request))
    (step_s,) = screen.screen(screen.types.rows([{0: 2, 1: 1}])).step_s
    exact = evaluate([Part(found[0], 2), Part(found[1], 1)], "ParameterServer", request, workload_of(request))
    assert isinstance(exact, Choice) and step_s == pytest.approx(exact.prediction.step_s, rel=0.1)
