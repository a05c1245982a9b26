"""Strict validation of manifests against the schemas of every supported Kubernetes version.

``assert_valid`` rejects unknown fields and wrong types, as an API
server with field validation would, without a server.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import jsonschema
from kubernetes_validate import utils
from referencing import Registry, Resource

OLDEST = (1, 30)
"""The oldest release that dljob supports."""

ALL: tuple[str, ...] = tuple(
    version for version in utils.all_versions() if tuple(int(part) for part in version.split(".")[:2]) >= OLDEST
)


@cache
def _registry(version: str) -> Any:
    definitions = utils.schema_contents(f"kubernetes-json-schema/v{version}-local-strict/_definitions.json", version)
    return Resource.from_contents(definitions) @ Registry()


@cache
def _validator(version: str, api_version: str, kind: str) -> Any:
    group, _, tail = api_version.rpartition("/")
    stem = "-".join(part for part in (kind.lower(), group.split(".")[0], tail) if part)
    try:
        schema = utils.schema_contents(f"kubernetes-json-schema/v{version}-local-strict/{stem}.json", version)
    except FileNotFoundError:
        raise AssertionError(f"Kubernetes {version} has no {api_version} {kind}") from None
    return jsonschema.Draft202012Validator(schema, registry=_registry(version))


def problems(manifest: Mapping[str, Any], version: str) -> list[str]:
    """Return the errors of an object in Kubernetes ``version`` as ``path: message``, or an empty list if it is valid."""
    validator = _validator(version, manifest["apiVersion"], manifest["kind"])
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(manifest)]


def assert_valid(manifest: Mapping[str, Any], versions: Iterable[str] = ALL) -> None:
    """Assert that an object is valid, with no unknown field, for every version of Kubernetes in ``versions``.

    Raise AssertionError with object, version, field and error. A kind that is missing in a version is an error too.
    """
    name = f"{manifest['kind']}/{manifest.get('metadata', {}).get('name', '?')}"
    for version in versions:
        if found := problems(manifest, version):
            raise AssertionError(f"{name} is not valid for Kubernetes {version}:\n  " + "\n  ".join(found))
