"""Tests of the slowest link between ranks on nodes of several types of devices."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dljob.cluster.hardware import Hardware, LinkSpeed
from dljob.perf.step.communication import ETHERNET_BANDWIDTH_Bps
from dljob.planner import FixedChoice, Learned
from dljob.planner.candidates.evaluate import Part, evaluate
from dljob.planner.candidates.node_layout import Layout
from dljob.planner.candidates.options import Option, link_of, options
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
    link, _ = link_of(found, 2)
    assert (link.bandwidth_Bps, link.name) == (ETHERNET_BANDWIDTH_Bps, "an assumed network")


def test_annotation_takes_precedence_over_the_probe_but_not_over_runs() -> None:
    """The probe uses TCP on one network card. An administrator may know more."""
    for known, name in ((PROBE, "the network"), (PROBE | RUN, "the measured network")):
        (annotated, _) = mixed_options({A100: "25G", T4: None}, known)
        assert link_of([annotated], 2)[0].name == name
    (probed, _) = mixed_options({A100: None, T4: None}, PROBE)
    assert link_of([probed], 2)[0].name == "the network measured by the probe"


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
    (link, spread), alone = link_of(found, 2), [link_of([option], 2) for option in found]
    assert link.bandwidth_Bps == min(each.bandwidth_Bps for each, _ in alone)
    assert link.latency_s == max(each.latency_s for each, _ in alone)
    assert spread == max(each for _, each in alone)

    workload = workload_of(REQUEST)
    screen = Screen(found, REQUEST, workload)
    screened = screen.screen(screen.types.rows([{0: 2, 1: 3}]))
    parts = [Part(option, nodes) for option, nodes in zip(found, (2, 3), strict=True)]
    exact = evaluate(parts, screen.collectives[screened.collective[0]], REQUEST, workload)
    assert isinstance(exact, Choice)
    assert screened.step_s[0] == pytest.approx(exact.prediction.step_s, rel=0.03)
    assert screened.step_p90_s[0] == pytest.approx(exact.prediction.step_p90_s, rel=0.03)
