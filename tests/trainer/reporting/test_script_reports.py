"""Tests of ``dltrain.report``: what arrives at the agent, what a run without an agent prints, and what it needs."""

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dlcontract
from dltrain.protocol import metric_values
from dltrain.protocol.errors import MisuseError
from dltrain.protocol.rank_messages import SOCKET_ENV, Busy, Evaluated, Logged, Step
from dltrain.reporting import script_reports
from support.trainer.listener import Listener

TRAINER = Path(__file__).resolve().parents[3] / "trainer-image"
WITHIN_S = 240


def bare(script: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a script in an interpreter without any installed package: it finds the standard library and dltrain."""
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(TRAINER)!r})\n{script}"]
    variables = {
        k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "DLTRAIN_", "RANK", "WORLD"))
    }
    return subprocess.run(
        command, env=variables | environ, capture_output=True, text=True, timeout=WITHIN_S, check=False
    )


def test_reports_need_the_standard_library_only() -> None:
    ended = bare("import dltrain\nfor n in range(3): dltrain.report(step=n + 1, steps=3, loss=0.5, perplexity=2)")
    assert ended.returncode == 0, ended.stderr
    lines = ended.stderr.splitlines()
    assert lines[0] == "dltrain: step 1/3 loss 0.5000, perplexity 2"
    assert lines[-1].startswith("dltrain: step 3/3 loss 0.5000, "), "the last report is printed at the end"
    for name in ("torch", "pydantic", "numpy", "dlcontract"):
        assert bare(f"import dltrain; dltrain.report(step=1); assert {name!r} not in sys.modules").returncode == 0


def test_reports_need_no_newer_syntax_than_that_of_python_3_8() -> None:
    """``tests/trainer/agent/test_injected_agent.py`` reports from Python 3.9."""
    script = "import dltrain\nfrom dltrain.reporting import older_python\ndltrain.report(step=1)\n"
    ended = bare(script + "print(*(m.__file__ for n, m in sys.modules.items() if n.partition('.')[0] == 'dltrain'))")
    paths = [Path(name) for name in ended.stdout.split()]
    assert {"__init__.py", "script_reports.py", "metric_values.py", "older_python.py"} <= {path.name for path in paths}
    for path in paths:
        ast.parse(path.read_text(), str(path), feature_version=(3, 8))


def test_other_ranks_print_nothing() -> None:
    ended = bare("import dltrain; dltrain.report(step=1, loss=1)", RANK="1", WORLD_SIZE="2")
    assert (ended.returncode, ended.stderr) == (0, "")


def test_updates_arrive_at_the_agent_as_messages(tmp_path: Path) -> None:
    script = """import dltrain
for step in range(1, 5001):
    dltrain.report(step=step, steps=5000, loss=1 / step, epoch=step // 1000, samples=8)
dltrain.report(step=5000, accuracy=0.75, bleu=30)
dltrain.busy("upload", 600)
"""
    with Listener(tmp_path) as agent:
        ended = bare(script, **{SOCKET_ENV: agent.path, "RANK": "1", "WORLD_SIZE": "4"})
        assert (ended.returncode, ended.stderr) == (0, "")
        agent.wait_for(Busy, 1)
        agent.wait_for(Logged, 1)
        first, *_, last = agent.of(Step)
    assert (first.step, first.step_s, first.typical_s, first.interval_s) == (1, 0.0, None, None)
    assert (last.rank, last.step, last.steps, last.epoch, last.world_size) == (1, 5000, 5000, 5, 4)
    assert last.reported and last.measure is None and last.loss == 1 / 5000
    assert last.step_s > 0 and last.samples_per_s == pytest.approx(8 / last.step_s)
    assert len(agent.of(Step)) < 1000, "a report in every step is not a message in every step"
    assert agent.of(Evaluated) == [Evaluated(rank=1, step=5000, accuracy=0.75, loss=1 / 5000)]
    assert agent.of(Logged) == [Logged(rank=1, step=5000, values={"bleu": 30.0})]
    assert agent.of(Busy) == [Busy(rank=1, what="upload", limit_s=600)]


def test_a_lost_agent_does_not_end_the_script(tmp_path: Path) -> None:
    script = "import dltrain, time\nfor n in range(8): dltrain.report(step=n, loss=n); time.sleep(0.1)\nprint('done')"
    nowhere = bare(script, **{SOCKET_ENV: str(tmp_path / "nowhere")})
    assert (nowhere.returncode, nowhere.stdout) == (0, "done\n"), nowhere.stderr
    with Listener(tmp_path) as agent:
        path = agent.path
        arguments = [sys.executable, "-c", script.replace("range(8)", "range(20)")]
        process = subprocess.Popen(
            arguments,
            env=os.environ | {SOCKET_ENV: path, "PYTHONPATH": str(TRAINER)},
            stdout=subprocess.PIPE,
            text=True,
        )
        agent.wait_for(Step, 1)
    assert process.communicate(timeout=WITHIN_S)[0] == "done\n" and process.returncode == 0


def test_a_fork_is_not_the_rank(tmp_path: Path) -> None:
    script = """import dltrain, os
dltrain.report(step=1)
if os.fork() == 0:
    dltrain.report(step=2); dltrain.busy("x", 1)
    sys.exit()
os.wait()
dltrain.report(step=3)
"""
    with Listener(tmp_path) as agent:
        assert bare(script, **{SOCKET_ENV: agent.path}).returncode == 0
        agent.wait_for(Step, 2)
    assert [message.step for message in agent.of(Step)] == [1, 3] and not agent.of(Busy)


def test_report_of_a_signal_handler_may_interrupt_another_one(tmp_path: Path) -> None:
    """Fixed bug: the script waited without end for its own lock if the signal came while a tensor was read."""
    script = """import dltrain, signal
signal.alarm(60)
signal.signal(signal.SIGUSR1, lambda *_: dltrain.report(step=2, loss=0.25, note=7))
class Loss:
    def __float__(self):
        signal.raise_signal(signal.SIGUSR1)
        return 0.5
dltrain.report(step=1, loss=Loss(), other=1)
"""
    with Listener(tmp_path) as agent:
        ended = bare(script, **{SOCKET_ENV: agent.path})
        assert ended.returncode == 0, ended
        agent.wait_for_ends()
    assert (agent.of(Step)[-1].step, agent.of(Step)[-1].loss) == (2, 0.25)
    assert {name: value for logged in agent.of(Logged) for name, value in logged.values.items()} == {
        "other": 1,
        "note": 7,
    }


def test_first_reports_of_several_threads_are_those_of_one_rank(tmp_path: Path) -> None:
    """Fixed bug: each of the threads made a connection to the agent, whose request to stop came to one of them."""
    script = """import dltrain, sys, threading
sys.setswitchinterval(1e-6)
barrier = threading.Barrier(8)
def first(step):
    barrier.wait()
    dltrain.report(step=step)
threads = [threading.Thread(target=first, args=(step,)) for step in range(1, 9)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
    with Listener(tmp_path) as agent:
        assert bare(script, **{SOCKET_ENV: agent.path}).returncode == 0
        agent.wait_for_ends()
        assert agent.connections == 1 and agent.of(Step)


def test_invalid_values_end_no_script(tmp_path: Path) -> None:
    script = """import dltrain
for _ in range(2):
    dltrain.report(step=1, steps=float("inf"), epoch="first", samples=float("nan"))
    dltrain.busy("upload", "long")
dltrain.report(step=None)
dltrain.busy(3, 600)
"""
    with Listener(tmp_path) as agent:
        ended = bare(script, **{SOCKET_ENV: agent.path})
        assert ended.returncode == 0, ended.stderr
        agent.wait_for(Busy, 1)
        assert agent.of(Busy) == [Busy(rank=0, what="3", limit_s=600)]
    fields = [line.split(":")[1].strip() for line in ended.stderr.splitlines()]
    assert fields == ["steps", "epoch", "samples", "busy", "step"]


def test_a_script_that_asks_whether_to_stop_stops_at_the_step_of_the_request(tmp_path: Path) -> None:
    script = """import dltrain, sys, time
for step in range(1, 10**6):
    dltrain.report(step=step)
    if dltrain.stop_requested():
        print("stopped at", step)
        break
    time.sleep(0.01)
"""
    with Listener(tmp_path) as agent:
        command = [sys.executable, "-c", script]
        variables = os.environ | {SOCKET_ENV: agent.path, "PYTHONPATH": str(TRAINER)}
        process = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True)
        agent.wait_for(Step, 2)
        assert agent.of(Step)[1].heeds_stop
        ahead = agent.of(Step)[-1].step + 500
        agent.stop(at_step=ahead)
        assert process.communicate(timeout=WITHIN_S)[0] == f"stopped at {ahead}\n"
    assert bare("import dltrain; dltrain.report(step=1); assert not dltrain.stop_requested()").returncode == 0


@pytest.mark.parametrize(("agent", "reports", "lines"), [(True, False, 1), (True, True, 0), (False, False, 0)])
def test_a_rank_that_asks_whether_to_stop_but_never_reports_is_named(
    tmp_path: Path, agent: bool, reports: bool, lines: int
) -> None:
    """Fixed bug: it could not stop after the same step as ranks that report, and nothing said so."""
    script = f"""import dltrain
for step in range(1, 5):
    assert not dltrain.stop_requested()
    if {reports}:
        dltrain.report(step=step)
"""
    with Listener(tmp_path) as listener:
        ended = bare(script, RANK="1", WORLD_SIZE="2", **({SOCKET_ENV: listener.path} if agent else {}))
    assert ended.returncode == 0 and len(ended.stderr.splitlines()) == lines
    assert not lines or "found no dltrain.report on rank 1; expected one" in ended.stderr


def test_a_script_with_the_dltrain_api_logs_through_its_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[Any] = []

    class Trainer:
        def log(self, **values: Any) -> None:
            logged.append(values)

        def busy(self, what: str, limit_s: float) -> None:
            logged.append((what, limit_s))

    monkeypatch.setattr(script_reports, "_trainer", None)
    script_reports.set_trainer(Trainer())
    script_reports.report(step=1, steps=9, loss=0.5, bleu=3)
    script_reports.busy("upload", 60)
    assert logged == [{"loss": 0.5, "accuracy": None, "bleu": 3}, ("upload", 60)]


def test_an_invalid_loss_ends_no_script_with_the_dltrain_api(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed bug: the trainer's exception for ``t.log`` ended the script."""
    logged: list[Any] = []

    class Trainer:
        def log(self, *, loss: Any = None, **values: Any) -> None:
            if isinstance(loss, str):
                raise MisuseError("t.log: loss: found str; expected a number")
            logged.append(values)

    monkeypatch.setattr(script_reports, "_trainer", Trainer())
    with pytest.warns(UserWarning, match="t.log: loss: found str"):
        script_reports.report(step=1, loss="high", bleu=3)
    assert logged == [{"accuracy": None, "bleu": 3}]


def test_bounds_are_those_of_the_contract() -> None:
    found = (metric_values.MAX_METRICS, metric_values.MAX_METRIC_NAME)
    assert found == (dlcontract.MAX_METRICS, dlcontract.MAX_METRIC_NAME)
