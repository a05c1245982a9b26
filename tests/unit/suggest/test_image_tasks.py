"""Images of a job with a task: the look pod's suggestion, and scripts that read the images where the job finds them."""

import io
import json
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from dljob.api.spec import TaskType
from dljob.cluster import cluster_view
from dljob.job.task.suggestion import SCRIPTS, Suggestion
from dljob.suggest.look import Question, look
from dljob.suggest.subject import Options, read_subject
from support.generated_data import Write, archive, arrays, image_folder, images, mixed_modes, picture, sixteen_bits
from support.projects import analysis, metrics, no_baseline, script, shorten

NODE = cluster_view({"nodes": [{"name": "n", "cpu": 2, "memory": "4Gi"}]})
URI = "https://data.example/pictures?token=secret"


def packed(*names: str, first: int = 0, to: str = "data.tar") -> Write:
    """Return a function that writes an archive of images with these names."""

    def write(folder: Path) -> Path:
        with tarfile.open(folder / to, "w") as file:
            for i, name in enumerate(names):
                png = io.BytesIO()
                picture(first + i).save(png, "png")
                member = tarfile.TarInfo(name)
                member.size = len(png.getvalue())
                file.addfile(member, io.BytesIO(png.getvalue()))
        return folder / to

    return write


def shards(folder: Path) -> Path:
    for first, name in enumerate(("train-0.tar", "train-1.tar", "test-0.tar")):
        packed(*(f"c{i % 2}/{i}.png" for i in range(10)), first=10 * first, to=name)(folder)
    return folder


def null_labels(folder: Path) -> Path:
    """Write an archive of images whose class is their folder, or the next key of their JSON files."""
    path = packed(*(f"c{i % 2}/{i}.png" for i in range(20)))(folder)
    with tarfile.open(path, "a") as file:
        for i in range(20):
            labels = {"label": None} if i < 10 else {"cls": None, "label": f"c{i % 2}"}
            content = json.dumps(labels).encode()
            member = tarfile.TarInfo(f"c{i % 2}/{i}.json")
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    return path


def truth_values(folder: Path) -> Path:
    np.savez(folder / "data.npz", x=np.random.default_rng(1).random((20, 8, 8)) < 0.5, y=np.arange(20) % 2)
    return folder / "data.npz"


def unlabelled_test_part(folder: Path) -> Path:
    """Write classes in ``train``, and images without classes in ``test``, as many competitions do."""
    image_folder(test=True)(folder)
    for file in sorted((folder / "test").rglob("*.png")):
        file.rename(folder / "test" / file.name)
    for name in ("class 0", "class 1"):
        (folder / "test" / name).rmdir()
    return folder


def hidden_copies(folder: Path) -> Path:
    """Write images with the copies that Jupyter makes, and other files beside them."""
    image_folder()(folder)
    for name in ("class 0", "class 1"):
        (folder / name / ".ipynb_checkpoints").mkdir()
        (folder / name / ".ipynb_checkpoints/0-checkpoint.png").write_bytes(b"no image")
        (folder / name / "Thumbs.db").write_bytes(b"no image")
        picture(5).save(folder / name / "from the web.jfif", "JPEG")
    return folder


DOTS = packed(*(f"c{i % 2}/IMG.2024.{i}.png" for i in range(20)))
PARTS = packed(*(f"data/{part}/c{i % 2}/{i}.png" for part in ("train", "Test") for i in range(12)))
CASES = {case.name: case.write for case in images()} | {
    "truth values": truth_values,
    "archives in a folder": shards,
    "folder with a test part without classes": unlabelled_test_part,
    "folder with hidden copies": hidden_copies,
    "archive with dots in names": DOTS,
    "archive with a test part": PARTS,
    "archive with null as a class": null_labels,
}


def asked(path: Path, task: TaskType = TaskType.IMAGE_CLASSIFICATION) -> tuple[Suggestion, dict[str, str]]:
    return look(Question(path, URI, task, uid="u", digest="a" * 32), NODE, lambda: 0.0, no_baseline)


def error(path: Path, task: TaskType = TaskType.IMAGE_CLASSIFICATION) -> str:
    suggestion, scripts = asked(path, task)
    assert not scripts and suggestion.error is not None
    assert "--" not in suggestion.error and str(path) not in suggestion.error and "secret" not in suggestion.error
    return suggestion.error


def module(text: str) -> Any:
    found = ModuleType("data")
    exec(compile(text, "data.py", "exec"), found.__dict__)
    return found


@pytest.mark.parametrize("name", CASES)
def test_the_scripts_read_the_same_images_as_the_look_pod(name: str, tmp_path: Path) -> None:
    path = CASES[name](tmp_path)
    suggestion, scripts = asked(path)
    assert suggestion.model is not None and set(scripts) == set(SCRIPTS)
    data = module(scripts["data.py"])
    expected, found = read_subject(Options(path)).arrays, data.load(path)
    assert expected is not None and set(expected) == set(found)
    for key, values in expected.items():
        assert np.array_equal(found[key], values), key
    x, *_ = data.parts(path, 0)
    assert len(x) == suggestion.model.samples or "x_test" not in found
    assert x[0].nbytes == suggestion.model.sample_nbytes


def test_the_suggestion_has_reason_facts_and_alternatives(tmp_path: Path) -> None:
    suggestion, scripts = asked(archive("cls")(tmp_path))
    assert suggestion.model is not None and suggestion.model.name == "convolutional network of 2 stages"
    assert len(suggestion.alternatives) == 2 and "24 images" in suggestion.data[0]
    assert Suggestion.parse(suggestion.to_json()) == suggestion
    assert all(len(text.splitlines()) <= 150 and "$" not in text for text in scripts.values())


@pytest.mark.long
@pytest.mark.parametrize("write", [archive("cls"), image_folder(), arrays((8, 8)), mixed_modes], ids=range(4))
def test_the_scripts_train_from_the_data_of_the_job(write: Write, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "scripts").mkdir()
    path = write(tmp_path / "data")
    for name, text in asked(path)[1].items():
        (tmp_path / "scripts" / name).write_text(text, encoding="utf-8")
    shorten(tmp_path / "scripts", 3)
    script(tmp_path / "scripts", "train.py", DLJOB_DATASET=str(path))
    assert 0 <= metrics(tmp_path / "scripts")["accuracy"] <= 1
    assert analysis(tmp_path / "scripts")["samples"] > 1
    picture(1).save(tmp_path / "new.png")
    assert len(script(tmp_path / "scripts", "predict.py", str(tmp_path / "new.png")).splitlines()) == 2


def test_data_that_is_no_image_is_one_error_in_terms_of_the_spec(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text("a,b\n1,2\n")
    assert "expected a folder with a folder for each class, a .tar archive, or an .npz file" in error(table)
    (tmp_path / "empty").mkdir()
    assert "found 0 folders with images" in error(tmp_path / "empty")
    (tmp_path / "x.tar").write_bytes(b"no archive")
    assert "no readable tar archive" in error(tmp_path / "x.tar")
    assert "spec.task.type: ImageClassification" in error(tmp_path / "x.tar", TaskType.TABULAR_CLASSIFICATION)


def test_a_new_image_of_sixteen_bits_is_read_as_in_training(tmp_path: Path) -> None:
    """Fixed bug: predict.py cut the values off, so that nearly every such image was white."""
    _, scripts = asked(sixteen_bits(tmp_path))
    path = sorted(tmp_path.rglob("*.png"))[0]
    found = module(scripts["data.py"]).scaled(path)
    assert found.max() < 255 and "scaled(" in scripts["predict.py"]


def test_a_new_image_that_is_too_large_is_an_error_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed bug: predict.py ended with a traceback, because Pillow's error is none of those of other images."""
    path = tmp_path / "large.png"
    picture(1).save(path)
    data = module(asked(archive("cls")(tmp_path))[1]["data.py"])
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 10)
    with pytest.raises(OSError, match="exceeds limit"):
        data.scaled(path)
