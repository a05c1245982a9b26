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
from support.manifests.admission import schema_of
from support.manifests.schema_validation import ALL, assert_valid
from support.spec_cases import CASES, spec_of

Json = dict[str, Any]
SPEC = schema_of("DLJob", "spec")
VERSIONS = (ALL[0], ALL[len(ALL) // 2], ALL[-1])
TEXTS = (
    "a",
    "x-1",
    "10s",
    "1h30m",
    "2Gi",
    "500m",
    "1",
    "Auto",
    "https://a.example/b.npz",
    "pvc://data/a.npz",
    "0" * 64,
    "",
)
POD_PARTS: tuple[Json, ...] = (
    {},
    {"nodeSelector": {"zone": "b"}},
    {"tolerations": [{"operator": "Exists"}]},
    {"containers": [{"name": "trainer", "env": [{"name": "A", "value": "b"}]}, {"name": "b", "image": "b"}]},
)
"""Overrides of a pod spec. Only the API server knows all fields of pods: it rejects a StatefulSet with others."""
VIEWS = (CPUS, MIXED, nodes({"name": "one", "count": 1, "cpu": "300m", "memory": "1Gi"}), ClusterView(()))
BASES = [spec_of(changes) for changes, words in CASES.values() if not words]


def values(schema: Json, depth: int = 0) -> st.SearchStrategy[Any]:
    """Return values of a structural schema, at the ends of its bounds as well as within them."""
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    match schema.get("type"):
        case "boolean":
            return st.booleans()
        case "integer":
            low, high = int(schema.get("minimum", -(2**63))), int(schema.get("maximum", 2**63 - 1))
            return st.integers(low, min(high, low + 8)) | st.sampled_from((low, high))
        case "number":
            low, high = schema.get("minimum", 0.0), schema.get("maximum", 1e300)
            return st.sampled_from((low, high, (low + min(high, low + 1)) / 2))
        case "array":
            return st.lists(values(schema["items"], depth + 1), max_size=2)
        case "object" if "properties" in schema:
            required = {name: values(field, depth + 1) for name, field in schema["properties"].items()}
            needed = {name: required.pop(name) for name in schema.get("required", ())}
            return st.fixed_dictionaries(needed, optional=required)
        case "object" if schema.get("x-kubernetes-preserve-unknown-fields"):
            return st.sampled_from(POD_PARTS)
        case "object":
            return st.dictionaries(
                st.sampled_from(TEXTS[:3]), values(schema.get("additionalProperties", {})), max_size=2
            )
    return st.sampled_from(TEXTS)


@st.composite
def specs(draw: st.DrawFn) -> Json:
    """Return a valid spec in which a few fields were replaced by values of their schemas."""
    spec = dict(draw(st.sampled_from(BASES)))
    for name in draw(st.lists(st.sampled_from(sorted(SPEC["properties"])), max_size=3, unique=True)):
        value = draw(values(SPEC["properties"][name]))
        old = spec.get(name)
        spec[name] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
    return spec


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
