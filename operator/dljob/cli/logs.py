"""``dljob logs``: print the last output of a job's ranks after its pods are gone."""

import argparse
import base64
import gzip
import re
from collections.abc import Mapping
from typing import Any

from dlcontract import config_map_names
from dljob.cli import remote
from dljob.cli.errors import BadInputError


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "logs",
        help="print the last output of the ranks of a job that has ended",
        description="Print the last output of each rank of a job that has ended. The ConfigMap JOB-logs stores at most "
        "32 KiB per rank and 256 KiB per job, compressed. While a job runs, use kubectl logs.",
    )
    remote.add_namespace(command)
    command.add_argument("job", help="name of the DLJob")
    command.add_argument("--rank", type=int, help="print only this rank, without a header")
    command.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    namespace = given.namespace or remote.default_namespace()
    name = config_map_names(given.job)[2]
    body = remote.reach(lambda api: logs_of(api, namespace, name))
    outputs = outputs_of(body)
    if not outputs:
        raise BadInputError(
            f"{given.job}: found no output in ConfigMap {name} of namespace {namespace}; expected a job whose ranks "
            "have ended. While it runs, use kubectl logs"
        )
    if given.rank is not None and given.rank not in outputs:
        listed = ", ".join(map(str, sorted(outputs)))
        raise BadInputError(f"--rank: found {given.rank}; expected one of the ranks with stored output: {listed}")
    for rank, text in outputs.items():
        if given.rank is None:
            print(f"=== rank {rank}")
        if given.rank in (None, rank):
            print(text.rstrip("\n"))
    return 0


async def logs_of(api: Any, namespace: str, name: str) -> Mapping[str, Any]:
    """Return the ConfigMap ``<job>-logs``, which has this ``name``. The result is empty if there is none."""
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

    Ignore entries whose names do not have the form ``rank-<number>.log.gz``.
    """
    found = {}
    for name, data in (body.get("binaryData") or {}).items():
        if match := re.fullmatch(r"rank-(\d+)\.log\.gz", name):
            found[int(match[1])] = gzip.decompress(base64.b64decode(data)).decode(errors="replace")
    return dict(sorted(found.items()))
