"""Tests of the layer with Horovod's API: its functions on real ranks, and where Python finds it."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from support.trainer.ranks import BODIES, ROOT, alone, environment, run, run_apart, run_ranks

LAYER = ROOT / "trainer-image/dltrain/compatibility"
BODY = BODIES / "training/scripts/horovod_api.py"


@pytest.mark.mpi
@pytest.mark.patient
@pytest.mark.parametrize("ranks", [1, 3])
def test_functions_do_what_their_names_say(ranks: int) -> None:
    if ranks == 1:
        ended = run(alone("-m", "dltrain.local", BODY), OMP_NUM_THREADS="1")
        assert ended.code == 0, ended.output
    else:
        ended = run_ranks(ranks, "-m", "dltrain.local", BODY, OMP_NUM_THREADS="1")
    assert ended.output.count("all functions work") == ranks, ended.output


def python(code: str, *path: Path, fresh: bool = True) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter, or a fork of the zygote, that looks for packages in ``path`` last."""
    append = f"import sys; sys.path += {[str(place) for place in path]}; "
    if not fresh:
        return run_apart("-c", append + code, env=environment())
    command = [sys.executable, "-c", append + code]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)


def test_installed_horovod_takes_precedence(tmp_path: Path) -> None:
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod/__init__.py").write_text("real = True\n")
    assert python("import horovod; print(horovod.real)", tmp_path, LAYER).stdout == "True\n"


@pytest.mark.parametrize("name", ["tensorflow", "keras", "mxnet"])
def test_other_frameworks_are_named_as_missing(name: str) -> None:
    ended = python(f"import horovod.{name}", LAYER)
    assert ended.returncode == 1 and f"ImportError: horovod.{name}: found dljob's layer" in ended.stderr


def test_ranks_of_another_launcher_do_not_train_alone() -> None:
    ended = python(
        "import os; os.environ['WORLD_SIZE'] = '2'; import horovod.torch as hvd; hvd.init()", LAYER, fresh=False
    )
    assert ended.returncode == 1 and "Set trainer.framework: MPI" in ended.stderr


def test_missing_functions_are_named() -> None:
    ended = python("import horovod.torch as hvd; hvd.alltoall", LAYER, fresh=False)
    assert "AttributeError: horovod.torch: found alltoall; expected one of dltrain.horovod: " in ended.stderr
    ended = python("import horovod.torch as hvd; print(hasattr(hvd, 'elastic'))", LAYER, fresh=False)
    assert ended.stdout == "False\n"


def test_wheel_extends_the_search_path_last(tmp_path: Path) -> None:
    """A line of a ``.pth`` file in site-packages is a folder that Python appends to ``sys.path``."""
    spec = importlib.util.spec_from_file_location("setup_of_dltrain", ROOT / "trainer-image/setup.py")
    assert spec is not None and spec.loader is not None
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    assert setup.PTH.endswith(".pth") and ROOT / "trainer-image" / setup.COMPATIBILITY == LAYER
