"""Compare texts with golden files, or write them: ``hack/update-golden`` sets ``DLJOB_UPDATE_GOLDEN``."""

import os
from pathlib import Path

UPDATE = "DLJOB_UPDATE_GOLDEN"


def assert_golden(path: Path, text: str) -> None:
    """Assert that the file holds the text. Write it instead if ``UPDATE`` is set."""
    if os.environ.get(UPDATE):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.exists(), f"{path.name}: no such file; make it with hack/update-golden and review it"
    assert text == path.read_text(encoding="utf-8"), (
        f"{path.name}: review the change, then accept it: hack/update-golden"
    )
