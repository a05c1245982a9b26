"""Print the third-party requirements of dependency groups and distributions of this workspace.

python hack/requirements.py dev bench        # groups of pyproject.toml
python hack/requirements.py 'dljob[operator]'  # a distribution, with extras
"""

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MEMBERS = {"dlcontract": "operator/contract", "dljob": "operator", "dltrain": "trainer-image"}


def requirements(*wanted: str) -> list[str]:
    """Return the requirements of the dependency groups and distributions ``wanted``, sorted, each once.

    If a requirement is a distribution of this repository, its own requirements replace it. Raise KeyError for an
    unknown group or extra.
    """
    groups = _toml(".")["dependency-groups"]
    found: set[str] = set()
    pending: list[Any] = [text for one in wanted for text in groups.get(one, [one])]
    while pending:
        text = pending.pop()
        if isinstance(text, dict):
            pending += groups[text["include-group"]]
            continue
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
    print("\n".join(requirements(*sys.argv[1:] or ["dev"])))
