"""Tests that the paths exist on the pages that guide newcomers through the code.

A path may be relative to the repository, to the folder of one of its packages, or to a folder that its line names.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = ("docs/explanation/architecture.md", "CONTRIBUTING.md")
PACKAGES = ("operator/dljob", "operator/contract", "trainer-image/dltrain")
_CODE = re.compile(r"`([^`]+)`")
_PATH = re.compile(r"[\w-]+(\.\w+)?(/[\w.-]+)+/?|[\w-]+/|[\w-]+\.(py|md|json|yaml|txt|toml|mod|sum)")
_DOMAIN = re.compile(r"[\w-]+\.dev/")
"""Labels of Kubernetes look like paths."""


def paths(line: str) -> list[str]:
    """Return the paths in the code on a line. Of a command, only the program counts."""
    words = [code.split()[0] for code in _CODE.findall(line)]
    return [word for word in words if _PATH.fullmatch(word) and not _DOMAIN.match(word)]


def missing(text: str) -> list[str]:
    """Return the paths in the text of a page that name no file and no folder of the repository."""
    found = []
    for line in text.splitlines():
        folders = [ROOT, *(ROOT / package for package in PACKAGES)]
        for path in paths(line):  # a folder may be in another folder of the line
            folders += [folder / path for folder in folders if (folder / path).is_dir()]
        found += [path for path in paths(line) if not any((folder / path).exists() for folder in folders)]
    return found


@pytest.mark.parametrize("page", PAGES)
def test_paths_on_the_page_exist(page: str) -> None:
    assert missing((ROOT / page).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("`operator/dljob/api/crd.py`, `api/crd.py`, `hack/test fast` and `dljob.dev/device`", []),
        ("| `api/` | What may users write? `spec/` has `model.py`, but no `rules.py`. |", ["rules.py"]),
        ("`selection.py` in `comm/`\nand `selection.py`", ["selection.py"]),
        ("`api/spec/compatibility.py`", ["api/spec/compatibility.py"]),
    ],
)
def test_missing_paths_are_found(text: str, expected: list[str]) -> None:
    assert missing(text) == expected
