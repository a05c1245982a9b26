"""``dljob top``: show all jobs with measured and predicted step time."""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from dljob.api import DLJobStatus
from dljob.cli import remote, seconds
from dljob.cli.tables import table
from dljob.job.queue import QUEUE_LABEL
from dljob.planner.types.texts import duration, plain
from dljob.scheduling.gain import MIN_BETWEEN_S
from dljob.status import find, readable_status

HEADER = ["NAME", "PHASE", "NODES", "READY", "PROGRESS", "STEP/S", "MEASURED", "PREDICTED", "ERROR", "LEFT", "RESTARTS"]
RATES = ["SAMPLES/S", "PER STEP S"]
"""Columns of throughput, and of throughput divided by step time."""


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "top",
        help="show jobs with progress, measured and predicted step time",
        description="Show the jobs of a namespace with phase, progress, steps per second, measured and predicted step "
        "time, the error of the prediction, remaining time and restarts, the place and predicted start of waiting "
        "jobs, and how often jobs were preempted.",
    )
    remote.add_namespace(command)
    remote.add_cluster(command)
    command.add_argument("-A", "--all-namespaces", action="store_true", help="show the jobs of all namespaces")
    command.add_argument(
        "--rates", action="store_true", help="also show samples per second, and these divided by the step time"
    )
    command.add_argument("-w", "--watch", action="store_true", help="refresh the table until Ctrl-C")
    command.add_argument(
        "--interval",
        type=float,
        default=2.0,
        metavar="SECONDS",
        help="with --watch: seconds between two tables (default: %(default)s)",
    )
    command.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    seconds.check(given, "interval", zero=False)
    namespace = None if given.all_namespaces else given.namespace or remote.default_namespace()
    jobs = remote.reach(lambda api: _jobs(api, namespace))
    clear = "\x1b[H\x1b[2J" if given.watch and sys.stdout.isatty() else ""
    while True:
        print(end=clear)
        where = "any namespace" if namespace is None else f"namespace {namespace}"
        print("\n".join(lines(jobs, namespace is None, given.rates)) if jobs else f"no DLJobs in {where}", flush=True)
        if not given.watch:
            return 0
        time.sleep(given.interval)
        jobs = remote.reach(lambda api: remote.patiently(lambda: _jobs(api, namespace), "the table is out of date"))


async def _jobs(api: Any, namespace: str | None) -> list[Mapping[str, Any]]:
    from dljob.kube.kinds import DLJOB

    found: list[Mapping[str, Any]] = await api.find(DLJOB, namespace)
    return found


def lines(jobs: Sequence[Mapping[str, Any]], with_namespace: bool, with_rates: bool = False) -> list[str]:
    """Return the lines of a table with a header and one line per job, sorted by namespace and name.

    ``jobs``: the jobs as the API server returns them. ``with_namespace``: show each job as namespace/name.
    ``with_rates``: add two columns with the throughput and the throughput divided by the step time. If a job waits for
    devices, two more columns show the place in the queue and the predicted start. If a job was preempted, one more
    column shows how often. If devices stay free because a job rests after a move, one more column shows until when. If
    a job is in a queue of Kueue, the last column names the queues.
    """
    queues, waits = any(_queue(body) for body in jobs), any(_waits(body) for body in jobs)
    preempted, rests = any(_preemptions(body) for body in jobs), any(_rests_until(body) for body in jobs)
    rows = []
    for body in sorted(jobs, key=lambda b: (b["metadata"]["namespace"], b["metadata"]["name"])):
        metadata = body["metadata"]
        name = f"{metadata['namespace']}/{metadata['name']}" if with_namespace else metadata["name"]
        place, rates = ["-", "-"], ["-", "-"]
        status = readable_status(given := body.get("status") or {})
        if given.get("phase", status.phase.value) == status.phase.value:
            rows.append([name, *cells(status)])
            if (measured := status.measured) is not None and measured.step_seconds:
                throughput = measured.samples_per_second
                rates = [plain(throughput, 4), plain(throughput / measured.step_seconds, 4)]
            if (queue := status.queue) is not None:
                start = queue.forecast_start
                place = [f"{queue.position}/{queue.jobs}", _minute(start) if start else "?"]
        else:  # A later release has phases that this one does not know.
            rows.append([name, "?", *["-"] * (len(HEADER) - 2)])
        rows[-1] += rates if with_rates else []
        rows[-1] += place if waits else []
        rows[-1] += [str(_preemptions(body))] if preempted else []
        rows[-1] += [_rests_until(body) or "-"] if rests else []
        rows[-1] += [_queue(body) or "-"] if queues else []
    more = [
        *(RATES if with_rates else []),
        *(["PLACE", "STARTS"] if waits else []),
        *(["PREEMPTED"] if preempted else []),
        *(["RESTS UNTIL"] if rests else []),
        *(["QUEUE"] if queues else []),
    ]
    return table([*HEADER, *more], rows)


def _waits(body: Mapping[str, Any]) -> bool:
    return bool((body.get("status") or {}).get("queue"))


def _preemptions(body: Mapping[str, Any]) -> int:
    found = (body.get("status") or {}).get("preemptions")
    return found if isinstance(found, int) else 0


def _rests_until(body: Mapping[str, Any]) -> str:
    """Return the time until which a job rests although devices are free that it could use; empty if it does not."""
    resizing = find(readable_status(body.get("status") or {}).conditions, "Resizing")
    if resizing is None or resizing.reason != "Resting":
        return ""
    return _minute(resizing.last_transition_time + timedelta(seconds=MIN_BETWEEN_S))


def _minute(time: datetime) -> str:
    return f"{time.astimezone(UTC):%Y-%m-%dT%H:%MZ}"


def _queue(body: Mapping[str, Any]) -> str:
    return str((body["metadata"].get("labels") or {}).get(QUEUE_LABEL, ""))


def cells(status: DLJobStatus) -> list[str]:
    measured = status.measured.step_seconds if status.measured else 0.0
    predicted = status.plan.predicted.step_seconds if status.plan else 0.0
    error = status.measured.step_error if status.measured else None
    return [
        status.phase.value,
        str(status.nodes),
        status.ready,
        (status.progress.display or f"{status.progress.percent}%").replace("%", " %") if status.progress else "-",
        plain(1 / measured, 4) if measured else "-",
        duration(measured) if measured else "-",
        duration(predicted) if predicted else "-",
        f"{100 * error:+.0f} %" if error is not None else "-",
        status.remaining or "-",
        str(status.restarts),
    ]
