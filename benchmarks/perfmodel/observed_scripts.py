"""Compare predictions of training scripts that nobody described with their measured steps, on this machine.

    python -m benchmarks.perfmodel.observed_scripts [--rounds 3] [--json FILE] [--script gan]

The scripts are those of ``examples/programs`` and ``examples/scripts``, unmodified. In each round, the hardware probe
runs first. Then each script runs with one rank, and with two ranks of one core each over gloo, and the observer of
rank 0 reports its structure as in a pod (``dltrain.observation``). Five predictions by the operator's planner are
compared with the median of a run's steps:

- *layers*: as *counted*, but without the counted calls of the host. Its overhead follows from the number of operators
  in forward passes, as for described models.
- *counted*: from the structure that was observed in the third step of the same run, and the hardware probe. No measured
  step enters it.
- *first*: from the first 20 steps of the same run, or fewer if they are slow.
- *second*: from the complete run of the round before, at the same place. Needs two rounds.
- *elsewhere*: from the complete run of the same round with the other number of ranks.

Ratios are predicted / measured. The table has their medians over the rounds. The medians of the absolute errors over
all scripts, places and rounds come last, with the part of the errors within the bar. The last line has the difference
between the measured steps of a run and of the same run in the round before: no prediction from an earlier run can have
a smaller error. The first call downloads the training libraries (120 MB). The machine needs two idle cores. With
``--cpu-time``, other processes may use them, and each script runs with one rank only.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from benchmarks.lib.figures import machine
from benchmarks.lib.local_ranks import PYTHONPATH, ROOT
from benchmarks.perfmodel.core_scaling import MACHINE
from benchmarks.perfmodel.first_prediction import Constants, probed

from dlcontract import Structure
from dljob.api import DLJobSpec
from dljob.api.profiles.script import ObservedStructure
from dljob.calibrate.learned import Learned
from dljob.job.observed_structure import planner_structure
from dljob.job.plan.request import planner_request
from dljob.job.plan.structure import stored_structure
from dljob.planner import Decision, plan
from support.cluster.program_image import libraries

SCRIPTS = {
    "hf_trainer": 120,
    "accelerate_loop": 400,
    "lightning_module": 400,
    "fsdp": 300,
    "gan": 400,
    "train_torchrun": 0,
    "train_elastic": 0,
}
"""Script → its number of steps, which the variable STEPS sets; 0: the script has its own. ``stream.py`` compiles its
model, so that it is not observed. ``contrastive.py`` needs a description."""
PLACES = (1, 2)
"""Numbers of ranks, all on this machine, with a core each."""
BARS = {"layers": 0.25, "counted": 0.25, "first": 0.25, "second": 0.10, "elsewhere": 0.25}
"""Kind of prediction → largest error that meets the goal."""
STARTUP = ROOT / "trainer-image/dltrain/startup/path"
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Run:
    """The messages of a run: the structure without a step time, that with the first one, and that of its end."""

    script: str
    ranks: int
    counted: Structure
    first: Structure
    last: Structure

    @property
    def measured_s(self) -> float:
        if self.last.step_s is None:
            raise SystemExit(f"{self.script}, {self.ranks} ranks: too few steps for a time; raise STEPS")
        return self.last.step_s


def stored(run: Run, seen: Structure) -> ObservedStructure:
    """Return what the operator stores of a run that has reported ``seen``."""
    return stored_structure(
        seen, nodes=1, ranks_per_node=run.ranks, cores=1, step_s=seen.step_s, steps=seen.steps if seen.step_s else 0
    )


def predicted_s(script: ObservedStructure, ranks: int, known: Constants) -> float:
    """Return the step time that the planner predicts for a script on this machine."""
    spec = DLJobSpec.model_validate(
        {
            "trainer": {"framework": "Torchrun", "image": "benchmark", "command": ["torchrun", "script.py"]},
            "planning": {"mode": "Fixed", "groups": [{"device": "cpu", "nodes": 1, "ranksPerNode": ranks}]},
            "resources": {"cpu": str(ranks)},
            "checkpoint": {"enabled": False},
        }
    )
    request = planner_request("benchmark", spec)
    learned = Learned(structure=planner_structure(script, "cpu"))
    found = plan(request, MACHINE, {**known, (request.key(), "cpu"): learned})
    if not isinstance(found, Decision):
        raise SystemExit(f"{ranks} ranks: {found.field}: {found.message}")
    if not found.chosen.prediction.step_s:
        raise SystemExit(f"{ranks} ranks: {found.warning}")
    return found.chosen.prediction.step_s


CPU_CLOCK = """import sys, time, types
observer = sys.modules.get("_dljob_observation.observer")
if observer is not None:
    observer.time = types.SimpleNamespace(monotonic=time.process_time)
"""
"""A ``sitecustomize`` with which the observer measures CPU times of its process."""


def run(script: str, ranks: int, folder: Path, cpu_time: bool = False) -> Run:
    """Run a script to its end, and return what its rank 0 reported. Raise SystemExit if a rank fails.

    ``cpu_time``: its steps are measured as CPU times of its process, which exclude other processes.
    """
    path = next(
        each for each in (ROOT / f"examples/{part}/{script}.py" for part in ("programs", "scripts")) if each.exists()
    )
    seen: list[Structure] = []
    with socket.socket(socket.AF_UNIX) as server, socket.socket() as free:
        server.bind(str(folder / "agent"))
        server.listen(64)
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        threading.Thread(target=_read_all, args=(server, seen), daemon=True).start()
        (folder / "site").mkdir()
        if cpu_time:
            (folder / "site/sitecustomize.py").write_text(CPU_CLOCK, encoding="utf-8")
        processes = [_started(path, rank, ranks, port, folder) for rank in range(ranks)]
        for rank, process in enumerate(processes):
            output, _ = process.communicate(timeout=TIMEOUT_S)
            if process.returncode:
                raise SystemExit(f"{script}: rank {rank} exited with {process.returncode}:\n{output[-2000:]}")
    seen.sort(key=lambda each: each.steps)  # Each message has a thread that reads it.
    timed = [each for each in seen if each.step_s is not None]
    if not timed or seen[0].step_s is not None:
        raise SystemExit(f"{script}: {ranks} ranks reported no structure:\n{output[-2000:]}")
    return Run(script, ranks, seen[0], timed[0], timed[-1])


def _started(path: Path, rank: int, ranks: int, port: int, folder: Path) -> "subprocess.Popen[str]":
    cores = sorted(os.sched_getaffinity(0))
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir(exist_ok=True)
    variables = {
        "PYTHONPATH": os.pathsep.join((PYTHONPATH, str(libraries()), str(STARTUP), str(folder / "site"))),
        "RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1, "HF_HUB_OFFLINE": 1,
        "DLJOB_CHECKPOINT_DIR": checkpoints, "STEPS": SCRIPTS[path.stem] or "",
    }  # fmt: skip
    if rank == 0:
        variables |= {"DLTRAIN_OBSERVE": "on", "DLTRAIN_SOCKET": folder / "agent"}
    env = {name: text for name, value in variables.items() if (text := str(value))}
    return subprocess.Popen(
        [sys.executable, str(path)],
        cwd=folder,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {cores[rank % len(cores)]}),
    )


def _read_all(server: socket.socket, seen: list[Structure]) -> None:
    """Store the structures of all messages until the server is closed."""
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        threading.Thread(target=_read, args=(connection, seen), daemon=True).start()


def _read(connection: socket.socket, seen: list[Structure]) -> None:
    with connection, connection.makefile(encoding="utf-8") as lines:
        for line in lines:
            message = json.loads(line)
            if message.get("type") == "observed":
                seen.append(Structure.model_validate(message["structure"]))


def rows(
    runs: dict[tuple[str, int], Run], before: dict[tuple[str, int], Run], known: Constants
) -> Iterator[dict[str, Any]]:
    """Return each kind of prediction of the runs of a round beside what was measured.

    The kind *repeat* is no prediction, but what the same run of the round before measured.

    ``before``: runs of the round before. ``known``: the constants of this round's hardware probe.
    """
    for (script, ranks), each in runs.items():
        without_calls = each.counted.model_copy(update={"host": None})
        sources = {
            "layers": stored(each, without_calls),
            "counted": stored(each, each.counted),
            "first": stored(each, each.first),
        }
        if earlier := before.get((script, ranks)):
            sources["second"] = stored(earlier, earlier.last)
        if other := runs.get((script, sum(PLACES) - ranks)):
            sources["elsewhere"] = stored(other, other.last)
        steps_s = {kind: predicted_s(script_costs, ranks, known) for kind, script_costs in sources.items()}
        if earlier:
            steps_s["repeat"] = earlier.measured_s
        for kind, step_s in steps_s.items():
            yield {
                "script": script, "ranks": ranks, "kind": kind, "predicted_s": step_s, "measured_s": each.measured_s,
            }  # fmt: skip


def table(found: list[dict[str, Any]]) -> list[str]:
    """Return the medians of each script and place as a table, and the errors over all."""
    lines = [
        "| script, ranks | measured, ms | " + " | ".join(f"{kind}, ms (ratio)" for kind in BARS) + " |",
        "|---" * (2 + len(BARS)) + "|",
    ]
    for script, ranks in dict.fromkeys((each["script"], each["ranks"]) for each in found):
        mine = [each for each in found if (each["script"], each["ranks"]) == (script, ranks)]
        cells = [f"{1e3 * median(each['measured_s'] for each in mine):.2f}"]
        for kind in BARS:
            some = [each for each in mine if each["kind"] == kind]
            ratio = median(each["predicted_s"] / each["measured_s"] for each in some) if some else 0.0
            cells.append(f"{1e3 * median(each['predicted_s'] for each in some):.2f} ({ratio:.2f})" if some else "-")
        lines.append(f"| {script}, {ranks} | {' | '.join(cells)} |")
    by_kind = {
        kind: [abs(log(each["predicted_s"] / each["measured_s"])) for each in found if each["kind"] == kind]
        for kind in (*BARS, "repeat")
    }
    for kind, bar in BARS.items():
        if errors := by_kind[kind]:
            within = sum(each <= log(1 + bar) for each in errors)
            lines.append(
                f"{kind}: median error {100 * (exp(median(errors)) - 1):.0f} % (goal {100 * bar:.0f}), largest "
                f"{100 * (exp(max(errors)) - 1):.0f} %, {within} of {len(errors)} within the goal"
            )
    if errors := by_kind["repeat"]:
        middle, most = (100 * (exp(error) - 1) for error in (median(errors), max(errors)))
        lines.append(
            f"two equal runs: their measured steps differ by {middle:.0f} % at the median, at most {most:.0f} %"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="Number of rounds (default %(default)s)")
    parser.add_argument("--script", choices=sorted(SCRIPTS), help="Measure one script (default: all)")
    parser.add_argument("--cpu-time", action="store_true", help="Measure CPU times of one rank, also on a busy machine")
    parser.add_argument("--json", type=Path, help="File for all predictions and measurements")
    options = parser.parse_args()
    found: list[dict[str, Any]] = []
    before: dict[tuple[str, int], Run] = {}
    for number in range(1, options.rounds + 1):
        known, _ = probed()
        runs = {}
        for script in (options.script,) if options.script else SCRIPTS:
            for ranks in PLACES[:1] if options.cpu_time else PLACES:
                with tempfile.TemporaryDirectory() as folder:
                    runs[script, ranks] = run(script, ranks, Path(folder), options.cpu_time)
                print(
                    f"round {number}: {script}, {ranks} ranks: {1e3 * runs[script, ranks].measured_s:.2f} ms",
                    flush=True,
                )
        found += [{"round": number, **each} for each in rows(runs, before, known)]
        before = runs
    print("\n".join(table(found)))
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "rows": found}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
