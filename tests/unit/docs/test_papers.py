"""Tests that docs/papers.md names files and commands that exist, and has the ratios that the program prints."""

import re
from importlib.util import find_spec
from pathlib import Path

from benchmarks.papers.taihulight_page import published_table

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/papers.md").read_text(encoding="utf-8")
FOLDERS = (ROOT, ROOT / "operator", ROOT / "operator/contract", ROOT / "trainer-image")


def test_files_that_the_page_names_exist() -> None:
    named = set(re.findall(r"`((?:benchmarks|dljob|dltrain|tests)/[\w./-]*)`", PAGE))
    assert len(named) > 20
    missing = {name for name in named if not any((folder / name).exists() for folder in FOLDERS)}
    assert not missing, f"docs/papers.md: found {sorted(missing)}; expected files. Correct their names"


def test_commands_that_the_page_names_exist() -> None:
    modules = set(re.findall(r"python -m (benchmarks\.[\w.]+)", PAGE))
    assert len(modules) > 8
    missing = {module for module in modules if find_spec(module) is None}
    assert not missing, f"docs/papers.md: found {sorted(missing)}; expected modules. Correct their names"


def test_published_ratios_and_their_predictions_are_those_that_the_program_prints() -> None:
    head, cells = published_table()
    for line in (head, *cells):
        assert f"| {' | '.join(line)} |\n" in PAGE
