"""Tests of jobs in images that were not built from the trainer image. Their agent is injected."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from devcluster.images.oci_layout import Layout
from devcluster.progress import Progress
from devcluster.providers import choose
from support.cluster.kubectl import Kubectl, condition, example
from support.trainer.foreign_images import debian_11, debian_12

pytestmark = pytest.mark.e2e

IMAGES: dict[str, tuple[str, Callable[[], Path], str]] = {
    "debian-12": ("localhost/debian-with-python:12", debian_12, "('2.36', True, (3, 11))"),
    "debian-11-without-a-shell": ("localhost/python-without-shell:11", debian_11, "('2.31', False, (3, 9))"),
}
SCRIPT = """import os, platform, sys
found = (platform.libc_ver()[1], os.path.exists("/bin/sh"), sys.version_info[:2])
if found != EXPECTED:
    raise SystemExit(f"found {found}, expected EXPECTED")
if sys.version_info >= (3, 11):
    import dltrain
    for step in range(1, 41):
        dltrain.report(step=step, steps=40, loss=1 / step)
"""
SUM = """import ctypes
mpi = ctypes.CDLL("libmpi.so.40", mode=ctypes.RTLD_GLOBAL)
mpi.MPI_Init(None, None)
names = "ompi_mpi_int", "ompi_mpi_op_sum", "ompi_mpi_comm_world"
arguments = [ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(mpi, name))) for name in names]
sent, total = ctypes.c_int(1), ctypes.c_int()
mpi.MPI_Allreduce(ctypes.byref(sent), ctypes.byref(total), 1, *arguments)
mpi.MPI_Finalize()
if total.value != 2:
    raise SystemExit(f"found {total.value} ranks, expected 2")
"""


@pytest.fixture(scope="module", params=[pytest.param("debian-12", marks=pytest.mark.long), "debian-11-without-a-shell"])
def image(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Load an image into the nodes. Return its reference, and what a script in it must find."""
    reference, rootfs, expected = IMAGES[request.param]
    layout = Layout(tmp_path_factory.mktemp("layout"))
    layout.add_rootfs(reference, rootfs())
    provider = choose(None, os.environ["DLJOB_TEST_CLUSTER"], Progress(quiet=True))
    provider.load([layout.folder])
    return reference, expected


def job(name: str, framework: str, command: list[str], image: str) -> dict[str, Any]:
    script = {
        "volumes": [{"name": "scripts", "configMap": {"name": name}}],
        "containers": [{"name": "trainer", "volumeMounts": [{"name": "scripts", "mountPath": "/scripts"}]}],
    }
    return example(
        "torchrun-minimal.yaml", job=name, checkpoint={"enabled": False}, resources={"memory": "1Gi"},
        trainer={"framework": framework, "image": image, "imagePullPolicy": "Never", "command": command},
        podTemplateOverrides=[{"manager": "e2e", "spec": script}],
    )  # fmt: skip


def scripts(name: str, text: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"train.py": text}}


@pytest.mark.parametrize("framework", ["Torchrun", pytest.param("MPI", marks=pytest.mark.long)])
def test_script_runs_in_an_image_that_was_not_built_from_ours(
    framework: str, image: tuple[str, str], kubectl: Kubectl
) -> None:
    reference, expected = image
    name = f"any-{framework.lower()}-{reference.rpartition(':')[2]}"
    text = SCRIPT.replace("EXPECTED", expected) + (SUM if framework == "MPI" else "")
    launcher = "torchrun" if framework == "Torchrun" else "mpirun"
    program = ["/scripts/train.py"] if framework == "Torchrun" else ["python3", "/scripts/train.py"]
    kubectl.apply(scripts(name, text), job(name, framework, [launcher, *program], reference))
    done = kubectl.wait_phase(name, "Complete", 240)
    assert done["status"]["plan"]["agent"] == "Auto"
    if "3, 11" in expected:
        assert done["status"]["progress"]["step"] == 40


def test_missing_program_is_one_clear_condition(image: tuple[str, str], kubectl: Kubectl) -> None:
    name = f"missing-{image[0].rpartition(':')[2]}"
    missing = job(name, "Torchrun", ["/opt/venv/bin/train"], image[0])
    kubectl.apply(scripts(name, ""), missing)
    ended = kubectl.wait_phase(name, "Failed", 120)
    failed = condition(ended, "Failed")
    assert failed is not None and failed["reason"] == "CommandNotFound", failed
    assert failed["message"].startswith("spec.trainer.command: found /opt/venv/bin/train"), failed
    assert not ended["status"].get("restarts"), "a restart cannot help"
