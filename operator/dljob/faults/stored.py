"""The stored form of the record of node faults: the data of a ConfigMap, with one key for each node.

Administrators may delete a key to end the record of a node. An entry that somebody edited into an invalid one counts as
deleted.
"""

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from dljob.faults.types import Ledger, NodeRecord

MAX_NBYTES = 64 * 2**10
"""Maximum length of one node's entry. Longer ones, which the operator never writes, are ignored."""
_LISTS = ("faults", "left_out")
_NAME: Any = {"__all__": {"node"}}


def data(ledger: Ledger) -> dict[str, str]:
    """Return the data of the ConfigMap. A node's name is only in the key of its entry."""
    names = dict.fromkeys(_LISTS, _NAME)
    return {
        node: record.model_dump_json(exclude=names, exclude_defaults=True) for node, record in sorted(ledger.items())
    }


def parse(stored: Mapping[str, str]) -> Ledger:
    """Return the record that the data of the ConfigMap contains. Entries that do not parse are left out."""
    found: dict[str, NodeRecord] = {}
    for node, text in stored.items():
        try:
            found[node] = NodeRecord.model_validate(_named(node, text))
        except (ValidationError, ValueError, TypeError, RecursionError):
            continue
    return found


def _named(node: str, text: str) -> Any:
    """Return the decoded entry of a node, with the node's name in each part."""
    if len(text) > MAX_NBYTES:
        raise ValueError(f"found {len(text)} characters; expected at most {MAX_NBYTES}")
    document = json.loads(text)
    return {**document, **{name: [{**item, "node": node} for item in document.get(name, ())] for name in _LISTS}}
