"""docs/explanation/planning.md: its cluster file, its command and what that prints are real."""

import re
from pathlib import Path

import pytest
import yaml

from dljob.cli import main

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/explanation/planning.md").read_text(encoding="utf-8")


def test_the_page_shows_what_the_command_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After a change of the model: paste the new output."""
    found = re.search(r"```yaml\n(nodes:\n.*?)```", PAGE, re.DOTALL)
    assert found
    (tmp_path / "cluster.yaml").write_text(found[1], encoding="utf-8")
    assert main(["plan", str(ROOT / "examples/plan-only.yaml"), "--cluster", str(tmp_path / "cluster.yaml")]) == 0
    assert f"```\n{capsys.readouterr().out}```" in PAGE


def test_the_page_shows_the_batches_that_the_command_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    noise = {"data": "digits", "samples": 2400, "steps": 1350, "runs": 3}
    spec = {"model": "digits-cnn", "device": "cpu"}
    profile = {"kind": "DLProfile", "spec": spec, "status": {"noiseScale": noise}}
    for name, content in (("profiles", profile), ("cluster", {"nodes": [{"count": 3, "cpu": 2, "memory": "4Gi"}]})):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    files = ["--cluster", str(tmp_path / "cluster.yaml"), "--profiles", str(tmp_path / "profiles.yaml")]
    assert main(["plan", str(ROOT / "examples/batch-size.yaml"), *files]) == 0
    text = capsys.readouterr().out
    shown = text[text.index("Global batch: ") : text.index("\nScaling")]
    assert f"```\n{shown}```" in PAGE


def test_the_page_shows_the_parts_that_the_command_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump({"nodes": [{"count": 3, "cpu": 2, "memory": "4Gi"}]}))
    assert main(["plan", str(ROOT / "examples/auto-strategy.yaml"), "--cluster", str(tmp_path / "cluster.yaml")]) == 0
    text = capsys.readouterr().out
    shown = text[: text.index("\nScaling")]
    assert f"```\n{shown}```" in PAGE


def test_every_reason_is_explained() -> None:
    sources = (ROOT / "operator/dljob/planner").rglob("*.py")
    pattern = re.compile(r'Infeasible\(\s*"([A-Za-z]+)"(?: if [^,]* else "([A-Za-z]+)")?')
    said = {
        reason for path in sources for pair in pattern.findall(path.read_text("utf-8")) for reason in pair if reason
    }
    assert {"NoSuchDevice", "TooFewNodes", "DeviceBusy", "DoesNotFit", "BatchMismatch"} <= said
    for reason in said:
        assert f"| `{reason}` |" in PAGE, reason
