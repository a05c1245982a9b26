"""Tests of checkpoints in a bucket, in real pods on three nodes without a shared volume. A pod serves S3 (moto's server)."""

import pytest
import yaml

from support.chaos.killed_jobs import killed_once, resumed_from
from support.cluster.kubectl import ROOT, Kubectl, condition, step_of
from support.cluster.pod_server import pod_server, trainer_image
from support.cluster.program_image import SITE_PACKAGES, add_program_image, added_images, s3_server, scripts

pytestmark = [pytest.mark.e2e, pytest.mark.programs]

SERVER = """
import threading, boto3
from moto.server import ThreadedMotoServer
ThreadedMotoServer(ip_address="0.0.0.0", port=8080, verbose=False).start()
local = {"endpoint_url": "http://127.0.0.1:8080", "aws_access_key_id": "id", "aws_secret_access_key": "key"}
boto3.client("s3", region_name="us-east-1", **local).create_bucket(Bucket="models")
threading.Event().wait()
"""
SECRET = {
    "apiVersion": "v1", "kind": "Secret",
    "metadata": {"name": "checkpoint-store", "labels": {"dljob.dev/usable": "true"}},
    "stringData": {
        "AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key", "AWS_ENDPOINT_URL": "http://store:8080",
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def image(admin: Kubectl, kubectl: Kubectl) -> str:
    """Serve S3 in the namespace. Return the reference of an image with the programs' libraries."""
    with added_images() as layout:
        trainer = trainer_image(admin)
        server = f"localhost/s3-server:{trainer.rpartition(':')[2]}"
        layout.add_layer(server, trainer, s3_server(), SITE_PACKAGES)
        programs = add_program_image(layout, trainer)
    kubectl.apply(SECRET, *pod_server("store", server, SERVER))
    return programs


def test_three_nodes_without_a_volume_resume_from_the_bucket(image: str, kubectl: Kubectl) -> None:
    job = yaml.safe_load((ROOT / "examples/checkpoints-s3.yaml").read_text())
    job["spec"] |= {"epochs": 60}
    job["spec"]["checkpoint"]["interval"] = "2s"
    kubectl.apply(job)
    done = killed_once(kubectl, "digits-s3", 100)
    assert done["status"]["lastCheckpoint"]["path"].startswith("s3://models/team-a/digits-s3-"), done["status"]
    assert done["status"]["result"]["accuracy"] >= 0.95 and done["status"]["progress"]["percent"] == 100
    assert done["status"]["result"]["steps"] == step_of(done)
    assert not kubectl.list("persistentvolumeclaims")


def test_script_resumes_from_the_files_of_its_folder(image: str, kubectl: Kubectl) -> None:
    """The script writes to $DLJOB_CHECKPOINT_DIR, whose files a process beside the ranks uploads."""
    job = yaml.safe_load((ROOT / "examples/programs/job.yaml").read_text())
    job["metadata"]["name"] = "staged"
    job["spec"]["trainer"] |= {
        "image": image, "imagePullPolicy": "Never", "command": ["torchrun", "/programs/hf_trainer.py"],
        "env": [{"name": "STEPS", "value": "2400"}, {"name": "SAVE_STEPS", "value": "300"}],
    }  # fmt: skip
    job["spec"]["checkpoint"] = {"uri": "s3://models/team-a", "secretName": "checkpoint-store"}
    programs = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "programs"}, "data": scripts()}
    kubectl.apply(programs, job)
    # The folder of a node that never writes counts as unchanged after 20 s.
    done = killed_once(kubectl, "staged", 1200)
    assert (done["status"]["progress"]["step"], done["status"]["progress"]["percent"]) == (2400, 100)
    assert resumed_from(kubectl, "staged") >= 300
    saved = done["status"]["lastCheckpoint"]
    assert saved["name"] == "checkpoint-2400" and saved["path"].startswith("s3://models/team-a/staged-"), saved
    assert saved["bytes"] > 0 and saved["writeSeconds"] > 0 and 0 < saved.get("step", 1) <= 2400, saved
    assert done["status"]["result"]["checkpoint"] == saved["path"], done["status"]
    assert not kubectl.list("persistentvolumeclaims")


def test_missing_bucket_is_one_clear_condition(image: str, kubectl: Kubectl) -> None:
    job = yaml.safe_load((ROOT / "examples/checkpoints-s3.yaml").read_text())
    job["metadata"]["name"] = "nowhere"
    job["spec"]["checkpoint"]["uri"] = "s3://absent/team-a"
    kubectl.apply(job)
    failed = condition(kubectl.wait_phase("nowhere", "Failed", 180), "Failed")
    assert failed is not None and "s3://absent" in failed["message"], failed
