"""Tests that the documentation shows real output of `dljob plan` and explains every reason.

After a change of the model or of its texts, update the outputs and review the difference:

    DLJOB_UPDATE_GOLDEN=1 python -m pytest tests/unit/docs/test_planning.py
"""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from dljob.api import DLJobSpec
from dljob.cli import main
from dljob.job.identity import profile_key

ROOT = Path(__file__).resolve().parents[3]
EXPLANATION = ROOT / "docs/explanation"
PLANNING = EXPLANATION / "planning.md"
BATCH_SIZE, GPUS, MEMORY = (EXPLANATION / f"planning-{name}.md" for name in ("batch-size", "gpus", "memory"))
README = ROOT / "README.md"
FIRST_JOB = ROOT / "docs/tutorials/first-job.md"
TORCHRUN = ROOT / "docs/how-to/torchrun.md"
PLAIN = {"nodes": [{"count": 3, "cpu": 2, "memory": "4Gi"}]}
NOISE_PROFILE = {
    "kind": "DLProfile",
    "spec": {"model": "digits-cnn", "device": "cpu"},
    "status": {"noiseScale": {"data": "digits", "samples": 2400, "steps": 1350, "runs": 3}},
}
SCRIPT = DLJobSpec.model_validate(yaml.safe_load((ROOT / "examples/torchrun-minimal.yaml").read_text("utf-8"))["spec"])
OBSERVED_PROFILE = {
    "kind": "DLProfile",
    "spec": {"model": profile_key(SCRIPT), "device": "cpu"},
    "status": {
        "structure": {
            "parameters": 1474,
            "flopsPerSample": 8450,
            "sampleBytes": 256,
            "batch": 32,
            "optimizerSlots": 1,
            "work": [{"kind": "product", "count": 2, "forwardFlopsPerSample": 2816, "movedBytesPerSample": 1000}],
            "nodes": 2,
            "ranksPerNode": 1,
            "cores": 1,
            "stepSeconds": 0.02,
            "steps": 640,
        }
    },
}


def cluster_on(page: Path) -> Any:
    found = re.search(r"```yaml\n(nodes:\n.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert found
    return yaml.safe_load(found[1])


GPU = {"nodes": [{"count": 2, "device": "NVIDIA-A100-SXM4-40GB", "cpu": 16, "memory": "256Gi"}]}
ONE: dict[str, Any] = {"device": "NVIDIA-A100-SXM4-40GB", "cpu": 16, "memory": "256Gi"}
CLOCKED = {"nodes": [ONE, {**ONE, "name": "locked", "clockLimit": 1050}]}
GPU_JOB = {
    "apiVersion": "dljob.dev/v1alpha1",
    "kind": "DLJob",
    "metadata": {"name": "energy"},
    "spec": {
        "model": {"name": "resnet50"},
        "dataset": {"name": "synthetic-images"},
        "globalBatchSize": 512,
        "steps": 10000,
        "nodes": {"max": 1},
        "objective": {"minimize": "Energy"},
    },
}


# Page, example or job, cluster (None: the one that the page shows), profile, first words of the block, where the block ends.
SHOWN: dict[str, tuple[Path, Any, Any, Any, str, str]] = {
    "a plan": (PLANNING, "plan-only", None, None, "plan-only: ", ""),
    "batches": (BATCH_SIZE, "batch-size", PLAIN, NOISE_PROFILE, "Global batch: ", "\nScaling"),
    "parts of the model": (MEMORY, "auto-strategy", PLAIN, None, "auto-strategy: ", "\nScaling"),
    "power limits": (GPUS, GPU_JOB, GPU, None, "Power limits: ", "\nScaling"),
    "clock limits": (GPUS, GPU_JOB, CLOCKED, None, "energy: ", "\nBottleneck"),
    "README": (README, "mixed-devices", None, None, "mixed: ", "\nRuled out"),
    "observed script": (TORCHRUN, "torchrun-minimal", PLAIN, OBSERVED_PROFILE, "torchrun-minimal: ", "\nFields that"),
    "first job": (FIRST_JOB, "digits", PLAIN, None, "digits: ", "\nRuled out"),
}


@pytest.mark.parametrize("case", SHOWN)
def test_page_shows_the_output_of_the_command(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, example, cluster, profile, start, end = SHOWN[case]
    files = []
    for name, content in (("cluster", cluster or cluster_on(page)), ("profiles", profile)):
        if content:
            (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
            files += [f"--{name}", str(tmp_path / f"{name}.yaml")]
    job = ROOT / f"examples/{example}.yaml" if isinstance(example, str) else tmp_path / "job.yaml"
    if not isinstance(example, str):
        job.write_text(yaml.safe_dump(example), encoding="utf-8")
    assert main(["plan", str(job), *files]) == 0
    text = capsys.readouterr().out
    expected = text[text.index(start) : text.index(end) if end else None]
    content = page.read_text(encoding="utf-8")
    found = re.search(rf"^{re.escape(start)}.*?(?=^```$)", content, re.DOTALL | re.MULTILINE)
    assert found
    if os.environ.get("DLJOB_UPDATE_GOLDEN"):
        page.write_text(content.replace(found[0], expected), encoding="utf-8")
    else:
        assert found[0] == expected


def test_page_shows_what_the_trainer_cannot_run_yet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = {
        "apiVersion": "dljob.dev/v1alpha1",
        "kind": "DLJob",
        "metadata": {"name": "xl"},
        "spec": {
            "model": {"hints": {"like": "GPT-2-XL"}},
            "dataset": {"uri": "pvc://data/tokens", "sampleBytes": 8192, "samples": 10**6},
            "trainer": {"command": ["python", "train.py"]},
            "globalBatchSize": 512,
            "steps": 1000,
            "optimizer": {"name": "AdamW"},
        },
    }
    gpus = {"count": 4, "device": "NVIDIA-A100-SXM4-80GB", "devices": 8, "cpu": 64, "memory": "1Ti", "bandwidth": "25G"}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job), encoding="utf-8")
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump({"nodes": [gpus]}), encoding="utf-8")
    assert main(["plan", str(tmp_path / "job.yaml"), "--cluster", str(tmp_path / "cluster.yaml")]) == 1
    text, title = capsys.readouterr().out, "The trainer cannot run this yet\n"
    expected = text[text.index(title) :]
    content = MEMORY.read_text(encoding="utf-8")
    found = re.search(rf"^{title}.*?(?=^```$)", content, re.DOTALL | re.MULTILINE)
    assert found
    if os.environ.get("DLJOB_UPDATE_GOLDEN"):
        MEMORY.write_text(content.replace(found[0], expected), encoding="utf-8")
    else:
        assert found[0] == expected


def test_every_reason_is_explained() -> None:
    page = PLANNING.read_text(encoding="utf-8")
    sources = (ROOT / "operator/dljob/planner").rglob("*.py")
    pattern = re.compile(r'Infeasible\(\s*"([A-Za-z]+)"(?: if [^,]* else "([A-Za-z]+)")?')
    reasons = {
        reason for path in sources for pair in pattern.findall(path.read_text("utf-8")) for reason in pair if reason
    }
    assert {"NoSuchDevice", "TooFewNodes", "DeviceBusy", "DoesNotFit", "BatchMismatch"} <= reasons
    for reason in reasons:
        assert f"| `{reason}` |" in page, reason


def test_links_to_sections_that_have_moved_lead_to_them() -> None:
    """Earlier releases and other sites link to sections of the page that are now on pages of their own."""
    content = PLANNING.read_text(encoding="utf-8")
    rows = re.findall(r'<a id="([a-z-]+)"></a>\[[^]]+\]\(([a-z-]+\.md)#([a-z-]+)\)', content)
    assert len(rows) == 19 and all(old == new for old, _, new in rows)
    for anchor, page, _ in rows:
        titles = re.findall(r"^#+ (.*)", (EXPLANATION / page).read_text(encoding="utf-8"), re.MULTILINE)
        assert anchor in {re.sub(r"[^a-z0-9 ]", "", title.lower()).replace(" ", "-") for title in titles}, anchor
