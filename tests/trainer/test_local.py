"""Tests of the trainer without a cluster, by plain ``python`` and ``mpirun -n 2`` on real ranks."""

import contextlib
import random
import re
import socket
import sys
from pathlib import Path

import pytest
import torch

from dlcontract import DatasetRef, ModelRef, OptimizerRef
from dltrain.local import torchrun_variables
from dltrain.protocol.errors import BadInputError
from dltrain.protocol.rank_messages import EXIT_BAD_INPUT, EXIT_OK, EXIT_STOPPED, EXIT_USER_ERROR
from dltrain.record.run_report.document import Document
from support.mpi_programs import MPI_PROGRAMS, MpiProgram
from support.trainer.plans import make_plan, write
from support.trainer.ranks import ROOT, Ended, alone, command, run, run_ranks

pytestmark = [pytest.mark.mpi, pytest.mark.patient]
SCRIPTS = ROOT / "examples/scripts"
BUSY_S = 400.0
"""Time limit of a run on a machine whose processors other tests use."""


def local(ranks: int, *arguments: str | Path, port: str = "29500", fresh: bool = True) -> Ended:
    """Run ``python -m dltrain.local``. With ``fresh``, ranks are new interpreters, as if a user started them."""
    words = ["-m", "dltrain.local", *map(str, arguments)]
    if ranks == 1:
        started = [sys.executable, *words] if fresh else alone(*words)
    else:
        started = command(ranks, *words, fresh=fresh)
    return run(started, BUSY_S, OMP_NUM_THREADS="1", MASTER_PORT=port)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_built_in_model_trains_locally(ranks: int, tmp_path: Path) -> None:
    ended = local(
        ranks,
        "--report",
        tmp_path,
        "--model",
        "mlp",
        "--dataset",
        "iris",
        "--batch",
        "12",
        "--epochs",
        "8",
        "--optimizer",
        "Adam",
    )
    assert ended.code == EXIT_OK, ended.output
    finished = re.search(r"finished 80 steps in .* s, accuracy (\d\.\d+)", ended.output)
    assert finished is not None and float(finished[1]) > 0.85, ended.output
    document = Document.parse((tmp_path / "report.json").read_bytes())
    assert document.phase == "Succeeded" and document.step == 80 and document.points[-1].loss is not None
    assert "<html" in (tmp_path / "report.html").read_text() and "run report" in ended.output
    assert document.analysis is not None and document.outcome is not None
    found = document.analysis.analysis
    assert (found.task, found.samples) == ("classification", 30) and found.classification is not None
    assert found.classification.names == ("setosa", "versicolor", "virginica")
    assert document.outcome.accuracy == found.classification.accuracy, "both ranks' samples count once"


def test_lenet_learns_real_images() -> None:
    words = ["--model", "lenet", "--dataset", "digits-32", "--optimizer", "Adam", "--learning-rate", "0.003"]
    ended = local(2, *words, "--epochs", "8", fresh=False)
    assert ended.code == EXIT_OK, ended.output
    finished = re.search(r"finished 184 steps in .* s, accuracy (\d\.\d+)", ended.output)
    assert finished is not None and float(finished[1]) > 0.9, ended.output


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_unmodified_torchrun_script_trains(ranks: int) -> None:
    """It exits with code 0 even if gloo threads still run, because ``zygote.run`` runs it as in a pod."""
    ended = local(ranks, SCRIPTS / "train_torchrun.py", port=str(free_port()), fresh=ranks == 1)
    assert ended.code == EXIT_OK, ended.output
    found = re.search(rf"world size {ranks}, accuracy (\d\.\d+)", ended.output)
    assert found is not None and float(found[1]) > 0.95, ended.output


@pytest.mark.long
def test_elastic_torchrun_script_goes_on_with_another_number_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLJOB_CHECKPOINT_DIR", str(tmp_path))
    for ranks, first, epochs in ((3, 0, 10), (1, 10, 20)):
        monkeypatch.setenv("EPOCHS", str(epochs))
        ended = local(ranks, SCRIPTS / "train_elastic.py", port=str(free_port()))
        assert ended.code == EXIT_OK, ended.output
        assert f"{ranks} ranks start at epoch {first} with {128 // ranks} samples each" in ended.output
    assert float(re.findall(r"accuracy (\d\.\d+)", ended.output)[-1]) > 0.95, ended.output


@pytest.mark.parametrize("script", ["train_mpi4py.py", pytest.param("train_horovod.py", marks=pytest.mark.long)])
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_unmodified_mpi_program_trains(script: str, ranks: int) -> None:
    ended = local(ranks, SCRIPTS / script)
    assert ended.code == EXIT_OK, ended.output
    found = re.search(rf"world size {ranks}, accuracy (\d\.\d+)", ended.output)
    assert found is not None and float(found[1]) > 0.95, ended.output


@pytest.mark.parametrize(
    ("program", "more"),
    [(MPI_PROGRAMS["mpi"], 50), pytest.param(MPI_PROGRAMS["horovod"], 1, marks=pytest.mark.long)],
    ids=["mpi", "horovod"],
)
def test_mpi_program_reports_and_resumes(
    program: MpiProgram, more: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an agent, rank 0 prints what it reports. The step of ``more`` has a checkpoint."""
    path = tmp_path / program.script
    path.write_text(program.text)
    monkeypatch.setenv("DLJOB_CHECKPOINT_DIR", str(tmp_path))
    for first in (0, more):
        monkeypatch.setenv(program.steps, str(first + more))
        ended = local(2, path)
        assert ended.code == EXIT_OK, ended.output
        assert re.search(rf"resumed from (step|epoch) {first}\n", ended.output), ended.output
        assert f"step {first + more}/{first + more}" in ended.output, ended.output


def free_port() -> int:
    """Return a port that stays free: the kernel gives none of these to connections, unlike those of ``bind`` to 0."""
    for port in random.sample(range(20_000, 30_000), 100):
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise AssertionError("found no free port from 20000 to 30000")


@pytest.mark.long
def test_gpt_learns_real_text(tmp_path: Path) -> None:
    """The loss starts at ln 256 = 5.5, that of uniform bytes. The entropy of single bytes is about 3.3."""
    plan = make_plan(
        2, global_batch=8, steps=24, model=ModelRef(name="gpt-mini"), dataset=DatasetRef(name="python-source"),
        optimizer=OptimizerRef(name="AdamW", learning_rate=3e-3),
    )  # fmt: skip
    ended = run_ranks(2, "-m", "dltrain.builtin.rank", DLTRAIN_PLAN=write(plan, tmp_path), OMP_NUM_THREADS="1")
    losses = [float(loss) for loss in re.findall(r"step 2\d/24 .* loss (\d+\.\d+)", ended.output)]
    assert losses and max(losses) < 3.8, ended.output


def test_failed_checkpoint_write_is_reported_in_one_line_and_leaves_no_files(tmp_path: Path) -> None:
    limited = (
        "import resource, runpy, sys\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (192 * 512, 192 * 512))\n"
        "runpy.run_module('dltrain.local', run_name='__main__', alter_sys=True)\n"
    )
    words = ["--model", "mlp", "--epochs", "1", "--checkpoints", str(tmp_path)]
    ended = run(alone("-c", limited, *words), BUSY_S)
    assert ended.code == EXIT_USER_ERROR and "Traceback" not in ended.output, ended.output
    assert f"CheckpointFailed: spec.checkpoint.volume: found {tmp_path}/local-local: File too large; expected room" in (
        ended.output
    )
    left = {path.name for path in (tmp_path / "local-local").iterdir()}
    assert left == {"term", "report.html", "report.json", "model.json", "predict.py"}, (
        "the report names the failure; no part of a checkpoint is left"
    )


def test_resumed_run_has_its_complex_buffers_and_the_report_of_the_whole_training(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch, dltrain\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.linear = torch.nn.Linear(2, 1)\n"
        "        for bits in (64, 128):\n"
        "            value = torch.zeros(3, dtype=getattr(torch, f'complex{bits}'))\n"
        "            self.register_buffer(f'z{bits}', value)\n"
        "            self.register_buffer(f'conjugate{bits}', (value + 1j).conj())\n"
        "    def forward(self, x):\n"
        "        self.z64.add_(t.mean(torch.tensor(1 + 2j)))\n"
        "        self.z128.add_(2**-40 - 1j)\n"
        "        return self.linear(x) * self.z64.abs().sum().clamp(max=1)\n"
        f"t = dltrain.init(batch=4, epochs=int(sys.argv[1]), checkpoints={str(tmp_path / 'saved')!r})\n"
        "model = Net()\n"
        "model, opt = t.wrap(model, torch.optim.SGD(model.parameters(), 0.01))\n"
        "for (x,) in t.steps(t.loader((torch.ones(16, 2),))):\n"
        "    opt.zero_grad()\n    model(x).mean().backward()\n    opt.step()\n"
        "print('buffers', model.z64[0].item(), model.z128[0].item())\n"
        "t.finish()\n"
    )
    for epochs in (2, 3):
        ended = run(command(2, script, str(epochs)), BUSY_S, OMP_NUM_THREADS="1")
        assert ended.code == EXIT_OK, ended.output
        steps = 4 * epochs
        assert f"buffers {complex(steps, 2 * steps)} {complex(steps * 2**-40, -steps)}" in ended.output, ended.output
    assert "resumed from step 8" in ended.output, ended.output
    document = Document.parse((tmp_path / "saved/train-local/report.json").read_bytes())
    assert document.points[0].step == 1 and sum(point.steps for point in document.points) == document.step == 12
    assert [(entry.step, entry.size) for entry in document.attempts] == [(0, 2), (8, 0), (8, 2), (12, 0)]


def test_early_exit_and_second_init_are_reported(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, dltrain\nt = dltrain.init(batch=4, epochs=2)\nmodel = torch.nn.Linear(2, 1)\n"
        "model, opt = t.wrap(model, torch.optim.SGD(model.parameters(), 0.1))\n"
        "for (x,) in t.steps(t.loader((torch.ones(16, 2),))):\n"
        "    model(x).mean().backward()\n    opt.step()\n    raise SystemExit(3)\n"
    )
    early_exit = run(alone(script), BUSY_S, DLTRAIN_REPORT=str(tmp_path / "report"))
    assert (
        early_exit.code == 3 and "dltrain: the script exits after step 1 of 8 without t.finish()" in early_exit.output
    )
    assert Document.parse((tmp_path / "report/report.json").read_bytes()).phase == "Stopped"
    script.write_text("import dltrain\ndltrain.init()\ndltrain.init()\n")
    twice = run(alone(script), BUSY_S)
    assert twice.code == EXIT_BAD_INPUT
    assert (
        twice.output
        == "dltrain: BadInput: train.py, line 3: dltrain.init: found a second call; expected one call per process\n"
    )


def test_interrupt_is_reported_and_every_start_has_the_same_seed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, random, signal, numpy, dltrain\nt = dltrain.init()\nprint(random.random(), numpy.random.rand())\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
    )
    first, second = (run(alone(script), BUSY_S) for _ in range(2))
    assert (first.code, first.output) == (130, second.output), first.output
    assert re.fullmatch(r"0\.\d+ 0\.\d+\ndltrain: interrupted\n", first.output), first.output


def test_validation_code_of_the_how_to_page_works_also_after_a_restart(tmp_path: Path) -> None:
    page = (ROOT / "docs/how-to/your-own-script.md").read_text(encoding="utf-8")
    found = re.search(r"^### Validation.*?^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert found is not None
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, dltrain\nfrom torch.nn.functional import cross_entropy\n"
        "from torch.optim.lr_scheduler import OneCycleLR\nfrom torch.utils.data import TensorDataset, random_split\n"
        "import sys\nfolder, stopped_after = sys.argv[1], int(sys.argv[2])\n"
        "t = dltrain.init(batch=13, epochs=30, checkpoints=folder)\nx = torch.randn(210, 4)\ny = (x.sum(1) > 0).long()\n"
        "train_set, validation_set = random_split(TensorDataset(x, y), [160, 50])\nmodel = torch.nn.Linear(4, 2)\n"
        "model, opt = t.wrap(model, torch.optim.SGD(model.parameters(), 0.1))\n"
        + found[1]
        .replace("/tmp/best.pt", str(tmp_path / "best.pt"))
        .replace(
            "    if t.end_of_epoch:\n",
            "    if t.step == stopped_after:\n        t.reporter.stop.set()\n    if t.end_of_epoch:\n",
        )
        + "print('after', t.step, 'best', best['accuracy'], 'last', right, seen)\n"
    )

    def train(folder: str, stopped_after: int, code: int) -> list[tuple[str, str, str]]:
        ended = run(command(2, script, str(tmp_path / folder), str(stopped_after)), BUSY_S, OMP_NUM_THREADS="1")
        assert ended.code == code, ended.output
        return re.findall(r"after (\d+) best ([\d.]+) last ([\d.]+) 50\.0", ended.output)

    lines = train("whole", 0, EXIT_OK)
    assert len(lines) == 2 and lines[0] == lines[1], lines
    steps = int(lines[0][0])
    assert steps < 30 * 13 and float(lines[0][1]) > 0.9, "early stopping ended the run, and the model learned"
    best = torch.load(tmp_path / "best.pt")
    assert set(best) == {"weight", "bias"}
    (tmp_path / "best.pt").unlink()
    # Fixed bug: a restart forgot the best accuracy and the epochs since, and then saved a worse model as the best one.
    assert train("restarted", steps - 2, EXIT_STOPPED) == []
    assert train("restarted", 0, EXIT_OK) == lines
    again = torch.load(tmp_path / "best.pt")
    assert all(torch.equal(again[name], tensor) for name, tensor in best.items())


def test_script_reads_dataset_path_from_environment(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import dltrain\nprint('at', dltrain.init().dataset_path)\n")
    found = run(alone(script), BUSY_S, DLJOB_DATASET="/data/x")
    missing = run(alone(script), BUSY_S)
    assert (found.code, "at /data/x" in found.output) == (EXIT_OK, True), found.output
    assert missing.code == EXIT_BAD_INPUT and "no environment variable DLJOB_DATASET" in missing.output, missing.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "mlp", "--dataset", "/nowhere.npz"], "spec.dataset.uri: found no file /nowhere.npz; expected "),
        (["--model", "mlp", "--dataset", "mnist"], "dataset: found 'mnist'; expected one of digits, breast-cancer, "),
        (["--model", "mlp", "--batch", "0"], "batch: found 0; expected a whole number of at least 1"),
        (["--model", "mlp", "--epochs", "0"], "epochs: found 0; expected greater than or equal to 1"),
        (["--model", "mlp", "--learning-rate", "nan"], "learning_rate: found nan; expected a finite number"),
        (["--model", "mlp", "--collective", "Telepathy"], "collective: found 'Telepathy'; expected Auto, Ring, MPI, "),
        (["nowhere.py"], "script: found nowhere.py; expected a Python file"),
    ],
    ids=["dataset", "no such dataset", "batch", "epochs", "rate", "collective", "script"],
)
def test_bad_input_is_reported_in_one_line(arguments: list[str], message: str) -> None:
    ended = local(1, *arguments, fresh=False)
    assert ended.code == EXIT_BAD_INPUT
    (line,) = ended.output.splitlines()
    assert line.startswith(f"dltrain: BadInput: {message}")


def test_bad_input_of_all_ranks_is_reported_once() -> None:
    ended = local(2, "--model", "alexandria", fresh=False)
    assert ended.code == EXIT_BAD_INPUT
    (line,) = [line for line in ended.output.splitlines() if line.startswith("dltrain: ")]
    assert line.startswith("dltrain: BadInput: spec.model.name: found 'alexandria'; expected one of mlp, ")


MPI = {"RANK": "3", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": "29500"}),
        ({"MASTER_PORT": "1234"}, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"}),
        ({f"OMPI_COMM_WORLD_{k}": v for k, v in MPI.items()} | {"MASTER_ADDR": "a"}, TORCHRUN | {"MASTER_ADDR": "a"}),
    ],
    ids=["alone", "a port", "two machines"],
)
def test_torchrun_variables_match_those_of_mpirun(env: dict[str, str], expected: dict[str, str]) -> None:
    assert expected.items() <= torchrun_variables(env).items()


def test_two_machines_need_a_master_address() -> None:
    with pytest.raises(BadInputError, match=r"\$MASTER_ADDR: found nothing, and 2 of 4 ranks"):
        torchrun_variables({f"OMPI_COMM_WORLD_{k}": v for k, v in MPI.items()})


def test_restart_of_an_early_stopped_training_takes_no_more_steps(tmp_path: Path) -> None:
    """Fixed bug: t.finish() was forgotten, so a restart for work after the loop trained on to the last epoch."""
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch, dltrain\n"
        "epochs, stopped_at = int(sys.argv[1]), int(sys.argv[2])\n"
        f"t = dltrain.init(batch=10, epochs=epochs, checkpoints={str(tmp_path / 'saved')!r})\n"
        "model = torch.nn.Linear(4, 1)\n"
        "model, opt = t.wrap(model, torch.optim.SGD(model.parameters(), 0.1))\n"
        "print('resumed after', t.step, 'steps in epoch', t.epoch)\n"
        "for x, y in t.steps(t.loader((torch.ones(100, 4), torch.ones(100, 1)))):\n"
        "    (model(x) - y).square().mean().backward()\n"
        "    opt.step()\n"
        "    if t.step == stopped_at:\n"
        "        t.finish()\n"
        "print('ended after', t.step, 'steps in epoch', t.epoch, 'complete:', t.complete)\n"
    )
    for epochs, stopped_at, expected in (
        (10, 25, ("0 steps in epoch 0", "25 steps in epoch 2")),
        (10, 0, ("25 steps in epoch 2", "25 steps in epoch 2")),
        (10, 0, ("25 steps in epoch 2", "25 steps in epoch 2")),
        (3, 0, ("25 steps in epoch 2", "30 steps in epoch 2")),  # another length asks for more steps
    ):
        ended = run(alone(script, str(epochs), str(stopped_at)), BUSY_S)
        lines = [line for line in ended.output.splitlines() if line.startswith(("resumed", "ended"))]
        assert lines == [f"resumed after {expected[0]}", f"ended after {expected[1]} complete: True"], ended.output
