"""Tests that rules and dashboard use existing metrics, and that promtool accepts and evaluates the rules."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import metriclist
from dljob.job.observed import JOB_LABEL
from support.manifests.helm_chart import CHART, MONITORED, of_kind, one, render

Json = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
RULES = CHART / "files/rules.yaml"
GROUPS: list[Json] = yaml.safe_load(RULES.read_text())["groups"]
ALL_RULES = [rule for group in GROUPS for rule in group["rules"]]
DASHBOARD: Json = json.loads((CHART / "files/dashboard.json").read_text())
EXPORTED = {name for metric in metriclist.operator() + metriclist.trainer() for name in metric.series}


def promtool(*args: str | Path) -> str:
    binary = shutil.which("promtool")
    assert binary, "promtool: not found, expected Debian's package prometheus; hack/test installs it"
    done = subprocess.run([binary, *args], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def queries() -> list[str]:
    panels = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    variables = [v["query"]["query"] for v in DASHBOARD["templating"]["list"] if v["type"] == "query"]
    return [*(rule["expr"] for rule in ALL_RULES), *panels, *variables]


@pytest.mark.parametrize("query", queries())
def test_every_metric_exists(query: str) -> None:
    queried = set(re.findall(r"\bdljob_(?:operator|trainer)_[a-z0-9_]+", query)) - {"dljob_dev_job"}
    recorded = set(re.findall(r"\bdljob:[a-z0-9_:]+", query))
    assert queried or recorded
    assert queried <= EXPORTED, f"not exported: {queried - EXPORTED}"
    assert recorded <= {rule["record"] for rule in ALL_RULES if "record" in rule}


def test_unknown_metric_is_detected() -> None:
    assert "dljob_trainer_step_seconds" in EXPORTED and "dljob_trainer_step_hours" not in EXPORTED
    assert len(EXPORTED) > 30


@pytest.mark.parametrize("metric", metriclist.operator() + metriclist.trainer(), ids=lambda m: m.name)
def test_metrics_follow_naming_conventions_and_have_help(metric: metriclist.Exported) -> None:
    """Check the rules of https://prometheus.io/docs/practices/naming: base units, and counters that end in _total."""
    assert len(metric.help) > 15
    assert not re.search(r"_(ms|milliseconds|minutes|kb|mb|percent)(_|$)", metric.name)
    assert (metric.type == "counter") == metric.name.endswith("_total")


def test_labels_of_metrics_are_listed() -> None:
    labels = {metric.name: metric.labels for metric in metriclist.operator() + metriclist.trainer()}
    assert labels["dljob_operator_used_cost_dollars_total"] == ("job_namespace",)
    assert labels["dljob_operator_queue_start_seconds"] == ("position", "percentile")
    assert labels["dljob_operator_leader"] == ()
    assert labels["dljob_trainer_step_seconds"] == ("rank",)
    assert labels["dljob_trainer_energy_joules_total"] == ("rank", "source")
    assert labels["dljob_trainer_term"] == ()


def test_promtool_accepts_the_rules() -> None:
    assert f"{len(ALL_RULES)} rules found" in promtool("check", "rules", RULES)


def test_alerts_fire_only_under_their_conditions(tmp_path: Path) -> None:
    """promtool evaluates the rules on synthetic series (rules_test.yaml)."""
    tests = yaml.safe_load((Path(__file__).parent / "rules_test.yaml").read_text())
    file = tmp_path / "rules_test.yaml"
    file.write_text(yaml.safe_dump({**tests, "rule_files": [str(RULES)]}))
    assert "SUCCESS" in promtool("test", "rules", file)


def test_every_alert_is_tested_and_documented() -> None:
    tried = {
        check["alertname"]
        for test in yaml.safe_load((Path(__file__).parent / "rules_test.yaml").read_text())["tests"]
        for check in test["alert_rule_test"]
        if check["exp_alerts"]
    }
    alerts = {rule["alert"] for rule in ALL_RULES if "alert" in rule}
    documented = set(re.findall(r"^\| (DLJob\w+) \|", (ROOT / "docs/how-to/monitoring.md").read_text(), re.MULTILINE))
    assert alerts == tried == documented


def meta(labels: dict[str, str], port: str) -> dict[str, str]:
    """Return the labels that Prometheus discovers for a pod's port."""
    found = {f"__meta_kubernetes_pod_label_{re.sub(r'[^a-zA-Z0-9]', '_', key)}": value for key, value in labels.items()}
    found |= {"__meta_kubernetes_pod_container_port_name": port, "__meta_kubernetes_namespace": "here"}
    return found | {"__meta_kubernetes_pod_name": "a-pod"}


def test_documented_scrape_configuration_selects_the_metrics_ports(tmp_path: Path) -> None:
    """It selects only the metrics ports of operator and trainers, with the labels that the rules use.

    Debian's Prometheus is built without Kubernetes discovery, so static targets have the labels of discovery.
    """
    [block] = re.findall(
        r"^```yaml\n(.*?)^```", (ROOT / "docs/how-to/monitoring.md").read_text(), re.MULTILINE | re.DOTALL
    )
    config = yaml.safe_load(block)
    template = one(render(), "Deployment")["spec"]["template"]
    assert "metrics" in [port["name"] for port in template["spec"]["containers"][0]["ports"]]
    targets = {
        "operator:1": meta(template["metadata"]["labels"], "metrics"),
        "trainer:1": meta({"app.kubernetes.io/name": "dljob-trainer", JOB_LABEL: "j"}, "metrics"),
        "trainer:2": meta({"app.kubernetes.io/name": "dljob-trainer", JOB_LABEL: "j"}, "agent"),
    }
    for scrape in config["scrape_configs"]:
        del scrape["kubernetes_sd_configs"]
        scrape["static_configs"] = [{"targets": [name], "labels": labels} for name, labels in targets.items()]
    shutil.copy(RULES, tmp_path / "rules.yaml")
    file = tmp_path / "prometheus.yml"
    file.write_text(yaml.safe_dump(config))
    assert "SUCCESS" in promtool("check", "config", file)

    def labels(job: str) -> list[dict[str, str]]:
        text = promtool("check", "service-discovery", "--timeout=1s", file, job)
        return [found["labels"] for found in json.loads(text) if found.get("labels")]

    common = {"namespace": "here", "pod": "a-pod"}
    [operator] = labels("dljob-operator")
    assert operator.items() >= {**common, "instance": "operator:1"}.items()
    [trainer] = labels("dljob-jobs")
    assert trainer.items() >= {**common, "instance": "trainer:1", "dljob": "j"}.items()


def test_chart_contains_rules_and_dashboard() -> None:
    objects = render(MONITORED)
    assert one(objects, "PrometheusRule")["spec"]["groups"] == GROUPS
    [config] = [o for o in of_kind(objects, "ConfigMap") if o["metadata"]["name"].endswith("-dashboard")]
    assert json.loads(config["data"]["dljob.json"]) == DASHBOARD
    for kind in ("ServiceMonitor", "PodMonitor", "PrometheusRule"):
        assert one(objects, kind)["metadata"]["labels"]["release"] == "prometheus"
    assert not {"ServiceMonitor", "PodMonitor", "PrometheusRule"} & {o["kind"] for o in render()}


def test_pod_monitor_is_limited_to_watched_namespaces() -> None:
    everywhere = one(render(MONITORED), "PodMonitor")["spec"]["namespaceSelector"]
    limited = one(render({**MONITORED, "watchNamespaces": ["a"]}), "PodMonitor")["spec"]["namespaceSelector"]
    assert (everywhere, limited) == ({"any": True}, {"matchNames": ["a"]})


LIMITS = {"sampleLimit": 5000, "bodySizeLimit": "2MB", "labelLimit": 32, "labelValueLengthLimit": 256}


def test_scrapes_of_jobs_are_limited() -> None:
    """A tenant's pod may export anything under the label of a job. Prometheus rejects a scrape beyond the limits."""
    assert one(render(MONITORED), "PodMonitor")["spec"].items() >= LIMITS.items()
    changed = {"sampleLimit": 100, "bodySizeLimit": "500KB"}
    values = {"metrics": {**MONITORED["metrics"], "podMonitor": {"enabled": True, **changed}}}
    assert one(render(values), "PodMonitor")["spec"].items() >= {**LIMITS, **changed}.items()


@pytest.mark.parametrize(
    ("field", "value"),
    [("sampleLimit", 0), ("sampleLimit", "many"), ("bodySizeLimit", "2 MB"), ("bodySizeLimit", "0MB")],
)
def test_limits_of_scrapes_cannot_be_switched_off(field: str, value: Any) -> None:
    """Prometheus takes 0 for no limit."""
    with pytest.raises(Exception, match=field):
        render({"metrics": {"podMonitor": {"enabled": True, field: value}}})


def test_documented_scrape_configuration_has_the_same_limits() -> None:
    [block] = re.findall(
        r"^```yaml\n(.*?)^```", (ROOT / "docs/how-to/monitoring.md").read_text(), re.MULTILINE | re.DOTALL
    )
    [jobs] = [each for each in yaml.safe_load(block)["scrape_configs"] if each["job_name"] == "dljob-jobs"]
    snake = {re.sub(r"[A-Z]", lambda found: f"_{found[0].lower()}", name): value for name, value in LIMITS.items()}
    assert {name: jobs.get(name) for name in snake} == snake


def test_panels_do_not_overlap() -> None:
    used: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & used and max(x for x, _ in cells) < 24, panel["title"]
        used |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
