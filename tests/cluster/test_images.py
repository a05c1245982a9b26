"""What makes an image's tag, how images are stored, and that the pins hold what the project asks for."""

import io
import json
import re
import tarfile
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from devcluster.errors import ClusterError
from devcluster.images.inputs import IMAGES, digest, files, reference
from devcluster.ocilayout import Layout

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


def test_the_tag_changes_with_what_goes_in_and_nothing_else(tree: Path) -> None:
    before = digest(TRAINER, {}, tree)
    cache = tree / "trainer-image/dltrain/__pycache__"
    cache.mkdir()
    (cache / "module.pyc").write_text("compiled")
    (tree / "README.md").write_text("for people")
    assert digest(TRAINER, {}, tree) == before
    assert digest(TRAINER, {"TORCH": "torch==2.5"}, tree) != before
    (tree / "operator/dljob/module.py").write_text("changed")  # both images hold the one distribution
    changed = digest(TRAINER, {}, tree)
    assert changed != before
    (tree / "operator/dljob/module.py").rename(tree / "operator/dljob/renamed.py")
    assert digest(TRAINER, {}, tree) != changed


@pytest.mark.parametrize("name", IMAGES)
def test_every_input_is_in_the_build_context(root: Path, name: str) -> None:
    """The digest covers what the Dockerfile copies, and .dockerignore lets it through."""
    image = IMAGES[name]
    assert all((root / one).exists() for one in (image.dockerfile, *image.inputs))
    ignored = (root / ".dockerignore").read_text().splitlines()
    allowed = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    assert ignored[0] == "*"
    others_pins = {f"{folder}/constraints.txt" for folder in ("operator", "trainer-image")} - set(image.inputs)
    assert allowed - others_pins == set(image.inputs) - {".dockerignore"}
    assert len(list(files(image))) > len(image.inputs)


def test_references() -> None:
    local, remote = reference(TRAINER, {}, None), reference(TRAINER, {}, "registry.example/team")
    assert re.fullmatch(r"localhost/dljob-trainer:[0-9a-f]{12}", local)
    assert remote == local.replace("localhost", "registry.example/team")


@pytest.mark.parametrize(("name", "folder"), [("operator", "operator"), ("trainer", "trainer-image")])
def test_pins_satisfy_the_project(root: Path, name: str, folder: str) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    pins: dict[str, str] = {
        canonicalize_name(line.split("==")[0]): line.split("==")[1].strip()
        for line in (root / folder / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    }
    dockerfile = (root / folder / "Dockerfile").read_text()
    torch = re.search(r"^ARG TORCH=torch==(\S+)$", dockerfile, re.MULTILINE)
    if torch:
        pins["torch"] = torch[1]
    wanted = [*project["dependencies"], *project["optional-dependencies"][name]]
    for text in wanted:
        requirement = Requirement(text)
        pinned = pins.get(canonicalize_name(requirement.name))
        assert pinned is not None, f"{folder}/constraints.txt lacks {requirement.name}: hack/images --lock"
        assert requirement.specifier.contains(pinned), f"{requirement}, but {folder}/constraints.txt has {pinned}"


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    program = tmp_path / "hello"
    made = Layout(tmp_path / "layout")
    for version in ("1", "2", "3"):
        program.write_text(f"program {version}")
        made.add_program(f"localhost/hello:{version}", program)
    return made


def test_a_stream_leaves_out_what_the_reader_has(layout: Layout) -> None:
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


def test_old_images_and_their_blobs_go(layout: Layout) -> None:
    first, last = set(layout.blobs("localhost/hello:1")), set(layout.blobs("localhost/hello:3"))
    assert layout.keep_newest(2) == ["localhost/hello:1"]
    assert list(layout.images()) == ["localhost/hello:2", "localhost/hello:3"]
    assert all(layout.blob(digest).exists() for digest in last)
    assert not any(layout.blob(digest).exists() for digest in first - last)


def test_an_image_that_is_not_there_is_named(layout: Layout) -> None:
    with pytest.raises(ClusterError, match=r"no image localhost/hello:9: found .*hello:1.*build it with hack/images"):
        layout.blobs("localhost/hello:9")
