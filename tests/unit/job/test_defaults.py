"""Laws of the administrator's defaults: the job's own values win, and empty defaults change nothing."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dljob.api import DLJobSpec
from dljob.api.defaults import NO_DEFAULTS, JobDefaults
from dljob.cluster.domains import SAME_AS_OTHERS, Crossing, Spot, Topology
from dljob.cluster.prices import CATALOGUE_PRICES
from dljob.cluster.site import ASSUMED_SITE
from dljob.job.defaults import (
    applied,
    applied_site,
    parse_defaults,
    prices_of,
    site_of,
    spot_of,
    topology_of,
    with_defaults,
)
from support.builders import DIGITS

Json = dict[str, Any]
FULL: Json = {
    "trainer": {"imagePullSecrets": ["registry"]},
    "scheduling": {
        "nodeSelector": {"pool": "training", "zone": "a"},
        "tolerations": [{"key": "dedicated", "operator": "Equal", "value": "training", "effect": "NoSchedule"}],
        "disruption": "Avoid",
        "priorityClassName": "batch",
        "runtimeClassName": "gvisor",
        "schedulerName": "gang",
        "podGroupLabel": "example.com/group",
    },
    "runPolicy": {"activeDeadlineSeconds": 3600, "ttlSecondsAfterFinished": 600},
    "checkpoint": {"volume": {"storageClassName": "shared", "shared": True}},
    "prices": {"usdPerDeviceHour": {"NVIDIA-A100-SXM4-40GB": 1.5, "cpu": 0.02}, "usdPerKwh": 0.25},
    "energy": {
        "idleWatts": {"NVIDIA-A100-SXM4-40GB": 50.0, "cpu": 1.5},
        "hostWattsPerGpu": 60.0,
        "pue": 1.2,
        "carbon": {"gramsPerKwh": 380.0},
    },
    "dataset": {"sourceBandwidth": "5G"},
}

_names = st.sampled_from(["a", "b", "c"])
_tolerations = st.lists(
    st.fixed_dictionaries({"key": _names, "operator": st.just("Exists")}, optional={"effect": st.just("NoSchedule")}),
    max_size=3,
)


def sections(**more: Any) -> st.SearchStrategy[Json]:
    """Return a strategy for the sections that spec and defaults share."""
    scheduling = {
        "nodeSelector": st.dictionaries(_names, _names, max_size=3),
        "tolerations": _tolerations,
        "disruption": st.sampled_from(["Allow", "Avoid"]),
        "priorityClassName": _names,
        "schedulerName": _names,
        "podGroupLabel": _names,
    }
    seconds = st.integers(1, 99)
    policy = {"activeDeadlineSeconds": seconds, "ttlSecondsAfterFinished": seconds}
    volume = st.fixed_dictionaries({}, optional={"storageClassName": _names, "shared": st.booleans()})
    return st.fixed_dictionaries(
        {},
        optional={
            "trainer": st.fixed_dictionaries(
                {},
                optional={
                    "imagePullSecrets": st.lists(_names, max_size=2),
                    "scratch": st.fixed_dictionaries({"size": st.sampled_from(["Auto", "20Gi"])}),
                },
            ),
            "scheduling": st.fixed_dictionaries({}, optional=scheduling),
            "runPolicy": st.fixed_dictionaries({}, optional=policy),
            "checkpoint": st.fixed_dictionaries({}, optional={"volume": volume}),
            **more,
        },
    )


specs = sections().map(lambda more: DLJobSpec.model_validate({**DIGITS, **more}))
defaults = sections().map(JobDefaults.model_validate)


@given(specs)
def test_empty_defaults_are_the_identity(spec: DLJobSpec) -> None:
    for empty in (NO_DEFAULTS, JobDefaults.model_validate({"scheduling": {"nodeSelector": {}}, "trainer": {}})):
        assert empty.empty
        assert with_defaults(spec, empty) is spec
        assert applied(spec, empty) == applied_site(empty, ["cpu"]) == ()


@given(specs, defaults)
def test_defaults_are_idempotent(spec: DLJobSpec, given_defaults: JobDefaults) -> None:
    once = with_defaults(spec, given_defaults)
    assert with_defaults(once, given_defaults) == once
    assert applied(once, given_defaults) == ()


@given(specs, defaults)
def test_values_of_the_job_win(spec: DLJobSpec, given_defaults: JobDefaults) -> None:
    """Every value that a job sets is still there, and a completed spec is valid."""
    full = with_defaults(spec, given_defaults)
    assert full.scheduling.node_selector.items() >= spec.scheduling.node_selector.items()
    assert full.scheduling.tolerations[: len(spec.scheduling.tolerations)] == spec.scheduling.tolerations
    for own, found in (
        (spec.trainer, full.trainer),
        (spec.scheduling, full.scheduling),
        (spec.run_policy, full.run_policy),
        (spec.checkpoint.volume, full.checkpoint.volume),
    ):
        for name in type(own).model_fields:
            if name not in ("node_selector", "tolerations") and getattr(own, name) not in (None, ()):
                assert getattr(found, name) == getattr(own, name), name
    assert DLJobSpec.model_validate(full.manifest()) == full


@given(specs, defaults)
def test_every_default_is_in_the_spec_unless_the_job_sets_it(spec: DLJobSpec, given_defaults: JobDefaults) -> None:
    full = with_defaults(spec, given_defaults)
    wanted, policy = given_defaults.scheduling, given_defaults.run_policy
    if wanted is not None:
        assert full.scheduling.node_selector.keys() >= (wanted.node_selector or {}).keys()
        assert all(item.manifest() in full.scheduling.tolerations for item in wanted.tolerations or ())
        for name in ("disruption", "priority_class_name", "scheduler_name", "pod_group_label"):
            value = getattr(wanted, name)
            assert getattr(full.scheduling, name) in (value, getattr(spec.scheduling, name))
            assert value is None or getattr(full.scheduling, name) is not None
    if policy is not None and policy.ttl_seconds_after_finished is not None:
        assert full.run_policy.ttl_seconds_after_finished is not None


def test_applied_names_each_value_and_no_value_of_the_job() -> None:
    own = {"scheduling": {"nodeSelector": {"zone": "b"}, "schedulerName": "mine"}}
    lines = applied(DLJobSpec.model_validate({**DIGITS, **own}), JobDefaults.model_validate(FULL))
    assert lines == (
        "trainer.imagePullSecrets: registry",
        "checkpoint.volume.storageClassName: shared",
        "checkpoint.volume.shared: true",
        "runPolicy.activeDeadlineSeconds: 3600",
        "runPolicy.ttlSecondsAfterFinished: 600",
        "scheduling.nodeSelector: pool=training",
        "scheduling.tolerations: dedicated=training:NoSchedule",
        "scheduling.disruption: Avoid",
        "scheduling.priorityClassName: batch",
        "scheduling.podGroupLabel: example.com/group",
        "scheduling.runtimeClassName: gvisor",
    )


def test_prices_and_energy_of_the_plan_are_named() -> None:
    found = JobDefaults.model_validate(FULL)
    assert applied_site(found, ["Tesla-T4", "a100-sxm4-40gb"]) == (
        "prices.usdPerDeviceHour: a100-sxm4-40gb=1.5",
        "energy.idleWatts: a100-sxm4-40gb=50",
        "prices.usdPerKwh: 0.25",
        "energy.hostWattsPerGpu: 60",
        "energy.pue: 1.2",
        "energy.carbon.gramsPerKwh: 380",
    )
    by_hour = JobDefaults.model_validate({"energy": {"carbon": {"gramsPerKwhByHour": [100.0, *[50.0] * 23]}}})
    assert applied_site(by_hour, ["cpu"]) == ("energy.carbon.gramsPerKwhByHour: 50 to 100",)
    assert site_of(NO_DEFAULTS) == ASSUMED_SITE
    assert prices_of(NO_DEFAULTS) is CATALOGUE_PRICES


@pytest.mark.parametrize(
    "checkpoint", [{"enabled": False}, {"volume": {"claimName": "mine"}}, {"volume": {"storageClassName": "mine"}}]
)
def test_storage_class_is_only_for_claims_that_the_operator_creates(checkpoint: Json) -> None:
    spec = DLJobSpec.model_validate({**DIGITS, "checkpoint": checkpoint})
    found = with_defaults(spec, JobDefaults.model_validate({"checkpoint": FULL["checkpoint"]}))
    assert found.checkpoint == spec.checkpoint


# Invalid defaults, and the words of their rejection. The chart's schema rejects those of ``tests/chart`` earlier.
BAD: dict[str, tuple[object, tuple[str, ...]]] = {
    "no mapping": (["x"], ("jobDefaults: found", "mapping")),
    "unknown section": ({"schedulin": {}}, ("jobDefaults.schedulin", "unknown field", "README.md")),
    "field with a built-in default": ({"runPolicy": {"backoffLimit": 3}}, ("jobDefaults.runPolicy.backoffLimit",)),
    "unknown choice": ({"scheduling": {"disruption": "Never"}}, ("scheduling.disruption", "'Never'", "'Allow'")),
    "bad label": ({"scheduling": {"nodeSelector": {"a b": "c"}}}, ("scheduling.nodeSelector", "'a b'", "label")),
    "bad label value": ({"scheduling": {"nodeSelector": {"a": "?"}}}, ("nodeSelector.a", "'?'", "label")),
    "bad name": ({"scheduling": {"priorityClassName": "A_b"}}, ("priorityClassName", "'A_b'", "lower-case")),
    "toleration without key": ({"scheduling": {"tolerations": [{"value": "x"}]}}, ("tolerations.0.key", "Exists")),
    "value that has no effect": (
        {"scheduling": {"tolerations": [{"key": "a", "operator": "Exists", "value": "x"}]}},
        ("tolerations.0.value", "Remove value"),
    ),
    "seconds that have no effect": (
        {"scheduling": {"tolerations": [{"key": "a", "operator": "Exists", "tolerationSeconds": 3}]}},
        ("tolerations.0.tolerationSeconds", "NoExecute"),
    ),
    "text for a number": ({"runPolicy": {"ttlSecondsAfterFinished": "1h"}}, ("ttlSecondsAfterFinished", "'1h'")),
    "no price": ({"prices": {"usdPerKwh": 0}}, ("prices.usdPerKwh", "found 0", "greater than 0")),
    "less than all power": ({"energy": {"pue": 0.9}}, ("energy.pue", "found 0.9", "greater than or equal to 1")),
    "hours that are missing": (
        {"energy": {"carbon": {"gramsPerKwhByHour": [100]}}},
        ("energy.carbon.gramsPerKwhByHour", "24"),
    ),
    "two forms of carbon intensity": (
        {"energy": {"carbon": {"gramsPerKwh": 1, "gramsPerKwhByHour": [1] * 24}}},
        ("energy.carbon.gramsPerKwh", "Remove one"),
    ),
    "two prices of a GPU": (
        {"prices": {"usdPerDeviceHour": {"Tesla-T4": 1, "t4": 2}}},
        ("prices.usdPerDeviceHour", "Tesla-T4", "t4"),
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_invalid_defaults_are_rejected_with_field_value_and_remedy(case: str) -> None:
    document, words = BAD[case]
    with pytest.raises(ValueError, match="jobDefaults") as refusal:
        parse_defaults(document)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


def test_defaults_round_trip() -> None:
    found = parse_defaults(FULL)
    assert found.manifest() == FULL and parse_defaults(found.manifest()) == found


def test_spot_nodes_and_topology() -> None:
    assert spot_of(parse_defaults({})) == SAME_AS_OTHERS
    assert topology_of(parse_defaults({"topology": {"rackLabel": "a/b"}})).racks is None
    found = parse_defaults({
        "spot": {"labels": [{"key": "a/b", "value": "c"}], "priceFactor": 0.4, "interruptionsPerHour": 0.1},
        "topology": {"rackLabel": "a/rack", "betweenZones": {"bandwidth": "250M"}, "betweenRacks": {"latencySeconds": 1}},
    })  # fmt: skip
    assert spot_of(found) == Spot((("a/b", "c"),), 0.4, 0.1)
    assert topology_of(found) == Topology(Crossing(2.5e8), Crossing(None, 1.0), "a/rack")


def test_bandwidth_of_the_source_of_data() -> None:
    assert site_of(parse_defaults({})).data_source_Bps is None
    assert site_of(parse_defaults(FULL)).data_source_Bps == 5e9


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ({"spot": {"priceFactor": 0}}, "spot.priceFactor"),
        ({"spot": {"interruptionsPerHour": -1}}, "spot.interruptionsPerHour"),
        ({"spot": {"labels": []}}, "spot.labels"),
        ({"topology": {"betweenZones": {"bandwidth": "fast"}}}, "topology.betweenZones.bandwidth"),
        ({"topology": {"betweenRacks": {"bandwidth": "0"}}}, "topology.betweenRacks.bandwidth"),
        ({"dataset": {"sourceBandwidth": "0"}}, "dataset.sourceBandwidth"),
        ({"dataset": {"sourceBandwidth": "fast"}}, "dataset.sourceBandwidth"),
    ],
)
def test_wrong_spot_nodes_and_topology_are_rejected(document: dict[str, object], field: str) -> None:
    """Fixed bug: the message about a bandwidth of 0 named the field ``…betweenZones.bandwidth.bandwidth``."""
    with pytest.raises(ValueError, match=rf"^jobDefaults\.{re.escape(field)}: found "):
        parse_defaults(document)
