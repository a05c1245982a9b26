"""Tests of dljob's sitecustomize beside those of the image and of the job."""

import ast
import os
from pathlib import Path

import pytest

from dltrain.launch.rank_environment import STARTUP
from support.trainer.observed_scripts import python


def test_sitecustomize_of_the_image_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.customized = __name__\n")
    script = "import sys, sitecustomize\nprint(sys.customized, sitecustomize.__file__)"
    for order in ([str(STARTUP), str(tmp_path)], [str(tmp_path), str(STARTUP)]):
        ended = python(script, None, fresh=True, PYTHONPATH=os.pathsep.join(order))
        assert (ended.stdout, ended.stderr) == (f"sitecustomize {tmp_path / 'sitecustomize.py'}\n", "")


CHAINED = """
import importlib.machinery, os, sys
sys.ran = [*getattr(sys, "ran", []), "own"]
path = [entry for entry in sys.path if entry != os.path.dirname(__file__)]
following = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
following.loader.load_module("sitecustomize")
"""
"""As of New Relic and other tools: a sitecustomize that runs the next one."""


@pytest.mark.parametrize("first", [True, False])
def test_sitecustomize_that_runs_the_next_one_runs_once(first: bool, tmp_path: Path) -> None:
    """Fixed bug: it and that of dljob ran each other until Python had no stack left."""
    for name, text in (("own", CHAINED), ("image", "import sys\nsys.ran = [*getattr(sys, 'ran', []), 'image']\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "sitecustomize.py").write_text(text)
    ours = [str(STARTUP), str(tmp_path / "own")]
    path = os.pathsep.join([*(ours if first else reversed(ours)), str(tmp_path / "image")])
    script = "import sys\nprint(sys.ran, [type(each).__name__ for each in sys.meta_path].count('_Awaiting'))"
    ended = python(script, None, fresh=True, PYTHONPATH=path, RANK="0", WORLD_SIZE="2", PYTHONWARNINGS="ignore")
    assert (ended.stdout, ended.stderr) == ("['own', 'image'] 2\n", "")


OLDER = """
import runpy, sys
sys.version_info = (3, 7, 0, "final", 0)
runpy.run_path(sys.argv[1])
print("customized" in vars(sys), any("_dljob" in name for name in sys.modules))
"""


def test_older_python_still_runs_its_sitecustomize(tmp_path: Path) -> None:
    """Fixed bug: that of dljob, which does nothing there, came before it."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.customized = 1\n")
    code = f"import sys\nsys.argv[1:] = [{str(STARTUP / 'sitecustomize.py')!r}]\nsys.path.append({str(tmp_path)!r})\n"
    ended = python(code + OLDER, None, fresh=True, PYTHONPATH="")
    assert (ended.stdout, ended.stderr) == ("True False\n", "")


def test_python_2_can_parse_it() -> None:
    """Fixed bug: each Python 2 of a rank wrote that the import of sitecustomize failed."""
    newer = (ast.Starred, ast.JoinedStr, ast.AnnAssign, ast.NamedExpr, ast.Nonlocal, ast.YieldFrom, ast.arg)
    tree = ast.parse((STARTUP / "sitecustomize.py").read_text())
    found = [node for node in ast.walk(tree) if isinstance(node, newer)]
    assert [node for node in found if not isinstance(node, ast.arg) or node.annotation is not None] == []
    assert not any(node.returns for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
