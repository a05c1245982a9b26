"""``dljob report``: save the run report of a job that has ended.

The ConfigMap ``<job>-logs`` stores it, because the job's pods no longer exist.
"""

import argparse
import sys
from pathlib import Path

from dlcontract import config_map_names
from dljob.cli import remote
from dljob.client.errors import BadInputError
from dljob.client.output.records import job_is_missing, job_of, logs_of, report_of
from dljob.client.output.usage import text_with_usage, usage_of


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    report = commands.add_parser(
        "report",
        help="save the run report of a job that has ended",
        description="Save the run report of a job that has ended: a page with plots that needs no network, or its "
        "data as JSON, with the energy and the cost of all attempts. A job with checkpoints also has the report, "
        "without these, on its checkpoint volume, even while the job runs.",
    )
    remote.add_namespace(report)
    remote.add_cluster(report)
    report.add_argument("job", metavar="JOB", help="name of the DLJob")
    report.add_argument("--json", action="store_true", help="save the data as JSON instead of the page")
    report.add_argument(
        "-o", "--output", metavar="FILE", help="file to write (default: JOB-report.html or .json; -: standard output)"
    )
    report.set_defaults(run=save_report)


def save_report(given: argparse.Namespace) -> int:
    namespace = given.namespace or remote.default_namespace()
    name = config_map_names(given.job)[2]
    kind = "json" if given.json else "html"
    text = report_of(remote.reach(lambda api: logs_of(api, namespace, name)), kind)
    if text is None:
        check_exists(given.job, namespace)
        raise BadInputError(
            f"{given.job}: found no run report in ConfigMap {name} of namespace {namespace}; expected a job that has "
            "ended, with this or a later trainer image. While the job runs, copy the report from its checkpoint volume"
        )
    text = text_with_usage(text, kind, usage_of(remote.reach(lambda api: job_of(api, namespace, given.job))))
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


def check_exists(job: str, namespace: str) -> None:
    """Raise BadInputError if the namespace has no such job."""
    if remote.reach(lambda api: job_is_missing(api, namespace, job)):
        raise BadInputError(
            f"{job}: found no DLJob with this name in namespace {namespace}; expected an existing job. Correct the "
            "name, or name its namespace with -n; dljob top -A lists all jobs"
        )
