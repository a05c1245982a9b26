"""A model that the SDK copies is checked without a delay of the client's other calls."""

import asyncio
import hashlib
import io
import json
import tarfile
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from dljob.client import model_copy


def test_other_tasks_run_while_files_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed bug: the SDK's event loop stood still for as long as the model was hashed."""
    buffer, began, ticked = io.BytesIO(), threading.Event(), threading.Event()
    files = {
        "model": b"x",
        "manifest.json": json.dumps({"files": {"model": {"sha256": hashlib.sha256(b"x").hexdigest()}}}).encode(),
    }
    with tarfile.open(fileobj=buffer, mode="w|") as archive:
        for name, data in files.items():
            entry_ = tarfile.TarInfo(name)
            entry_.size = len(data)
            archive.addfile(entry_, io.BytesIO(data))
    digest = hashlib.file_digest

    def slow(*arguments: Any) -> Any:
        began.set()
        assert ticked.wait(5.0), "the event loop is blocked"
        return digest(*arguments)

    async def parts() -> AsyncIterator[bytes]:
        yield buffer.getvalue()

    async def receive() -> list[str]:
        receiving = asyncio.create_task(model_copy.receive(parts(), tmp_path / "new"))
        while not (began.is_set() or receiving.done()):
            await asyncio.sleep(0.001)
        ticked.set()
        return await receiving

    monkeypatch.setattr(hashlib, "file_digest", slow)
    assert asyncio.run(receive()) == ["manifest.json", "model"]
