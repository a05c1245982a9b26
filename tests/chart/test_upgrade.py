"""Tests of upgrades from the last release with Helm: values, and fields that Kubernetes does not let change."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml

import helm_engine
from support.cluster.release import last_release
from support.manifests.helm_chart import CHART, WAYS, of_kind

Json = dict[str, Any]
FIXED: dict[str, tuple[str, ...]] = {
    "Deployment": ("spec", "selector"),
    "RoleBinding": ("roleRef",),
    "ClusterRoleBinding": ("roleRef",),
    "PriorityClass": ("value",),
}
"""Kind → path of the field that Kubernetes does not let change."""
KEPT_WAYS = ("defaults", "monitored", "highly available", "one namespace", "two namespaces", "brought along")
"""Installations whose values the last release has, too."""


@pytest.fixture(scope="module")
def last(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chart of the last release."""
    return last_release(tmp_path_factory) / "charts/dljob"


def objects(chart: Path, values: Json) -> list[Json]:
    texts = helm_engine.render(chart, "dljob", "dljob-system", values)
    manifests = [text for path, text in sorted(texts.items()) if not path.endswith("NOTES.txt")]
    return [document for text in manifests for document in yaml.safe_load_all(text) if document]


def fixed(found: list[Json]) -> dict[tuple[str, str, str], Any]:
    """Return (kind, namespace, name) → value of the field that cannot change."""
    values = {}
    for kind, path in FIXED.items():
        for each in of_kind(found, kind):
            value = each
            for name in path:
                value = value[name]
            values[kind, each["metadata"].get("namespace", ""), each["metadata"]["name"]] = value
    return values


def leaves(values: Json, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in values.items():
        yield from leaves(value, (*path, name)) if isinstance(value, dict) and value else ((*path, name),)


def without(values: Json, path: tuple[str, ...]) -> Json:
    name, *rest = path
    if not rest:
        return {key: value for key, value in values.items() if key != name}
    return {**values, name: without(values[name], tuple(rest))}


def with_defaults(values: Json, folder: Path) -> Path:
    """Return a copy of the chart with other defaults, as Helm takes them with ``--reuse-values``."""
    chart = shutil.copytree(CHART, folder / "dljob")
    (chart / "values.yaml").write_text(yaml.safe_dump(values))
    return chart


@pytest.mark.parametrize("way", KEPT_WAYS)
def test_upgrade_changes_no_field_that_kubernetes_fixes(last: Path, way: str) -> None:
    old, new = fixed(objects(last, WAYS[way])), fixed(objects(CHART, WAYS[way]))
    assert {key: (old[key], new[key]) for key in old.keys() & new.keys() if old[key] != new[key]} == {}
    assert ("Deployment", "dljob-system", "dljob") in old.keys() & new.keys() or way == "brought along"


def test_values_of_the_last_release_are_valid(last: Path) -> None:
    """Administrators copy values.yaml, and change some of it."""
    assert objects(CHART, yaml.safe_load((last / "values.yaml").read_text()))


def test_reused_values_are_refused_with_a_remedy(last: Path, tmp_path: Path) -> None:
    """Fixed bug: Helm said ``nil pointer evaluating interface {}.enabled``."""
    chart = with_defaults(yaml.safe_load((last / "values.yaml").read_text()), tmp_path)
    with pytest.raises(helm_python.HelmError, match=r"found no value; expected one.*--reset-then-reuse-values"):
        objects(chart, {})


def test_each_new_value_is_noticed_if_it_is_missing(last: Path, tmp_path: Path) -> None:
    now, before = (yaml.safe_load((chart / "values.yaml").read_text()) for chart in (CHART, last))
    known = set(leaves(before))
    new = {path for path in leaves(now) if path not in known and path[0] != "jobDefaults"}
    new = {path[:1] if path[0] not in before else path for path in new}
    assert new
    for path in sorted(new):
        chart = with_defaults(without(now, path), tmp_path / "-".join(path))
        with pytest.raises(helm_python.HelmError, match=rf"{'.'.join(path)}: found no value"):
            objects(chart, {})


def test_charts_without_changes_render_the_same_objects() -> None:
    """Argo CD and Flux render the chart again and again, and would apply every difference."""
    assert objects(CHART, WAYS["monitored"]) == objects(CHART, WAYS["monitored"])
