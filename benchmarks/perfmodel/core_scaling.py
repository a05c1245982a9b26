"""Compare the predicted with the measured gain of more cores per rank, and of more ranks per node, on this machine.

    python -m benchmarks.perfmodel.core_scaling [--json] [--model resnet18] [--repeats 3]

The built-in trainer runs as one rank with one core, as one rank with two cores, and as two ranks with one core each.
The three layouts alternate, and the median of the repeats counts. The output has the time of each layout divided by
that of one core, and the same ratio of the predictions, without measurements and with the profile of the run on one
core. The machine needs two idle cores.
"""

import argparse
import json
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median

from benchmarks.perfmodel.prediction import RunMessages, decided, report, steady_s, train

from dljob.api import DLJobSpec, DLProfileStatus
from dljob.calibrate import Place
from dljob.cluster import cluster_view
from dljob.job.identity import profile_key
from dljob.job.plan.trainer import trainer_plan
from dljob.job.profiles import updated_profile

CASES = (("digits-cnn", "digits", 96), ("mlp", "digits", 96), ("resnet18", "synthetic-images", 16))
STEPS = {"digits-cnn": 150, "mlp": 300, "resnet18": 10}
LAYOUTS = ((1, 1), (1, 2), (2, 1))
"""(Ranks, cores of each rank)."""


@dataclass(frozen=True)
class Question:
    """A model with its dataset and batch, on ``ranks`` ranks with ``cores`` cores each on one node."""

    model: str
    dataset: str
    batch: int
    ranks: int
    cores: int

    @property
    def spec(self) -> DLJobSpec:
        return DLJobSpec.model_validate(
            {
                "model": {"name": self.model},
                "dataset": {"name": self.dataset},
                "globalBatchSize": self.batch,
                "steps": STEPS[self.model],
                "planning": {"mode": "Fixed", "groups": [{"device": "cpu", "nodes": 1, "ranksPerNode": self.ranks}]},
                "resources": {"cpu": str(self.ranks * self.cores)},
                "collective": "Ring",
                "checkpoint": {"enabled": False},
            }
        )

    def predicted_s(self, profile: DLProfileStatus) -> float:
        return decided(self.spec, MACHINE, profile).chosen.prediction.step_s

    def run(self) -> tuple[float, RunMessages, DLProfileStatus]:
        """Run the layout. Return its step time in seconds, the messages of its ranks, and its profile."""
        decision = decided(self.spec, MACHINE, DLProfileStatus())
        todo = trainer_plan("benchmark", "default", "0", self.spec, decision, 1, 1, "benchmark", "cluster.local")
        messages = train(todo, 300, self.ranks * self.cores, "self,sm")
        layout, place = (self.cores, self.ranks), Place(1, self.ranks)
        now, key = datetime.now(UTC), profile_key(self.spec)
        profile = updated_profile(
            DLProfileStatus(), key, "cpu", report(todo, messages), now, place if self.ranks > 1 else None, None, layout
        )
        return steady_s(messages), messages, profile


MACHINE = cluster_view({"nodes": [{"name": "this", "cpu": 2, "memory": "8Gi"}]})


def compared(model: str, dataset: str, batch: int, repeats: int) -> list[dict[str, object]]:
    """Return a row for each layout with the measured and the predicted ratios of its time to that of one core."""
    questions = [Question(model, dataset, batch, *layout) for layout in LAYOUTS]
    seconds: list[list[float]] = [[] for _ in questions]
    profile = DLProfileStatus()
    for _ in range(repeats):
        for question, found in zip(questions, seconds, strict=True):
            step_s, _, learned = question.run()
            found.append(step_s)
            profile = learned if question is questions[0] else profile
    measured = [median(found) for found in seconds]
    rows: list[dict[str, object]] = []
    for question, step_s in zip(questions, measured, strict=True):
        ratios = {
            name: question.predicted_s(known) / questions[0].predicted_s(known)
            for name, known in (("catalogue", DLProfileStatus()), ("profile", profile))
        }
        rows.append(
            {"model": model, "ranks": question.ranks, "cores": question.cores, "measured_s": step_s}
            | {"measured": step_s / measured[0]}
            | ratios
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", choices=[m for m, _, _ in CASES])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        raise SystemExit("found 1 core; expected at least 2")
    rows = []
    for case in CASES:
        if args.model in (None, case[0]):
            rows += compared(*case, args.repeats)
            for row in rows[-len(LAYOUTS) :] if not args.json else ():
                ms = 1e3 * float(str(row["measured_s"]))
                print(
                    f"{row['model']:12} {row['ranks']} ranks x {row['cores']} cores: {ms:.2f}"
                    f" ms; time relative to one core: measured {row['measured']:.2f}, predicted {row['catalogue']:.2f}"
                    f" (from the profile of one core: {row['profile']:.2f})",
                    flush=True,
                )
    if args.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
