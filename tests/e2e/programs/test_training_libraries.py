"""Tests of programs with training libraries that are not ours (hack/test programs): each is killed once and resumes."""

import copy
from typing import Any

import pytest
import yaml

from dljob.client.output.records import outputs_of
from support.chaos.killed_jobs import killed_once, resumed_from
from support.cluster.kubectl import ROOT, Kubectl
from support.cluster.pod_server import trainer_image
from support.cluster.program_image import add_program_image, added_images, scripts
from support.mpi_programs import MPI_PROGRAMS
from support.trainer.foreign_images import compiler

pytestmark = [pytest.mark.e2e, pytest.mark.programs]

LAUNCHERS = {
    "accelerate_loop": ("python", "-m", "accelerate.commands.launch", "--config_file", "/programs/accelerate.yml"),
}
"""Commands that start a program in the place of torchrun."""
STEPS = {
    "hf_trainer": 500, "accelerate_loop": 5000, "lightning_module": 4000, "stream": 400, "fsdp": 800, "gan": 6000,
    "zero": 4000,
}  # fmt: skip
"""Steps of each program: long enough to be killed after a checkpoint, and before the end."""
ZERO_3_STEPS = 800
ZERO_PARAMETERS = 64 * 256 + 256 + 256 * 256 + 256 + 256 * 10 + 10
"""Number of parameters of the model in ``zero.py``."""
MPI_SIZES = {"mpi": {"STEPS": 3000, "SAMPLES": 200_000}, "horovod": {"EPOCHS": 400}}
"""Variables of the MPI programs, with which a run takes about a minute. The shorter runs of the examples end too soon."""


@pytest.fixture(scope="module")
def image(admin: Kubectl) -> str:
    """Load the image of the programs into the nodes. Return its reference."""
    with added_images() as layout:
        return add_program_image(layout, trainer_image(admin))


def job(name: str, image: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the example's job for one program, and the ConfigMap with the programs."""
    made = copy.deepcopy(yaml.safe_load((ROOT / "examples/programs/job.yaml").read_text()))
    made["metadata"]["name"] = name.replace("_", "-")
    made["spec"]["trainer"] |= {
        "image": image,
        "imagePullPolicy": "Never",
        "command": [*LAUNCHERS.get(name, ("torchrun",)), f"/programs/{name}.py"],
    }
    made["spec"]["trainer"]["env"] = [{"name": "STEPS", "value": str(STEPS.get(name, 0))}]
    programs = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "programs"}, "data": scripts()}
    return made, programs


@pytest.mark.parametrize("program", sorted(STEPS))
def test_program_resumes_after_a_kill(program: str, image: str, kubectl: Kubectl) -> None:
    made, programs = job(program, image)
    name = made["metadata"]["name"]
    kubectl.apply(programs, made)
    done = killed_once(kubectl, name)
    progress = done["status"]["progress"]
    assert (progress["step"], progress["percent"]) == (STEPS[program], 100)
    assert 0 < done["status"]["result"]["loss"] < 5
    assert resumed_from(kubectl, name) >= 20


def test_compiled_program_resumes_in_an_image_with_its_own_pytorch(admin: Kubectl, kubectl: Kubectl) -> None:
    """Debian 12 with g++, Python and PyTorch, without dltrain: inductor compiles, and the injected agent reports."""
    pytorch, reference = "localhost/debian-with-pytorch:12", "localhost/debian-with-pytorch-and-a-compiler:12"
    with added_images() as layout:
        layout.add_up_to_largest_layer(pytorch, trainer_image(admin))  # which is that of the packages, without dltrain
        layout.add_layer(reference, pytorch, compiler(), "usr")
    made, programs = job("stream", reference)
    made["metadata"]["name"] = "compiled"
    made["spec"]["trainer"]["command"] = ["/opt/dljob/bin/python", "-m", "torch.distributed.run", "/programs/stream.py"]
    kubectl.apply(programs, made)
    done = killed_once(kubectl, "compiled")
    assert done["status"]["plan"]["agent"] == "Auto"
    assert (done["status"]["progress"]["step"], done["status"]["progress"]["percent"]) == (STEPS["stream"], 100)
    assert resumed_from(kubectl, "compiled") >= 20
    assert "backend inductor" in "".join(outputs_of(kubectl.get("configmap", "compiled-logs") or {}).values())


def test_zero_3_resumes_after_a_kill(image: str, kubectl: Kubectl) -> None:
    """DeepSpeed divides the parameters, too. The job resumes from the parts of both ranks."""
    made, programs = job("zero", image)
    made["metadata"]["name"] = "zero-3"
    env = {"STEPS": str(ZERO_3_STEPS), "ZERO_STAGE": "3"}
    made["spec"]["trainer"]["env"] = [{"name": key, "value": value} for key, value in env.items()]
    kubectl.apply(programs, made)
    done = killed_once(kubectl, "zero-3")
    assert (done["status"]["progress"]["step"], done["status"]["progress"]["percent"]) == (ZERO_3_STEPS, 100)
    assert resumed_from(kubectl, "zero-3") >= 20
    output = "".join(outputs_of(kubectl.get("configmap", "zero-3-logs") or {}).values())
    assert f"observed a step: {ZERO_PARAMETERS:,} parameters" in output


@pytest.mark.parametrize("name", sorted(MPI_PROGRAMS))
def test_mpi_program_resumes_after_a_kill(name: str, kubectl: Kubectl) -> None:
    """The examples for mpi4py and Horovod, with one line that reports the progress."""
    program, sizes = MPI_PROGRAMS[name], MPI_SIZES[name]
    script, made = yaml.safe_load_all((ROOT / "examples" / f"{name}.yaml").read_text())
    script["data"] = {program.script: program.text}
    made["spec"]["trainer"]["env"] = [{"name": key, "value": str(value)} for key, value in sizes.items()]
    kubectl.apply(script, made)
    done = killed_once(kubectl, name)
    progress = done["status"]["progress"]
    assert (progress["step"], progress["percent"]) == (sizes[program.steps], 100)
    assert 0 < done["status"]["result"]["loss"] < 5
    assert resumed_from(kubectl, name) >= 20


@pytest.mark.parametrize(
    ("program", "hints", "epochs", "bound"),
    [
        ("contrastive", {"parameters": 12448, "flopsPerSample": 150000}, 40, 2),
        ("lora", {"parameters": 16384, "flopsPerSample": 45000000}, 20, 2.5),
        ("text_stream", {"parameters": 58000, "flopsPerSample": 8000000}, 2, 3),
    ],
)
def test_loop_with_the_five_lines_resumes_after_a_kill(
    program: str, hints: dict[str, int], epochs: int, bound: float, image: str, kubectl: Kubectl
) -> None:
    """A loss that compares the samples of all ranks, adapters of a base that checkpoints do not have, and a stream."""
    made, programs = job(program, image)
    spec = made["spec"]
    del spec["trainer"]["framework"]
    spec["trainer"]["command"] = ["python", f"/programs/{program}.py"]
    spec |= {"model": {"hints": hints}, "dataset": {"name": "digits"}, "globalBatchSize": 64, "epochs": epochs}
    spec["checkpoint"]["interval"] = "1s"
    kubectl.apply(programs, made)
    done = killed_once(kubectl, made["metadata"]["name"])
    assert done["status"]["progress"]["percent"] == 100 and done["status"]["result"]["loss"] < bound
