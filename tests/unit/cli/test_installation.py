"""The commands without the Python packages that only the operator needs."""

import subprocess
import sys

import pytest

BLOCKED = """
import sys
for name in ("aiohttp", "kopf", "kubernetes"):
    sys.modules[name] = None
from dljob.cli import main
sys.exit(main())
"""


def without_packages(*arguments):
    return subprocess.run(
        [sys.executable, "-c", BLOCKED, *arguments], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("arguments", [("top",), ("logs", "mnist"), ("report", "mnist")], ids=lambda a: a[0])
def test_commands_that_need_the_cluster_say_what_to_install(arguments):
    done = without_packages(*arguments)
    assert done.returncode == 2
    assert "found no Python package " in done.stderr
    assert "pip install './operator[operator]'" in done.stderr
    assert "Traceback" not in done.stderr
