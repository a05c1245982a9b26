"""Tests of the Dockerfiles, built and run by a real Docker engine. A local image replaces the public base image."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from devcluster.embedded import packages
from devcluster.images import pip_config
from devcluster.images.builders import PUBLIC_BASE, Buildah
from devcluster.paths import cache_root
from devcluster.progress import Progress
from devcluster.shell import find, run

pytestmark = pytest.mark.docker
START_LIMIT_S = 60
BUILD_LIMIT_S = 1800


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the address of a private engine with its data in the cache. It is stopped afterwards."""
    packages.install({"dockerd": "docker.io"}, Progress())
    folder = tmp_path_factory.mktemp("docker")
    address, log = f"unix://{folder}/docker.sock", folder / "log"
    data = cache_root() / "docker"
    daemon = find("dockerd")
    assert daemon
    options = [f"--host={address}", f"--data-root={data}", f"--exec-root={folder}/exec", f"--pidfile={folder}/pid"]
    with log.open("wb") as output:
        # Builds use the machine's network without a bridge or firewall rules, so that the machine is unchanged.
        # In a mount namespace of its own, whose mounts end with it: one that stays breaks the removal of temporary files.
        private = ["unshare", "--mount", "--propagation", "private"]
        command = [*private, daemon, *options, "--bridge=none", "--iptables=false", "--ip6tables=false"]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        deadline_s = time.monotonic() + START_LIMIT_S
        while run(["docker", "--host", address, "version"], check=False).returncode:
            assert process.poll() is None and time.monotonic() < deadline_s, log.read_text()[-3000:]
            time.sleep(0.2)
        yield address
    finally:
        process.terminate()
        process.wait(timeout=60)
        run(["rm", "-rf", str(data)], timeout_s=300)


@pytest.fixture(scope="module")
def base(engine: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the public base image in the engine. It is pulled, or created by debootstrap under its name."""
    if run(["docker", "--host", engine, "pull", "--quiet", PUBLIC_BASE], check=False, timeout_s=120).returncode:
        builder = Buildah(Progress())
        archive = tmp_path_factory.mktemp("base") / "base.tar"
        builder.save(builder.base(), archive, PUBLIC_BASE)
        run(["docker", "--host", engine, "load", "--input", archive], timeout_s=300)
    if (certificates := pip_config.read().ca_bundle) is not None:
        # The classic builder has no mounts, so a base image brings the certificates of this machine's network.
        folder = tmp_path_factory.mktemp("certificates")
        shutil.copy(certificates, folder / "ca.pem")
        (folder / "Dockerfile").write_text(
            f"FROM {PUBLIC_BASE}\nCOPY ca.pem /etc/ca.pem\nENV PIP_CERT=/etc/ca.pem SSL_CERT_FILE=/etc/ca.pem\n"
        )
        options = ["build", "--tag", PUBLIC_BASE, str(folder)]
        run(["docker", "--host", engine, *options], env={"DOCKER_BUILDKIT": "0"}, timeout_s=300)
    return PUBLIC_BASE


@pytest.fixture(scope="module")
def images(root: Path, engine: str, base: str) -> dict[str, str]:
    """Return references by name of the images that `hack/images` builds with Docker."""
    assert base
    environment = {**os.environ, "DOCKER_HOST": engine}
    done = subprocess.run(
        [str(root / "hack" / "images")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=BUILD_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "with docker" in done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("name", "words", "expected"),
    [
        ("operator", ["--entrypoint", "dljob", "IMAGE", "--version"], "dljob"),
        ("trainer", ["--entrypoint", "python", "IMAGE", "-c", "import dltrain, torch; print(torch.__version__)"], "2."),
    ],
)
def test_image_runs_its_program(
    engine: str, images: dict[str, str], name: str, words: list[str], expected: str
) -> None:
    options = ["run", "--rm", "--network=none", "--read-only", "--tmpfs=/tmp", "--user=12345:12345"]
    command = [images[name] if word == "IMAGE" else word for word in words]
    done = run(["docker", "--host", engine, *options, *command], timeout_s=120)
    assert expected in done.stdout


def test_second_build_builds_nothing(root: Path, engine: str, images: dict[str, str]) -> None:
    environment = {**os.environ, "DOCKER_HOST": engine}
    done = subprocess.run(
        [str(root / "hack" / "images")], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(done.stdout) == images
    assert done.stderr.count("is built") == 2


def test_image_of_the_programs_has_their_libraries(root: Path, engine: str, images: dict[str, str]) -> None:
    """Without BuildKit, as ``hack/images`` builds here."""
    arguments = {"TRAINER": images["trainer"], **pip_config.proxies(os.environ)}
    options = [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
    command = ["build", "--network=host", "--tag", "programs", *options, str(root / "examples" / "programs")]
    run(["docker", "--host", engine, *command], env={"DOCKER_BUILDKIT": "0"}, timeout_s=BUILD_LIMIT_S)
    code = "import accelerate, lightning, torch, transformers; print('imported', transformers.__version__)"
    program = ["--entrypoint", "python", "programs", "-c", code]
    done = run(["docker", "--host", engine, "run", "--rm", "--network=none", *program], timeout_s=300)
    assert "imported 5." in done.stdout
