"""``dljob report``: save the run report of a job after its pods are gone."""

import argparse
import base64
import gzip
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlcontract import config_map_names
from dljob.cli import remote
from dljob.cli.errors import BadInputError
from dljob.cli.logs import logs_of


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "report",
        help="save the run report of a job that has ended",
        description="Save the run report of a job that has ended: a page with plots that needs no network, or the same "
        "as JSON. The report is also beside the job's checkpoints, and there while the job runs, too.",
    )
    remote.add_namespace(command)
    command.add_argument("job", help="name of the DLJob")
    command.add_argument("--json", action="store_true", help="save the data as JSON instead of the page")
    command.add_argument(
        "-o", "--output", metavar="FILE", help="file to write (default: JOB-report.html or .json; -: standard output)"
    )
    command.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    namespace = given.namespace or remote.default_namespace()
    name = config_map_names(given.job)[2]
    kind = "json" if given.json else "html"
    text = report_of(remote.reach(lambda api: logs_of(api, namespace, name)), kind)
    if text is None:
        raise BadInputError(
            f"{given.job}: found no run report in ConfigMap {name} of namespace {namespace}; expected a job that has "
            "ended, with this or a later trainer image. While it runs, copy the report from its volume"
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


def report_of(body: Mapping[str, Any], kind: str) -> str | None:
    """Return the run report from ``body``, the ConfigMap ``<job>-logs``, or None. ``kind``: ``html`` or ``json``."""
    data = (body.get("binaryData") or {}).get(f"report.{kind}.gz")
    return None if data is None else gzip.decompress(base64.b64decode(data)).decode(errors="replace")
