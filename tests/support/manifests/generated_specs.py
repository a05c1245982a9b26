"""Generate specs of DLJobs for property tests: valid ones, with fields replaced by values of their schemas."""

from typing import Any

from hypothesis import strategies as st

from support.manifests.admission import schema_of
from support.specs.cases import CASES
from support.specs.small_specs import spec_of

Json = dict[str, Any]
SPEC = schema_of("DLJob", "spec")
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
    integers = (0, 1, 2**33) if schema.get("x-kubernetes-int-or-string") else ()
    return st.sampled_from((*integers, *TEXTS))


@st.composite
def specs(draw: st.DrawFn) -> Json:
    """Return a valid spec in which a few fields were replaced by values of their schemas."""
    spec = dict(draw(st.sampled_from(BASES)))
    for name in draw(st.lists(st.sampled_from(sorted(SPEC["properties"])), max_size=3, unique=True)):
        value = draw(values(SPEC["properties"][name]))
        old = spec.get(name)
        spec[name] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
    return spec
