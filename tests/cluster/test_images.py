"""Tests of image tags, image storage and pinned dependencies."""

import io
import json
import re
import tarfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from devcluster.errors import ClusterError
from devcluster.images import lock, torch_build
from devcluster.images.builders import without_mounts
from devcluster.images.inputs import IMAGES, digest, files, reference
from devcluster.images.oci_layout import Layout
from requirements import requirements

TRAINER = IMAGES["trainer"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in (TRAINER.dockerfile, *TRAINER.inputs):
        path = tmp_path / name
        if "." in path.name or path.name in ("Dockerfile", "LICENSE"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(name)
        else:
            path.mkdir(parents=True)
            (path / "module.py").write_text(name)
    return tmp_path


def test_tag_changes_only_with_the_inputs_of_the_image(tree: Path) -> None:
    before = digest(TRAINER, {}, tree)
    cache = tree / "trainer-image/dltrain/__pycache__"
    cache.mkdir()
    (cache / "module.pyc").write_text("compiled")
    (tree / "README.md").write_text("for people")
    assert digest(TRAINER, {}, tree) == before
    assert digest(TRAINER, {"TORCH": "torch==2.5"}, tree) != before
    (tree / "operator/contract/module.py").write_text("changed")
    changed = digest(TRAINER, {}, tree)
    assert changed != before
    (tree / "operator/contract/module.py").rename(tree / "operator/contract/renamed.py")
    assert digest(TRAINER, {}, tree) != changed


@pytest.mark.parametrize("name", IMAGES)
def test_every_input_is_in_the_build_context(root: Path, name: str) -> None:
    """The digest covers all files that the Dockerfile copies, and .dockerignore does not exclude them."""
    image = IMAGES[name]
    assert all((root / one).exists() for one in (image.dockerfile, *image.inputs))
    ignored = (root / ".dockerignore").read_text().splitlines()
    allowed = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    assert ignored[0] == "*"
    theirs = {one for other in IMAGES.values() for one in other.inputs} - set(image.inputs)
    excluded = {".dockerignore"}
    assert allowed - theirs == {one for one in image.inputs if one not in excluded}
    assert len(list(files(image))) > len(image.inputs)


def test_image_references_are_normalized() -> None:
    local, remote = reference(TRAINER, {}, None), reference(TRAINER, {}, "registry.example/team")
    assert re.fullmatch(r"localhost/dljob-trainer:[0-9a-f]{12}", local)
    assert remote == local.replace("localhost", "registry.example/team")


@pytest.mark.parametrize("name", lock.LOCKS)
def test_pins_satisfy_the_requirements(root: Path, name: str) -> None:
    path = lock.LOCKS[name].path
    there = (lock.LOCKS[each].path for each in (lock.LOCKS[name].beside, name) if each)
    pins = {
        canonicalize_name(key): value
        for each in there
        for key, value in lock.versions((root / each).read_text()).items()
    }
    pins["torch"] = torch_build.requirement().removeprefix("torch==")
    for text in requirements(*lock.LOCKS[name].wanted):
        requirement = Requirement(text)
        pinned = pins.get(canonicalize_name(requirement.name))
        assert pinned is not None, f"{path} lacks {requirement.name}: run hack/lock"
        assert requirement.specifier.contains(pinned), f"{requirement}, but {path} has {pinned}: run hack/lock"


def test_lock_names_no_local_build_of_pytorch() -> None:
    text = (
        "torch==2.13.0 \\\n    --hash=sha256:00\nnvidia-cublas==13 ; sys_platform == 'linux' \\\n    --hash=sha256:01\n"
    )
    assert lock.without_builds(text + "tqdm==4.0 \\\n    --hash=sha256:02\n") == "tqdm==4.0 \\\n    --hash=sha256:02\n"


def test_every_entry_of_a_lock_has_a_hash(root: Path) -> None:
    for one in (*(lock.LOCKS[name].path for name in lock.LOCKS), "hack/locks/uv.txt"):
        entries = re.split(r"^(?=[a-zA-Z0-9])", (root / one).read_text(), flags=re.MULTILINE)
        assert all("--hash=sha256:" in entry for entry in entries if entry[:1].isalnum()), one


def test_classic_builder_gets_no_mounts(root: Path) -> None:
    for image in IMAGES.values():
        plain = without_mounts((root / image.dockerfile).read_text())
        assert "--mount" not in plain and "UV_CACHE_DIR" not in plain
        assert plain.count("\nRUN ") == (root / image.dockerfile).read_text().count("\nRUN ")


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    program = tmp_path / "hello"
    made = Layout(tmp_path / "layout")
    for version in ("1", "2", "3"):
        program.write_text(f"program {version}")
        made.add_program(f"localhost/hello:{version}", program)
    return made


def test_image_stream_omits_layers_that_the_reader_has(layout: Layout) -> None:
    wanted = layout.blobs("localhost/hello:2")
    assert len(wanted) == 3
    everything, rest = _members(layout, wanted[:0]), _members(layout, wanted[2:])
    assert everything - rest == {"blobs/" + wanted[2].replace(":", "/")}
    assert {"oci-layout", "index.json"} <= rest


def _members(layout: Layout, present: list[str]) -> set[str]:
    output = io.BytesIO()
    layout.stream(["localhost/hello:2"], present, output)
    output.seek(0)
    with tarfile.open(fileobj=output) as tar:
        index = tar.extractfile("index.json")
        assert index
        (entry,) = json.load(index)["manifests"]
        assert entry["annotations"] == {"io.containerd.image.name": "localhost/hello:2"}
        return set(tar.getnames())


def test_old_images_and_their_blobs_are_removed(layout: Layout) -> None:
    first, last = set(layout.blobs("localhost/hello:1")), set(layout.blobs("localhost/hello:3"))
    assert layout.keep_newest(2) == ["localhost/hello:1"]
    assert list(layout.images()) == ["localhost/hello:2", "localhost/hello:3"]
    assert all(layout.blob(digest).exists() for digest in last)
    assert not any(layout.blob(digest).exists() for digest in first - last)


def test_missing_image_is_reported(layout: Layout) -> None:
    with pytest.raises(ClusterError, match=r"image localhost/hello:9: found only .*hello:1.*Build it with hack/images"):
        layout.blobs("localhost/hello:9")
