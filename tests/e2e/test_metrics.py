"""Tests of metrics with a real Prometheus that scrapes the operator and every trainer pod."""

import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.cluster.kubectl import TWO_NODES, Kubectl, example, step_of, wait_for

pytestmark = pytest.mark.e2e
LISTEN = "127.0.0.1:19090"


@pytest.fixture(scope="module")
def running(kubectl: Kubectl) -> list[dict[str, Any]]:
    """Return the pods of a job that trains for longer than the test."""
    kubectl.apply(example("digits.yaml", job="watched", epochs=2000, nodes=TWO_NODES))
    kubectl.wait_job("watched", "a step", lambda j: step_of(j) > 0, 120)
    return kubectl.list("pods", "dljob.dev/job=watched")


@pytest.fixture(scope="module")
def prometheus(
    admin: Kubectl, kubectl: Kubectl, running: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    binary = shutil.which("prometheus")
    assert binary, "prometheus: not found, expected Debian's package; hack/test installs it"
    folder: Path = tmp_path_factory.mktemp("prometheus")
    [operator] = Kubectl(admin.kubeconfig, "dljob-system").list("pods", "app.kubernetes.io/name=dljob")
    port = next(p for p in operator["spec"]["containers"][0]["ports"] if p["name"] == "metrics")["containerPort"]
    targets = {
        "operator": [f"{operator['status']['podIP']}:{port}"],
        "trainer": [f"{p['status']['podIP']}:9470" for p in running],
    }
    config = {
        "global": {"scrape_interval": "1s"},
        "scrape_configs": [{"job_name": k, "static_configs": [{"targets": v}]} for k, v in targets.items()],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = [
        binary,
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address={LISTEN}",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield f"http://{LISTEN}"
    finally:
        process.terminate()
        process.wait(20)
        kubectl.delete("dljob", "watched", "--wait=false")


def query(server: str, expression: str) -> list[dict[str, Any]]:
    url = f"{server}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            result: list[dict[str, Any]] = json.load(answer)["data"]["result"]
            return result
    except OSError:
        return []


@pytest.mark.parametrize(
    ("expression", "count"),
    [
        ("up == 1", 3),
        ("dljob_trainer_step > 0", 2),
        ("dljob_trainer_samples_per_second > 0", 2),
        ("dljob_trainer_step_seconds > 0", 2),
        ("dljob_operator_jobs{phase='Running'} >= 1", 1),
        ("dljob_operator_reconcile_duration_seconds_count > 0", 1),
    ],
)
def test_prometheus_finds_the_series(expression: str, count: int, prometheus: str) -> None:
    wait_for(
        f"{count} series of {expression}",
        lambda: len(query(prometheus, expression)) == count,
        60,
        lambda: f"has {query(prometheus, expression.split(' ')[0])}",
    )
