"""Read manifests and cluster files from disk or standard input."""

import re
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from dljob.client.errors import BadInputError
from dljob.cluster import ClusterView, cluster_view
from dljob.job.plan.recommendation import Job, checked_profiles, parse_job

MAX_NBYTES = 16 * 2**20


class _Loader(yaml.SafeLoader):
    """Reads YAML as kubectl does, where PyYAML differs.

    A mapping with the same key twice is refused; PyYAML would use the last value. 1e-3 is a number, for PyYAML a text.
    1.0 is an integer, because JSON does not tell them apart.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set[str]()
        for key, _ in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge" else None
            if name is not None and name in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"found the key {name!r} twice; expected it once", key.start_mark
                )
            seen |= {name} if name is not None else set()
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found

    def number(self, node: yaml.ScalarNode) -> float:
        found: float = self.construct_yaml_float(node)
        return int(found) if found.is_integer() and abs(found) < 2**53 else found


_FLOAT = "tag:yaml.org,2002:float"
_Loader.add_implicit_resolver(
    _FLOAT, re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"), [*"-+.0123456789"]
)
_Loader.add_constructor(_FLOAT, _Loader.number)


def documents(path: str) -> list[Any]:
    """Return the decoded YAML or JSON documents of a file, or of standard input if ``path`` is ``-``.

    Empty documents are left out. Raise BadInputError if the file cannot be read, is too large or is not valid YAML.
    """
    if not path:
        raise BadInputError("found an empty path; expected that of a file, or - for standard input")
    try:
        if path == "-":
            text = sys.stdin.read(MAX_NBYTES + 1)
        else:
            with Path(path).open(encoding="utf-8") as file:
                text = file.read(MAX_NBYTES + 1)
    except UnicodeDecodeError as error:
        raise BadInputError(
            f"{path}: found the byte 0x{error.object[error.start]:02x} at position {error.start}; expected text in "
            "UTF-8. Save the file as UTF-8"
        ) from None
    except OSError as error:
        raise BadInputError(f"{path}: {error.strerror or error}") from None
    if len(text) > MAX_NBYTES:
        raise BadInputError(
            f"{path}: found more than {MAX_NBYTES >> 20} MiB; expected a manifest of at most this size. Check the path"
        )
    try:
        return [document for document in yaml.load_all(text, _Loader) if document is not None]
    except (yaml.YAMLError, RecursionError) as error:
        raise BadInputError(f"{path}: found invalid YAML: {' '.join(str(error).split())[:300]}") from None


def manifests(path: str) -> list[Any]:
    """Return the Kubernetes objects in a file of YAML or JSON documents.

    An object of kind List is replaced by its items. ``path``: path of the file, or ``-`` for standard input. Raise
    BadInputError if there are no documents.
    """
    found: list[Any] = []
    for document in documents(path):
        items = document.get("items") if isinstance(document, dict) and document.get("kind") == "List" else None
        found += items if isinstance(items, list) else [document]
    if not found:
        raise BadInputError(f"{path}: found no YAML document; expected the manifest of a DLJob")
    return found


def jobs(path: str) -> list[Job]:
    """Return all DLJobs of a file. Raise BadInputError if there is none, if one is invalid, or if two have one name."""
    found = manifests(path)
    wanted = [m for m in found if not isinstance(m, dict) or m.get("kind") == "DLJob"]
    if not wanted:
        kinds = ", ".join(sorted({str(each.get("kind", "none")) for each in found}))
        raise BadInputError(
            f"{path}: found no DLJob among its documents, but the kind {kinds:.200}; expected at least one"
        )
    try:
        parsed = [parse_job(manifest) for manifest in wanted]
    except ValueError as error:
        raise BadInputError(f"{path}: {error}") from None
    repeated = [name for name, count in Counter((job.namespace, job.name) for job in parsed).items() if count > 1]
    if repeated:
        namespace, name = repeated[0]
        where = f" in namespace {namespace}" if namespace else ""
        raise BadInputError(
            f"{path}: metadata.name: found two DLJobs named {name}{where}; expected different names, because the "
            "second would replace the first. Rename or remove one of them"
        )
    return parsed


def profiles(path: str) -> tuple[Mapping[str, Any], ...]:
    """Return the DLProfile objects of a file, such as ``kubectl get dlprofiles -o yaml`` writes it.

    Raise BadInputError if the file has no DLProfile, or if one is invalid.
    """
    found = [m for m in manifests(path) if isinstance(m, dict) and m.get("kind") == "DLProfile"]
    if not found:
        raise BadInputError(
            f"{path}: found no DLProfile among its documents; expected at least one. Create the file with kubectl get "
            "dlprofiles -o yaml"
        )
    try:
        return checked_profiles(found)
    except ValueError as error:
        raise BadInputError(f"{path}: {error}") from None


def cluster(path: str) -> ClusterView:
    """Return the cluster of the file ``path``, whose key ``nodes`` lists groups of equal nodes.

    Raise BadInputError if the file is invalid.
    """
    found = documents(path)
    if len(found) != 1:
        raise BadInputError(
            f"{path}: found {len(found)} documents; expected one that describes the cluster, with the key nodes"
        )
    try:
        return cluster_view(found[0])
    except ValueError as error:
        raise BadInputError(f"{path}: {error}") from None
