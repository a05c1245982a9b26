"""A node runs at most one pod of a job, which must not cost the scheduler a comparison with all pods of the cluster."""

from typing import Any

import pytest

from support.builders import DIGITS, rendered, seen


@pytest.mark.parametrize("overridden", [False, True])
def test_no_second_pod_fits_on_a_node_of_the_job(overridden: bool) -> None:
    """An override of the affinity used to replace the rule."""
    override = {"manager": "me", "spec": {"affinity": {"podAntiAffinity": None, "nodeAffinity": None}}}
    spec: dict[str, Any] = {**DIGITS, **({"podTemplateOverrides": [override]} if overridden else {})}
    [found] = [each for each in rendered(seen(spec)) if each["kind"] == "StatefulSet"]
    template = found["spec"]["template"]
    assert "podAntiAffinity" not in (template["spec"].get("affinity") or {})
    [rule] = template["spec"]["topologySpreadConstraints"]
    assert rule["whenUnsatisfiable"] == "DoNotSchedule" and rule["topologyKey"] == "kubernetes.io/hostname"
    # With fewer nodes than minDomains, the smallest count is 0: one pod on a node is the maximum.
    assert rule["maxSkew"] == 1 and rule["minDomains"] == 2**31 - 1
    assert rule["labelSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
