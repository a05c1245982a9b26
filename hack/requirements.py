"""Print what a dependency group of the workspace needs from a package index: ``python hack/requirements.py [GROUP]``.

A distribution of the workspace stands for its own requirements. hack/env calls this with a bare Python.
"""

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MEMBERS = {"dlcontract": "operator/contract", "dljob": "operator", "dltrain": "trainer-image"}


def requirements(group: str) -> list[str]:
    """Return the requirements of ``group``, sorted, each once. Raise KeyError for a group that does not exist."""
    found: set[str] = set()
    pending = list(_toml(".")["dependency-groups"][group])
    while pending:
        text = pending.pop()
        match = re.fullmatch(r"(\w+)(?:\[([\w,]+)\])?(?:==.*)?", text)
        if match is None or match[1] not in MEMBERS:
            found.add(text)
            continue
        project = _toml(MEMBERS[match[1]])["project"]
        pending += project["dependencies"]
        for extra in (match[2] or "").split(","):
            pending += project["optional-dependencies"][extra] if extra else []
    return sorted(found)


def _toml(folder: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1] if len(sys.argv) > 1 else "dev")))
