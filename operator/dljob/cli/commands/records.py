"""``dljob logs`` and ``dljob report``: print the last output, or save the run report, of a job that has ended.

The ConfigMap ``<job>-logs`` stores both, because the job's pods no longer exist.
"""

import argparse
import sys
from pathlib import Path

from dlcontract import config_map_names
from dljob.cli import remote
from dljob.client.errors import BadInputError
from dljob.client.records import attempts_of, job_is_missing, logs_of, output_of, ranks_of, report_of


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    logs = commands.add_parser(
        "logs",
        help="print the last output of the ranks of a job that has ended",
        description="Print the last output of each rank of a job that has ended. The ConfigMap JOB-logs stores at most "
        "32 KiB per rank and 256 KiB per job, compressed. A job with checkpoints has more output in the folder "
        "logs of its checkpoint volume. While a job runs, use kubectl logs.",
    )
    remote.add_namespace(logs)
    remote.add_cluster(logs)
    logs.add_argument("job", metavar="JOB", help="name of the DLJob")
    logs.add_argument("--rank", type=int, metavar="RANK", help="print only this rank, without a header")
    logs.set_defaults(run=print_logs)
    report = commands.add_parser(
        "report",
        help="save the run report of a job that has ended",
        description="Save the run report of a job that has ended: a page with plots that needs no network, or its "
        "data as JSON. A job with checkpoints also has the report on its checkpoint volume, even while the job runs.",
    )
    remote.add_namespace(report)
    remote.add_cluster(report)
    report.add_argument("job", metavar="JOB", help="name of the DLJob")
    report.add_argument("--json", action="store_true", help="save the data as JSON instead of the page")
    report.add_argument(
        "-o", "--output", metavar="FILE", help="file to write (default: JOB-report.html or .json; -: standard output)"
    )
    report.set_defaults(run=save_report)


def print_logs(given: argparse.Namespace) -> int:
    namespace = given.namespace or remote.default_namespace()
    name = config_map_names(given.job)[2]
    stored = remote.reach(lambda api: logs_of(api, namespace, name))
    ranks, attempts = ranks_of(stored), attempts_of(stored)
    if not ranks:
        _check_exists(given.job, namespace)
        raise BadInputError(
            f"{given.job}: found no output in ConfigMap {name} of namespace {namespace}; expected a job whose ranks "
            "have ended. While the job runs, use kubectl logs"
        )
    if given.rank is not None and given.rank not in ranks:
        listed = ", ".join(map(str, ranks))
        raise BadInputError(f"--rank: found {given.rank}; expected one of the ranks with stored output: {listed}")
    damaged = []
    for rank in ranks if given.rank is None else [given.rank]:
        if given.rank is None:
            print(f"=== rank {rank}" + (f" (attempt {attempts[rank]})" if rank in attempts else ""))
        try:
            print(output_of(stored, rank).rstrip("\n"))
        except BadInputError as error:  # The output of the other ranks is printed nevertheless.
            damaged.append(error)
    if damaged:
        raise damaged[0]
    newest = max(attempts.values(), key=lambda name: [int(part) for part in name.split(".")], default="")
    if given.rank in attempts and attempts[given.rank] != newest:
        older = f"rank {given.rank}: this is the output of attempt {attempts[given.rank]}"
        print(f"{older}. The newest attempt with stored output is {newest}", file=sys.stderr)
    return 0


def save_report(given: argparse.Namespace) -> int:
    namespace = given.namespace or remote.default_namespace()
    name = config_map_names(given.job)[2]
    kind = "json" if given.json else "html"
    text = report_of(remote.reach(lambda api: logs_of(api, namespace, name)), kind)
    if text is None:
        _check_exists(given.job, namespace)
        raise BadInputError(
            f"{given.job}: found no run report in ConfigMap {name} of namespace {namespace}; expected a job that has "
            "ended, with this or a later trainer image. While the job runs, copy the report from its checkpoint volume"
        )
    if given.output == "-":
        sys.stdout.write(text)
        return 0
    path = Path(given.output or f"{given.job}-report.{kind}")
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadInputError(f"--output: found {path}, which cannot be written: {error.strerror}") from error
    print(path)
    return 0


def _check_exists(job: str, namespace: str) -> None:
    """Raise BadInputError if the namespace has no such job."""
    if remote.reach(lambda api: job_is_missing(api, namespace, job)):
        raise BadInputError(
            f"{job}: found no DLJob with this name in namespace {namespace}; expected an existing job. Correct the "
            "name, or name its namespace with -n; dljob top -A lists all jobs"
        )
