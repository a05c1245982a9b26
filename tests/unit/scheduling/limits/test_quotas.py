"""Tests and laws of what quotas leave."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dljob.scheduling import Charge, LimitRange, NamespaceLimits, Quota
from dljob.scheduling.limits.quotas import Scope, amount_text, shortages, unstated

Json = dict[str, Any]
RESOURCES = ("pods", "requests.cpu", "requests.memory", "requests.nvidia.com/gpu")
amounts = st.dictionaries(st.sampled_from(RESOURCES), st.integers(0, 10**6))
charges = amounts.map(lambda found: Charge(tuple(sorted(found.items())), is_pod=True))
quotas = st.builds(Quota, st.just("q"), amounts, amounts)
needs = st.lists(st.tuples(charges, st.integers(0, 50)), max_size=4)


@given(quotas, needs)
def test_what_is_not_short_fits(quota: Quota, wanted: list[tuple[Charge, int]]) -> None:
    """Creating the objects makes no resource exceed the quota that did not before."""
    if not shortages([quota], wanted):
        after = quota.with_usage(wanted)
        assert all(after.left(name) >= min(0, quota.left(name)) for name in quota.hard)


@given(quotas, needs, needs)
def test_what_others_reserve_never_helps(
    quota: Quota, wanted: list[tuple[Charge, int]], others: list[tuple[Charge, int]]
) -> None:
    before = {item.resource for item in shortages([quota], wanted)}
    assert before <= {item.resource for item in shortages([quota.with_usage(others)], wanted)}


@given(quotas, needs)
def test_objects_with_room_are_short_only_of_a_quota_that_is_too_small(
    quota: Quota, wanted: list[tuple[Charge, int]]
) -> None:
    found = quota.with_room_for(wanted)
    assert all(item.needed > item.hard for item in shortages([found], wanted))
    assert all(found.left(name) >= quota.left(name) for name in quota.hard)


@given(quotas, charges, st.integers(0, 9))
def test_own_pods_leave_what_they_charged(quota: Quota, charge: Charge, count: int) -> None:
    with_pods = quota.with_usage([(charge, count)])
    again = with_pods.with_usage([(charge, -count)])
    assert all(again.left(name) == quota.left(name) for name in quota.hard)


@given(quotas, charges)
def test_fewer_pods_are_never_shorter(quota: Quota, charge: Charge) -> None:
    short = [len(shortages([quota], [(charge, count)])) for count in range(6)]
    assert short == sorted(short) and short[0] == 0


@given(quotas, quotas)
def test_limits_grow_exactly_if_something_more_is_left(old: Quota, new: Quota) -> None:
    grown = NamespaceLimits((new,)).grown(NamespaceLimits((old,)))
    assert grown == any(name not in new.hard or new.left(name) > old.left(name) for name in old.hard)


def test_limits_grow_without_the_quota_or_with_other_ranges() -> None:
    one = NamespaceLimits((Quota("q", {"pods": 1000}),))
    assert NamespaceLimits().grown(one) and not one.grown(one) and not one.grown(NamespaceLimits())
    assert replace(one, ranges=(LimitRange("r"),)).grown(one)


def test_quota_lowered_below_its_usage_blocks_only_what_needs_more() -> None:
    low = Quota("q", {"pods": 1000, "requests.cpu": 1000}, {"pods": 5000, "requests.cpu": 0})
    assert not shortages([low], [(Charge((("requests.cpu", 500),), is_pod=True), 2)])
    [found] = shortages([low], [(Charge((("pods", 1000),), is_pod=True), 1)])
    assert (found.left, found.needed) == (0, 1000)
    assert str(found) == "ResourceQuota q: pods has 5 of 1 used or reserved and 0 left, 1 needed"


def test_status_takes_precedence_over_the_spec() -> None:
    body = {
        "metadata": {"name": "q"},
        "spec": {"hard": {"pods": "9", "requests.cpu": "2"}, "scopes": ["NotTerminating"]},
        "status": {"hard": {"pods": "3"}, "used": {"pods": "1", "secrets": "7"}},
    }
    found = Quota.parse(body)
    assert found == Quota("q", {"pods": 3000, "requests.cpu": 2000}, {"pods": 1000}, (Scope("NotTerminating"),))


def pod(**traits: Any) -> Charge:
    return Charge((("pods", 1000),), is_pod=True, **traits)


SCOPES: dict[str, tuple[Scope, Charge, bool]] = {
    "deadline": (Scope("Terminating"), pod(terminating=True), True),
    "no deadline": (Scope("Terminating"), pod(), False),
    "not terminating": (Scope("NotTerminating"), pod(), True),
    "best effort": (Scope("BestEffort"), pod(), False),
    "not best effort": (Scope("NotBestEffort"), pod(), True),
    "own namespace": (Scope("CrossNamespacePodAffinity"), pod(), False),
    "class in": (Scope("PriorityClass", "In", ("high", "low")), pod(priority_class="low"), True),
    "class not among": (Scope("PriorityClass", "In", ("high",)), pod(priority_class="low"), False),
    "class not in": (Scope("PriorityClass", "NotIn", ("high",)), pod(priority_class="low"), True),
    "class exists": (Scope("PriorityClass", "Exists"), pod(priority_class="low"), True),
    "plain scope": (Scope("PriorityClass"), pod(), False),
    "class does not exist": (Scope("PriorityClass", "DoesNotExist"), pod(), True),
    "unknown scope": (Scope("VolumeAttributesClass", "In", ("gold",)), pod(), False),
    "object that is no pod": (Scope("NotTerminating"), Charge((("pods", 1000),)), False),
}


@pytest.mark.parametrize("case", SCOPES)
def test_scopes(case: str) -> None:
    scope, charge, counted = SCOPES[case]
    found = Quota("q", {"pods": 0}, scopes=(scope,)).charged(charge)
    assert bool(found) == counted


def test_quota_counts_only_what_all_scopes_select() -> None:
    quota = Quota("q", {"pods": 0}, scopes=(Scope("NotTerminating"), Scope("PriorityClass", "In", ("high",))))
    assert not quota.charged(pod()) and quota.charged(pod(priority_class="high"))


def test_containers_must_state_what_a_quota_limits() -> None:
    spec: Json = {"containers": [{"name": "trainer", "resources": {"requests": {"cpu": "1"}}}]}
    quota = Quota("q", {"limits.cpu": 9000, "requests.cpu": 9000, "requests.nvidia.com/gpu": 0})
    found = unstated([quota], spec, pod())
    assert found is not None and (found.quota, found.resource, found.container) == ("q", "limits.cpu", "trainer")
    assert unstated([quota], {**spec, "resources": {"limits": {"cpu": "2"}}}, pod()) is None
    assert unstated([replace(quota, scopes=(Scope("Terminating"),))], spec, pod()) is None


@pytest.mark.parametrize(
    ("resource", "value", "text"),
    [
        ("requests.cpu", 1500, "1500m"),
        ("requests.cpu", 2000, "2"),
        ("limits.memory", 1000 * 3 * 2**29, "1.5Gi"),
        ("requests.storage", 1000 * 2**20, "1Mi"),
    ],
)
def test_text_of_amounts(resource: str, value: int, text: str) -> None:
    assert amount_text(resource, value) == text
