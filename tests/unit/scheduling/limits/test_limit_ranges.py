"""Tests of LimitRanges: the defaults that containers get, and the pods and claims that are forbidden."""

from dataclasses import replace
from typing import Any

import pytest

from dljob.scheduling import LimitRange
from dljob.scheduling.limits.limit_ranges import bounds, claim_violation, violation, with_defaults

Json = dict[str, Any]


def limit_range(type: str = "Container", **fields: Json) -> LimitRange:  # noqa: A002 - the field's name
    return LimitRange.parse({"metadata": {"name": "r"}, "spec": {"limits": [{"type": type, **fields}]}})


def pod(requests: Json, limits: Json | None = None) -> Json:
    return {"containers": [{"name": "trainer", "resources": {"requests": requests, "limits": limits or {}}}]}


CASES: dict[str, tuple[LimitRange, Json, str | None]] = {
    # name: (range, pod, expected text of the violation)
    "within": (limit_range(min={"cpu": "1"}, max={"cpu": "4"}), pod({"cpu": "2"}, {"cpu": "3"}), None),
    "request below min": (
        limit_range(min={"cpu": "1"}), pod({"cpu": "500m"}), "a request of 500m; expected at least 1",
    ),
    "limit above max": (
        limit_range(max={"memory": "1Gi"}), pod({}, {"memory": "2Gi"}), "a limit of 2048Mi; expected at most 1024Mi",
    ),
    "max needs a limit": (limit_range(max={"cpu": "1"}), pod({"cpu": "1"}), "no limit; expected at most 1"),
    "default limit": (
        limit_range(max={"cpu": "1"}, default={"cpu": "1"}), pod({"cpu": "1"}), None,
    ),
    "request above the default limit": (
        limit_range(default={"cpu": "500m"}), pod({"cpu": "1"}), "a request of 1 above the default limit of 500m",
    ),
    "default request": (
        limit_range(min={"cpu": "100m"}, defaultRequest={"cpu": "100m"}), pod({}), None,
    ),
    "ratio": (
        limit_range(maxLimitRequestRatio={"cpu": "2"}), pod({"cpu": "1"}, {"cpu": "3"}), "at most 2 times the request",
    ),
    "ratio kept": (limit_range(maxLimitRequestRatio={"cpu": "2"}), pod({"cpu": "1"}, {"cpu": "2"}), None),
    "whole pod": (
        limit_range("Pod", max={"memory": "1Gi"}), pod({}, {"memory": "2Gi"}), "expected at most 1024Mi",
    ),
    "claims do not concern pods": (limit_range("PersistentVolumeClaim", max={"storage": "1Gi"}), pod({"cpu": "1"}), None),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_violation(case: str) -> None:
    each, spec, expected = CASES[case]
    found = violation(with_defaults(spec, [each]), [each])
    assert (found is None) == (expected is None)
    if expected is not None:
        assert expected in str(found) and str(found).startswith("LimitRange r: ")


def test_sum_of_containers_is_limited_for_pods() -> None:
    each = limit_range("Pod", max={"memory": "3Gi"})
    spec = {"containers": [*pod({}, {"memory": "2Gi"})["containers"], *pod({}, {"memory": "2Gi"})["containers"]]}
    assert violation(spec, [each]) is not None


def test_init_containers_are_limited_too() -> None:
    each = limit_range(min={"memory": "1Gi"})
    found = violation({"initContainers": pod({"memory": "256Mi"})["containers"], "containers": []}, [each])
    assert found is not None and found.resource == "memory"


def test_first_range_gives_the_default() -> None:
    ranges = [limit_range(default={"cpu": "1"}), limit_range(default={"cpu": "2", "memory": "1Gi"})]
    [container] = with_defaults(pod({"cpu": "1"}), ranges)["containers"]
    assert container["resources"]["limits"] == {"cpu": "1", "memory": "1Gi"}
    assert bounds(ranges).limit["cpu"] == 1000


def test_smallest_default_limit_counts_whatever_the_names_of_the_ranges() -> None:
    """Fixed bug: LimitRanger applied the default of the second range, which was below the requests of the pods."""
    ranges = [limit_range(default={"cpu": "2", "memory": "1Gi"}), limit_range(default={"cpu": "900m"})]
    [container] = with_defaults(pod({"cpu": "1"}), ranges)["containers"]
    assert container["resources"]["limits"] == {"cpu": "900m", "memory": "1Gi"}
    assert bounds(ranges).limit["cpu"] == 900
    found = violation(with_defaults(pod({"cpu": "1"}), ranges), [replace(ranges[0], name="a"), ranges[1]])
    assert found is not None and (found.range, found.resource) == ("r", "cpu")


def test_bounds_are_the_strictest() -> None:
    found = bounds(
        [limit_range(min={"cpu": "1"}, max={"cpu": "8"}), limit_range("Pod", min={"cpu": "2"}, max={"cpu": "4"})]
    )
    assert found.least == {"cpu": 2000} and found.most == {"cpu": 4000}


def test_claims() -> None:
    each = limit_range("PersistentVolumeClaim", min={"storage": "1Gi"}, max={"storage": "2Gi"})
    assert claim_violation("2Gi", [each]) is None
    assert claim_violation("3Gi", [each]) is not None and claim_violation("1Mi", [each]) is not None
