"""Tests that upgrades do not delete the CRDs, and all jobs with them, by accident."""

import shutil
from pathlib import Path
from typing import Any

import helm_python
import pytest

from support.manifests.helm_chart import CHART
from support.servers.helm_api import helm_api

Json = dict[str, Any]
BOTH = {"dljobs.dljob.dev", "dlprofiles.dljob.dev"}


@pytest.fixture
def chart(tmp_path: Path) -> Path:
    """The chart without objects other than CRDs."""
    copy = shutil.copytree(CHART, tmp_path / "dljob")
    for template in (copy / "templates").iterdir():
        if template.name not in ("_env.tpl", "_helpers.tpl", "_validation.tpl", "crds.yaml", "validation.yaml"):
            template.unlink()
    return copy


def upgraded(chart: Path, *releases: Json) -> set[str]:
    """Install the chart with the first values of ``crds``, and upgrade with the others. Return the CRDs after that."""
    with (
        helm_api() as (kubeconfig, stored),
        helm_python.Config(
            kubeconfig_content=kubeconfig, namespace="system", storage_driver="memory", qps=1000.0, burst_limit=1000
        ) as helm,
    ):
        first, *others = ({"crds": crds} for crds in releases)
        helm.install(chart, "dljob", first, namespace="system")
        assert set(stored) == BOTH
        try:
            for values in others:
                helm.upgrade(chart, "dljob", values, namespace="system")
        finally:
            left = set(stored)
            assert left == BOTH, "jobs are deleted with their CRD"
        return left


@pytest.mark.parametrize(
    "releases",
    [({}, {"enabled": False}), ({"keep": False}, {}, {"enabled": False}), ({}, {"enabled": False, "keep": False})],
    ids=["kept", "kept since an upgrade", "kept until now"],
)
def test_crds_that_the_chart_no_longer_has_stay(chart: Path, releases: tuple[Json, ...]) -> None:
    assert upgraded(chart, *releases) == BOTH


def test_upgrade_that_would_delete_the_crds_is_refused(chart: Path) -> None:
    """Fixed bug: it deleted the CRDs, and all jobs with them."""
    with pytest.raises(helm_python.HelmError, match=r"crds\.enabled: found false .* crds\.keep true"):
        upgraded(chart, {"keep": False}, {"enabled": False})
