"""Tests of jobs with a task: a pod serves data, and the job looks at it, trains a model, and analyses it."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.cluster.kubectl import ROOT, Kubectl, condition, example, wait_for
from support.cluster.pod_server import pod_server, trainer_image

pytestmark = pytest.mark.e2e

SERVER = """
import http.server, os, random
import pyarrow
from pyarrow import parquet
os.makedirs("/tmp/data")
draw = random.Random(1)
rows = [(draw.gauss(0, 1), draw.gauss(0, 1)) for _ in range(400)]
with open("/tmp/data/points.csv", "w") as file:
    file.write("x,y,side\\n")
    file.writelines(f"{x:.4f},{y:.4f},{'above' if x + y > 0 else 'below'}\\n" for x, y in rows)
x, y = zip(*rows)
sides = ["above" if a + b > 0 else "below" for a, b in rows]
parquet.write_table(pyarrow.table({"x": x, "y": y, "side": sides}), "/tmp/data/points.parquet")
os.chdir("/tmp/data")
http.server.ThreadingHTTPServer(("", 8080), http.server.SimpleHTTPRequestHandler).serve_forever()
"""

FOLDER = """
import random
import pyarrow
from pathlib import Path
from pyarrow import parquet
draw = random.Random(2)
Path("/data/points").mkdir()
for part in range(4):
    rows = [(draw.gauss(0, 1), draw.gauss(0, 1)) for _ in range(100)]
    x, y = zip(*rows)
    columns = {"x": x, "y": y, "side": ["above" if a + b > 0 else "below" for a, b in rows]}
    parquet.write_table(pyarrow.table(columns), f"/data/points/part-{part}.snappy.parquet")
Path("/data/points/_SUCCESS").touch()
"""
"""Writes a folder as Spark does."""

IMAGES = """
import http.server, io, os, tarfile
import numpy as np
from PIL import Image
os.makedirs("/tmp/data")
draw = np.random.default_rng(1)
with tarfile.open("/tmp/data/pictures.tar", "w") as archive:
    for i in range(200):
        pixels = draw.integers(0, 100, (16, 16, 3)) + 150 * (i % 2)
        png = io.BytesIO()
        Image.fromarray(pixels.astype(np.uint8)).save(png, "png")
        member = tarfile.TarInfo(f"{('dark', 'bright')[i % 2]}/{i}.png")
        member.size = len(png.getvalue())
        archive.addfile(member, io.BytesIO(png.getvalue()))
os.chdir("/tmp/data")
http.server.ThreadingHTTPServer(("", 8080), http.server.SimpleHTTPRequestHandler).serve_forever()
"""


def job(name: str, target: str, file: str = "points.csv") -> dict[str, Any]:
    return example(
        "task.yaml", job=name, dataset={"uri": f"http://table:8080/{file}"},
        task={"type": "TabularClassification", "target": target, "within": "10m"},
    )  # fmt: skip


@pytest.mark.long
def test_a_table_becomes_a_trained_and_analysed_model_and_a_wrong_target_one_condition(
    admin: Kubectl, kubectl: Kubectl
) -> None:
    image = trainer_image(admin)
    kubectl.apply(*pod_server("table", image, SERVER), job("points", "side"))
    found = kubectl.wait_phase("points", "Complete", 300)
    suggestion, result = found["status"]["suggestion"], found["status"]["result"]
    assert suggestion["model"] == "linear model" and suggestion["configMap"] == "points-suggestion"
    assert result["analysis"]["task"] == "classification" and result["analysis"]["value"] > 0.9
    judged = suggestion["baseline"]
    assert "problem" not in judged and judged["measure"] == "accuracy" and 0 < judged["seconds"] < 120
    assert [each["model"] for each in judged["scores"]] == ["linear model", "trees"]
    others = {each["name"]: each["value"] for each in result["analysis"]["otherModels"]}
    assert others == pytest.approx({each["model"]: each["test"] for each in judged["scores"]}, abs=1e-4)
    assert "this model" in result["comparison"]
    assert not kubectl.list("pods", "dljob.dev/look=true")
    kubectl.apply(job("wrong", "colour"), job("parquet", "side", "points.parquet"))
    found = kubectl.wait_phase("parquet", "Complete", 300)
    assert found["status"]["suggestion"]["model"] == "linear model"
    assert found["status"]["result"]["analysis"]["value"] > 0.9

    def reported(found: dict[str, Any]) -> bool:
        inspected = condition(found, "DataInspected")
        return inspected is not None and inspected["reason"] == "DataNotUsable" and "'colour'" in inspected["message"]

    kubectl.wait_job("wrong", "DataInspected=False/DataNotUsable naming the column", reported, 120)


@pytest.mark.long
def test_a_folder_of_parquet_files_on_a_claim_becomes_a_model_that_predicts(
    admin: Kubectl, kubectl: Kubectl, tmp_path: Path
) -> None:
    [storage, *_] = admin.list("storageclasses")
    claim = {
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "tables"},
        "spec": {
            "accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "100Mi"}},
            "storageClassName": storage["metadata"]["name"],
        },
    }  # fmt: skip
    writer, _ = pod_server("writer", trainer_image(admin), FOLDER)
    writer["spec"] |= {"restartPolicy": "Never", "securityContext": {"fsGroup": 65532}}
    writer["spec"]["volumes"].append({"name": "data", "persistentVolumeClaim": {"claimName": "tables"}})
    [container] = writer["spec"]["containers"]
    container["volumeMounts"].append({"name": "data", "mountPath": "/data"})
    del container["readinessProbe"]
    kubectl.apply(claim, writer)

    def written() -> bool | None:
        return (kubectl.get("pod", "writer") or {}).get("status", {}).get("phase") == "Succeeded" or None

    wait_for("the pod that writes the data", written, 120)
    folder = example(
        "task.yaml", job="folder", dataset={"uri": "pvc://tables/points"},
        task={"type": "TabularClassification", "target": "side", "within": "10m"},
    )  # fmt: skip
    kubectl.apply(folder)
    found = kubectl.wait_phase("folder", "Complete", 300)
    assert found["status"]["suggestion"]["data"][0].startswith("400 rows")
    assert found["status"]["result"]["analysis"]["value"] > 0.9
    paths = ("operator", "operator/contract", "trainer-image")
    environment = os.environ | {
        "KUBECONFIG": kubectl.kubeconfig, "PYTHONPATH": os.pathsep.join(str(ROOT / path) for path in paths),
    }  # fmt: skip

    def run(*command: str, cwd: Path = tmp_path) -> str:
        ended = subprocess.run(
            [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    run("-m", "dljob.cli", "get-model", "folder", "model", "--all", "--namespace", kubectl.namespace)
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"x": [3.0, -3.0], "y": [1.0, -1.0]}), tmp_path / "model/new.parquet")
    predicted = run("predict.py", "new.parquet", cwd=tmp_path / "model").splitlines()
    assert [line.partition(",")[0] for line in predicted] == ["side", "above", "below"]


@pytest.mark.long
def test_an_archive_of_images_becomes_a_trained_and_analysed_model(admin: Kubectl, kubectl: Kubectl) -> None:
    images = example(
        "task-images.yaml", job="images", dataset={"uri": "http://pictures:8080/pictures.tar"},
        task={"type": "ImageClassification", "within": "5m"},
    )  # fmt: skip
    kubectl.apply(*pod_server("pictures", trainer_image(admin), IMAGES), images)
    found = kubectl.wait_phase("images", "Complete", 600)
    suggestion, result = found["status"]["suggestion"], found["status"]["result"]
    assert suggestion["model"].startswith("convolutional network") and "200 images" in suggestion["data"][0]
    assert result["analysis"]["task"] == "classification" and result["analysis"]["value"] > 0.9
    assert {each["name"] for each in result["analysis"]["otherModels"]} == {"linear model", "trees"}
