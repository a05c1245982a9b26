"""Laws of node templates: what an autoscaler can still add to the nodes that exist."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dljob.cluster import ClusterView, cluster_view
from dljob.cluster.templates import NO_TEMPLATES, NodeTemplates, parse_templates
from support.builders import Json

ZONES = st.sampled_from(["a", "b", None])


def nodes(name: str, count: int, **fields: object) -> ClusterView:
    return cluster_view({"nodes": [{"name": name, "count": count, **fields}]} if count else {"nodes": []})


def labelled(zone: str | None) -> Json:
    return {} if zone is None else {"labels": {"zone": zone}}


@given(existing=st.integers(0, 5), count=st.integers(1, 5), zone=ZONES, asked=ZONES)
def test_existing_nodes_count_against_their_template(
    existing: int, count: int, zone: str | None, asked: str | None
) -> None:
    view = nodes("real", existing, device="cpu", **labelled(zone))
    templates = NodeTemplates(nodes("new", count, device="cpu", **labelled(asked)).nodes)
    alike = existing if asked in (None, zone) else 0
    larger = templates.scaled_up(view)
    assert larger.nodes[:existing] == view.nodes
    assert len(larger.nodes) - existing == max(0, count - alike)


@given(existing=st.integers(0, 3), counts=st.lists(st.integers(1, 3), max_size=3))
def test_all_templates_together_never_exceed_their_counts(existing: int, counts: list[int]) -> None:
    view = nodes("real", existing)
    listed = [node for i, count in enumerate(counts) for node in nodes(f"t{i}", count).nodes]
    assert len(NodeTemplates(tuple(listed)).scaled_up(view).nodes) == max(existing, sum(counts))


def test_other_devices_and_sizes_do_not_count_as_nodes_of_a_template() -> None:
    view = ClusterView((*nodes("a", 2, device="Tesla-T4", devices=4).nodes, *nodes("b", 2, device="cpu").nodes))
    templates = NodeTemplates(nodes("new", 3, device="Tesla-T4", devices=1).nodes)
    assert len(templates.scaled_up(view).nodes) == 7


def test_without_templates_the_view_stays_the_same_object() -> None:
    view = nodes("real", 2)
    assert NO_TEMPLATES.scaled_up(view) is view
    assert NodeTemplates(nodes("t", 1).nodes).scaled_up(view) is view


@pytest.mark.parametrize("fields", [{}, {"devices": 8}, {"devices": 8, "gpu": False}], ids=str)
def test_operator_starts_with_a_device_that_is_not_in_the_catalogue(fields: Json) -> None:
    """Fixed bug: several devices that are no GPUs stopped the operator, although the chart accepts them."""
    (node,) = parse_templates(json.dumps([{"device": "NVIDIA-X9000", "count": 1, **fields}]))
    assert (node.device, node.is_gpu, node.devices, node.free_devices) == ("NVIDIA-X9000", False, 1, 1)


def test_template_of_an_unknown_gpu_keeps_its_devices() -> None:
    (node,) = parse_templates('[{"device": "NVIDIA-X9000", "gpu": true, "devices": 8, "count": 1}]')
    assert (node.is_gpu, node.devices) == (True, 8)
