"""The names of the fields of a DLJob's spec, to say which known field an unknown one may be meant to be."""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any

from dljob.api.spec.spec import DLJobSpec

MOST = 3
"""Maximum number of fields that are proposed for one name."""
ALIKE = 0.8
"""Smallest similarity of two names (``difflib``, from 0 to 1) with which one may be a typing error of the other."""
SHORTEST = 4
"""Least number of characters of a name that may be a part of another, such as ``batchSize`` of ``globalBatchSize``."""


def similar_fields(path: str) -> tuple[str, ...]:
    """Return the fields of a spec that may be meant by the path of a field that does not exist; empty if none is alike.

    Example: ``spec.nodeSelector`` → ``spec.scheduling.nodeSelector``. Fields with the same name elsewhere in the spec
    come first, then similar ones beside the given one, then similar ones elsewhere. In a path, a number stands for an
    item of a list; fields inside lists and maps are proposed only for a path in the same list.
    """
    *parents, name = path.split(".")
    beside, elsewhere = dict[str, str](), dict[str, list[str]]()
    for known in _fields():
        *above, last = known.split(".")
        if _matches(above, parents):
            beside[last] = ".".join([*parents, last])
        if "*" not in above:
            elsewhere.setdefault(last, []).append(known)
    same = [each for last, paths in elsewhere.items() if last.lower() == name.lower() for each in paths]
    near = [beside[each] for each in _alike(name, beside)]
    far = [each for last in _alike(name, elsewhere) for each in elsewhere[last]]
    return tuple(dict.fromkeys(same or near or far))[:MOST]


def _alike(name: str, names: Mapping[str, object]) -> list[str]:
    """Return those of the ``names`` that resemble one, the most similar first."""
    lower = {each.lower(): each for each in names}
    parts = [each for each in lower if _is_part(name.lower(), each) or _is_part(each, name.lower())]
    return [lower[each] for each in dict.fromkeys([*get_close_matches(name.lower(), lower, MOST, ALIKE), *parts])]


def _is_part(name: str, other: str) -> bool:
    return len(name) >= SHORTEST and (other.startswith(name) or other.endswith(name))


def _matches(known: list[str], given: list[str]) -> bool:
    return len(known) == len(given) and all(a in ("*", b) for a, b in zip(known, given, strict=True))


@cache
def _fields() -> tuple[str, ...]:
    """Return the paths of all fields. ``*`` stands for the index of a list."""
    schema = DLJobSpec.model_json_schema(by_alias=True)
    return tuple(_paths("spec", schema, schema["$defs"]))


def _paths(path: str, schema: Mapping[str, Any], models: Mapping[str, Any]) -> Iterator[str]:
    for form in (schema, *schema.get("anyOf", ()), *schema.get("allOf", ())):
        if "$ref" in form:
            yield from _paths(path, models[form["$ref"].rpartition("/")[2]], models)
        for name, inner in form.get("properties", {}).items():
            yield f"{path}.{name}"
            yield from _paths(f"{path}.{name}", inner, models)
        if isinstance(items := form.get("items"), Mapping):
            yield from _paths(f"{path}.*", items, models)
