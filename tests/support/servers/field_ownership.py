"""The ownership of an object's fields by field managers, as the API server records it in ``metadata.managedFields``.

The status is left out, and a list is one field. An object from ``HttpApiServer.put`` has no owners.
"""

from collections.abc import Iterable, Mapping
from typing import Any

Json = dict[str, Any]
Path = tuple[str, ...]


def applied(before: Json, body: Json, manager: str) -> tuple[Json, list[Json]]:
    """Return content and managed fields of the object ``before`` after a server-side apply of ``body`` with force.

    The content is everything that clients own: no status, and of the metadata, only labels, annotations and owners.
    Fields that only the manager's last apply had, and that ``body`` lacks, are removed.
    """
    entries = _entries(before)
    key, wanted = (manager, "Apply"), _values(_content(body))
    others = set[Path]().union(*(paths for other, paths in entries.items() if other != key))
    kept = {
        path: value for path, value in _values(_content(before)).items() if path not in entries.get(key, set()) - others
    }
    for other, paths in entries.items():
        entries[other] = {path for path in paths if path not in wanted or kept.get(path) == wanted[path]}
    return _nested(kept | wanted), _managed({**entries, key: set(wanted)})


def updated(before: Json, after: Json, manager: str) -> list[Json]:
    """Return the managed fields of ``after``, into which an update by ``manager`` has changed the object ``before``.

    A changed field belongs to the manager alone. A manager that only removes fields owns none. An update may also write ``metadata.managedFields`` itself.
    """
    old, new = (_values(_content(each)) for each in (before, after))
    changed = {path for path, value in new.items() if path not in old or old[path] != value}
    entries = {key: paths & new.keys() - changed for key, paths in _entries(after).items()}
    key = (manager, "Update")
    return _managed({**entries, key: entries.get(key, set()) | changed})


def _content(body: Mapping[str, Any]) -> Json:
    found = {name: value for name, value in body.items() if name not in ("apiVersion", "kind", "metadata", "status")}
    meta = body.get("metadata") or {}
    own = {name: meta[name] for name in ("annotations", "labels", "ownerReferences") if name in meta}
    return {**found, "metadata": own} if own else found


def _entries(body: Json) -> dict[tuple[str, str], set[Path]]:
    return {
        (entry["manager"], entry["operation"]): set(_paths(entry["fieldsV1"]))
        for entry in body["metadata"].get("managedFields") or ()
    }


def _managed(entries: Mapping[tuple[str, str], set[Path]]) -> list[Json]:
    found = []
    for (manager, operation), paths in entries.items():
        fields: Json = {}
        for path in paths:
            place = fields
            for name in path:
                place = place.setdefault(f"f:{name}", {})
        if fields:
            found.append({"manager": manager, "operation": operation, "fieldsV1": fields})
    return found


def _paths(fields: Json, above: Path = ()) -> Iterable[Path]:
    for name, below in fields.items():
        path = (*above, name.removeprefix("f:"))
        yield from _paths(below, path) if below else (path,)


def _values(spec: Mapping[str, Any], above: Path = ()) -> dict[Path, Any]:
    """Return path → value of each field that is no object, and of each empty object."""
    found: dict[Path, Any] = {}
    for name, value in spec.items():
        deeper = isinstance(value, Mapping) and value
        found |= _values(value, (*above, name)) if deeper else {(*above, name): value}
    return found


def _nested(values: Mapping[Path, Any]) -> Json:
    found: Json = {}
    for path, value in values.items():
        place = found
        for name in path[:-1]:
            place = place.setdefault(name, {})
        place[path[-1]] = value
    return found
