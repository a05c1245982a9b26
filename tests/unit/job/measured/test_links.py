"""Tests of the runs whose network and placement the profiles of device types get."""

from dataclasses import replace

import pytest

from dlcontract import RunPhase
from dljob.calibrate import Place
from dljob.cluster import ClusterView
from dljob.job.defaults import parse_defaults
from dljob.reconcile import reconcile
from dljob.reconcile.desired import RunMeasurements
from support.builders import CONFIG, DIGITS, NOW, Json, after, nodes, plan_of, report, seen, settled

CPU: Json = {"cpu": 2, "memory": "4Gi"}
ZONES = nodes({"name": "a", "count": 2, "zone": "a", **CPU}, {"name": "b", "count": 3, "zone": "b", **CPU})
TYPES = nodes({"name": "a", "count": 2, "device": "old", **CPU}, {"name": "b", "count": 2, "device": "new", **CPU})
BOTH = [{"device": "old", "nodes": 1, "ranksPerNode": 1}, {"device": "new", "nodes": 1, "ranksPerNode": 1}]
TWO = {"min": 2, "max": 2}


def measured(spec: Json, view: ClusterView, *, slow_border: bool = False) -> RunMeasurements:
    """Return the measurements of a run that has ended. ``slow_border``: the network between zones is slower."""
    topology = {"topology": {"betweenZones": {"bandwidth": "10M"}}} if slow_border else {}
    config = replace(CONFIG, job_defaults=parse_defaults(topology))
    first = seen({**DIGITS, **spec}, view)
    found = settled(after(first, reconcile(first, config, NOW)))
    found = replace(found, report=report(found))
    found = after(found, reconcile(found, config, NOW))
    ranks = [
        {"rank": r.rank, "device": r.device, "share": r.share, "compute_s": 0.1} for r in plan_of(found).plan.ranks
    ]
    link = {"link_latency_s": 1e-4, "link_bandwidth_Bps": 5e8}
    desired = reconcile(replace(found, report=report(found, RunPhase.SUCCEEDED, ranks=ranks, **link)), config, NOW)
    assert desired.measurements is not None
    return desired.measurements


@pytest.mark.parametrize("devices", [["old", "new"], ["old"], ["new"]])
def test_a_run_over_several_types_of_devices_measures_the_network_of_none(devices: list[str]) -> None:
    """Fixed bug: the slowest link of the run was stored for all types, so that fast nodes seemed to be slow."""
    groups = BOTH if len(devices) > 1 else [{"device": devices[0], "nodes": 2, "ranksPerNode": 1}]
    found = measured({"nodes": TWO, "planning": {"mode": "Fixed", "groups": groups}}, TYPES)
    assert set(found.devices) == set(devices), "the compute times of each type are stored"
    one = len(devices) == 1
    assert found.report.link_bandwidth_Bps == (5e8 if one else None)
    assert found.report.link_latency_s == (1e-4 if one else None)


@pytest.mark.parametrize(
    ("count", "slow_border", "inside"), [(4, False, True), (4, True, False), (2, True, True), (2, False, True)]
)
def test_a_run_across_zones_measures_no_network_of_one_zone(count: int, *, slow_border: bool, inside: bool) -> None:
    """Fixed bug: plans within a zone were predicted with the link and the step times of runs across zones."""
    found = measured({"nodes": {"min": count, "max": count}}, ZONES, slow_border=slow_border)
    assert found.report.link_bandwidth_Bps == (5e8 if inside else None)
    assert found.place == (Place(count, 1, "Ring", sharded=False) if inside else None)
    assert found.devices == ("cpu",)
