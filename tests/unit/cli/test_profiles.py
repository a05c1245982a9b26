"""Tests of ``dljob plan --profiles``: only the profiles for the namespace of a job count."""

import json
from pathlib import Path

import pytest
import yaml

from dljob.api import API_VERSION
from dljob.cli import main
from support.specs.small_specs import MINIMAL

ONE_RANK = {**MINIMAL, "nodes": {"min": 1, "max": 1}, "resources": {"cpu": "1"}}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory with a cluster file and profiles for two namespaces, without access to an API server."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    (tmp_path / "cluster.yaml").write_text("nodes: [{name: n, cpu: 4}]")
    for name, order in (("one.yaml", 1), ("other.yaml", -1)):
        profiles = [
            {
                "apiVersion": API_VERSION,
                "kind": "DLProfile",
                "metadata": {"name": namespace},
                "spec": {"model": "mlp", "device": "cpu", "namespace": namespace},
                "status": {"compute": [{"batch": 8, "seconds": seconds, "observations": 50, "cores": 1}]},
            }
            for namespace, seconds in (("team-a", 0.002), ("team-b", 0.003))
        ]
        (tmp_path / name).write_text(yaml.safe_dump_all(profiles[::order]))
    return tmp_path


@pytest.mark.parametrize("profiles", ["one.yaml", "other.yaml"])
@pytest.mark.parametrize(
    ("namespace", "seconds", "hint"),
    [
        ("team-a", 0.002, None),
        ("team-b", 0.003, None),
        (
            None,
            None,
            "found mlp for plans of namespace team-a, team-b only; expected default, the namespace of the job",
        ),
    ],
)
def test_only_profiles_for_the_namespace_of_the_job_count(
    folder: Path,
    profiles: str,
    namespace: str | None,
    seconds: float | None,
    hint: str | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Fixed bug: the last profile of the file counted, whatever its namespace."""
    meta = {"name": "a"} | ({"namespace": namespace} if namespace else {})
    job = {"apiVersion": API_VERSION, "kind": "DLJob", "metadata": meta, "spec": ONE_RANK}
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    assert main(["plan", "job.yaml", "--cluster", "cluster.yaml", "--profiles", profiles, "--json"]) == 0
    printed = capsys.readouterr()
    predicted = json.loads(printed.out)["plan"]["predicted"]
    if seconds is None:
        assert predicted["basis"] == "catalogue"
    else:
        assert round(predicted["stepSeconds"], 3) == seconds
    assert (hint in printed.err) if hint else not printed.err
