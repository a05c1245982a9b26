"""Strict validation of manifests against the schemas of every supported Kubernetes version.

``assert_valid`` rejects unknown fields and wrong types, as an API
server with field validation would, without a server.
"""

import json
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import jsonschema
from kubernetes_validate import utils

Json = dict[str, Any]
OLDEST = (1, 30)
"""The oldest release that dljob supports."""

ALL: tuple[str, ...] = tuple(
    dict.fromkeys(  # It lists each version once for each folder with schemas.
        version for version in utils.all_versions() if tuple(int(part) for part in version.split(".")[:2]) >= OLDEST
    )
)
ROOT = ""
"""Name of the schema of the kind itself among those to which it refers."""


@cache
def _definitions(version: str) -> Json:
    found: Json = utils.schema_contents(f"kubernetes-json-schema/v{version}-local-strict/_definitions.json", version)
    definitions: Json = found["$defs"]
    return definitions


def _constraints(schema: Any, names: set[str]) -> Any:
    """Return a schema without annotations such as descriptions. Add the definitions to which it refers to ``names``."""
    if isinstance(schema, list):
        return [_constraints(item, names) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        names.add(name)
        return {"$ref": name}
    return {
        key: {name: _constraints(field, names) for name, field in value.items()}
        if key == "properties"
        else _constraints(value, names)
        for key, value in schema.items()
        if key not in ("description", "$schema", "$id") and not key.startswith("x-kubernetes-")
    }


@cache
def _schemas(version: str, api_version: str, kind: str) -> str:
    """Return as JSON the schema of a kind and those to which it refers. It is the same text where versions agree."""
    group, _, tail = api_version.rpartition("/")
    stem = "-".join(part for part in (kind.lower(), group.split(".")[0], tail) if part)
    try:
        root = utils.schema_contents(f"kubernetes-json-schema/v{version}-local-strict/{stem}.json", version)
    except FileNotFoundError:
        raise AssertionError(f"Kubernetes {version} has no {api_version} {kind}") from None
    names = set[str]()
    found = {ROOT: _constraints(root, names)}
    while missing := names - found.keys():
        found |= {name: _constraints(_definitions(version)[name], names) for name in missing}
    return json.dumps(found, sort_keys=True)


@cache
def _validator(schemas: str) -> Any:
    """Return a validator. Its schemas contain each other in the place of references, which takes half of the time."""
    definitions: dict[str, Json] = json.loads(schemas)
    resolved: dict[str, Json] = {name: {} for name in definitions}

    def without_references(schema: Any) -> Any:
        if isinstance(schema, list):
            return [without_references(item) for item in schema]
        if not isinstance(schema, dict):
            return schema
        if isinstance(name := schema.get("$ref"), str):
            return resolved[name]
        return {key: without_references(value) for key, value in schema.items()}

    for name, definition in definitions.items():
        resolved[name] |= without_references(definition)
    return jsonschema.Draft202012Validator(resolved[ROOT])


_problems_of = dict[tuple[str, str], list[str]]()
"""Errors of the objects that were validated: many tests render the same ones."""


def problems(manifest: Mapping[str, Any], version: str) -> list[str]:
    """Return the errors of an object in Kubernetes ``version`` as ``path: message``, or an empty list if it is valid."""
    schemas = _schemas(version, manifest["apiVersion"], manifest["kind"])
    key = schemas, repr(manifest)
    if key not in _problems_of:
        errors = _validator(schemas).iter_errors(manifest)
        _problems_of[key] = [f"{error.json_path}: {error.message}" for error in errors]
    return _problems_of[key]


def assert_valid(manifest: Mapping[str, Any], versions: Iterable[str] = ALL) -> None:
    """Assert that an object is valid, with no unknown field, for every version of Kubernetes in ``versions``.

    Raise AssertionError with object, version, field and error. A kind that is missing in a version is an error too.
    """
    name = f"{manifest['kind']}/{manifest.get('metadata', {}).get('name', '?')}"
    for version in versions:
        if found := problems(manifest, version):
            raise AssertionError(f"{name} is not valid for Kubernetes {version}:\n  " + "\n  ".join(found))
