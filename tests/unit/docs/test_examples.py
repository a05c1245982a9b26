"""Tests that the API server and the operator accept every example and every manifest in the documentation."""

import hashlib
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from dljob.api import DLJobSpec
from dljob.cluster import cluster_view
from dljob.job.plan.request import planner_request
from dljob.planner import Decision, Infeasible, plan
from support.manifests.admission import refusals
from support.manifests.schema_validation import assert_valid

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = sorted((ROOT / "examples").rglob("*.yaml"))
DOCUMENTS = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]
_BLOCK = re.compile(r"^```yaml\n(.*?)^```", re.MULTILINE | re.DOTALL)
JOBS = {"digits.yaml", "minimal.yaml", "plan-only.yaml", "mixed-devices.yaml", "deadline-energy.yaml"}
JOBS |= {"dataset-uri.yaml", "gpt.yaml", "fixed-plan.yaml", "own-script.yaml", "torchrun.yaml", "queued.yaml"}
JOBS |= {"stale-synchronous.yaml", "pipeline.yaml", "tensor.yaml", "batch-size.yaml", "auto-strategy.yaml"}
JOBS |= {"kueue.yaml", "priority.yaml", "finish-by.yaml", "torchrun-minimal.yaml", "autoscaled.yaml"}
JOBS |= {"pipeline-script.yaml", "mpi.yaml", "horovod.yaml", "script-from-git.yaml", "torchrun-elastic.yaml"}
JOBS |= {"report.yaml", "until.yaml", "gradient-accumulation.yaml", "precision.yaml", "activation-checkpointing.yaml"}
JOBS |= {"gan-script.yaml", "sharded-script.yaml"}


def documented() -> list[Any]:
    """Return the manifests in the documentation, without fragments that have no kind."""
    found = []
    for path in DOCUMENTS:
        for number, block in enumerate(_BLOCK.findall(path.read_text() if path.exists() else ""), 1):
            if "kind: DLJob" in block and "healthCheckExprs" not in block:
                found.append(pytest.param(block, id=f"{path.name} {number}"))
    return found


def check(text: str) -> list[dict[str, Any]]:
    documents = [document for document in yaml.safe_load_all(text) if document]
    for document in documents:
        if document["kind"] == "DLJob":
            assert refusals(document) == []
            DLJobSpec.model_validate(document["spec"])
        else:
            assert_valid(document)
    return documents


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_example_is_accepted(path: Path) -> None:
    assert [d["kind"] for d in check(path.read_text())].count("DLJob") == 1
    assert path.read_text().startswith("# "), "an example must start with a comment about its purpose"


NODES = [
    {"device": "cpu", "count": 3, "name": "plain", "cpu": 2, "memory": "4Gi"},
    {"device": "cpu-fast", "cpu": 2, "memory": "4Gi"},
    {"device": "cpu-slow", "cpu": 2, "memory": "4Gi"},
]
"""The nodes of hack/cluster, and the heterogeneous nodes that an example needs."""


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_example_has_a_plan(path: Path) -> None:
    """The plan is for a development cluster, and its shares add up to the batch."""
    [job] = [d for d in yaml.safe_load_all(path.read_text()) if d["kind"] == "DLJob"]
    spec = DLJobSpec.model_validate(job["spec"])
    if spec.task is not None:
        return  # Its plan depends on its data.
    decision = plan(planner_request(job["metadata"]["name"], spec), cluster_view({"nodes": NODES}), {})
    assert isinstance(decision, Decision), decision
    shares = [share for group in decision.chosen.groups for share in group.shares]
    if spec.missing:
        assert spec.global_batch_size is None and set(shares) == {1}
        return
    whole = decision.chosen.splits_model
    assert (set(shares) == {spec.global_batch_size}) if whole else (sum(shares) == spec.global_batch_size)


def test_example_with_strategy_auto_is_a_pipeline_because_nothing_else_fits() -> None:
    job = yaml.safe_load((ROOT / "examples/auto-strategy.yaml").read_text())

    def planned(strategy: str) -> Decision | Infeasible:
        parallelism = {**job["spec"]["parallelism"], "strategy": strategy}
        spec = DLJobSpec.model_validate({**job["spec"], "parallelism": parallelism})
        return plan(planner_request("job", spec), cluster_view({"nodes": NODES}), {})

    chosen = planned("Auto")
    assert isinstance(chosen, Decision) and chosen.chosen.strategy == "Pipeline"
    for strategy in ("Data", "Optimizer"):
        rejected = planned(strategy)
        assert isinstance(rejected, Infeasible) and rejected.reason == "DoesNotFit"


def test_example_with_gradient_accumulation_needs_it() -> None:
    job = yaml.safe_load((ROOT / "examples/gradient-accumulation.yaml").read_text())

    def planned(accumulation: str) -> Decision | Infeasible:
        spec = DLJobSpec.model_validate({**job["spec"], "parallelism": {"gradientAccumulation": accumulation}})
        return plan(planner_request("job", spec), cluster_view({"nodes": NODES}), {})

    chosen, rejected = planned("Auto"), planned("Never")
    assert isinstance(chosen, Decision) and chosen.chosen.micro_batches > 1
    assert isinstance(rejected, Infeasible) and rejected.reason == "DoesNotFit"


@pytest.mark.parametrize("text", documented())
def test_manifest_in_the_documentation_is_accepted(text: str) -> None:
    check(text)


def test_examples_have_unique_names() -> None:
    assert {path.name for path in EXAMPLES} >= JOBS
    names = [d["metadata"]["name"] for p in EXAMPLES for d in yaml.safe_load_all(p.read_text()) if d["kind"] == "DLJob"]
    assert len(set(names)) == len(names), "two examples with the same name would overwrite each other"


WITH_SCRIPTS = ("own-script.yaml", "pipeline-script.yaml", "report.yaml", "torchrun.yaml", "torchrun-elastic.yaml")
WITH_SCRIPTS += ("mpi.yaml", "horovod.yaml", "gan-script.yaml", "sharded-script.yaml")


@pytest.mark.parametrize("name", WITH_SCRIPTS)
def test_scripts_in_manifests_match_the_script_files(name: str) -> None:
    """The script in a ConfigMap equals the file that other tests run."""
    config_map, job = yaml.safe_load_all((ROOT / "examples" / name).read_text())
    [(script, text)] = config_map["data"].items()
    assert text == (ROOT / "examples/scripts" / script).read_text()
    trainer = job["spec"]["trainer"]
    if "source" in trainer:
        assert trainer["command"] == ["python", script]
        assert trainer["source"] == {"configMap": {"name": config_map["metadata"]["name"]}}
        return
    assert trainer["command"] == ["torchrun" if trainer.get("elastic") else "python", f"/scripts/{script}"]
    [override] = job["spec"]["podTemplateOverrides"]
    assert override["spec"]["volumes"][0]["configMap"]["name"] == config_map["metadata"]["name"]


@pytest.mark.parametrize(
    ("page", "script", "example"),
    [
        ("your-own-script", "train_five_lines.py", "own-script.yaml"),
        ("large-models", "train_pipeline.py", "pipeline-script.yaml"),
        ("frozen-and-several-models", "train_gan.py", "gan-script.yaml"),
    ],
)
def test_page_shows_the_script_and_the_manifest_of_the_example(page: str, script: str, example: str) -> None:
    page = (ROOT / f"docs/how-to/{page}.md").read_text()
    text = (ROOT / "examples/scripts" / script).read_text()
    assert f"```python\n{text[text.index('import torch') :]}```\n" in page
    job = (ROOT / "examples" / example).read_text().partition("---\n")[2]
    assert f"```yaml\n{job}```\n" in page


def test_checksum_in_the_example_matches_the_file() -> None:
    job, *_ = yaml.safe_load_all((ROOT / "examples/dataset-uri.yaml").read_text())
    served = ROOT / "trainer-image/dltrain/data" / job["spec"]["dataset"]["uri"].rpartition("/")[2]
    assert hashlib.sha256(served.read_bytes()).hexdigest() == job["spec"]["dataset"]["sha256"]


def test_smallest_example_has_at_most_ten_lines() -> None:
    lines = [line for line in (ROOT / "examples/minimal.yaml").read_text().splitlines() if not line.startswith("#")]
    assert len(lines) <= 10


def test_digits_is_short() -> None:
    assert len((ROOT / "examples/digits.yaml").read_text().splitlines()) < 25
