"""Rules of Kubernetes about the metadata of an object, apart from its name, which ``crd.JOB_NAME_RULE`` describes.

The API server refuses metadata that breaks them. ``dljob plan`` reads manifests that no API server has seen.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

_DNS_LABEL = re.compile("[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_PREFIX = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_NAME = re.compile("[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_MAX_PREFIX = 253
_EXAMPLE = {"labels": "team: vision", "annotations": 'example.com/owner: "vision"'}


def metadata_error(metadata: Mapping[Any, Any]) -> str | None:
    """Return the first error in namespace, labels and annotations, with the field; None if they are valid."""
    namespace = metadata.get("namespace")
    if namespace not in (None, "") and not (isinstance(namespace, str) and _DNS_LABEL.fullmatch(namespace)):
        return (
            f"metadata.namespace: found {namespace!r:.100}; expected the name of a namespace: at most 63 lower-case "
            "letters, digits and dashes, with a letter or digit at both ends. Correct it, or remove it"
        )
    return _map_error("labels", metadata.get("labels")) or _map_error("annotations", metadata.get("annotations"))


def _map_error(name: str, given: object) -> str | None:
    if given is None:
        return None
    if not isinstance(given, Mapping):
        return (
            f"metadata.{name}: found {given!r:.100}; expected a mapping of names to texts. Write it as "
            f"{{{_EXAMPLE[name]}}}"
        )
    for key, value in given.items():
        if not isinstance(key, str) or not _is_key(key.lower() if name == "annotations" else key):
            return (
                f"metadata.{name}: found the key {key!r:.100}; expected one such as pool or example.com/pool: at most "
                "63 letters, digits, dashes, dots and underscores after an optional DNS name and a slash. Correct it"
            )
        if value is None:  # The API server stores an empty text.
            continue
        if not isinstance(value, str):
            shown = json.dumps(value, default=str)[:100]
            remedy = "Write one text" if isinstance(value, Mapping | list) else f'Put the value in quotes: "{shown}"'
            return f"metadata.{name}.{key}: found {shown}; expected text. {remedy}"
        if name == "labels" and value and not _NAME.fullmatch(value):
            return (
                f"metadata.{name}.{key}: found {value!r:.100}; expected at most 63 letters, digits, dashes, dots and "
                "underscores, with a letter or digit at both ends. Correct it, or use an annotation, which may hold "
                "any text"
            )
    return None


def _is_key(key: str) -> bool:
    """Return True if the key of a label or annotation is valid: a name, or a DNS name, a slash and a name."""
    prefix, slash, name = key.rpartition("/")
    valid_prefix = not slash or (len(prefix) <= _MAX_PREFIX and _PREFIX.fullmatch(prefix) is not None)
    return valid_prefix and _NAME.fullmatch(name) is not None
