"""``dljob logs``: print the output of the ranks of a job, while it runs and after it has ended.

While the job runs, the output is in the logs of its pods. Later, the ConfigMap ``<job>-logs`` has the end of it.
"""

import argparse
import sys
from contextlib import aclosing
from typing import Any

from dlcontract import config_map_names
from dljob.cli import remote
from dljob.cli.commands.records import check_exists
from dljob.client.errors import BadInputError
from dljob.client.output.live_logs import OVER, Following, printed, started
from dljob.client.output.records import attempts_of, logs_of, output_of, ranks_of
from dljob.status import readable_status


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    logs = commands.add_parser(
        "logs",
        help="print the output of the ranks of a job, and follow it",
        description="Print the output of the ranks of a job. While the job runs, it comes from the logs of all its "
        "pods, and each line of a rank begins with [rank R]. After the job has ended, the end of the output is in the "
        "ConfigMap JOB-logs: at most 32 KiB per rank and 256 KiB per job, compressed. A job with checkpoints has more "
        "output in the folder logs of its checkpoint volume.",
    )
    remote.add_namespace(logs)
    remote.add_cluster(logs)
    logs.add_argument("job", metavar="JOB", help="name of the DLJob")
    logs.add_argument("--rank", type=int, metavar="RANK", help="print only this rank, without a header or [rank R]")
    logs.add_argument(
        "-f",
        "--follow",
        action="store_true",
        help="print new lines as they come, also after restarts and on other pods, until the job has ended",
    )
    logs.add_argument(
        "--tail", type=int, metavar="LINES", help="begin with the last lines of each pod (default: all lines)"
    )
    logs.add_argument(
        "-p",
        "--previous",
        action="store_true",
        help="also while the job runs, print the stored output of ranks that have ended, such as before a restart",
    )
    logs.set_defaults(run=print_logs)


def print_logs(given: argparse.Namespace) -> int:
    _check_options(given)
    namespace = given.namespace or remote.default_namespace()
    if given.previous or remote.reach(lambda api: _is_over(api, namespace, given.job)):
        return _print_stored(given, namespace)
    if given.follow:
        return remote.reach(lambda api: _follow(api, namespace, given))
    if not remote.reach(lambda api: _print_live(api, namespace, given)):
        return _print_stored(given, namespace)
    return 0


def _check_options(given: argparse.Namespace) -> None:
    if given.rank is not None and given.rank < 0:
        raise BadInputError(f"--rank: found {given.rank}; expected 0 or more")
    if given.tail is not None and given.tail < 0:
        raise BadInputError(f"--tail: found {given.tail}; expected 0 or more lines")
    if given.previous and (given.follow or given.tail is not None):
        raise BadInputError(
            "--previous: found it with --follow or --tail; expected it alone, because stored output is printed as it is"
        )


async def _is_over(api: Any, namespace: str, job: str) -> bool:
    """Return True if the job has ended, or cannot be read. What is stored of it is then all there is."""
    from dljob.kube import ApiError
    from dljob.kube.kinds import DLJOB

    try:
        body = await api.get(DLJOB, namespace, job)
    except ApiError as error:
        if not (error.not_found or error.forbidden):
            raise
        return True
    return readable_status(body.get("status") or {}).phase in OVER


async def _print_live(api: Any, namespace: str, given: argparse.Namespace) -> bool:
    """Print the lines of the logs of the job's pods. Return False if none has started."""
    runs, found = await started(api, namespace, given.job), False
    async for line in printed(api, namespace, runs, given.tail):
        if (text := line.shown(given.rank)) is not None:
            found = True
            print(text)
    if runs and not found and given.rank is not None:
        raise BadInputError(
            f"--rank: found {given.rank}, of which the pods of {given.job} have no output; expected a rank that has "
            "printed something. Without --rank, dljob logs prints the output of all ranks"
        )
    return bool(runs)


async def _follow(api: Any, namespace: str, given: argparse.Namespace) -> int:
    """Print the lines of the job's pods until it has ended, and changes of its phase to standard error."""
    following = Following(api, namespace, given.job, given.tail, lambda text: print(f"dljob: {text}", file=sys.stderr))
    async with aclosing(following.lines()) as lines:
        async for line in lines:
            if (text := line.shown(given.rank)) is not None:
                print(text, flush=True)
    return 0


def _print_stored(given: argparse.Namespace, namespace: str) -> int:
    """Print the output that the ConfigMap JOB-logs has."""
    name = config_map_names(given.job)[2]
    stored = remote.reach(lambda api: logs_of(api, namespace, name))
    ranks, attempts = ranks_of(stored), attempts_of(stored)
    if not ranks:
        check_exists(given.job, namespace)
        raise BadInputError(
            f"{given.job}: found no output in ConfigMap {name} of namespace {namespace}, and no pod that has started; "
            "expected a job whose ranks run or have ended. dljob logs -f waits for its pods"
        )
    if given.rank is not None and given.rank not in ranks:
        listed = ", ".join(map(str, ranks))
        raise BadInputError(f"--rank: found {given.rank}; expected one of the ranks with stored output: {listed}")
    damaged = []
    for rank in ranks if given.rank is None else [given.rank]:
        if given.rank is None:
            print(f"=== rank {rank}" + (f" (attempt {attempts[rank]})" if rank in attempts else ""))
        try:
            lines = output_of(stored, rank).rstrip("\n").split("\n")
            print("\n".join(lines if given.tail is None else lines[max(0, len(lines) - given.tail) :]))
        except BadInputError as error:  # The output of the other ranks is printed nevertheless.
            damaged.append(error)
    if damaged:
        raise damaged[0]
    newest = max(attempts.values(), key=lambda name: [int(part) for part in name.split(".")], default="")
    if given.rank in attempts and attempts[given.rank] != newest:
        older = f"rank {given.rank}: this is the output of attempt {attempts[given.rank]}"
        print(f"{older}. The newest attempt with stored output is {newest}", file=sys.stderr)
    return 0
