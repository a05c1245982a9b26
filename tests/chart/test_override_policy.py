"""Tests of the admission policies that the chart installs."""

from typing import Any

import pytest

from dljob.api.overrides import OverridePolicy, admission_policy
from support.manifests.helm_chart import one, render

Json = dict[str, Any]


@pytest.mark.parametrize("policy", OverridePolicy)
@pytest.mark.parametrize("values", [{}, {"singleNamespaceInstall": True}])
def test_every_value_of_overrides_has_its_policy(policy: OverridePolicy, values: Json) -> None:
    """Fixed bug: only ``safe`` had one, so that others let everybody store the annotation for a later ``safe``."""
    objects = render({**values, "overrides": str(policy)}, namespace="here")
    installed, binding = one(objects, "ValidatingAdmissionPolicy"), one(objects, "ValidatingAdmissionPolicyBinding")
    assert installed["spec"] == admission_policy(policy)
    assert binding["spec"]["policyName"] == installed["metadata"]["name"]
    assert binding["spec"]["validationActions"] == ["Deny"]
    selected = binding["spec"].get("matchResources")
    assert (selected is None) == (not values)
    if selected is not None:
        [expression] = selected["namespaceSelector"]["matchExpressions"]
        assert expression["values"] == ["here"]
