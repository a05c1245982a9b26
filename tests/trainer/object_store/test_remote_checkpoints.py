"""Tests of the trainer's checkpoints in an object store, with moto's server and injected errors."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dlcontract import CheckpointRef, reasons
from dltrain.checkpoint import remote_store
from dltrain.checkpoint.background import Writer
from dltrain.checkpoint.job_files import JobFiles
from dltrain.checkpoint.remote_store import RemoteCheckpoints
from dltrain.checkpoint.store import Snapshot
from dltrain.object_store import client
from dltrain.object_store.client import ObjectStore
from dltrain.protocol.errors import BadInputError, CheckpointError, CheckpointVolumeError, FencedError, failure
from support.trainer.object_store import Server
from support.trainer.plans import make_plan

PREFIX = "job/"
Open = Callable[..., RemoteCheckpoints]


def snapshot(step: int, size: int = 3) -> Snapshot:
    weights = torch.arange(size, dtype=torch.float32) * 0.1 + step
    return Snapshot(step, {"w": weights, "b": weights[:2].bfloat16()}, {"0.m": -weights}, {"seed": 7}, {"ema": weights})


@pytest.fixture
def opened(tmp_path: Path, store: Server) -> Open:
    def open_them(term: int = 1, keep: int = 2, identity: str = "x") -> RemoteCheckpoints:
        return RemoteCheckpoints(ObjectStore("s3://models/job"), identity, keep, tmp_path / "restored", term)

    return open_them


def loaded(checkpoints: RemoteCheckpoints) -> int | None:
    found = checkpoints.load()
    return found.snapshot().step if found is not None else None


def data_of(store: Server, step: int) -> list[str]:
    return [key for key in store.keys("models", PREFIX) if f"step-{step:010d}" in key]


def test_state_is_restored_bit_for_bit(opened: Open, store: Server, tmp_path: Path) -> None:
    before = snapshot(40, 1_000_000)
    place, nbytes = opened().save(before)
    assert place.startswith("s3://models/job/data/t0000000001-") and place.endswith("/step-0000000040")
    found = opened(term=2).load()
    assert found is not None and found.place == place and nbytes > 8_000_000
    after = found.snapshot()
    for one, other in ((before.model, after.model), (before.optimizer, after.optimizer), (before.kept, after.kept)):
        assert one.keys() == other.keys()
        for name in one:
            assert one[name].dtype == other[name].dtype and torch.equal(one[name], other[name])
    assert after.state == {"seed": 7} and opened(term=2).steps() == [40]
    assert not (tmp_path / "restored").exists(), "opening deletes the copy"


def test_large_tensors_are_sent_in_parts(opened: Open, store: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PART_NBYTES", 5 * 2**20)  # the minimum of S3
    checkpoints = opened()
    store.refuse("UploadPart", 503, "SlowDown", times=2)
    store.refuse("CompleteMultipartUpload", 500, "InternalError", times=1)
    checkpoints.save(snapshot(1, 3_000_000))
    assert store.requests.count("UploadPart") >= 3 * 3 + 2
    store.refuse("GetObject", 500, "InternalError", times=3)
    found = opened().load()
    assert found is not None and torch.equal(found.snapshot().model["w"], snapshot(1, 3_000_000).model["w"])


def test_keep_newest_checkpoints(opened: Open, store: Server) -> None:
    checkpoints = opened(keep=2)
    for step in (1, 2, 3, 4):
        checkpoints.save(snapshot(step))
    assert checkpoints.steps() == [3, 4] and not data_of(store, 2) and len(data_of(store, 3)) == 4


@pytest.mark.parametrize(
    ("operation", "status", "code"),
    [
        ("PutObject", 503, "SlowDown"),
        ("PutObject", 403, "RequestTimeTooSkewed"),  # Fixed bug: a wrong clock was reported as a missing permission.
        ("PutObject", 0, "truncated"),
        ("PutObject", 0, "lost answer"),
        ("ListObjectsV2", 500, "InternalError"),
    ],
)
def test_transient_errors_are_repeated(opened: Open, store: Server, operation: str, status: int, code: str) -> None:
    checkpoints = opened()
    checkpoints.save(snapshot(1))
    store.refuse(operation, status, code, times=3)
    checkpoints.save(snapshot(2))
    assert opened().steps() == [1, 2], "a commit whose answer was lost counts once"


def test_interrupted_upload_is_no_checkpoint_and_is_pruned(opened: Open, store: Server) -> None:
    checkpoints = opened()
    checkpoints.save(snapshot(1))
    store.refuse("PutObject", 500, "InternalError", key="commits/")
    with pytest.raises(OSError, match="InternalError"):
        checkpoints.save(snapshot(2))
    store.allow_all()
    assert len(data_of(store, 2)) == 4 and loaded(opened()) == 1, "all files, but no marker"
    again = opened(term=2)
    assert again.steps() == [1]
    again.save(snapshot(3))
    assert not data_of(store, 2) and data_of(store, 1) and loaded(opened(term=2)) == 3


def test_failed_parts_leave_no_incomplete_upload(opened: Open, store: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PART_NBYTES", 5 * 2**20)
    checkpoints = opened()
    store.refuse("UploadPart", 500, "InternalError")
    with pytest.raises(OSError):
        checkpoints.save(snapshot(1, 3_000_000))
    assert not store.client().list_multipart_uploads(Bucket="models").get("Uploads")
    key = "job/data/t0000000001-0123/step-0000000001/model.safetensors"
    later = "job/data/t0000000009-0123/step-0000000001/model.safetensors"
    for each in (key, later):
        store.client().create_multipart_upload(Bucket="models", Key=each)
    opened(term=2)
    left = store.client().list_multipart_uploads(Bucket="models")["Uploads"]
    assert [each["Key"] for each in left] == [later], "uploads of a higher term are not touched"


def test_deleted_marker_hides_its_checkpoint(opened: Open, store: Server) -> None:
    checkpoints = opened(keep=3)
    for step in (1, 2):
        checkpoints.save(snapshot(step))
    newest = max(key for key in store.keys("models", PREFIX) if "/commits/" in key)
    store.client().delete_object(Bucket="models", Key=newest)
    assert loaded(opened()) == 1


@pytest.mark.parametrize("what", ["changed", "shorter", "missing"])
def test_damaged_file_is_skipped_and_pruned_later(opened: Open, store: Server, what: str) -> None:
    checkpoints = opened(keep=3)
    for step in (1, 2):
        checkpoints.save(snapshot(step))
    [key] = [key for key in data_of(store, 2) if "model" in key]
    content = store.client().get_object(Bucket="models", Key=key)["Body"].read()
    if what == "missing":
        store.client().delete_object(Bucket="models", Key=key)
    else:
        wrong = content[:-1] if what == "shorter" else content[:-1] + b"\x55"
        store.client().put_object(Bucket="models", Key=key, Body=wrong)
    again = opened()
    if (
        what == "shorter"
    ):  # S3 answers a range beyond the end of the file with fewer bytes, as a broken connection does.
        store.requests.clear()
    assert loaded(again) == 1
    again.save(snapshot(3))
    assert 1 in again.steps() and 3 in again.steps() and (2 in again.steps()) is (what == "shorter")


def test_damaged_marker_is_skipped(opened: Open, store: Server) -> None:
    checkpoints = opened(keep=3)
    for step in (1, 2):
        checkpoints.save(snapshot(step))
    newest = max(key for key in store.keys("models", PREFIX) if "/commits/" in key)
    content = json.loads(store.client().get_object(Bucket="models", Key=newest)["Body"].read())
    store.client().put_object(Bucket="models", Key=newest, Body=json.dumps(content | {"term": 0}).encode())
    again = opened()
    assert loaded(again) == 1 and data_of(store, 2)
    again.save(snapshot(3))
    assert again.steps() == [1, 3]


def test_read_errors_never_lead_to_a_fresh_start_or_a_deletion(opened: Open, store: Server) -> None:
    checkpoints = opened(keep=1)
    checkpoints.save(snapshot(1))
    before = store.keys("models", PREFIX)
    again = opened()
    store.refuse("GetObject", 503, "SlowDown", key="data/")
    with pytest.raises(CheckpointVolumeError, match=r"spec.checkpoint.uri: .*nothing was deleted") as error:
        again.load()
    assert failure(error.value, 0, "pod").reason == reasons.CHECKPOINT_FAILED and failure(error.value, 0, "pod").retry
    store.allow_all()
    assert store.keys("models", PREFIX) == before and loaded(again) == 1


def test_unreadable_checkpoint_survives_pruning(opened: Open, store: Server) -> None:
    checkpoints = opened(keep=3)
    for step in (1, 2):
        checkpoints.save(snapshot(step))
    again = opened(keep=2)
    store.refuse("GetObject", 503, "SlowDown", key="step-0000000002")
    assert loaded(again) == 1
    store.allow_all()
    again.save(snapshot(3))
    assert again.steps() == [1, 2, 3], "it does not count as one to keep"


@pytest.mark.parametrize(
    ("operation", "permission"), [("PutObject", "s3:PutObject"), ("ListObjectsV2", "s3:ListBucket")]
)
def test_missing_permission_is_named_and_loses_nothing(
    opened: Open, store: Server, operation: str, permission: str
) -> None:
    opened().save(snapshot(1))
    before = store.keys("models", PREFIX)
    store.refuse(operation, 403, "AccessDenied")
    with pytest.raises(BadInputError, match=f"no permission {permission} on bucket 'models'") as error:
        opened(term=2)
    assert failure(error.value, 0, "pod").reason == reasons.BAD_INPUT and not failure(error.value, 0, "pod").retry
    store.allow_all()
    assert store.keys("models", PREFIX) == before


def test_missing_permission_to_read_is_no_fresh_start(opened: Open, store: Server) -> None:
    opened().save(snapshot(1))
    again = opened()
    store.refuse("GetObject", 403, "AccessDenied")
    with pytest.raises(BadInputError, match="s3:GetObject"):
        RemoteCheckpoints(again.store, "x", 2, again.scratch, 1).load()


def test_permission_lost_during_the_run_fails_the_checkpoint_alone(opened: Open, store: Server) -> None:
    checkpoints = opened()
    checkpoints.save(snapshot(1))
    store.refuse("PutObject", 403, "AccessDenied")
    with pytest.raises(PermissionError, match="s3:PutObject"):
        checkpoints.save(snapshot(2))
    store.allow_all()
    assert loaded(opened()) == 1


def test_missing_permission_to_delete_keeps_all_checkpoints(
    opened: Open, store: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = opened(keep=1)
    store.refuse("DeleteObjects", 403, "AccessDenied")
    for step in (1, 2):
        checkpoints.save(snapshot(step))
    assert "cannot delete old checkpoints (no permission s3:DeleteObject" in capsys.readouterr().err
    store.allow_all()
    assert opened().steps() == [1, 2]


@pytest.mark.parametrize("bucket", ["nothing"])
def test_missing_bucket(bucket: str, store: Server, tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="no bucket 'nothing'"):
        RemoteCheckpoints(ObjectStore(f"s3://{bucket}/a"), "x", 1, tmp_path, 1)


def test_store_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float]) -> None:
    for name, value in {"ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "ENDPOINT_URL": "http://127.0.0.1:9"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    with pytest.raises(CheckpointVolumeError, match=r"spec\.checkpoint\.uri"):
        RemoteCheckpoints(ObjectStore("s3://models/a"), "x", 1, tmp_path, 1)
    assert sum(pauses) > 15


def test_run_with_a_lower_term_cannot_commit(opened: Open, store: Server) -> None:
    old = opened(term=1)
    old.save(snapshot(1))
    new = opened(term=2)
    with pytest.raises(FencedError, match="found term 2; expected 1"):
        old.save(snapshot(2))
    with pytest.raises(FencedError):
        opened(term=1)
    new.save(snapshot(3))
    assert opened(term=2).steps() == [1, 3] and not data_of(store, 2)


@pytest.mark.parametrize("conditional", [True, False])
def test_claim_between_check_and_commit_fences_the_run(
    opened: Open, store: Server, monkeypatch: pytest.MonkeyPatch, conditional: bool
) -> None:
    if not conditional:
        store.refuse("PutObject", 501, "NotImplemented", times=1, key="commits/")
    old = opened(term=1)
    create = old.store.create

    def late(key: str, content: bytes, *, conditional: bool = True) -> None:
        monkeypatch.setattr(old.store, "create", create)
        opened(term=2)  # takes the number that the old run has chosen for its own marker
        create(key, content, conditional=conditional)

    monkeypatch.setattr(old.store, "create", late)
    if conditional:
        with pytest.raises(FencedError):
            old.save(snapshot(5))
        assert opened(term=2).load() is None
    else:
        old.save(snapshot(5))  # Without conditional writes, the marker has replaced the claim,
        old_again = opened(term=2)  # which the next claim repeats.
        with pytest.raises(FencedError):
            old.save(snapshot(6))
        assert old_again.steps() == [5]


def test_two_writers_of_one_term_lose_no_commit(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = opened(keep=9), opened(keep=9)
    create = one.store.create

    def late(key: str, content: bytes, *, conditional: bool = True) -> None:
        monkeypatch.setattr(one.store, "create", create)
        other.save(snapshot(1))
        create(key, content, conditional=conditional)

    monkeypatch.setattr(one.store, "create", late)
    one.save(snapshot(2))
    assert opened().steps() == [1, 2]


def test_checkpoint_of_another_model(opened: Open) -> None:
    opened().save(snapshot(1))
    with pytest.raises(BadInputError, match="a checkpoint of another model"):
        opened(identity="y").load()


def test_writer_reports_the_place_and_the_field(opened: Open, store: Server) -> None:
    sent: list[object] = []

    class Reporter:
        rank = 0

        def send(self, message: object) -> None:
            sent.append(message)

    writer = Writer(opened(), Reporter())  # type: ignore[arg-type]
    writer.begin(snapshot(1))
    writer.wait()
    assert writer.last is not None and writer.last.path.startswith("s3://models/job/") and sent
    store.refuse("PutObject", 507, "QuotaExceeded")
    writer.begin(snapshot(2))
    with pytest.raises(CheckpointError, match=r"spec.checkpoint.uri: .*quota of the bucket"):
        writer.wait()


def test_secret_of_the_job_is_used_and_renewed(store: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in store.environ():
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    secret = tmp_path / "secret"
    secret.mkdir()
    for name, value in store.environ().items():
        (secret / name).write_text(value + "\n")
    files = ObjectStore("s3://models/a", secret)
    files.write("b", b"c")
    store.refuse("GetObject", 403, "ExpiredToken", times=1)
    (secret / "AWS_SECRET_ACCESS_KEY").write_text("another")
    assert files.read("b") == b"c" and files.list("") == {"b": 1}


def test_names_of_files_are_those_of_the_trainer(opened: Open, store: Server) -> None:
    checkpoints = opened()
    checkpoints.save(snapshot(1))
    entry = checkpoints.log.commits()[-1]
    assert set(entry.files) == remote_store._NAMES


def test_small_files_of_a_job_are_beside_its_checkpoints(store: Server, tmp_path: Path) -> None:
    plan = make_plan(1, checkpoint=CheckpointRef(directory=str(tmp_path / "disk"), uri="s3://models/a/"))
    files = JobFiles(plan)
    with pytest.raises(FileNotFoundError):
        files.read("learning-rate.json")
    for content in (b"1", b"2"):
        files.write("learning-rate.json", content)
    assert files.read("learning-rate.json") == b"2" and not (tmp_path / "disk").exists()
    assert store.keys("models") == ["a/digits-0001/learning-rate.json"]
