"""Copy the checkpoint folder of a script to the object store and back: ``python -m dltrain.object_store.stage MODE …``.

The agent of a pod runs this program beside the ranks of a script for torchrun or an MPI program. The pod of rank 0
leads: it commits what all pods have uploaded. Before the ranks start, ``restore`` makes the folders of all pods equal
to one commit. In the leading pod, it chooses the commit and names it in the store; in the other pods, it waits for this
choice. While the ranks run, ``watch`` uploads the folder of this pod whenever it has settled, and once more at SIGTERM,
after the ranks have exited with code 0, or at SIGUSR1 otherwise. ``upload`` does only the latter. ``term`` prints the
highest term that a run of the job has claimed.

Exit codes: 0 for success; 64 if the job's spec cannot succeed; 75 if another coordinator has taken over; 74 if a retry
may succeed. The last line of output gives the reason.
"""

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from dlcontract import Plan
from dltrain.object_store.client import FIELD, ObjectStore
from dltrain.object_store.commit_log import CommitLog, DamagedError
from dltrain.object_store.content import Changes
from dltrain.object_store.notices import UploadNotices
from dltrain.object_store.parts import ATTEMPTS, Part, PartExchange, try_to_delete
from dltrain.object_store.reading import opening_error, tell
from dltrain.object_store.staged_folder import ChangedError, StagedFolder
from dltrain.object_store.watching import Alone, Following, Leading, Work, finish, watch
from dltrain.protocol.errors import BadInputError, CheckpointError, FencedError, VolumeError
from dltrain.protocol.rank_messages import EXIT_BAD_INPUT, EXIT_NOT_FETCHED, EXIT_OK, EXIT_PEER_LOST
from dltrain.protocol.volume_layout import checkpoint_place, job_directory

CHOICE_POLL_S = 0.5
RESTARTS = "The ranks restart from the last commit"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dltrain.object_store.stage")
    parser.add_argument("mode", choices=("term", "restore", "watch", "upload"))
    parser.add_argument("--plan", type=Path, required=True, help="file with the plan")
    parser.add_argument("--attempt", required=True, help="name of this launch of all ranks")
    parser.add_argument("--pod", default="", help="name of this pod")
    parser.add_argument("--ended", type=float, help="Unix time at which the previous ranks ended, if it is known")
    parser.add_argument("--killed", action="store_true", help="a rank of this pod has not exited with code 0")
    parser.add_argument("--notices", type=int, metavar="FD", help="descriptor of the pipe for messages to the agent")
    options = parser.parse_args(arguments)
    plan = Plan.parse(options.plan.read_bytes(), ignore_unknown=True)
    notices = UploadNotices(options.notices if options.pod == plan.pods[0] else None)
    try:
        match options.mode:
            case "term":
                print(f"term {staged_folder(plan).log.highest_term()}")  # noqa: T201
            case "restore":
                restore(plan, options.attempt, options.pod, options.ended, notices)
            case "watch":
                _watch_until_signal(staged_work(plan, options.attempt, options.pod, notices))
            case _:
                upload(staged_work(plan, options.attempt, options.pod, notices), exited=not options.killed)
    except BadInputError as error:
        tell(str(error))
        return EXIT_BAD_INPUT
    except FencedError as error:
        tell(str(error))
        return EXIT_PEER_LOST
    except (VolumeError, CheckpointError) as error:
        tell(str(error))
        return EXIT_NOT_FETCHED
    except (OSError, ChangedError, DamagedError) as error:
        place = checkpoint_place(plan)
        tell(str(CheckpointError(place, error, FIELD)))
        if options.mode in ("watch", "upload"):
            notices.upload_failed(str(place), getattr(error, "strerror", None) or str(error), RESTARTS)
        return EXIT_NOT_FETCHED
    return EXIT_OK


def staged_folder(plan: Plan, notices: UploadNotices | None = None) -> StagedFolder:
    """Return the checkpoint folder of the plan's script. Raise BadInputError if no client can be created.

    ``notices``: tells the agent about uploads; None: it is not told.
    """
    log = CommitLog(ObjectStore(checkpoint_place(plan)), plan.term)
    has_parts = len(plan.pods) > 1
    return StagedFolder(job_directory(plan), log, plan.checkpoint.keep, has_parts=has_parts, notices=notices)


def staged_work(plan: Plan, attempt: str, pod: str, notices: UploadNotices | None = None) -> Work:
    """Return the part of ``pod`` in uploading checkpoints. Raise BadInputError if no client can be created.

    ``notices``: tells the agent about uploads; None: it is not told.
    """
    folder = staged_folder(plan, notices)
    exchange = PartExchange(folder.log.store, attempt)
    if len(plan.pods) == 1:
        return Alone(folder)
    return Leading(folder, exchange, plan.pods) if pod == plan.pods[0] else Following(folder, exchange, pod)


def restore(
    plan: Plan, attempt: str, pod: str, ended_unix_s: float | None, notices: UploadNotices | None = None
) -> None:
    """Make the folder of ``pod`` equal to the commit with which the ranks of ``attempt`` continue.

    The pod of rank 0 chooses the commit for all pods. ``ended_unix_s``: Unix time at which the previous ranks ended;
    None: unknown. ``notices``: tells the agent about the commit; None: it is not told. Raise BadInputError,
    FencedError, CheckpointError, CheckpointVolumeError, OSError.
    """
    folder = staged_folder(plan, notices)
    store, choice = folder.log.store, f"{ATTEMPTS}{attempt}.json"
    if pod == plan.pods[0]:
        try:
            sequence = folder.restore(ended_unix_s)
            if folder.has_parts:
                try_to_delete(store, [key for key in store.list(ATTEMPTS) if key != choice])
                store.write(choice, json.dumps({"sequence": sequence}).encode())
        except (VolumeError, CheckpointError):
            raise
        except OSError as error:
            raise opening_error(store.uri, error) from None
    else:
        sequence = _choice(store, choice)
        folder.restore_sequence(sequence)
        if pod in plan.pods:
            # It shows the leader, before any rank starts, that this pod will upload parts.
            PartExchange(store, attempt).publish(pod, Part(folder.log.run, 0, Changes(), 0, 0))
    files = len(folder.committed)
    tell(f"restored {files} files from {store.uri}" if files else f"found no checkpoint in {store.uri}")


def _choice(store: ObjectStore, key: str) -> int:
    """Wait for the choice of the leading pod. Return the number of its commit. Raise BadInputError, VolumeError."""
    while True:
        try:
            return int(json.loads(store.read(key))["sequence"])
        except FileNotFoundError:
            time.sleep(CHOICE_POLL_S)  # The agent ends this process if the attempt ends.
        except OSError as error:
            raise opening_error(store.uri, error) from None


def upload(work: Work, *, exited: bool) -> None:
    """Upload the folder after the ranks of this pod have ended. Raise ChangedError, FencedError, OSError.

    ``exited``: True if all of them exited with code 0.
    """
    work.open()
    finish(work, exited=exited)


def _watch_until_signal(work: Work) -> None:
    stop, killed = threading.Event(), threading.Event()

    def kill(*_: object) -> None:
        killed.set()
        stop.set()

    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGUSR1, kill)
    os.nice(10)  # The ranks come first.
    watch(work, stop, lambda: not killed.is_set())


if __name__ == "__main__":
    sys.exit(main())
