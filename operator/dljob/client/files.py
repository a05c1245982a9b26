"""Read manifests and cluster files from disk or standard input."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from dljob.client.errors import BadInputError
from dljob.cluster import ClusterView, cluster_view
from dljob.job.plan.recommendation import Job, checked_profiles, parse_job

MAX_NBYTES = 16 * 2**20


def documents(path: str) -> list[Any]:
    """Return the decoded YAML or JSON documents of a file, or of standard input if ``path`` is ``-``.

    Empty documents are left out. Raise BadInputError if the file cannot be read, is too large or is not valid YAML.
    """
    try:
        if path == "-":
            text = sys.stdin.read(MAX_NBYTES + 1)
        else:
            with Path(path).open(encoding="utf-8") as file:
                text = file.read(MAX_NBYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise BadInputError(f"{path}: {reason}") from None
    if len(text) > MAX_NBYTES:
        raise BadInputError(
            f"{path}: found more than {MAX_NBYTES >> 20} MiB; expected a manifest of at most this size. Check the path"
        )
    try:
        return [document for document in yaml.safe_load_all(text) if document is not None]
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
    """Return all DLJobs of a file. Raise BadInputError if there is none, or if one is invalid."""
    wanted = [m for m in manifests(path) if not isinstance(m, dict) or m.get("kind") == "DLJob"]
    if not wanted:
        raise BadInputError(f"{path}: found no DLJob among its documents; expected at least one")
    try:
        return [parse_job(manifest) for manifest in wanted]
    except ValueError as error:
        raise BadInputError(f"{path}: {error}") from None


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
