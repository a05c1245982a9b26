"""Each way to use the trainer, without a cluster: plain ``python`` and ``mpirun -n 2``, on real ranks."""

import re
import socket
import sys
from pathlib import Path

import pytest

from dljob.contract import DatasetRef, ModelRef, OptimizerRef
from dltrain.errors import BadInputError
from dltrain.local import torchrun_variables
from dltrain.messages import EXIT_BAD_INPUT, EXIT_OK
from trainer.plans import make_plan, write
from trainer.ranks import ROOT, Ended, command, run, run_ranks

pytestmark = pytest.mark.mpi
SCRIPTS = ROOT / "examples/scripts"


def local(ranks: int, *arguments: str | Path, port: str = "29500") -> Ended:
    words = ["-m", "dltrain.local", *map(str, arguments)]
    started = [sys.executable, *words] if ranks == 1 else command(ranks, *words, fresh=True)
    return run(started, OMP_NUM_THREADS="1", MASTER_PORT=port)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_built_in_model(ranks: int) -> None:
    ended = local(ranks, "--model", "mlp", "--dataset", "iris", "--batch", "12", "--epochs", "8", "--optimizer", "Adam")
    assert ended.code == EXIT_OK, ended.output
    finished = re.search(r"finished 80 steps in .* s, accuracy (\d\.\d+)", ended.output)
    assert finished is not None and float(finished[1]) > 0.85, ended.output


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_unmodified_torchrun_script(ranks: int) -> None:
    """It ends with 0, threads of gloo or not: ``zygote.run`` runs it, as in a pod."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ended = local(ranks, SCRIPTS / "train_torchrun.py", port=port)
    assert ended.code == EXIT_OK, ended.output
    found = re.search(rf"world size {ranks}, accuracy (\d\.\d+)", ended.output)
    assert found is not None and float(found[1]) > 0.95, ended.output


def test_a_gpt_learns_real_text(tmp_path: Path) -> None:
    """From ln 256 = 5.5 for bytes of which nothing is known; the entropy of single bytes is about 3.3."""
    plan = make_plan(
        2, global_batch=8, steps=24, model=ModelRef(name="gpt-mini"), dataset=DatasetRef(name="python-source"),
        optimizer=OptimizerRef(name="AdamW", learning_rate=3e-3),
    )  # fmt: skip
    ended = run_ranks(2, "-m", "dltrain.rank", DLTRAIN_PLAN=write(plan, tmp_path), OMP_NUM_THREADS="1")
    losses = [float(loss) for loss in re.findall(r"step 2\d/24 .* loss (\d+\.\d+)", ended.output)]
    assert losses and max(losses) < 3.8, ended.output


def test_a_script_finds_its_data_where_the_environment_says(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import dltrain\nprint('at', dltrain.init().dataset_path)\n")
    found = run([sys.executable, str(script)], DLJOB_DATASET="/data/x")
    missing = run([sys.executable, str(script)])
    assert (found.code, "at /data/x" in found.output) == (EXIT_OK, True), found.output
    assert missing.code == EXIT_BAD_INPUT and "$DLJOB_DATASET unset" in missing.output, missing.output


def test_bad_input_is_named() -> None:
    ended = local(1, "--model", "mlp", "--dataset", "/nowhere.npz")
    assert ended.code == EXIT_BAD_INPUT
    assert "spec.dataset.uri: found no file /nowhere.npz" in ended.output


MPI = {"RANK": "3", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
OURS = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": "29500"}),
        ({"MASTER_PORT": "1234"}, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"}),
        ({f"OMPI_COMM_WORLD_{k}": v for k, v in MPI.items()} | {"MASTER_ADDR": "a"}, OURS | {"MASTER_ADDR": "a"}),
    ],
    ids=["alone", "a port", "two machines"],
)
def test_what_torchrun_would_say(env: dict[str, str], expected: dict[str, str]) -> None:
    assert expected.items() <= torchrun_variables(env).items()


def test_two_machines_need_an_address() -> None:
    with pytest.raises(BadInputError, match=r"\$MASTER_ADDR: found nothing, and 2 of 4 ranks"):
        torchrun_variables({f"OMPI_COMM_WORLD_{k}": v for k, v in MPI.items()})
