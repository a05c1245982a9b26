"""The seed: an image store that is prepared once, and from which each node's store is made with hard links in 1 s.

Importing a large image into each node would take most of the start of a cluster. Images are therefore imported into one
containerd root in the cache. Its content and unpacked layers never change afterwards, so nodes use hard links to them.
Only containerd's two databases are copied.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

from devcluster.embedded import packages
from devcluster.embedded.processes import Registry, wait_until
from devcluster.errors import ClusterError
from devcluster.images.oci_layout import Layout
from devcluster.locks import locked
from devcluster.paths import cache_root
from devcluster.progress import Progress
from devcluster.shell import run

PAUSE_IMAGE = "localhost/dljob-pause:1"
_PAUSE_SOURCE = Path(__file__).parent / "pause" / "main.go"
_SCRATCH_IMAGE = "localhost/dljob-scratch:1"
_KEEP = "containerd.io/gc.root"  # with this label, containerd does not delete a blob to which no image refers yet
_IMPORT_LIMIT_S = 600


def image_layout() -> Layout:
    """Return the OCI layout that stores built images."""
    return Layout(cache_root() / "images" / "layout")


def prepare(progress: Progress) -> None:
    """Import the images in the layout into the seed, the containerd root that all nodes' image stores are made from."""
    layout = image_layout()
    with locked("images"):
        _ensure_pause(layout, progress)
        wanted = layout.images()
        root, noted = cache_root() / "seed" / "root", cache_root() / "seed" / "images.json"
        if noted.exists() and json.loads(noted.read_text()) == wanted:
            return
        with progress.step(f"importing {len(wanted)} images into the seed"):
            noted.unlink(missing_ok=True)
            _update(root, layout, wanted)
            noted.write_text(json.dumps(wanted))


def plant(target: Path) -> None:
    """Create a node's containerd root (its image store) in the folder `target`.

    Link its files to those of the seed (the prepared store in the cache). Copy only the databases.
    """
    root = cache_root() / "seed" / "root"
    scratch = target.with_name(target.name + ".new")
    shutil.rmtree(scratch, ignore_errors=True)
    with locked("images"):
        run(["cp", "-a", "--link", root, scratch], timeout_s=300)
        for database in scratch.rglob("*.db"):
            copy = database.with_suffix(".copy")
            shutil.copy2(database, copy)
            copy.replace(database)
    scratch.rename(target)


def load_layout(address: str, root: Path, layout: Layout, references: Collection[str]) -> None:
    """Import images from a layout into the containerd at `address`, whose root folder is `root`.

    If layout and store are on one file system, missing blobs are hard-linked into the store instead of copied. Only
    unpacking the layers then takes time.
    """
    client = ["ctr", "--address", address, "--namespace", "k8s.io"]
    wanted = {digest for reference in references for digest in layout.blobs(reference)}
    missing = sorted(wanted - set(run([*client, "content", "list", "--quiet"]).stdout.split()))
    for digest in missing:
        _adopt(client, root, layout.blob(digest), digest)
    present = set(run([*client, "content", "list", "--quiet"]).stdout.split())
    _import(client, address, layout, references, present)
    for digest in missing:
        run([*client, "content", "label", digest, f"{_KEEP}="], check=False)  # the images refer to them now


def _import(
    client: Sequence[str], address: str, layout: Layout, references: Collection[str], present: Collection[str]
) -> None:
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [*client, "images", "import", "-"], stdin=subprocess.PIPE, stdout=errors, stderr=errors
        )
        assert process.stdin
        try:
            layout.stream(references, present, process.stdin)
            process.stdin.close()
            process.wait(timeout=_IMPORT_LIMIT_S)
        except BrokenPipeError:
            process.wait(timeout=10)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if process.returncode:
            errors.seek(0)
            raise ClusterError(
                f"containerd at {address}: found an error on the import of images; expected all to be imported. The "
                f"end of its output: {errors.read().decode()[-2000:]}"
            )


def _adopt(client: Sequence[str], root: Path, blob: Path, digest: str) -> None:
    """Link a blob into containerd's content store and register it there.

    containerd shares content between namespaces: if its store already contains the digest to ingest, it reads no data.
    If linking fails (because of another file system), the following import copies the blob.
    """
    target = root / "io.containerd.content.v1.content" / "blobs" / Path(*digest.split(":", 1))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            target.hardlink_to(blob)
    except OSError:
        return
    expected = ["--expected-digest", digest, "--expected-size", str(blob.stat().st_size)]
    with blob.open("rb") as content:
        subprocess.run(
            [*client, "content", "ingest", *expected, f"adopt-{digest}"],
            stdin=content,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
            timeout=_IMPORT_LIMIT_S,
        )
    run([*client, "content", "label", digest, f"{_KEEP}=adopted"], check=False)


def import_archive(address: str, archive: Path) -> None:
    """Import a docker or OCI archive into the containerd at `address`."""
    command: Sequence[str | Path] = ["ctr", "--address", address, "--namespace", "k8s.io", "images", "import", archive]
    run(command, timeout_s=_IMPORT_LIMIT_S)


def _ensure_pause(layout: Layout, progress: Progress) -> None:
    note = cache_root() / "images" / "pause.digest"
    digest = hashlib.sha256(_PAUSE_SOURCE.read_bytes()).hexdigest()
    if PAUSE_IMAGE in layout.images() and note.exists() and note.read_text() == digest:
        return
    packages.install({"go": "golang-go"}, progress)
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "pause")
        env = {"CGO_ENABLED": "0", "GO111MODULE": "off", "GOCACHE": f"{folder}/cache", "GOFLAGS": ""}
        run(
            ["go", "build", "-trimpath", "-ldflags", "-s -w", "-o", program, _PAUSE_SOURCE],
            env=env,
            timeout_s=300,
        )
        layout.add_program(PAUSE_IMAGE, program)
    note.write_text(digest)


def _update(root: Path, layout: Layout, wanted: dict[str, str]) -> None:
    """Make the image store in `root` contain exactly the images `wanted`, with a temporary containerd.

    `layout`: the source of the images. `wanted`: image reference → manifest digest.
    """
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="dljob-seed-") as folder:
        address = f"{folder}/containerd.sock"
        config = Path(folder, "config.toml")
        config.write_text(
            f'version = 2\nroot = {json.dumps(str(root))}\nstate = "{folder}/state"\n'
            f'disabled_plugins = ["io.containerd.grpc.v1.cri"]\n[grpc]\naddress = "{address}"\n'
            f'[ttrpc]\naddress = "{address}.ttrpc"\n'
            '[plugins."io.containerd.gc.v1.scheduler"]\nstartup_delay = "1h"\n'
        )
        registry = Registry(Path(folder, "processes"), folder)
        registry.start("containerd", ["containerd", "--config", config], Path(folder, "log"))
        try:
            ready = ["ctr", "--address", address, "version"]
            if not wait_until(lambda: run(ready, check=False).returncode == 0, 30):
                raise ClusterError(
                    "containerd: found no answer to `ctr version` 30 s after its start; expected one. The end of its "
                    "log shows the cause:\n" + Path(folder, "log").read_text()[-2000:]
                )
            client = ["ctr", "--address", address, "--namespace", "k8s.io", "images"]
            listed = run([*client, "list"]).stdout.splitlines()[1:]
            have = {line.split()[0]: line.split()[2] for line in listed}
            new = [reference for reference, digest in wanted.items() if have.get(reference) != digest]
            if new:
                load_layout(address, root, layout, new)
            # Removing an image with --sync also collects the layers of those that were replaced.
            run([*client, "tag", PAUSE_IMAGE, _SCRATCH_IMAGE])
            run([*client, "remove", "--sync", _SCRATCH_IMAGE, *sorted(set(have) - set(wanted))], timeout_s=120)
        finally:
            registry.end(["containerd"], grace_s=10)
