"""``dljob run``: apply a DLJob and follow it until it ends."""

import argparse
import asyncio
import sys
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

from dljob.cli import remote, seconds
from dljob.cli.follow import Follower
from dljob.client import submission
from dljob.client.errors import BadInputError
from dljob.job.plan.recommendation import parse_job

SILENT_S = 15.0
"""Seconds without a status of the applied manifest after which the user is told that no operator writes one."""
OUTLIVES = "the job continues without this command; follow it again with dljob run, end it with kubectl delete dljob"

NO_OPERATOR = (
    "no operator has processed the manifest within {:g} s; the command waits on. Check that an operator runs (kubectl "
    "get pods -A -l app.kubernetes.io/name=dljob), and that it watches this namespace (chart value watchNamespaces)"
)


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "run",
        help="apply a DLJob and follow it until it is complete",
        description="Apply the manifest (server-side). Then print changes and progress until the job is complete or "
        "shows a PlanOnly plan (exit 0), or has failed (exit 1). Ctrl-C leaves the job running.",
    )
    command.add_argument("file", metavar="JOB.yaml", help="manifest with one DLJob; - for standard input")
    remote.add_namespace(command, before="the manifest, or of ")
    remote.add_cluster(command)
    command.add_argument("--no-follow", action="store_true", help="apply the job and return")
    command.add_argument(
        "--timeout", type=float, metavar="SECONDS", help="stop following after this time and exit with 1"
    )
    command.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    seconds.check(given, "timeout")
    manifest = submission.only_job(given.file)
    try:
        parse_job(manifest)
    except ValueError as error:
        raise BadInputError(f"{given.file}: {error}") from None
    metadata = manifest["metadata"]
    namespace = given.namespace or metadata.get("namespace") or remote.default_namespace()
    if given.namespace and metadata.get("namespace") not in (None, given.namespace):
        raise BadInputError(
            f"--namespace: found {given.namespace}; expected {metadata['namespace']} as in the manifest. Remove one of "
            "them"
        )
    body = submission.with_namespace(manifest, namespace)
    try:
        return remote.reach(lambda api: _apply_and_follow(api, body, not given.no_follow, given.timeout))
    except KeyboardInterrupt:
        print(f"dljob: {OUTLIVES} -n {namespace} {metadata['name']}", file=sys.stderr)
        raise


async def _apply_and_follow(api: Any, body: Mapping[str, Any], follow: bool, timeout_s: float | None) -> int:
    answer = await submission.apply(api, body)
    metadata = answer["metadata"]
    print(f"dljob {metadata['namespace']}/{metadata['name']} applied, generation {metadata['generation']}", flush=True)
    if not follow:
        return 0
    follower = Follower(metadata["generation"])
    if (code := follower.look(answer)) is not None:
        return code
    silent = asyncio.create_task(_say_without_operator(follower))
    try:
        async with asyncio.timeout(timeout_s):
            return await _followed(api, answer, follower)
    except TimeoutError:
        print(f"dljob: the job is not finished after {timeout_s:g} s; {OUTLIVES}", file=sys.stderr)
        return 1
    finally:
        silent.cancel()


async def _followed(api: Any, applied: Mapping[str, Any], follower: Follower) -> int:
    """Follow the job until it ends, and return the exit code. ``applied``: the job, as the API server returned it.

    The operator may delete a job as soon as it is complete (``ttlSecondsAfterFinished``). The watch has its last state.
    """
    from dljob.sdk import JobDeletedError, requests

    meta, said = applied["metadata"], False

    def unanswered(message: str) -> None:
        nonlocal said
        if not said:
            print(f"dljob: the API server does not answer ({message}); the job continues", file=sys.stderr)
        said = True

    changes = requests.changes(api, meta["namespace"], meta["name"], meta["uid"], applied, unanswered)
    try:
        async with aclosing(changes) as bodies:
            async for body in bodies:
                said = False
                if (code := follower.look(body)) is not None:
                    return code
    except JobDeletedError as error:
        raise BadInputError(str(error)) from None
    raise AssertionError("the changes of a job end only with an exception")


async def _say_without_operator(follower: Follower) -> None:
    """Tell the user after ``SILENT_S`` if no operator has processed the manifest by then."""
    await asyncio.sleep(SILENT_S)
    if not follower.processed:
        print(f"dljob: {NO_OPERATOR.format(SILENT_S)}", file=sys.stderr)
