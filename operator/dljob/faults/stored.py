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
"""Maximum length of one node's entry in characters. Longer entries, which the operator never writes, are ignored."""
_LISTS = ("faults", "left_out")
_NAME: Any = {"__all__": {"node"}}


def data(ledger: Ledger) -> dict[str, str]:
    """Return the data of the ConfigMap that stores the ledger: name of a node → its record as JSON.

    To save space, the JSON does not repeat the name of the node. ``parse`` is the inverse function.
    """
    names = dict.fromkeys(_LISTS, _NAME)
    return {
        node: record.model_dump_json(exclude=names, exclude_defaults=True) for node, record in sorted(ledger.items())
    }


def parse(stored: Mapping[str, str]) -> Ledger:
    """Return the ledger from ``stored``, the data of its ConfigMap. Entries that do not parse are left out."""
    found: dict[str, NodeRecord] = {}
    for node, text in stored.items():
        try:
            found[node] = NodeRecord.model_validate(_named(node, text))
        except (ValidationError, ValueError, TypeError, RecursionError):
            continue
    return found


def _named(node: str, text: str) -> Any:
    """Decode ``text``, the stored entry of a node, and add the node's name, which the stored form omits.

    Each of the node's faults, and each period in which it was left out, gets the name. Raise ValueError if the text is
    too long or is not JSON, and TypeError if the JSON has another form.
    """
    if len(text) > MAX_NBYTES:
        raise ValueError(f"found {len(text)} characters; expected at most {MAX_NBYTES}")
    document = json.loads(text)
    return {**document, **{name: [{**item, "node": node} for item in document.get(name, ())] for name in _LISTS}}
