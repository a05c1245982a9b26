"""List each module of the three distributions with the first sentence of its docstring, to find a place in the code."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DISTRIBUTIONS = {
    "operator/contract/dlcontract": "shared by operator and trainer",
    "operator/dljob": "operator, planner and command line",
    "trainer-image/dltrain": "agent, ranks and library for training scripts",
}
_NO_MODULES = {"templates", "__pycache__"}
"""Names of folders that hold no modules of the distribution, such as the scripts that ``dljob suggest`` writes."""


def page() -> str:
    """Return docs/reference/modules.md."""
    lines = ["<!-- made by hack/generate from the docstrings of modules; change those, then run it again. -->"]
    lines += ["# Modules", ""]
    lines += [
        "This page is for engineers who look for the place of something in the code: search it for a word. It lists"
    ]
    lines += [
        "each module with the first sentence of its docstring. [Architecture](../explanation/architecture.md) shows"
    ]
    lines += ["how the packages work together."]
    for top, what in DISTRIBUTIONS.items():
        lines += ["", f"## `{Path(top).name}`: {what}", "", f"Paths are relative to `{top}`.", ""]
        lines += ["| Module | What it does |", "|---|---|", *_rows(ROOT / top)]
    return "\n".join(lines) + "\n"


def _rows(top: Path) -> Iterator[str]:
    for path in sorted(top.rglob("*.py"), key=lambda path: (path.parent, path.name)):
        inner = path.relative_to(top)
        if _NO_MODULES & set(inner.parts) or path.name == "__main__.py":
            continue
        text = ast.get_docstring(ast.parse(path.read_text()))
        if text and (path.name != "__init__.py" or inner.parent.parts):
            yield f"| `{inner.parent if path.name == '__init__.py' else inner}` | {_first_sentence(text)} |"


def _first_sentence(docstring: str) -> str:
    """Return the first paragraph's first sentence on one line, as Markdown with single back-quotes."""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    sentence = re.split(r"(?<=[.!?]) (?=[A-Z`])", paragraph)[0]
    return re.sub(r"``([^`]*)``", r"`\1`", sentence).replace("|", "\\|")
