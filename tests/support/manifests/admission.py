"""Admission of a custom resource as by an API server: unknown fields, defaults, schema and rules.

It runs in memory on a CustomResourceDefinition. A CEL library evaluates the rules.
"""

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any

import jsonschema
from celpy import CompiledRunner, Environment, evaluation
from celpy.adapter import json_to_cel
from celpy.celtypes import BoolType, DoubleType, IntType, StringType
from celpy.evaluation import CELEvalError

import support.manifests
from dljob.api import crd

Json = dict[str, Any]


@dataclass(frozen=True)
class Broken:
    """A broken rule: its place in the object and its message."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


FORMATS = jsonschema.FormatChecker(formats=())
"""Formats that the API server checks. It ignores all others in the CRDs."""


@FORMATS.checks("date-time")  # type: ignore[untyped-decorator]
def _is_moment(value: object) -> bool:
    """Return True for a date and time with a time zone (RFC 3339)."""
    if not isinstance(value, str) or not re.match(
        r"\d{4}-\d{2}-\d{2}[Tt]\d{2}:\d{2}:\d{2}.*([Zz]|[+-]\d{2}:\d{2})$", value
    ):
        return not isinstance(value, str)
    try:
        datetime.fromisoformat(value.upper())
    except ValueError:
        return False
    return True


def closed(schema: Json) -> Json:
    """Return the structural schema as JSON Schema that rejects unknown fields, like strict field validation."""
    out = {k: v for k, v in schema.items() if not k.startswith("x-") and k != "default"}
    for bound in ("Minimum", "Maximum"):
        if out.pop(f"exclusive{bound}", False):
            out[f"exclusive{bound}"] = out.pop(bound.lower())
    if "items" in out:
        out["items"] = closed(out["items"])
    if isinstance(out.get("additionalProperties"), dict):
        out["additionalProperties"] = closed(out["additionalProperties"])
    if "properties" in out:
        out["properties"] = {name: closed(field) for name, field in out["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            out["additionalProperties"] = False
    return out


def defaulted(schema: Json, value: Any) -> Any:
    """Return ``value`` with the schema's defaults, from outer to inner fields."""
    if isinstance(value, list):
        return [defaulted(schema["items"], item) for item in value] if "items" in schema else value
    if not isinstance(value, dict) or "properties" not in schema:
        return value
    filled = dict(value)
    for name, field in schema["properties"].items():
        if name not in filled and "default" in field:
            filled[name] = copy.deepcopy(field["default"])
        if name in filled:
            filled[name] = defaulted(field, filled[name])
    return filled


vars(evaluation)["Result"] = object
"""celpy makes a union of this alias each time that it reads a variable, which took half of the time of an evaluation."""
vars(evaluation)["support"] = support  # The code of a rule finds ``_formatted`` by its full name.


def _equal(one: Any, other: Any) -> Any:
    """Return the result of ``==`` as an API server does: values of different types differ. celpy raises an error."""
    for value in (one, other):
        if isinstance(value, CELEvalError):
            return value
    return BoolType(_same(one, other))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(value, other[name]) for name, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if all(isinstance(value, IntType | DoubleType) for value in (one, other)):
        return float(one) == float(other)
    return (isinstance(one, type(other)) or isinstance(other, type(one))) and bool(one == other)


vars(evaluation)["bool_eq"] = _equal
_HAS = re.compile(
    r"(?<=lambda activation: )not isinstance\(celpy\.evaluation\.result\(activation, \w+\), CELEvalError\)"
)


@cache
def _program(rule: str) -> Any:
    """Return the rule as Python code, which takes a third of the time of celpy's interpreter."""
    environment = Environment(runner_class=CompiledRunner)
    program: Any = environment.program(environment.compile(rule), functions={"format": _formatted})
    # In celpy 0.5.0, the code of ``has`` returns a bool of Python, which the operators of CEL refuse.
    source = _HAS.sub(lambda found: f"celpy.celtypes.BoolType({found[0]})", program.tp.source_text)
    program.tp.executable_code = compile(source, "<CEL>", "exec")
    return program


def _formatted(text: Any, values: Any) -> StringType:
    """Replace each ``%s``, as ``format`` of Kubernetes' strings library does, which celpy lacks."""
    shown = (f"{value:g}" if isinstance(value, float) else str(value) for value in values)
    return StringType(str(text) % tuple(shown))


def evaluated(expression: str, value: Any, old: Any = None) -> Any:
    """Evaluate CEL for ``self = value`` and ``oldSelf = old``. Raise AssertionError if that fails."""
    return _evaluated(expression, {"self": json_to_cel(value)} | ({} if old is None else {"oldSelf": json_to_cel(old)}))


def _evaluated(expression: str, given: Json) -> Any:
    try:
        return _program(expression).evaluate(given)
    except CELEvalError as error:
        raise AssertionError(f"CEL {expression!r} cannot be evaluated for {given!r}: {error}") from error


def holds(rule: str, value: Any, old: Any = None) -> bool:
    """Return True if a CEL rule holds for ``self = value``. Raise AssertionError if its evaluation fails.

    ``old``: value before an update. Without it, rules about changes hold, as an API server does not evaluate them.
    """
    return (old is None and "oldSelf" in rule) or bool(evaluated(rule, value, old))


def change_refusals(old: Json, new: Json) -> list[str]:
    """Return the messages with which an API server refuses to replace the DLJob ``old`` by ``new``.

    The objects are as stored: with defaults.
    """
    given = {"self": json_to_cel(new), "oldSelf": json_to_cel(old)}
    return [
        str(_evaluated(rule["messageExpression"], given)) if "messageExpression" in rule else rule["message"]
        for rule in schema_of("DLJob")["x-kubernetes-validations"]
        if not _evaluated(rule["rule"], given)
    ]


def broken_rules(schema: Json, value: Any, path: str = "", words: str = "") -> Iterator[Broken]:
    """Yield every rule of the schema that ``value`` breaks, and the second of two items of a map list with equal keys.

    ``words``: evaluate only the rules whose messages contain them.
    """
    if rules := schema.get("x-kubernetes-validations"):
        given = {"self": json_to_cel(_typed(schema, value))}
        for rule in rules:
            if words in rule["message"] and "oldSelf" not in rule["rule"] and not _evaluated(rule["rule"], given):
                yield Broken(path, rule["message"])
    if isinstance(value, dict):
        for name, field in schema.get("properties", {}).items():
            if name in value:
                yield from broken_rules(field, value[name], f"{path}.{name}".lstrip("."), words)
    if isinstance(value, list):
        keys = schema.get("x-kubernetes-list-map-keys", ())
        names = [{key: item.get(key) for key in keys} for item in value] if keys else []
        for index, name in enumerate(names):
            if name in names[:index]:
                yield Broken(f"{path}[{index}]", f"Duplicate value: {name}")
        for index, item in enumerate(value):
            yield from broken_rules(schema.get("items", {}), item, f"{path}[{index}]", words)


@cache
def _schemas() -> dict[str, Json]:
    return {
        d["spec"]["names"]["kind"]: d["spec"]["versions"][0]["schema"]["openAPIV3Schema"] for d in crd.definitions()
    }


def schema_of(kind: str, part: str | None = None) -> Json:
    """Return the structural schema of a kind, or of its spec or status."""
    root = _schemas()[kind]
    return root["properties"][part] if part else root


def refusals(manifest: Json, *, cel: bool = True) -> list[str]:
    """Return why an API server rejects a manifest, as ``path: message``. The list is empty if it admits the manifest.

    With ``cel=False``, the server does not support rules.
    """
    root = schema_of(manifest["kind"])
    allowed = {**closed(root)}
    allowed["properties"] = {**allowed["properties"], "metadata": {"type": "object"}}
    errors = jsonschema.Draft202012Validator(allowed, format_checker=FORMATS).iter_errors(manifest)
    found = [f"{error.json_path.removeprefix('$.')}: {error.message}" for error in errors]
    if not found and cel:
        found = [str(broken) for broken in broken_rules(root, defaulted(root, manifest))]
    return found


def _typed(schema: Json, value: Any) -> Any:
    """Return the value with whole numbers as floats where the schema says ``number``, as rules of an API server see it."""
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        return {name: _typed(properties.get(name, {}), item) for name, item in value.items()}
    if isinstance(value, list):
        return [_typed(schema.get("items", {}), item) for item in value]
    whole = isinstance(value, int) and not isinstance(value, bool)
    return float(value) if whole and schema.get("type") == "number" else value
