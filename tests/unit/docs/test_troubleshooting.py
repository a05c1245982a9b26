"""Tests that docs/how-to/troubleshooting.md has a remedy for every reason of a condition, and no unknown reason."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from dlcontract import reasons
from dljob.job.plan.authentic import Edit
from dljob.job.waiting import QUOTA_EXCEEDED
from dljob.kueue import Stage

ROOT = Path(__file__).resolve().parents[3]
SOURCES = [*ROOT.glob("operator/dljob/**/*.py"), *ROOT.glob("trainer-image/dltrain/**/*.py")]
_REASON = re.compile(r"[A-Z][a-z]+(?:[A-Z][a-z]+)*")
# Name of a call → position of its argument that is a reason.
_CALLS = {"Verdict": 2, "_no": 0, "Infeasible": 0, "_of_rank": 2, "Problem": 0}


def reasons_in(source: str) -> Iterator[str]:
    """Yield the reasons in calls, in ``reason=`` and in the tables of exceptions (dltrain.protocol.errors)."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            given = [keyword.value for keyword in node.keywords if keyword.arg == "reason"]
            if name in _CALLS and len(node.args) > _CALLS[name]:
                given.append(node.args[_CALLS[name]])
            yield from (text for part in given for text in _texts(part))
        elif isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "").startswith("_REASONS") and node.value:
            yield from _texts(node.value)


def _texts(node: ast.AST) -> list[str]:
    parts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    parts += [getattr(reasons, part.attr) for part in ast.walk(node) if _of_contract(part)]  # type: ignore[attr-defined]
    return [part for part in parts if _REASON.fullmatch(part)]


def _of_contract(node: ast.AST) -> bool:
    """Return True for ``reasons.NAME``, a reason defined in dlcontract."""
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "reasons"


@cache
def in_code() -> set[str]:
    named = {QUOTA_EXCEEDED, *(each.value for each in (*Stage, *Edit))}
    return named.union(*(reasons_in(path.read_text()) for path in SOURCES))


def documented() -> set[str]:
    words: list[str] = re.findall(r"`([A-Z]\w+)`", (ROOT / "docs/how-to/troubleshooting.md").read_text())
    return {word for word in words if _REASON.fullmatch(word)} - {"WaitForFirstConsumer"}


def test_reasons_are_found_in_code() -> None:
    assert set(reasons_in('Verdict("Planned", TRUE, "A" if x else "BadThing", "t")\nf(reason="OtherThing")')) == {
        "BadThing", "OtherThing",
    }  # fmt: skip
    assert len(in_code()) > 40


def test_every_reason_is_documented() -> None:
    assert in_code() - documented() == set()


def test_every_documented_reason_exists() -> None:
    assert documented() - in_code() == set()
