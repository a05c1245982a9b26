"""Parse the command line, run a command, and print errors as one line."""

import argparse
import errno
import io
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from dljob.cli import remote
from dljob.cli.commands import logs, model, plan, probe, records, run, serve, suggest, top
from dljob.client.errors import BadInputError

EXAMPLES = """examples:
  dljob suggest data.csv --write DIR            look at data and write a project that trains a model
  dljob plan job.yaml                           show the plan for the current cluster, and the reasons
  dljob plan job.yaml --cluster cluster.yaml    show the plan for a cluster described in a file
  dljob plan job.yaml --json | jq .plan         print the plan as JSON
  dljob probe                                   measure the hardware of nodes, for first plans of new models
  dljob run job.yaml                            apply the job and follow it; exit with 1 if it fails
  dljob top -A                                  show all jobs with progress and step times
  dljob top --context gpus                      show the jobs of the cluster of another context of the kubeconfig
  dljob logs digits -f                          print the output of all ranks as it comes, until the job has ended
  dljob report digits                           save the run report of a job that has ended, a page with plots
  dljob get-model digits DIR                    copy the model of a job that has ended to this machine
  dljob serve --port 8470                       serve the planner over HTTP
"""


def parser() -> argparse.ArgumentParser:
    """Return the argument parser with all commands. Each command sets the attribute ``run``, which executes it.

    The help shows the command as ``kubectl dljob`` if it was started as a kubectl plug-in, and otherwise as ``dljob``.
    """
    called = Path(sys.argv[0]).name
    top_level = argparse.ArgumentParser(
        prog="kubectl dljob" if called.startswith("kubectl-dljob") else "dljob",
        description="Plan, run and watch distributed deep-learning jobs on Kubernetes.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top_level.add_argument("--version", action="version", version=f"dljob {_version()}")
    commands = top_level.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (suggest, plan, probe, run, top, logs, records, model, serve):
        command.add_to(commands)
    return top_level


def _version() -> str:
    try:
        return version("dljob")
    except PackageNotFoundError:
        return "(not installed)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command in ``arguments`` (default: the process's arguments) and return the exit code of the process.

    0: success. 1: no plan is possible, the job failed, or ``dljob run --timeout`` expired. 2: invalid input or an error
    of the API server, which is printed in one line (``BadInputError``). 130: Ctrl-C.
    """
    code = 0
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # Not every terminal shows all characters.
            stream.reconfigure(errors="replace")
    try:
        try:
            code = _run(parser().parse_args(arguments))
        finally:  # Python would find a closed pipe only on exit, also after --help, and end with an error of its own.
            print(end="", flush=True)
    except BrokenPipeError:  # The reader (head, less) closed the pipe.
        _discard_output()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        _discard_output()
        print(f"dljob: the output was not written: {error.strerror}. Write it elsewhere", file=sys.stderr)
        code = 2
    return code


def _discard_output() -> None:
    """Send standard output nowhere, so that Python does not try to write to it again on exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(given: argparse.Namespace) -> int:
    try:
        with remote.cluster_of(given):
            code: int = given.run(given)
    except BadInputError as error:
        print(f"dljob: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return code


if __name__ == "__main__":
    sys.exit(main())
