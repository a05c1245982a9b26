"""``dljob run``: apply a DLJob and follow it until it ends."""

import argparse
import asyncio
import sys
from collections.abc import Mapping
from time import monotonic
from typing import Any

from dljob.cli import remote, seconds
from dljob.cli.follow import Follower
from dljob.client import submission
from dljob.client.errors import BadInputError
from dljob.job.plan.recommendation import parse_job

LOOK_S = 0.5
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
    follower, began_s, said = Follower(metadata["generation"]), monotonic(), False
    try:
        async with asyncio.timeout(timeout_s):
            while (code := follower.look(answer)) is None:
                if not (said or follower.processed) and monotonic() - began_s >= SILENT_S:
                    said = True
                    print(f"dljob: {NO_OPERATOR.format(SILENT_S)}", file=sys.stderr)
                await asyncio.sleep(LOOK_S)
                answer = await _read(api, metadata["namespace"], metadata["name"])
                if answer["metadata"]["uid"] != metadata["uid"]:
                    raise BadInputError(
                        f"{metadata['name']}: found a new job with this name; expected the applied job, "
                        "which was deleted. Run the command again to follow the new job"
                    )
    except TimeoutError:
        print(f"dljob: the job is not finished after {timeout_s:g} s; {OUTLIVES}", file=sys.stderr)
        return 1
    return code


async def _read(api: Any, namespace: str, name: str) -> Mapping[str, Any]:
    """Return the job. Wait for an API server that does not answer: the job goes on."""
    from dljob.kube.kinds import DLJOB

    found: Mapping[str, Any] = await remote.patiently(lambda: api.get(DLJOB, namespace, name), "the job continues")
    return found
