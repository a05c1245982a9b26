"""``dljob logs`` and ``dljob report``: print the last output, or save the run report, of a job that has ended.

The ConfigMap ``<job>-logs`` stores both, because the job's pods no longer exist.
"""

import argparse
import base64
import json
import re
import sys
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dlcontract import config_map_names
from dljob.cli import remote
from dljob.cli.errors import BadInputError

MAX_UNPACKED_NBYTES = 2**26
"""Maximum number of bytes of one entry. 1 MiB, the limit of a ConfigMap, can be unpacked to 1 GiB."""


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    logs = commands.add_parser(
        "logs",
        help="print the last output of the ranks of a job that has ended",
        description="Print the last output of each rank of a job that has ended. The ConfigMap JOB-logs stores at most "
        "32 KiB per rank and 256 KiB per job, compressed. A job with checkpoints has more output in the folder "
        "logs of its checkpoint volume. While a job runs, use kubectl logs.",
    )
    remote.add_namespace(logs)
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
    outputs, attempts = outputs_of(stored), attempts_of(stored)
    if not outputs:
        raise BadInputError(
            f"{given.job}: found no output in ConfigMap {name} of namespace {namespace}; expected a job whose ranks "
            "have ended. While the job runs, use kubectl logs"
        )
    if given.rank is not None and given.rank not in outputs:
        listed = ", ".join(map(str, sorted(outputs)))
        raise BadInputError(f"--rank: found {given.rank}; expected one of the ranks with stored output: {listed}")
    for rank, text in outputs.items():
        if given.rank is None:
            print(f"=== rank {rank}" + (f" (attempt {attempts[rank]})" if rank in attempts else ""))
        if given.rank in (None, rank):
            print(text.rstrip("\n"))
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


async def logs_of(api: Any, namespace: str, name: str) -> Mapping[str, Any]:
    """Return the ConfigMap ``name`` (``<job>-logs``) as an API object; an empty mapping if it does not exist.

    The ConfigMap has the last output of the job's ranks, and the run report. Raise ApiError for other errors.
    """
    from dljob.kube import ApiError
    from dljob.kube.kinds import CONFIG_MAP

    try:
        found: Mapping[str, Any] = await api.get(CONFIG_MAP, namespace, name)
    except ApiError as error:
        if not error.not_found:
            raise
        return {}
    return found


def outputs_of(body: Mapping[str, Any]) -> dict[int, str]:
    """Return {rank: last output}, in the order of ranks, from ``body``, the ConfigMap ``<job>-logs``.

    The entries are compressed and encoded in base64; the results are plain text. Ignore entries whose names
    do not have the form ``rank-<number>.log.gz``.
    """
    data = body.get("binaryData") or {}
    return {rank: _unpacked(data[name]) for rank, name in _ranks(data).items()}


def attempts_of(body: Mapping[str, Any]) -> dict[int, str]:
    """Return {rank: name of the attempt that its output is from} from ``body``, the ConfigMap ``<job>-logs``.

    An attempt is one launch of all ranks; its name is ``TERM.NUMBER``. Most ranks have the output of the newest
    attempt. Ranks without a valid name, such as with an older trainer image, are left out.
    """
    data = body.get("binaryData") or {}
    newest = base64.b64decode(data.get("attempt", "")).decode(errors="replace")
    try:
        earlier = json.loads(base64.b64decode(data.get("earlier-attempts.json", "")) or "{}")
    except ValueError:
        earlier = {}
    if not isinstance(earlier, dict):
        return {}
    named = {rank: earlier.get(name, newest) for rank, name in _ranks(data).items()}
    return {rank: name for rank, name in named.items() if isinstance(name, str) and re.fullmatch(r"\d+\.\d+", name)}


def _ranks(names: Iterable[str]) -> dict[int, str]:
    """Return {rank: name of the entry with its output}, in the order of ranks."""
    found = {int(match[1]): name for name in names if (match := re.fullmatch(r"rank-(\d+)\.log\.gz", name))}
    return dict(sorted(found.items()))


def report_of(body: Mapping[str, Any], kind: str) -> str | None:
    """Return the run report from ``body``, the ConfigMap ``<job>-logs``; None if ``body`` has no such report.

    ``kind``: ``html`` for the page with plots, or ``json`` for its data.
    """
    data = (body.get("binaryData") or {}).get(f"report.{kind}.gz")
    return None if data is None else _unpacked(data)


def _unpacked(data: str) -> str:
    """Decompress an entry of the ConfigMap, at most ``MAX_UNPACKED_NBYTES`` of it."""
    unpacker = zlib.decompressobj(16 + zlib.MAX_WBITS)  # 16: with the header of gzip
    return unpacker.decompress(base64.b64decode(data), MAX_UNPACKED_NBYTES).decode(errors="replace")
