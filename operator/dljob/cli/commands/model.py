"""``dljob get-model``: copy the trained model of a job from its checkpoint volume to this machine."""

import argparse
from pathlib import Path

from dljob.cli import remote, seconds
from dljob.client.model_copy import CopyOptions, copy_model


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "get-model",
        help="copy the trained model of a job that has ended to this machine",
        description="Copy the last checkpoint of a job that has ended from its volume to a new folder: the model, what "
        "the script kept, and the run report. For built-in models, predict.py uses the model. For a job with "
        "spec.task, also copy the scripts that use its model and its baseline. A pod mounts the volume for reading "
        "while the files are copied, and is then deleted.",
    )
    remote.add_namespace(command)
    remote.add_cluster(command)
    command.add_argument("job", metavar="JOB", help="name of the DLJob")
    command.add_argument("folder", metavar="DIR", help="folder to create; an existing folder must be empty")
    command.add_argument(
        "--all", action="store_true", help="copy the whole folder of the job: all checkpoints, the reports and the logs"
    )
    command.add_argument(
        "--image", metavar="IMAGE", help="image of the pod, with python3 (default: the image of the job)"
    )
    command.add_argument(
        "--timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="time limit for the start of the pod; default: 300",
    )
    command.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    seconds.check(given, "timeout")
    folder = Path(given.folder)
    namespace = given.namespace or remote.default_namespace()
    options = CopyOptions(given.all, given.image, given.timeout)
    for name in remote.reach(lambda api: copy_model(api, namespace, given.job, folder, options)):
        print(folder / name)
    return 0
