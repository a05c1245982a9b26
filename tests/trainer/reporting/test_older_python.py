"""Tests of the callbacks for training libraries below Python 3.11."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from dltrain.reporting import older_python

TRAINER = Path(__file__).resolve().parents[3] / "trainer-image"
FOR_OLDER_PYTHON = ("accelerate", "huggingface", "lightning", "logged_values")


@pytest.mark.parametrize("name", ["__init__", *FOR_OLDER_PYTHON])
def test_callbacks_need_no_newer_python_than_3_8(name: str) -> None:
    """``tests/trainer/agent/test_injected_agent.py`` calls them in Python 3.9.

    Annotations are not evaluated. Elsewhere, Python 3.8 has no operator | for types and dictionaries.
    """
    text = (TRAINER / "dltrain/integrations" / f"{name}.py").read_text()
    tree = ast.parse(text, feature_version=(3, 8))
    assert name == "__init__" or "from __future__ import annotations" in text
    for node in ast.walk(tree):
        for field in ("annotation", "returns"):
            if hasattr(node, field):
                setattr(node, field, None)
    operations = [node for node in ast.walk(tree) if isinstance(node, (ast.BinOp, ast.AugAssign))]
    assert not [node.lineno for node in operations if isinstance(node.op, ast.BitOr)]


@pytest.mark.parametrize("name", [*FOR_OLDER_PYTHON, "mlflow", "exported_report"])
def test_older_python_may_import_the_callbacks_alone(name: str) -> None:
    assert (older_python.allows(f"dltrain.integrations.{name}")) is (name in FOR_OLDER_PYTHON)


def test_a_callback_imports_nothing_but_its_library_and_what_reports_need() -> None:
    script = (
        "import sys, types; sys.modules['accelerate'] = types.ModuleType('a')\n"
        "sys.modules['accelerate.tracking'] = types.SimpleNamespace(GeneralTracker=object)\n"
        f"sys.path.insert(0, {str(TRAINER)!r})\n"
        "from dltrain.reporting import older_python; older_python.refuse_other_modules()\n"
        "from dltrain.integrations.accelerate import ReportTracker\n"
        "try:\n    import dltrain.integrations.mlflow\nexcept ImportError as error:\n    print(error)\n"
    )
    command = [sys.executable, "-I", "-S", "-c", script]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert "expected Python 3.11 or newer" in ended.stdout, ended.stderr
