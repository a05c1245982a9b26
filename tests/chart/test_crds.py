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
KEPT = "_env.tpl", "_helpers.tpl", "_validation.tpl", "crds.yaml", "deployment.yaml", "validation.yaml"


@pytest.fixture
def chart(tmp_path: Path) -> Path:
    """The chart without objects other than CRDs and the Deployment."""
    copy = shutil.copytree(CHART, tmp_path / "dljob")
    for template in (copy / "templates").iterdir():
        if template.name not in KEPT:
            template.unlink()
    return copy


def upgraded(chart: Path, *releases: Json, **values: bool) -> set[str]:
    """Install the chart with the first values of ``crds``, and upgrade with the others. Return the CRDs after that.

    ``values``: further values of all releases.
    """
    with (
        helm_api() as (kubeconfig, stored),
        helm_python.Config(
            kubeconfig_content=kubeconfig, namespace="system", storage_driver="memory", qps=1000.0, burst_limit=1000
        ) as helm,
    ):
        first, *others = ({"crds": crds, **values} for crds in releases)
        helm.install(chart, "dljob", first, namespace="system")
        assert set(stored) == {*BOTH, "dljob"}
        try:
            for each in others:
                helm.upgrade(chart, "dljob", each, namespace="system")
        finally:
            left = set(stored) - {"dljob"}
            assert left == BOTH, "jobs are deleted with their CRD"
        return left


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize(
    "releases",
    [({}, {"enabled": False}), ({"keep": False}, {}, {"enabled": False}), ({}, {"enabled": False, "keep": False})],
    ids=["kept", "kept since an upgrade", "kept until now"],
)
def test_crds_that_the_chart_no_longer_has_stay(chart: Path, releases: tuple[Json, ...], single: bool) -> None:
    assert upgraded(chart, *releases, singleNamespaceInstall=single) == BOTH


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("releases", [({"keep": False},), ({"keep": False}, {"keep": False}), ({}, {"keep": False})])
def test_upgrade_that_would_delete_the_crds_is_refused(chart: Path, releases: tuple[Json, ...], single: bool) -> None:
    """Fixed bug: it deleted the CRDs, and all jobs with them, also with ``singleNamespaceInstall``."""
    with pytest.raises(helm_python.HelmError, match=r"crds\.enabled: found false .* crds\.keep true"):
        upgraded(chart, *releases, {"enabled": False}, singleNamespaceInstall=single)


def test_release_of_an_earlier_chart_is_refused_by_its_crds(chart: Path) -> None:
    """Its Deployment does not say that an upgrade may delete the CRDs."""
    deployment = chart / "templates" / "deployment.yaml"
    text = deployment.read_text()
    marked = text.replace("dljob.dev/crds", "dljob.dev/earlier")
    assert marked != text
    deployment.write_text(marked)
    with pytest.raises(helm_python.HelmError, match=r"crds\.enabled: found false .* crds\.keep true"):
        upgraded(chart, {"keep": False}, {"enabled": False})
