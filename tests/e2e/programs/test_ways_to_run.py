"""Tests of other kinds of jobs: training scripts, torchrun scripts, PlanOnly, suspension, and any UID."""

from typing import Any

import pytest
import yaml

from support.cluster.kubectl import ROOT, TWO_NODES, Kubectl, condition, example, no_pods, step_of, wait_for
from support.cluster.pod_server import trainer_image

pytestmark = pytest.mark.e2e


EXAMPLES = ("own-script.yaml", "pipeline-script.yaml", "mpi.yaml")
# Others in hack/test run what these run: torchrun scripts, Horovod's API over MPI, the first job of the README, a script
# that reports, and a job that stops at its target (tests of the agents).
LIKE_OTHERS = ("torchrun.yaml", "torchrun-elastic.yaml", "report.yaml", "horovod.yaml", "minimal.yaml", "until.yaml")
LIKE_OTHERS += ("gan-script.yaml",)


@pytest.mark.parametrize("name", [*EXAMPLES, *(pytest.param(name, marks=pytest.mark.long) for name in LIKE_OTHERS)])
def test_example_runs_to_completion(name: str, kubectl: Kubectl) -> None:
    path = ROOT / "examples" / name
    kubectl.run("apply", "-f", str(path))
    job = next(d for d in yaml.safe_load_all(path.read_text()) if d["kind"] == "DLJob")["metadata"]["name"]
    done = kubectl.wait_phase(job, "Complete", 240)
    if name == "report.yaml":
        progress = done["status"]["progress"]
        assert (progress["step"], progress["percent"]) == (300, 100) and progress["metrics"]["slope"] > 1
        assert done["status"]["result"]["loss"] == progress["loss"] > 0
    if name == "until.yaml":
        complete, result = condition(done, "Complete"), done["status"]["result"]
        assert complete is not None and complete["reason"] in ("TargetReached", "NoImprovement")
        assert result["steps"] < done["status"]["progress"]["steps"] and result["checkpoint"]


def test_sharded_model_in_16_bits_teaches_the_next_plan(kubectl: Kubectl) -> None:
    """Real pods gather parameters in bfloat16 and recompute blocks. The next plan of the script knows the step."""
    script, job = yaml.safe_load_all((ROOT / "examples" / "sharded-script.yaml").read_text())
    job["spec"]["epochs"] = 4
    kubectl.apply(script, job)
    name = job["metadata"]["name"]
    done = kubectl.wait_phase(name, "Complete", 240)
    plan = done["status"]["plan"]
    assert (plan["parallelism"], plan["precision"], plan["activationCheckpointing"]) == ("Sharded", "BF16", True)
    assert done["status"]["result"]["accuracy"] > 0.5
    assert plan["predicted"]["basis"] != "profile", "nothing was measured before"

    def learned() -> bool:
        own = [each for each in kubectl.list("dlprofiles") if each["spec"].get("namespace") == kubectl.namespace]
        return any(each.get("status", {}).get("splitSteps") for each in own)

    wait_for("a profile with the step", learned, 60)
    job["metadata"]["name"], job["spec"]["planning"] = f"{name}-again", {"mode": "PlanOnly"}
    kubectl.apply(job)
    again = kubectl.wait_job(f"{name}-again", "a plan", lambda found: bool(found.get("status", {}).get("plan")), 60)
    assert again["status"]["plan"]["predicted"]["basis"] == "profile"


def test_torchrun_needs_an_image_a_command_and_nodes_only(kubectl: Kubectl) -> None:
    script, job = yaml.safe_load_all((ROOT / "examples" / "torchrun.yaml").read_text())
    script["metadata"]["name"] = "torchrun-only"
    [override] = job["spec"]["podTemplateOverrides"]
    override["spec"]["volumes"][0]["configMap"]["name"] = "torchrun-only"
    # The script judges, because a pod's logs end with its container.
    script["data"]["counted.py"] = """import os
expected = {"TORCHELASTIC_RESTART_COUNT": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
found = {name: os.environ[name] for name in expected}
if found != expected:
    raise SystemExit(f"found {found}, expected {expected}")
if not os.environ["ON"]:
    raise SystemExit("no name of a node in ON")
exec(open("/scripts/train_torchrun.py").read())
"""
    trainer = {
        "framework": "Torchrun",
        # The image of the example does not exist. Without one, the operator's is used.
        "command": ["torchrun", "--nnodes=9", "--nproc-per-node=9", "/scripts/counted.py"],
        "env": [{"name": "ON", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}],
    }
    only = example(
        "torchrun-minimal.yaml", job="torchrun-only", trainer=trainer, podTemplateOverrides=[override],
        checkpoint={"enabled": False}, resources={"memory": "1Gi"},
    )  # fmt: skip
    kubectl.apply(script, only)
    running = kubectl.wait_job("torchrun-only", "a plan", lambda found: bool(found.get("status", {}).get("plan")), 60)
    plan = running["status"]["plan"]
    assert plan["predicted"]["stepSeconds"] == 0 and "spec.model" in plan["missingFields"][0]
    kubectl.wait_phase("torchrun-only", "Complete", 240)


@pytest.mark.long
def test_command_with_mpirun_runs_its_program_in_one_world(kubectl: Kubectl) -> None:
    script, job = yaml.safe_load_all((ROOT / "examples" / "mpi.yaml").read_text())
    script["metadata"]["name"] = job["metadata"]["name"] = "mpirun"
    [override] = job["spec"]["podTemplateOverrides"]
    override["spec"]["volumes"][0]["configMap"]["name"] = "mpirun"
    # The program judges, because a pod's logs end with its container.
    script["data"]["counted.py"] = """from mpi4py import MPI
world = MPI.COMM_WORLD
if (world.size, world.allreduce(world.rank + 1)) != (2, 3):
    raise SystemExit(f"found {world.size} ranks, expected 2")
"""
    job["spec"]["trainer"]["command"] = ["mpirun", "--allow-run-as-root", "-np", "9", "python", "/scripts/counted.py"]
    kubectl.apply(script, job)
    running = kubectl.wait_job("mpirun", "a plan", lambda found: bool(found.get("status", {}).get("plan")), 60)
    assert running["status"]["plan"]["collective"] == "MPI" and running["status"]["plan"]["missingFields"]
    kubectl.wait_phase("mpirun", "Complete", 240)


@pytest.mark.long
def test_replicas_of_a_pipeline_train(kubectl: Kubectl) -> None:
    """Each of two nodes has both stages of a replica."""
    job = example(
        "pipeline.yaml", job="replicas",
        parallelism={"strategy": "Pipeline", "stages": 2, "replicas": 2, "microBatches": 4},
        planning={"mode": "Fixed", "groups": [{"device": "cpu", "nodes": 2, "ranksPerNode": 2}]},
    )  # fmt: skip
    kubectl.apply(job)
    done = kubectl.wait_phase("replicas", "Complete", 240)
    assert (done["status"]["plan"]["ranks"], done["status"]["plan"]["replicas"]) == (4, 2)
    assert done["status"]["result"]["accuracy"] >= 0.95


@pytest.mark.long
def test_data_is_fetched_from_a_server(admin: Kubectl, kubectl: Kubectl) -> None:
    image = trainer_image(admin)
    job, service, files = yaml.safe_load_all((ROOT / "examples" / "dataset-uri.yaml").read_text())
    files["spec"]["containers"][0]["image"] = image
    kubectl.apply(job, service, files)  # the job is created first, and its pods wait for the server
    done = kubectl.wait_phase("dataset-uri", "Complete", 240)
    assert done["status"]["result"]["accuracy"] >= 0.95
    wrong = example("digits.yaml", job="wrong-sum", dataset={**job["spec"]["dataset"], "sha256": "0" * 64})
    kubectl.apply(wrong)

    def reported(found: dict[str, Any]) -> bool:
        failed = condition(found, "Failed")
        return failed is not None and failed["reason"] == "BadInput" and "spec.dataset.sha256" in failed["message"]

    kubectl.wait_job("wrong-sum", "Failed/BadInput naming the checksum", reported, 30)


def test_plan_only_creates_no_pods(kubectl: Kubectl) -> None:
    kubectl.run("apply", "-f", str(ROOT / "examples" / "plan-only.yaml"))
    job = kubectl.wait_phase("plan-only", "Planned", 30)
    plan = job["status"]["plan"]
    assert plan["candidates"] and [c["chosen"] for c in plan["candidates"]].count(True) == 1
    assert not kubectl.list("pods", "dljob.dev/job=plan-only")
    assert not kubectl.list("statefulsets", "dljob.dev/job=plan-only")


@pytest.mark.long
def test_suspended_job_resumes_without_lost_steps(kubectl: Kubectl) -> None:
    kubectl.apply(example("digits.yaml", job="pause", epochs=60))
    kubectl.wait_job("pause", "a step", lambda j: step_of(j) > 20, 120)
    kubectl.run("patch", "dljob", "pause", "--type=merge", "-p", '{"spec": {"suspend": true}}')
    suspended = kubectl.wait_phase("pause", "Suspended", 90)
    no_pods(kubectl, "pause", 60)
    checkpoint = suspended["status"]["lastCheckpoint"]["step"]
    assert checkpoint > 0, "a checkpoint is saved before suspension"
    kubectl.run("patch", "dljob", "pause", "--type=merge", "-p", '{"spec": {"suspend": false}}')
    resumed = kubectl.wait_phase("pause", "Running", 120)
    assert step_of(resumed) >= checkpoint
    done = kubectl.wait_phase("pause", "Complete", 240)
    assert done["status"]["result"]["accuracy"] >= 0.97


def test_job_runs_under_any_uid(kubectl: Kubectl) -> None:
    override = {"manager": "openshift", "spec": {"securityContext": {"runAsUser": 54321, "runAsGroup": 54321}}}
    job = example("digits.yaml", job="uid", epochs=3, nodes=TWO_NODES, podTemplateOverrides=[override])
    job["metadata"]["annotations"] = {"dljob.dev/overrides": "all"}
    kubectl.apply(job)
    kubectl.wait_phase("uid", "Running", 120)
    for pod in kubectl.list("pods", "dljob.dev/job=uid"):
        assert pod["spec"]["securityContext"]["runAsUser"] == 54321
        context = next(c for c in pod["spec"]["containers"] if c["name"] == "trainer")["securityContext"]
        assert context["readOnlyRootFilesystem"] and not context["allowPrivilegeEscalation"]
        assert context["capabilities"]["drop"] == ["ALL"]
    kubectl.wait_phase("uid", "Complete", 180)
