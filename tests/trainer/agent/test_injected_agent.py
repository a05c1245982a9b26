"""Tests of the injected agent: real agents out of a copied folder, in images that were not made from the trainer image.

One image has glibc 2.31, Python 3.9 and no shell, the other has no files at all. In both, the root file system is
read-only and the user has no name.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dlcontract import CheckpointRef, Report, RunPhase
from support.trainer.foreign_images import AGENT, debian_11, empty, inject, injected_agent
from support.trainer.object_store import server
from support.trainer.pods import Job, job, leave

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(os.getuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2 for namespaces"),
]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the agent's files, copied as the init container copies them."""
    made = injected_agent(tmp_path_factory.mktemp("made"))
    target = tmp_path_factory.mktemp("copied")
    subprocess.run([made / "bin/python", "-I", "-m", "dltrain.launch.injected", target], check=True)
    for folder in (target, *target.parents[:3]):
        folder.chmod(0o755)
    return target


def script(job: Job, text: str) -> str:
    path = job.directory / "train.py"
    path.write_text(text)
    path.chmod(0o644)
    return str(path)


def result(job: Job) -> Report:
    return job.until(lambda r: r.phase in (RunPhase.SUCCEEDED, RunPhase.FAILED))


CHECKED = """
import os, platform, socket, sys
assert platform.libc_ver() == ("glibc", "2.31") and sys.version_info[:2] == (3, 9), (platform.libc_ver(), sys.version)
assert not any(os.path.exists(name) for name in ("/bin/sh", "/usr/bin/env", "/etc/passwd"))
assert os.getuid() == 54321
try:
    open("/file", "w")
except OSError as error:
    assert error.errno == 30, error
else:
    raise SystemExit("the root file system is writable")
assert "LD_LIBRARY_PATH" not in os.environ and "LD_PRELOAD" not in os.environ
"""
CHECKED_MPI = CHECKED.replace('assert "LD_LIBRARY_PATH" not in os.environ and', "assert")
_SUM = """
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if rank == 0:
    with socket.create_server((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))) as server:
        others = [server.accept()[0] for _ in range(size - 1)]
        total = sum(int(other.recv(9)) for other in others)
else:
    total = size * (size - 1) // 2
    for attempt in range(1000):
        try:
            connection = socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
            break
        except ConnectionRefusedError:
            import time; time.sleep(0.01)
    connection.sendall(b"%d" % rank)
import dltrain
for step in range(1, 41):
    dltrain.report(step=step, steps=40, loss=1 / step, accuracy=0.5, norm=step)
import types
class Base:
    pass
for name, base in (("transformers", "TrainerCallback"), ("lightning.pytorch.callbacks", "Callback"),
                   ("accelerate.tracking", "GeneralTracker")):
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        sys.modules[".".join(parts[:depth])] = types.ModuleType(parts[depth - 1])
    setattr(sys.modules[name], base, Base)
from dltrain.integrations.accelerate import ReportTracker
from dltrain.integrations.huggingface import ReportCallback
from dltrain.integrations.lightning import ReportCallback as Lightning
args = types.SimpleNamespace(train_batch_size=8, gradient_accumulation_steps=2, world_size=size)
state = types.SimpleNamespace(global_step=40, max_steps=40, epoch=1.0)
control = types.SimpleNamespace(should_save=True, should_evaluate=True, should_training_stop=False)
trainer = types.SimpleNamespace(
    global_step=40, current_epoch=0, max_epochs=1, max_steps=40, num_training_batches=40, accumulate_grad_batches=1,
    callbacks=[], callback_metrics={"val_acc": 0.5}, sanity_checking=False)
hugging, lit = ReportCallback(), Lightning()
hugging.on_step_end(args, state, control)
hugging.on_log(args, state, control, logs={"loss": 1 / 40, "eval_accuracy": 0.5})
lit.on_train_start(types.SimpleNamespace(**{**vars(trainer), "global_step": 39}), None)
lit.on_train_batch_start(trainer, None, None, 0)
lit.on_train_batch_end(trainer, None, {"loss": 1 / 40}, None, 39)
lit.on_validation_end(trainer, None)
ReportTracker(steps=40).log({"loss": 1 / 40}, step=40)
for needs_more in (dltrain.init, lambda: dltrain.evaluate([1.0], [1.0]), lambda: dltrain.data.load("digits")):
    try:
        needs_more()
    except ImportError as error:
        assert "found Python 3.9; expected Python 3.11 or newer" in str(error), error
    else:
        raise SystemExit("Python 3.9 is enough")
open(os.environ["DLJOB_CHECKPOINT_DIR"] + f".rank{rank}", "w").write(f"{total} of {size}")
"""


def test_torchrun_script_runs_with_the_python_of_an_image_with_an_older_glibc(two: Job, tree: Path) -> None:
    inject(two, tree, debian_11())
    model = {"command": ("torchrun", "--nnodes=7", script(two, CHECKED + _SUM)), "framework": "Torchrun"}
    two.start(two.plan(["x"], per_pod=2, model=two.plan(["x"]).model.model_copy(update=model)))
    report = result(two)
    assert report.phase is RunPhase.SUCCEEDED, two.logs()
    assert (report.step, report.steps, report.loss) == (40, 40, 1 / 40), "the script reports its progress"
    written = sorted(path.read_text() for path in two.checkpoints.rglob("*.rank*"))
    assert written == ["6 of 4"] * 4
    assert leave(two) == [0, 0]


_OVER_GLOO = """
import types
class Distributed(types.ModuleType):
    ended = os.environ["DLJOB_CHECKPOINT_DIR"] + ".ended" + os.environ["RANK"]
    def is_initialized(self):
        return not os.path.exists(self.ended)
    def get_backend(self):
        return "gloo"
    def destroy_process_group(self):
        open(self.ended, "w").close()
sys.modules["torch.distributed"] = Distributed("torch.distributed")
"""


def test_threads_of_gloo_end_in_every_rank_of_an_image_with_an_older_python(two: Job, tree: Path) -> None:
    inject(two, tree, debian_11())
    model = {"command": ("torchrun", script(two, CHECKED + _OVER_GLOO)), "framework": "Torchrun"}
    two.start(two.plan(["x"], per_pod=2, model=two.plan(["x"]).model.model_copy(update=model)))
    assert result(two).phase is RunPhase.SUCCEEDED, two.logs()
    ended = {path.suffix for path in two.checkpoints.rglob("*.ended*")}
    assert ended == {f".ended{rank}" for rank in range(4)}, two.logs()


_MPI = """
import ctypes
mpi = ctypes.CDLL("libmpi.so.40", mode=ctypes.RTLD_GLOBAL)
assert mpi.MPI_Init(None, None) == 0
world = ctypes.addressof(ctypes.c_char.in_dll(mpi, "ompi_mpi_comm_world"))
number = ctypes.addressof(ctypes.c_char.in_dll(mpi, "ompi_mpi_int"))
total = ctypes.addressof(ctypes.c_char.in_dll(mpi, "ompi_mpi_op_sum"))
sent, got = ctypes.c_int(int(os.environ["OMPI_COMM_WORLD_RANK"]) + 1), ctypes.c_int()
arguments = [ctypes.c_void_p(value) for value in (number, total, world)]
assert mpi.MPI_Allreduce(ctypes.byref(sent), ctypes.byref(got), 1, *arguments) == 0
assert got.value == 3, got
assert mpi.MPI_Finalize() == 0
"""


def test_mpi_program_runs_with_the_injected_mpi_in_an_image_without_a_shell(two: Job, tree: Path) -> None:
    inject(two, tree, debian_11())
    model = {"command": ("mpirun", "-np", "9", "python3", script(two, CHECKED_MPI + _MPI)), "framework": "MPI"}
    two.start(two.plan(["x"], model=two.plan(["x"]).model.model_copy(update=model)))
    assert result(two).phase is RunPhase.SUCCEEDED, two.logs()
    assert leave(two) == [0, 0]


def test_image_without_python_is_one_clear_failure(two: Job, tree: Path, tmp_path: Path) -> None:
    inject(two, tree, empty(tmp_path / "rootfs"))
    model = {"command": ("torchrun", "train.py"), "framework": "Torchrun"}
    two.start(two.plan(["x"], model=two.plan(["x"]).model.model_copy(update=model)))
    report = result(two)
    assert report.phase is RunPhase.FAILED and report.failure is not None
    assert (report.failure.reason, report.failure.exit_code) == ("CommandNotFound", 127), report.failure
    assert "No such file or directory: 'python'" in report.failure.message


REPORTING = """
import os, dltrain
assert "torch" not in __import__("sys").modules
for step in range(1, 41):
    dltrain.report(step=step, steps=40, loss=1 / step)
try:
    dltrain.init()
except ImportError as error:
    assert "dltrain.init: found no package" in str(error) and "FROM the trainer image" in str(error), error
else:
    raise SystemExit("dltrain.init needs no package")
"""


def test_script_reports_its_progress_without_an_installed_dltrain(two: Job, tree: Path, tmp_path: Path) -> None:
    inject(two, tree, empty(tmp_path / "rootfs"))
    # The image is empty, so the agent's own Python stands in for one of an image.
    model = {"command": (f"{AGENT}/bin/python", script(two, REPORTING)), "framework": "Torchrun"}
    two.start(two.plan(["x"], model=two.plan(["x"]).model.model_copy(update=model)))
    report = result(two)
    assert report.phase is RunPhase.SUCCEEDED, two.logs()
    assert report.step == 40


def test_injected_programs_load_no_library_of_the_image(tree: Path) -> None:
    text = "import ssl, ctypes, pydantic_core; print(open('/proc/self/maps').read())"
    maps = subprocess.run([tree / "bin/python", "-I", "-c", text], check=True, capture_output=True, text=True).stdout
    programs = {line.split()[-1] for line in maps.splitlines() if "/" in line and "x" in line.split()[1]}
    assert programs and all(str(tree) in path for path in programs)


def test_agent_of_the_image_takes_precedence_where_there_is_one(tree: Path, tmp_path: Path) -> None:
    own = tmp_path / "dljob-agent"
    command = [tree / "bin/agent", "--prefer", own]
    # Without its settings, the injected agent ends at once.
    injected = subprocess.run(command, env={}, capture_output=True, text=True, check=False)
    assert injected.returncode == 64 and "DLJOB_NAME" in injected.stderr + injected.stdout
    own.write_text(f"#!{sys.executable}\nimport sys; print('own', sys.argv[1:])\n")
    own.chmod(0o755)
    preferred = subprocess.run(command, env={}, capture_output=True, text=True, check=True)
    assert preferred.stdout == "own []\n"


STAGED = """
import os
folder = os.environ["DLJOB_CHECKPOINT_DIR"]
assert not any(name.startswith("AWS_SECRET") for name in os.listdir(folder))
open(folder + "/weights.bin", "wb").write(b"1234")
"""


@pytest.mark.long
def test_checkpoints_of_a_script_are_uploaded_by_the_injected_agent(tree: Path) -> None:
    with server("0.0.0.0") as store, job(1) as one:
        inject(one, tree, debian_11())
        checkpoint = CheckpointRef(directory=str(one.checkpoints), uri="s3://models/injected")
        model = {"command": ("python3", script(one, STAGED)), "framework": "Torchrun"}
        plan = one.plan(["x"], model=one.plan(["x"]).model.model_copy(update=model), checkpoint=checkpoint)
        host = one.pods[0].address.rpartition(".")[0] + ".254"
        one.start(plan, **store.environ(host))
        assert result(one).phase is RunPhase.SUCCEEDED, one.logs()
        assert list(store.last_commit("models", "injected/")["files"]) == ["weights.bin"]
