"""Tests of the layout: at most 12 modules in a folder, and at most 400 lines in a module."""

from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
MAX_MODULES, MAX_LINES = 12, 400
MODULES = [
    path
    for folder in ("operator", "trainer-image", "tests", "benchmarks", "hack", "examples")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if not {"build", "node_modules"} & set(path.relative_to(ROOT).parts)
    and not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
]


def test_no_folder_has_too_many_modules() -> None:
    assert len(MODULES) > 1000
    found = Counter(str(path.parent.relative_to(ROOT)) for path in MODULES if path.name != "__init__.py")
    large = {folder: count for folder, count in found.items() if count > MAX_MODULES}
    assert not large, (
        f"found {large} modules; expected at most {MAX_MODULES} in a folder. Make a package of some of them"
    )


def test_no_module_is_too_long() -> None:
    lines = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES}
    long = {name: count for name, count in lines.items() if count > MAX_LINES}
    assert not long, f"found {long} lines; expected at most {MAX_LINES} in a module. Move a part to a module of its own"
