"""Tests of real ranks that each upload and download their part of a checkpoint in an object store."""

import re
from pathlib import Path

import pytest

from dlcontract.checkpoint.parts import part_name
from dltrain.checkpoint.store import MANIFEST, MODEL, OPTIMIZER, STATE
from dltrain.object_store.commit_log import PARTS_FORMAT
from support.trainer.object_store import Server
from support.trainer.ranks import BODIES, command, run, run_ranks

BODY = BODIES / "faults/parts_in_store.py"
PARTS = [[part_name(file, rank) for file in (MODEL, OPTIMIZER)] for rank in (0, 1)]


def ranks(number: int, store: Server, folder: Path, prefix: str, *checks: str, timeout_s: float = 240) -> str:
    uri = f"s3://models/{prefix}"
    ended = run_ranks(number, BODY, str(number), folder, uri, *checks, timeout_s=timeout_s, **store.environ())
    return ended.output


def copy(store: Server, source: str, target: str) -> None:
    for key in store.keys("models", f"{source}/"):
        to = f"{target}{key.removeprefix(source)}"
        store.client().copy_object(Bucket="models", Key=to, CopySource={"Bucket": "models", "Key": key})


def committed(store: Server, prefix: str) -> tuple[int, set[str]]:
    """Return (step of the newest checkpoint, its keys)."""
    entry, job = store.last_commit("models", f"{prefix}/"), f"{prefix}/digits-0001"
    return entry["about"]["step"], {f"{job}/{key}" for key, _, _ in entry["files"].values()}


def data(store: Server, prefix: str) -> set[str]:
    return {key for key in store.keys("models", f"{prefix}/") if "/data/" in key}


@pytest.mark.mpi(3)
@pytest.mark.long
def test_run_on_two_ranks_resumes_on_one_two_and_three(store: Server, tmp_path: Path) -> None:
    store.refuse("PutObject", 503, "SlowDown", times=1, key=PARTS[1][0])
    ranks(2, store, tmp_path, "two", "train")
    entry = store.last_commit("models", "two/")
    assert set(entry["files"]) == {*PARTS[0], *PARTS[1], STATE, MANIFEST, MODEL} and entry["format"] == PARTS_FORMAT
    for number in (1, 3):
        copy(store, "two", str(number))
    store.refuse("GetObject", 500, "InternalError", times=1, key=PARTS[1][1])
    output = ranks(2, store, tmp_path, "two", "resume")
    assert "resumed from step 6 in s3://models/two/" in output and "resumed 2 parts on 2 ranks" in output, output
    assert f"rank 0 downloaded {sorted([*PARTS[0], STATE, MANIFEST])} and ranges of []" in output, output
    assert f"rank 1 downloaded {sorted(PARTS[1])} and ranges of {PARTS[0]}" in output, output
    for number in (1, 3):
        output = ranks(number, store, tmp_path, str(number), "resume")
        assert f"resumed 2 parts on {number} ranks" in output, output
    assert "rank 2 downloaded [] and ranges of ['model-part-00000" in output, "two parts are divided among two ranks"


@pytest.mark.mpi(2)
@pytest.mark.parametrize("check", ["killed_in_upload", pytest.param("killed_before_commit", marks=pytest.mark.long)])
def test_killed_rank_leaves_the_checkpoint_before(store: Server, tmp_path: Path, check: str) -> None:
    begun = run(command(2, BODY, "2", tmp_path, "s3://models/killed", check), 240, **store.environ())
    assert begun.code != 0, begun.output
    step, keys = committed(store, "killed")
    left = data(store, "killed") - keys
    assert left, "parts of the checkpoint that was interrupted"
    output = ranks(2, store, tmp_path, "killed", "resume")
    assert f"resumed from step {step} in" in output and "resumed 2 parts on 2 ranks" in output, output
    assert committed(store, "killed")[0] == 12 and not data(store, "killed") & left, "the rest was deleted"


@pytest.mark.mpi(2)
def test_error_of_one_rank_is_the_same_on_all_ranks(store: Server, tmp_path: Path) -> None:
    output = ranks(2, store, tmp_path, "errors", "unreachable", "local_disk", "unreadable")
    told = re.findall("the same error on all ranks: (.*)", output)
    assert len(told) == 3, output
    assert "rank 1: ListObjectsV2" in told[0] and "stagingSize" in told[1] and "rank 1: GetObject" in told[2]


@pytest.mark.mpi(2)
def test_rejected_part_leaves_the_checkpoint_before_and_nothing_else(store: Server, tmp_path: Path) -> None:
    store.refuse("PutObject", 403, "AccessDenied", key=PARTS[1][1], skip=1)
    assert "a rejected part is an error on all ranks" in ranks(2, store, tmp_path, "refused", "refused")
    store.allow_all()
    _, keys = committed(store, "refused")
    assert data(store, "refused") == keys, "the other parts of the second checkpoint were deleted"
    store.refuse("PutObject", 403, "AccessDenied")
    output = ranks(2, store, tmp_path, "denied", "no_permission")
    assert "the same error on all ranks: spec.checkpoint.uri: found s3://models/denied" in output, output


@pytest.mark.mpi(2)
@pytest.mark.long
def test_damaged_part_of_rank_1_leads_all_ranks_to_the_checkpoint_before(store: Server, tmp_path: Path) -> None:
    ranks(2, store, tmp_path, "damaged", "train")
    ranks(2, store, tmp_path, "damaged", "resume")
    entry = store.last_commit("models", "damaged/")
    key = f"damaged/digits-0001/{entry['files'][PARTS[1][1]][0]}"
    content = store.client().get_object(Bucket="models", Key=key)["Body"].read()
    store.client().put_object(Bucket="models", Key=key, Body=content[:-1] + bytes([content[-1] ^ 1]))
    output = ranks(2, store, tmp_path, "damaged", "resume")
    assert output.count("skipped a damaged checkpoint") == 1 and "resumed from step 6 in" in output, output
    _, keys = committed(store, "damaged")
    assert key not in data(store, "damaged") and keys <= data(store, "damaged")
