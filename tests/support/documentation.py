"""The pages of the documentation, their blocks of code, and the commands that they show."""

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GUIDES = [
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "charts/dljob/README.md", "examples/programs/README.md")
    ),
    *sorted(path for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "design"),
]
"""The pages that describe the present version. Design notes describe the version of their date."""
_FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`([^`]+)`")


@dataclass(frozen=True)
class Code:
    """A piece of code on a page. ``language`` is empty for a block without one, and ``inline`` for code in a sentence."""

    place: str
    language: str
    text: str


@cache
def blocks() -> tuple[Code, ...]:
    """Return all blocks of code, without their indentation."""
    return tuple(
        Code(_place(path, text, found.start()), found[2], textwrap.dedent(found[3]))
        for path, text in _texts()
        for found in _FENCED.finditer(text)
    )


@cache
def inline() -> tuple[Code, ...]:
    """Return the code in sentences, with line breaks as spaces."""
    return tuple(
        Code(_place(path, text, found.start()), "inline", " ".join(found[1].split()))
        for path, text in _texts(code=False)
        for found in _INLINE.finditer(text)
    )


def commands() -> Iterator[tuple[Code, list[str]]]:
    """Yield the words of each command in blocks and in sentences, with the code that has it. Pipes separate commands."""
    for code in (*blocks(), *inline()):
        if code.language in ("", "console", "inline"):
            lines = re.sub(r"\\\n\s*", "", code.text).splitlines()
            prompted = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
            yield from ((code, words) for line in prompted or lines for words in _commands(line))


def _commands(line: str) -> Iterator[list[str]]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError:  # Output, with an apostrophe.
        return
    command: list[str] = []
    for word in [*words, ";"]:
        if set(word) <= set("|&;()<>"):
            if command:
                yield command
            command = []
        elif command or not re.fullmatch(r"[A-Z_]+=.*", word):
            command.append(word)


def _texts(*, code: bool = True) -> Iterator[tuple[Path, str]]:
    """Yield each page with its text. Without ``code``, its blocks are empty lines, so that line numbers stay."""
    for path in GUIDES:
        text = path.read_text(encoding="utf-8")
        yield path, text if code else _FENCED.sub(lambda each: "\n" * each[0].count("\n"), text)


def _place(path: Path, text: str, at: int) -> str:
    line = text[:at].count("\n") + 1
    return f"{path.relative_to(ROOT)}:{line}"
