"""Tests of scripts whose checkpoint folder is staged in an object store, with real agents and moto's server."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlcontract import CheckpointRef, ModelRef, Plan, RunPhase
from support.trainer.object_store import Server, server
from support.trainer.pods import KILL, TERM, UID, Job
from support.trainer.ranks import SPEAKING

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(os.getuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2 for namespaces"),
]
SCRIPT = SPEAKING.replace("faults/speaking_rank", "scripts/checkpointing_script")
SHARDED = SPEAKING.replace("faults/speaking_rank", "scripts/sharded_script")


@pytest.fixture
def store() -> Iterator[Server]:
    with server("0.0.0.0") as running:
        yield running


def disk_of_each_pod(job: Job) -> list[Path]:
    """Give each pod a directory of its own at the path of the checkpoints, as an emptyDir is. Return them."""
    disks = []
    for pod in job.pods:
        disk = pod.directory / "disk"
        disk.mkdir(exist_ok=True)
        os.chown(disk, UID, 0)
        at = pod.command.index("sh")
        pod.command[at:at] = ["sh", "-c", f'mount --bind {disk} {job.checkpoints} && exec "$@"', "sh"]
        disks.append(disk)
    return disks


def staged(job: Job, framework: str, *arguments: str, **fields: object) -> Plan:
    model = ModelRef(command=("python", SCRIPT, *arguments), framework=framework)
    checkpoint = CheckpointRef(directory=str(job.checkpoints), uri="s3://models/scripts")
    return job.plan(model=model, checkpoint=checkpoint, **fields)


def environ(job: Job, store: Server) -> dict[str, str]:
    host = job.pods[0].address.rpartition(".")[0] + ".254"
    return {"DLTRAIN_IMPORT_AHEAD": "off", **store.environ(host)}


@pytest.mark.long
@pytest.mark.parametrize("framework", ["Torchrun", "MPI"])
def test_pods_that_lose_their_disks_resume_from_the_store(two: Job, store: Server, framework: str) -> None:
    disks, go, save = disk_of_each_pod(two), two.directory / "go", two.directory / "save"
    plan = staged(two, framework, "6", "4", str(go), str(save))
    two.start(plan, **environ(two, store))
    two.until(lambda r: r.step >= 3)  # The coordinator knows the last step before the checkpoint.
    save.touch()
    two.until(lambda r: r.step >= 4)
    # Rank 1 might still begin to write, so that the first commit comes later.
    two.wait(lambda: "[checkpoints] dltrain: uploaded 2 files" in two.pods[0].text(), 120)
    uploads = two.until(lambda r: r.uploads is not None and r.uploads.last is not None).uploads
    assert uploads is not None and uploads.last is not None and uploads.last.step in (3, 4), (
        "reported just before and after"
    )
    assert (uploads.count, uploads.last.name, uploads.last.files) == (1, "checkpoint", 2)
    assert uploads.last.nbytes == uploads.nbytes > 4 * 256
    committed = uploads.last.path
    for pod, disk in zip(two.pods, disks, strict=True):
        pod.kill()
        shutil.rmtree(disk / f"test-{plan.uid}")
        (disk / f".test-{plan.uid}.json").unlink()
        pod.log.unlink()
    two.report_file.unlink()  # The store knows the last term, too.
    go.touch()
    for pod in two.pods:
        pod.start(**environ(two, store))
    resumed = two.until(lambda r: r.uploads is not None, 120).uploads
    assert resumed is not None and resumed.last is not None, "the store knows the commit, and no report did"
    assert (resumed.last.path, resumed.count) == (committed, 0) or resumed.count > 0
    done = two.until(lambda r: r.phase is RunPhase.SUCCEEDED)
    assert done.term == 2 and done.uploads is not None and done.uploads.last is not None and done.outcome is not None
    assert done.outcome.checkpoint == done.uploads.last.path > committed, "the last upload of a job that succeeds"
    for rank, pod in enumerate(two.pods):
        assert f"[rank {rank}] rank {rank} starts at step 4" in pod.text()
    assert (disks[1] / f"test-{plan.uid}/checkpoint/weights.bin").read_bytes() == bytes(range(256)) * 4
    assert store.last_commit("models", "scripts/")["files"].keys() == {"checkpoint/step.json", "checkpoint/weights.bin"}


@pytest.mark.long
def test_folder_is_uploaded_when_a_script_ends(two: Job, store: Server) -> None:
    disk_of_each_pod(two)
    plan = staged(two, "Torchrun", "3", "3", str(two.checkpoints))
    two.start(plan, **environ(two, store))
    two.until(lambda r: r.phase is RunPhase.SUCCEEDED)
    [size] = [file[1] for name, file in store.last_commit("models", "scripts/")["files"].items() if "bin" in name]
    assert size == 3 * 256


@pytest.mark.long
def test_missing_permission_fails_the_job_with_its_name(two: Job, store: Server) -> None:
    disk_of_each_pod(two)
    store.refuse("PutObject", 403, "AccessDenied")
    two.start(staged(two, "Torchrun", "3", "3", "/"), **environ(two, store))
    failure = two.until(lambda r: r.phase is RunPhase.FAILED).failure
    assert failure is not None and failure.reason == "BadInput" and not failure.retry
    assert "spec.checkpoint.uri" in failure.message and "s3:PutObject on bucket 'models'" in failure.message


@pytest.mark.long
def test_folder_is_uploaded_when_the_pods_stop(two: Job, store: Server) -> None:
    disk_of_each_pod(two)
    two.start(staged(two, "Torchrun", "9", "4", "/nowhere"), **environ(two, store))
    two.until(lambda r: r.step >= 4)
    # Once it has started, the script exits with code 0 at SIGTERM. Rank 1 may start after rank 0 has reached step 4.
    two.wait(lambda: all("starts at step 0" in pod.text() for pod in two.pods))
    for pod in two.pods:
        pod.signal(TERM)
    for pod in two.pods:
        pod.wait()
    assert set(store.last_commit("models", "scripts/")["files"]) == {"checkpoint/step.json", "checkpoint/weights.bin"}


@pytest.mark.long
def test_three_pods_without_a_shared_volume_train_and_resume(three: Job, store: Server) -> None:
    """The pods of a built-in model are lost together, with their disks and their copies in memory."""
    disks = disk_of_each_pod(three)
    checkpoint = CheckpointRef(directory=str(three.checkpoints), uri="s3://models/builtin", interval_s=0.5)
    plan = three.plan(model=ModelRef(name="mlp"), steps=100_000, checkpoint=checkpoint)
    host = environ(three, store)
    three.start(plan, **host)
    saved = three.until(lambda r: r.last_checkpoint).last_checkpoint
    assert saved is not None and (saved.path or "").startswith("s3://models/builtin/test-")
    for pod, disk in zip(three.pods, disks, strict=True):
        pod.kill()
        for folder in (disk, pod.directory / "memory"):
            for path in folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        pod.log.unlink()
    for pod in three.pods:
        pod.start(**host)
    step = saved.step
    three.until(lambda r: r.term == 2 and r.last_checkpoint and r.last_checkpoint.step > step)
    assert "dltrain: resumed from step" in three.pods[0].text() and " in s3://models/builtin/" in three.pods[0].text()
    for disk in disks:
        assert not [path for path in disk.rglob("*") if path.is_file()], "neither logs nor reports nor copies"


@pytest.mark.long
def test_sharded_checkpoint_of_two_nodes_resumes_on_three(three: Job, store: Server) -> None:
    """Ranks that FSDP has sharded write their shards on two nodes. Both nodes are lost, and three others resume."""
    disks, go = disk_of_each_pod(three), three.directory / "go"
    model = ModelRef(command=("python", SHARDED, "6", "4", str(go)), framework="Torchrun")
    checkpoint = CheckpointRef(directory=str(three.checkpoints), uri="s3://models/sharded")
    plan = three.plan(model=model, checkpoint=checkpoint, ranks=2)
    three.start(plan, **environ(three, store))
    three.wait(lambda: "[checkpoints] dltrain: uploaded 3 files" in three.pods[0].text(), 300)
    shards = {"4/.metadata", "4/__0_0.distcp", "4/__1_0.distcp"}
    assert store.last_commit("models", "sharded/")["files"].keys() == shards
    assert [disk.joinpath(f"test-{plan.uid}/4/__1_0.distcp").exists() for disk in disks] == [False, True, False]
    saved = re.findall(r"rank 0 saved step 4 with (\S+)", three.pods[0].text())
    for pod, disk in zip(three.pods, disks, strict=True):
        pod.kill()
        for path in disk.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        pod.log.unlink()
    go.touch()
    three.start(three.plan(model=model, checkpoint=checkpoint, number=2), **environ(three, store))
    three.until(lambda r: r.phase is RunPhase.SUCCEEDED, 300)
    for rank, pod in enumerate(three.pods):
        assert f"[rank {rank}] rank {rank} of 3 starts at step 4 with {saved[0]}" in pod.text()


@pytest.mark.long
def test_last_checkpoint_has_the_files_of_all_pods(two: Job, store: Server) -> None:
    """Rank 1 ends after rank 0, whose pod commits the files of both before the job succeeds."""
    disk_of_each_pod(two)
    program = (
        "import os, pathlib, time; r = os.environ['RANK']; go = pathlib.Path(os.environ['GO']);"
        "pathlib.Path(os.environ['DLJOB_CHECKPOINT_DIR'], 'part-' + r).write_text(r)\n"
        "while r == '1' and not go.exists(): time.sleep(0.02)"
    )
    go = two.directory / "go"
    plan = staged(two, "Torchrun", "1", "1", "/")
    plan = plan.model_copy(update={"model": plan.model.model_copy(update={"command": ("python", "-c", program)})})
    two.start(plan, GO=str(go), **environ(two, store))
    two.wait(lambda: "the commit waits for the other pods" in two.pods[0].text())
    go.touch()
    two.until(lambda r: r.phase is RunPhase.SUCCEEDED)
    assert set(store.last_commit("models", "scripts/")["files"]) == {"part-0", "part-1"}


@pytest.mark.long
def test_uploads_that_fail_are_reported_until_they_work(two: Job, store: Server) -> None:
    disk_of_each_pod(two)
    go = two.directory / "go"
    store.refuse("PutObject", 403, "AccessDenied", key="/data/")
    two.start(staged(two, "Torchrun", "6", "4", str(go)), **environ(two, store))
    failing = two.until(lambda r: r.uploads is not None and r.uploads.problem is not None, 120).uploads
    assert failing is not None and failing.problem is not None and failing.last is None and failing.failures >= 1
    assert failing.problem.reason == "UploadFailed" and "s3:PutObject" in failing.problem.message
    store.allow_all()
    works = two.until(lambda r: r.uploads is not None and r.uploads.last is not None, 120)
    assert works.uploads is not None and works.uploads.problem is None and works.phase is RunPhase.RUNNING
    assert not works.restarts, "the ranks train on"
    go.touch()
    two.until(lambda r: r.phase is RunPhase.SUCCEEDED)


@pytest.mark.long
def test_uploads_that_fail_for_long_restart_the_ranks(two: Job, store: Server) -> None:
    disk_of_each_pod(two)
    two.start(staged(two, "Torchrun", "9", "4", "/nowhere"), **environ(two, store))
    two.until(lambda r: r.step >= 4)
    for pid in two.pods[1].pids():
        if b"dltrain.object_store.stage\0watch" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, KILL)
    failure = two.until(lambda r: r.failure).failure
    assert failure is not None and failure.reason == "CheckpointFailed" and failure.host == two.pods[1].name
