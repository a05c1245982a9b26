"""Predict the runs of ``benchmarks.predictions`` again, with the performance model of this checkout.

    hack/env python -m benchmarks.predictions.replay predictions.json [--background CPUS]

The file has what the predictions follow from: the hardware profile, and the report of each run. So a change of the
model shows its effect on the errors without a cluster and without new runs. First runs are predicted from the hardware
profile, second runs also from the report of the first one. Totals are compared as in the benchmark.

A model that was changed to fit these runs predicts them better than others: measure it with new ones.
"""

import argparse
import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.lib.goals import table
from benchmarks.predictions.__main__ import Configuration, Constants
from benchmarks.predictions.figures import figures, groups, rows

from dlcontract import Report
from dljob.api import DLProfileStatus
from dljob.calibrate import Learned, Place
from dljob.cluster.hardware import KEY
from dljob.job.profiles import learned, updated_profile

Json = dict[str, Any]
NOW = datetime(2026, 1, 1, tzinfo=UTC)
COLLECTIVES = ("HalvingDoubling", "ParameterServer", "Butterfly", "Ring", "Tree", "Torch", "MPI")


def again(run: Json, known: Constants) -> Json:
    """Return the run with the prediction of this checkout."""
    said = Configuration(**run["configuration"]).predicted(run["steps"], known)
    times = {"stepSeconds": said.step_s, "stepSecondsP90": said.step_p90_s, "totalSeconds": said.total_s}
    return run | {"predicted": run["predicted"] | times}


def taught(run: Json) -> Learned:
    """Return what the profile of the run's model has after it, if it was the first run."""
    configuration = Configuration(**run["configuration"])
    report = Report.parse(json.dumps(run["report"]))
    if configuration.nodes > 1:  # Nodes of one machine measure no network.
        report = report.model_copy(update={"link_latency_s": None, "link_bandwidth_Bps": None})
    used = next((name for name in COLLECTIVES if name in run["summary"]), "Ring")
    place = Place(configuration.nodes, configuration.ranks_per_node, used)
    layout = max(1, configuration.cpu // configuration.ranks_per_node), configuration.ranks_per_node
    status = updated_profile(
        DLProfileStatus(),
        configuration.profile,
        "cpu",
        report,
        NOW,
        None if configuration.collective == "ParameterServer" else place,
        None,
        layout,
        configuration.nodes,
    )
    return learned(status, "cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="file of --json")
    parser.add_argument("--background", type=float, help="CPUs that others use, in place of the measured ones")
    options = parser.parse_args()
    found = json.loads(options.file.read_text())
    hardware = learned(DLProfileStatus.model_validate(found["hardware"][-1][0]), "cpu")
    if options.background is not None and hardware.hardware is not None:
        hardware = replace(hardware, hardware=replace(hardware.hardware, background_cpu=options.background))
    known: Constants = {(KEY, "cpu"): hardware}
    runs: list[Json] = []
    first: Json = {}
    for run in found["runs"]:
        if run["run"] == 1:
            first = run
            runs.append(again(run, known))
        else:
            runs.append(again(run, known | {(Configuration(**run["configuration"]).profile, "cpu"): taught(first)}))
    print("\n".join([*rows(runs), "", *groups(runs), ""]))
    print(table(figures(runs, found["failed"])))


if __name__ == "__main__":
    main()
