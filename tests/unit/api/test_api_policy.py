"""Tests of the policy that v1alpha1 changes only additively: named changes, allowed and forbidden."""

import copy
from typing import Any

import pytest

import api_policy
from dljob.api import crd

Json = dict[str, Any]
OLD: Json = {
    "type": "object",
    "required": ["a"],
    "properties": {
        "a": {"type": "integer", "minimum": 1, "maximum": 9, "default": 3, "description": "A."},
        "b": {"type": "string", "enum": ["x", "y"]},
        "c": {"type": "array", "items": {"type": "string", "maxLength": 5}},
        "e": {"type": "object", "x-kubernetes-validations": [{"rule": "!has(self.f) || has(self.g)"}]},
    },
    "x-kubernetes-validations": [{"rule": "self.a > 0 ? true : false"}],
}


def changed(*path: str, **fields: Any) -> Json:
    """Return the schema with other fields at a path. None removes a field."""
    schema = copy.deepcopy(OLD)
    at = schema
    for key in path:
        at = at[key]
    for key, value in fields.items():
        at.pop(key) if value is None else at.update({key: value})
    return schema


ALLOWED = {
    "description": changed("properties", "a", description="Other words."),
    "wider bound": changed("properties", "a", maximum=10, minimum=0),
    "no bound": changed("properties", "a", maximum=None),
    "more values": changed("properties", "b", enum=["x", "y", "z"]),
    "new field": changed("properties", d={"type": "string", "default": "new"}),
    "no longer required": changed(required=[]),
    "new rule about a new field": changed(**{"x-kubernetes-validations": [{"rule": "!has(self.new) || self.a > 1"}]}),
    "new rule about a new value": changed("properties", "b", enum=["x", "y", "z"])
    | {"x-kubernetes-validations": [{"rule": "!(has(self.b) && self.b in ['z']) || (self.a > 1)"}]},
    "former rule with an exemption": changed(
        **{"x-kubernetes-validations": [{"rule": "!has(self.b) || (self.a > 0 ? true : false)"}]}
    ),
    "new rule about what was required": changed(
        required=[], **{"x-kubernetes-validations": [{"rule": "has(self.a) || (has(self.b) && has(self.c))"}]}
    ),
    "rule of a field that moved up": changed(
        **{"x-kubernetes-validations": [{"rule": "!has(self.e) || (!has(self.e.f) || has(self.e.g)) || has(self.b)"}]}
    ),
    "integers beside texts": changed(
        "properties",
        "c",
        "items",
        type=None,
        **{"x-kubernetes-int-or-string": True, "anyOf": [{"type": "integer"}, {"type": "string"}], "minimum": 0},
    ),
    "new rule about changes": changed(**{"x-kubernetes-validations": [{"rule": "self.a >= oldSelf.a"}]}),
}
FORBIDDEN = {
    "removed field": (changed("properties", c=None), ".c: found it removed"),
    "other type": (changed("properties", "a", type="string"), ".a: found type 'string'"),
    "other default": (changed("properties", "a", default=4), ".a: found default 4"),
    "new default": (changed("properties", "b", default="x"), ".b: found default 'x'"),
    "tighter maximum": (changed("properties", "a", maximum=8), ".a: found maximum 8"),
    "tighter minimum": (changed("properties", "a", minimum=2), ".a: found minimum 2"),
    "fewer values": (changed("properties", "b", enum=["x"]), ".b: found enum"),
    "new bound": (changed("properties", "c", maxItems=3), ".c: found maxItems 3"),
    "tighter items": (changed("properties", "c", "items", maxLength=4), ".c[]: found maxLength 4"),
    "integers beside tighter texts": (
        changed("properties", "c", "items", type=None, maxLength=4, **{"x-kubernetes-int-or-string": True}),
        ".c[]: found maxLength 4",
    ),
    "integers in place of texts": (changed("properties", "c", "items", type="integer"), ".c[]: found type 'integer'"),
    "required": (changed(required=["a", "b"]), ".b: found it required"),
    "new rule about a field that may be set": (
        changed(**{"x-kubernetes-validations": [{"rule": "!has(self.a) || self.a > 1"}]}),
        "found the new rule",
    ),
    "new rule about a new field and others": (
        changed(**{"x-kubernetes-validations": [{"rule": "!has(self.new) || true ? self.a > 1 : true"}]}),
        "found the new rule",
    ),
    "new rule about a new value and an old one": (
        changed(**{"x-kubernetes-validations": [{"rule": "!(has(self.b) && self.b in ['y', 'z']) || (self.a > 1)"}]}),
        "found the new rule",
    ),
    "new rule about a new value, in a ternary": (
        changed(**{"x-kubernetes-validations": [{"rule": "!(self.b in ['z']) || true ? self.a > 1 : true"}]}),
        "found the new rule",
    ),
    "new rule about a field without an enumeration": (
        changed(**{"x-kubernetes-validations": [{"rule": "!(has(self.a) && self.a in ['z']) || (self.c == [])"}]}),
        "found the new rule",
    ),
    "former rule in a branch": (
        changed(
            **{"x-kubernetes-validations": [{"rule": "has(self.b) ? false : true || (self.a > 0 ? true : false)"}]}
        ),
        "found the new rule",
    ),
    "new rule about what was optional": (
        changed(**{"x-kubernetes-validations": [{"rule": "has(self.b) || (has(self.a) && has(self.c))"}]}),
        "found the new rule",
    ),
    "new rule about what was required, in a ternary": (
        changed(**{"x-kubernetes-validations": [{"rule": "has(self.a) || true ? has(self.b) : true"}]}),
        "found the new rule",
    ),
    "rule of a field that moved up without its exemption": (
        changed(**{"x-kubernetes-validations": [{"rule": "!has(self.e) || (has(self.e.g))"}]}),
        "found the new rule",
    ),
    "rule of a field that moved up, in a ternary": (
        changed(
            **{
                "x-kubernetes-validations": [
                    {"rule": "!has(self.e) || (!has(self.e.f) || has(self.e.g)) || true ? has(self.b) : true"}
                ]
            }
        ),
        "found the new rule",
    ),
    "new rule": (changed(**{"x-kubernetes-validations": [{"rule": "self.a > 1"}]}), "found the new rule"),
    "new rule about changes and new objects": (
        changed(**{"x-kubernetes-validations": [{"rule": "self.a >= oldSelf.orValue(1)", "optionalOldSelf": True}]}),
        "found the new rule",
    ),
}


@pytest.mark.parametrize("case", ALLOWED)
def test_additive_changes_are_allowed(case: str) -> None:
    assert list(api_policy.breaks(OLD, ALLOWED[case])) == []


@pytest.mark.parametrize("case", FORBIDDEN)
def test_other_changes_are_forbidden(case: str) -> None:
    schema, words = FORBIDDEN[case]
    (found,) = api_policy.breaks(OLD, schema)
    assert words in found


def test_definitions_are_compared() -> None:
    old = crd.job_definition()
    assert list(api_policy.definition_breaks(old, copy.deepcopy(old))) == []
    new = copy.deepcopy(old)
    new["spec"]["versions"][0]["name"] = "v1beta1"
    new["spec"]["scope"] = "Cluster"
    assert len(list(api_policy.definition_breaks(old, new))) == 2


def test_definitions_comply_with_the_last_release() -> None:
    assert api_policy.check() == []
