"""Tests of checkpoints with a workload identity: the pod has a token for a role, and no keys."""

import errno
from pathlib import Path

import pytest

from dltrain.object_store.client import ObjectStore
from support.trainer.object_store import Server

ROLE = "arn:aws:iam::123456789012:role/trains"


@pytest.fixture
def token(tmp_path: Path, store: Server, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of a pod's token. The environment names it and a role, and has no keys."""
    file = tmp_path / "token"
    file.write_text("header.payload.signature")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name, value in (("ROLE_ARN", ROLE), ("WEB_IDENTITY_TOKEN_FILE", str(file)), ("REGION", "eu-west-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    return file


@pytest.mark.usefixtures("token")
def test_token_of_the_pod_gives_access(store: Server) -> None:
    objects = ObjectStore("s3://models/job")
    objects.write("greeting", b"hello")
    assert objects.read("greeting") == b"hello" and store.keys("models", "job/") == ["job/greeting"]
    assert store.requests.count("AssumeRoleWithWebIdentity") == 1, "the role's keys are used until they expire"


@pytest.mark.usefixtures("token")
def test_refused_role_is_named_and_no_permission_on_the_bucket(store: Server) -> None:
    store.refuse("AssumeRoleWithWebIdentity", 403, "AccessDenied")
    with pytest.raises(PermissionError) as raised:
        ObjectStore("s3://models/job").write("greeting", b"hello")
    assert ROLE in str(raised.value) and "s3:PutObject" not in str(raised.value)


@pytest.mark.usefixtures("token")
def test_busy_service_for_keys_is_asked_again(store: Server) -> None:
    store.refuse("AssumeRoleWithWebIdentity", 400, "Throttling", times=1)
    ObjectStore("s3://models/job").write("greeting", b"hello")
    assert store.requests.count("AssumeRoleWithWebIdentity") == 2


def test_missing_token_is_named(token: Path) -> None:
    token.unlink()
    with pytest.raises(OSError) as raised:
        ObjectStore("s3://models/job").write("greeting", b"hello")
    assert raised.value.errno == errno.EACCES and str(token) in str(raised.value)
