"""Generated DLJobs through validation, planning and rendering.

Each accepted job renders objects that pass the strict schemas of three Kubernetes versions, each refused one names a
field, and nothing raises.
"""

import re
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dljob.cluster import ClusterView
from dljob.reconcile import parse_observed, reconcile
from support.builders import CONFIG, CPUS, MIXED, NOW, after, nodes, seen, settled
from support.manifests.generated_specs import specs
from support.manifests.schema_validation import ALL, assert_valid

Json = dict[str, Any]
VERSIONS = (ALL[0], ALL[len(ALL) // 2], ALL[-1])
VIEWS = (CPUS, MIXED, nodes({"name": "one", "count": 1, "cpu": "300m", "memory": "1Gi"}), ClusterView(()))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(specs(), st.sampled_from(VIEWS))
def test_every_job_is_refused_with_a_field_or_renders_valid_objects(spec: Json, view: ClusterView) -> None:
    observed = seen(spec, view)
    parsed = parse_observed(observed)
    desired = reconcile(observed, CONFIG, NOW)
    assert desired.status is not None
    if parsed.refusal is not None:
        assert re.search(r"\bspec\.?\w*", parsed.refusal.message), parsed.refusal.message
        assert desired.objects == ()
        return
    planned = next((c for c in desired.status.conditions if c.type == "Planned"), None)
    assert planned is None or planned.status != "False" or re.match(r"(spec\.)?\w+", planned.message), planned
    for manifest in desired.objects:
        assert_valid(manifest, VERSIONS)
    reconcile(settled(after(observed, desired)), CONFIG, NOW)
