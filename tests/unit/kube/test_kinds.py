"""Tests of the namespaces in which the operator watches objects, and of the paths of objects."""

import pytest

from dljob.kube.kinds import CONFIG_MAP, NODE, POD, Kind


@pytest.mark.parametrize(
    ("kind", "namespaces", "all_pods", "expected"),
    [
        (CONFIG_MAP, (), False, (None,)),
        (CONFIG_MAP, ("a", "b"), True, ("a", "b")),
        (NODE, ("a",), False, (None,)),
        (POD, ("a", "b"), False, ("a", "b")),
        (POD, ("a", "b"), True, (None,)),
    ],
)
def test_kind_is_watched_in(kind: Kind, namespaces: tuple[str, ...], all_pods: bool, expected: object) -> None:
    assert kind.watched_in(namespaces, all_pods=all_pods) == expected


def test_name_with_a_slash_is_no_other_path() -> None:
    """Regression: ``dljob logs digits/status`` read the status of the job digits."""
    assert CONFIG_MAP.path("a", "digits/status") == "/api/v1/namespaces/a/configmaps/digits%2Fstatus"
