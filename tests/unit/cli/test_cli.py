"""Tests of the command line: its output, and one line with exit code 2 for invalid input."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from dljob.cli import main
from dljob.cli.tables import cost, scaling_curve, table

ROOT = Path(__file__).resolve().parents[3]
DIGITS = str(ROOT / "examples/digits.yaml")
CLUSTER = """
nodes:
- {name: gpu, count: 4, device: NVIDIA-A100-SXM4-40GB, devices: 8, cpu: 64, memory: 512Gi, bandwidth: 12.5G}
- {name: spare, count: 6, device: cpu, cpu: 4, memory: 16Gi}
- {name: kept, device: cpu, cpu: 4, taints: [{key: dedicated, value: db, effect: NoSchedule}]}
"""
MINIMAL = """
apiVersion: dljob.dev/v1alpha1
kind: DLJob
metadata: {name: minimal}
spec: {model: {name: mlp}, dataset: {name: digits}, globalBatchSize: 64, epochs: 5}
"""

VALUES = """
replicas: 2
jobDefaults:
  scheduling: {tolerations: [{key: dedicated, value: db, effect: NoSchedule}], priorityClassName: batch}
  prices: {usdPerKwh: 0.5}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory with cluster.yaml and job.yaml, without access to an API server."""
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    (tmp_path / "job.yaml").write_text(MINIMAL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "no-kubeconfig"))
    return tmp_path


TORCHRUN = """
apiVersion: dljob.dev/v1alpha1
kind: DLJob
metadata: {name: mine}
spec: {trainer: {framework: Torchrun, image: a/b:1, command: [torchrun, train.py]}, nodes: {min: 2}}
"""


PROFILE = """
apiVersion: dljob.dev/v1alpha1
kind: DLProfile
metadata: {{name: p}}
spec: {{model: {model}, device: cpu}}
status: {{compute: [{{batch: 32, seconds: 0.002}}]}}
"""


class TestPlan:
    @pytest.mark.parametrize(
        ("precision", "measured", "lacks"),
        [("FP32", "mlp", None), ("BF16", "mlp", "mlp.bf16"), ("BF16", "mlp.bf16", None), ("Auto", "mlp.bf16", "mlp")],
    )
    def test_profiles_of_another_precision_do_not_count(
        self, folder: Path, precision: str, measured: str, lacks: str | None, capsys: pytest.CaptureFixture[str]
    ) -> None:
        Path("job.yaml").write_text(MINIMAL.replace("epochs: 5", f"epochs: 5, precision: {precision}"))
        Path("cluster.yaml").write_text("nodes: [{name: n, count: 2, cpu: 4}]")
        Path("profiles.yaml").write_text(PROFILE.format(model=measured))
        assert main(["plan", "job.yaml", "--cluster", "cluster.yaml", "--profiles", "profiles.yaml"]) == 0
        printed = capsys.readouterr()
        assert ("measurements of earlier runs" in printed.out) == (lacks is None)
        hint = f"dljob: minimal: --profiles: found {measured}; expected {lacks}. The plan uses data sheets\n"
        assert printed.err == (hint if lacks else "")

    def test_job_without_a_prediction_lists_what_is_missing(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (folder / "job.yaml").write_text(TORCHRUN)
        assert main(["plan", "job.yaml", "--cluster", "cluster.yaml"]) == 0
        text = capsys.readouterr().out
        assert text.startswith("mine: training script, no predicted time\n")
        assert "* 2 x NVIDIA-A100-SXM4-40GB (8 ranks each), Torch\n" in text
        assert "spec.model, spec.dataset, spec.globalBatchSize and spec.epochs (or steps): a prediction of step" in text
        assert "Bottleneck" not in text and "0us" not in text
        assert main(["plan", "job.yaml", "--cluster", "cluster.yaml", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert len(found["plan"]["missingFields"]) == 3 and found["scaling"] == []

    def test_job_with_a_task_has_no_plan_before_its_data_is_looked_at(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        task = "task: {type: TabularRegression}, dataset: {uri: pvc://a/b.csv}"
        (folder / "job.yaml").write_text(MINIMAL.partition("spec:")[0] + f"spec: {{{task}}}")
        assert main(["plan", "job.yaml", "--cluster", "cluster.yaml"]) == 2
        assert capsys.readouterr().err.startswith("dljob: minimal: spec.task: found a task; expected a job with a")

    def test_plan_names_an_mpi_program(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (folder / "job.yaml").write_text(TORCHRUN.replace("Torchrun", "MPI").replace("torchrun", "mpirun"))
        assert main(["plan", "job.yaml", "--cluster", "cluster.yaml"]) == 0
        text = capsys.readouterr().out
        assert text.startswith("mine: MPI program, no predicted time\n")
        assert "* 2 x NVIDIA-A100-SXM4-40GB (8 ranks each), MPI\n" in text

    @pytest.mark.parametrize(
        ("source", "line"),
        [
            (
                "git: {url: 'https://a.example/b', revision: 0123456789abcdef0123456789abcdef01234567, path: c/d}",
                "Script:     commit 0123456789ab of https://a.example/b, folder c/d",
            ),
            (
                "archive: {uri: 'https://a.example/b.zip?signature=secret'}",
                "Script:     https://a.example/b.zip. Without sha256, pods that start later may get another archive",
            ),
            ("configMap: {name: mine}", "Script:     ConfigMap mine. Pods that start later get later changes of it"),
        ],
        ids=["git", "archive", "config map"],
    )
    def test_plan_names_the_origin_of_the_script(
        self, folder: Path, capsys: pytest.CaptureFixture[str], source: str, line: str
    ) -> None:
        job = TORCHRUN.replace("framework:", f"source: {{{source}}}, framework:")
        (folder / "job.yaml").write_text(job)
        assert main(["plan", "job.yaml", "--cluster", "cluster.yaml"]) == 0
        assert line in capsys.readouterr().out.splitlines()

    def test_frameworks_are_compared_side_by_side(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (folder / "cluster.yaml").write_text("nodes: [{name: n, count: 4, cpu: 2, bandwidth: 125M}]")
        (folder / "job.yaml").write_text(MINIMAL.replace("epochs: 5", "epochs: 5, nodes: {min: 2}"))
        command = ["plan", "job.yaml", "--cluster", "cluster.yaml", "--compare", "frameworks"]
        assert main(command) == 0
        text = capsys.readouterr().out
        shown = text[text.index("\nFrameworks: ") :]
        for word in (
            "P10",
            "P90",
            "SAMPLES/S PER STEP S",
            "dltrain over MPI",
            "Torchrun with gloo",
            "parameter server",
        ):
            assert word in shown
        assert "measured on 20" in shown and "benchmarks.papers.framework_constants" in shown
        assert main([*command, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["frameworks"]
        assert [row["name"] for row in found] == ["dltrain over MPI", "Torchrun with gloo", "parameter server"]
        for row in found:
            assert row["stepSecondsP10"] < row["stepSeconds"] < row["stepSecondsP90"]
            ratio = row["samplesPerSecond"] / row["stepSeconds"]
            assert row["throughputPerLatency"] == pytest.approx(ratio, rel=1e-2)

    def test_job_without_a_prediction_has_no_comparison(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (folder / "job.yaml").write_text(TORCHRUN)
        assert main(["plan", "job.yaml", "--cluster", "cluster.yaml", "--compare", "frameworks"]) == 0
        assert "Frameworks: no comparison" in capsys.readouterr().out

    def test_plan_prints_a_table_with_the_chosen_plan_marked(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["plan", DIGITS, "--cluster", "cluster.yaml"]) == 0
        text = capsys.readouterr().out
        chosen, in_trade_offs = [line for line in text.splitlines() if line.startswith("* ") and "Ring" in line]
        assert chosen.split("  ")[0] == in_trade_offs.split("  ")[0]
        assert text.index("\nTrade-offs: ") < text.index(in_trade_offs, text.index(chosen) + 1)
        assert re.search(r"\d+(us|ms|s) ", chosen)
        for word in ("STEP", "P90", "EFFICIENCY", "ENERGY", "COST", "Bottleneck: ", "Based on:   data sheets"):
            assert word in text
        assert "Ruled out\n  1 x cpu: taint dedicated=db:NoSchedule is not tolerated" in text
        assert "Scaling: the best plan for each number of nodes" in text
        assert "\n* 3 " in text, "the chosen number of nodes is marked in the scaling curve"

    def test_plan_shows_the_target(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        until = "until: {metric: val/loss, atMost: 0.5, patience: 4}"
        (folder / "job.yaml").write_text(TORCHRUN.replace("nodes:", f"{until}, nodes:"))
        assert main(["plan", "job.yaml", "--cluster", "cluster.yaml"]) == 0
        expected = "no predicted time, until val/loss at most 0.5, or 4 values without an improvement\n"
        assert capsys.readouterr().out.startswith(f"mine: training script, {expected}")
        text = (ROOT / "examples/until.yaml").read_text()
        (folder / "job.yaml").write_text(text)
        assert main(["plan", "job.yaml", "--cluster", "cluster.yaml"]) == 0
        assert "at most 2400 steps of 120 samples, until accuracy at least 0.96" in capsys.readouterr().out

    def test_plan_prints_json(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["plan", DIGITS, "--cluster", "cluster.yaml", "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["job"] == "digits"
        assert document["plan"]["nodes"] == 3
        assert sum(b for g in document["plan"]["groups"] for b in g["batchPerRank"]) == 120
        by_nodes = {point["nodes"]: point for point in document["scaling"]}
        assert sorted(by_nodes) == [1, 2, 3, 4, 6] and by_nodes[3]["ranks"] == 3
        assert by_nodes[3]["stepSeconds"] == document["plan"]["predicted"]["stepSeconds"]
        assert 0 < by_nodes[2]["efficiency"] <= 1 and by_nodes[1]["samplesPerSecond"] > 0

    def test_json_has_the_documented_keys(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        page = (ROOT / "docs/explanation/planning.md").read_text(encoding="utf-8")
        table = page[page.index("### As JSON") : page.index("## Steer")]
        documented = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
        for cluster, code in (("cluster.yaml", 0), ("none.yaml", 1)):
            (folder / "none.yaml").write_text("nodes: []")
            assert main(["plan", DIGITS, "--cluster", cluster, "--json"]) == code
            assert list(json.loads(capsys.readouterr().out)) == documented

    def test_plan_shows_the_administrators_defaults(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (folder / "values.yaml").write_text(VALUES)
        given = ["plan", "job.yaml", "--cluster", "cluster.yaml", "--defaults", "values.yaml"]
        assert main(given) == 0
        text = capsys.readouterr().out
        assert (
            "\nAdministrator's defaults\n"
            "  scheduling.tolerations: dedicated=db:NoSchedule\n"
            "  scheduling.priorityClassName: batch\n"
        ) in text
        assert "is not tolerated" not in text, "the plan may use the node with the taint"
        assert main([*given, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["plan"]["defaults"]
        assert found[1] == "scheduling.priorityClassName: batch" and "prices.usdPerKwh: 0.5" in found
        assert main(["plan", "job.yaml", "--cluster", "cluster.yaml", "--json"]) == 0
        assert "defaults" not in json.loads(capsys.readouterr().out)["plan"]

    @pytest.mark.parametrize(
        ("values", "words"),
        [
            ("replicas: 2", ("values.yaml: found replicas", "expected the key jobDefaults")),
            ("[]", ("values.yaml: found no mapping",)),
            ("jobDefaults: {prices: {usdPerKwh: -1}}", ("values.yaml: jobDefaults.prices.usdPerKwh: found -1",)),
        ],
    )
    def test_invalid_defaults_are_reported(
        self, values: str, words: tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (folder / "values.yaml").write_text(values)
        assert main(["plan", "job.yaml", "--cluster", "cluster.yaml", "--defaults", "values.yaml"]) == 2
        error = capsys.readouterr().err
        assert all(word in error for word in words)

    def test_plan_writes_a_plot(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["plan", "job.yaml", "--cluster", "cluster.yaml", "--plot", "out.png"]) == 0
        assert (folder / "out.png").read_bytes().startswith(b"\x89PNG")

    def test_unwritable_plot_is_reported(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["plan", "job.yaml", "--cluster", "cluster.yaml", "--plot", "none/out.png"]) == 2
        assert "none/out.png" in capsys.readouterr().err

    def test_infeasible_job_gives_exit_code_1(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (folder / "small.yaml").write_text("nodes: [{cpu: 1}]")
        assert main(["plan", DIGITS, "--cluster", "small.yaml"]) == 1
        text = capsys.readouterr().out
        assert "No plan is possible: TooFewNodes" in text
        assert "spec.nodes.min: found 1 nodes" in text

    def test_plan_reads_several_jobs_and_standard_input(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        text = f"{MINIMAL}---\n{MINIMAL.replace('minimal', 'second')}---\n{{kind: Namespace}}\n"
        ended = subprocess.run(
            [sys.executable, "-m", "dljob.cli", "plan", "-", "--cluster", "cluster.yaml"],
            input=text, capture_output=True, text=True, timeout=240, env=environment(), check=True,
        )  # fmt: skip
        assert ended.stdout.startswith("minimal: mlp")
        assert "---\nsecond: mlp" in ended.stdout


WRONG = {
    "no such file": (["plan", "absent.yaml"], "absent.yaml: No such file or directory"),
    "a folder": (["plan", "."], ".: Is a directory"),
    "invalid YAML": (["plan", "bad.yaml"], "bad.yaml: found invalid YAML"),
    "no text": (["plan", "binary"], "binary: "),
    "empty": (["plan", "empty.yaml"], "empty.yaml: found no YAML document; expected the manifest of a DLJob"),
    "no job": (["plan", "cluster.yaml"], "found no DLJob among its documents"),
    "another kind in its place": (["plan", "text.yaml"], "manifest: found str; expected a mapping"),
    "wrong spec": (["plan", "wrong.yaml", "--cluster", "cluster.yaml"], "wrong.yaml: spec.globalBatchSize: found 0"),
    "no such cluster": (["plan", "job.yaml", "--cluster", "absent.yaml"], "absent.yaml: No such file"),
    "no cluster file": (["plan", "job.yaml", "--cluster", "job.yaml"], "expected a mapping with the single key nodes"),
    "no kubeconfig": (["plan", "job.yaml"], "kubeconfig: found an invalid file or invalid credentials"),
    "run without a cluster": (
        ["run", "job.yaml", "-n", "x"],
        "kubeconfig: found an invalid file or invalid credentials",
    ),
    "run of something wrong": (["run", "wrong.yaml"], "wrong.yaml: spec.globalBatchSize: found 0"),
    "run of no job": (["run", "other.yaml"], "other.yaml: found 0 DLJobs and ConfigMap; expected one DLJob"),
    "top without a cluster": (["top", "-A"], "kubeconfig: found an invalid file or invalid credentials"),
    "top of a namespace that no kubeconfig names": (
        ["top"],
        "kubeconfig: found an invalid file or invalid credentials",
    ),
    "run into a namespace that no kubeconfig names": (
        ["run", "job.yaml"],
        "kubeconfig: found an invalid file or invalid credentials",
    ),
    "top too often": (["top", "-A", "--interval", "0"], "--interval: found 0; expected a number of seconds above 0"),
    "port too large": (["serve", "--port", "99999"], "--port: found 99999; expected 0 to 65535"),
    "no such address": (["serve", "--host", "192.0.2.1"], "--host: found 192.0.2.1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_invalid_input_gives_one_line_and_exit_code_2(
    case: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "bad.yaml").write_text("a: [1, 2")
    (folder / "binary").write_bytes(b"\xff\xfe\x00\x80")
    (folder / "empty.yaml").write_text("")
    (folder / "text.yaml").write_text("just text")
    (folder / "wrong.yaml").write_text(MINIMAL.replace("globalBatchSize: 64", "globalBatchSize: 0"))
    (folder / "other.yaml").write_text("{apiVersion: v1, kind: ConfigMap, metadata: {name: a}}")
    arguments, message = WRONG[case]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("dljob: ")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["fly"], ["plan"], ["top", "--interval", "soon"], ["plan", "a", "b"]])
def test_wrong_usage_gives_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: " in capsys.readouterr().err


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for word in ("plan", "run", "top", "serve", "examples:"):
        assert word in text


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("operator", "operator/contract"))}


def test_closed_pipe_is_not_an_error(folder: Path) -> None:
    ended = subprocess.run(
        f"set -o pipefail; {sys.executable} -m dljob.cli plan job.yaml --cluster cluster.yaml | true",
        shell=True, executable="/bin/bash", capture_output=True, text=True, timeout=240, env=environment(),
    )  # fmt: skip
    assert "Traceback" not in ended.stderr


def test_unreachable_api_server_is_reported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "no-kubeconfig").write_text(
        f"""
apiVersion: v1
kind: Config
current-context: a
contexts: [{{name: a, context: {{cluster: a, user: a}}}}]
clusters: [{{name: a, cluster: {{server: "http://127.0.0.1:{port}"}}}}]
users: [{{name: a, user: {{token: t}}}}]
"""
    )
    assert main(["plan", "job.yaml"]) == 2
    assert "the API server does not answer" in capsys.readouterr().err


def test_serve_runs_until_a_signal(folder: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "dljob.cli", "serve", "--port", "0", "--cluster", "cluster.yaml"],
        stderr=subprocess.PIPE, text=True, env=environment(),
    )  # fmt: skip
    try:
        assert process.stderr is not None
        found = re.search(r"http://127.0.0.1:(\d+)/", process.stderr.readline())
        assert found
        with urllib.request.urlopen(f"http://127.0.0.1:{found[1]}/healthz", timeout=240) as reply:
            assert json.load(reply) == {"status": "ok"}
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()


class TestText:
    def test_numbers_are_right_aligned_and_text_left_aligned(self) -> None:
        assert table(["A", "N"], [["x", "1"], ["longer", "22"]]) == ["A        N", "x        1", "longer  22"]

    def test_costs_are_formatted(self) -> None:
        assert [cost(c) for c in (None, 0.0001, 1.234)] == ["-", "<$0.01", "$1.23"]

    def test_scaling_curve_needs_several_node_counts(self) -> None:
        assert scaling_curve([], None) == []  # type: ignore[arg-type]
