"""Copy the checkpoint folder of a script to the object store and back: ``python -m dltrain.object_store.stage MODE …``.

The agent of a pod runs this program beside the ranks of a script for torchrun or an MPI program. The pod of rank 0
leads: only its folder is uploaded. Before the ranks start, ``restore`` makes the folders of all pods equal to one
commit. In the leading pod, it chooses the commit and names it in the store; in the other pods, it waits for this
choice. While the ranks run, ``watch`` uploads the folder of the leading pod whenever it has settled, and once more at
SIGTERM. ``upload`` does only the latter. ``term`` prints the highest term that a run of the job has claimed.

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
from dltrain.object_store.reading import opening_error, tell
from dltrain.object_store.staged_folder import SETTLE_S, ChangedError, StagedFolder, scan, without_logs
from dltrain.protocol.errors import BadInputError, CheckpointError, FencedError, VolumeError
from dltrain.protocol.rank_messages import EXIT_BAD_INPUT, EXIT_NOT_FETCHED, EXIT_OK, EXIT_PEER_LOST
from dltrain.protocol.volume_layout import checkpoint_place, job_directory

POLL_S = 1.0
CHOICE_POLL_S = 0.5
AGAIN_S = 15.0
"""Seconds between two attempts to upload the folder while the store returns errors."""
GIVE_UP_S = 300.0
"""Seconds for which uploads may fail before the ranks are restarted, which shows the error in the job's status."""
UNSETTLED_S = 60.0
"""Seconds without an upload of a folder that changes all the time, after which a warning names the reason."""
FINAL_TRIES = 5
_CHOICES = "attempts/"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dltrain.object_store.stage")
    parser.add_argument("mode", choices=("term", "restore", "watch", "upload"))
    parser.add_argument("--plan", type=Path, required=True, help="file with the plan")
    parser.add_argument("--attempt", required=True, help="name of this launch of all ranks")
    parser.add_argument("--leads", action="store_true", help="this is the pod of rank 0")
    parser.add_argument("--ended", type=float, default=0.0, help="Unix time at which the previous ranks ended")
    options = parser.parse_args(arguments)
    plan = Plan.parse(options.plan.read_bytes(), ignore_unknown=True)
    try:
        match options.mode:
            case "term":
                print(f"term {staged_folder(plan).log.highest_term()}")  # noqa: T201
            case "restore":
                restore(plan, options.attempt, leads=options.leads, ended_unix_s=options.ended)
            case "watch":
                _watch_until_sigterm(plan)
            case _:
                upload(plan)
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
        tell(str(CheckpointError(checkpoint_place(plan), error, FIELD)))
        return EXIT_NOT_FETCHED
    return EXIT_OK


def staged_folder(plan: Plan) -> StagedFolder:
    """Return the checkpoint folder of the plan's script. Raise BadInputError if no client can be created."""
    log = CommitLog(ObjectStore(checkpoint_place(plan)), plan.term)
    return StagedFolder(job_directory(plan), log, plan.checkpoint.keep)


def restore(plan: Plan, attempt: str, *, leads: bool, ended_unix_s: float) -> None:
    """Make this pod's folder equal to the commit with which the ranks of ``attempt`` continue.

    ``leads``: True on the pod of rank 0, which chooses the commit for all pods. ``ended_unix_s``: Unix time at which
    the previous ranks ended. Raise BadInputError, FencedError, CheckpointError, CheckpointVolumeError, OSError.
    """
    folder = staged_folder(plan)
    store, choice = folder.log.store, f"{_CHOICES}{attempt}.json"
    several = len(plan.pods) > 1
    if leads:
        try:
            sequence = folder.restore(ended_unix_s)
            if several:
                store.delete(key for key in store.list(_CHOICES) if key != choice)
                store.write(choice, json.dumps({"sequence": sequence}).encode())
        except (VolumeError, CheckpointError):
            raise
        except OSError as error:
            raise opening_error(store.uri, error) from None
    else:
        sequence = _choice(store, choice)
        folder.restore_sequence(sequence)
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


def watch(folder: StagedFolder, stop: threading.Event) -> None:
    """Upload ``folder`` whenever it has settled, until ``stop`` is set, and then a last time.

    Raise FencedError if another coordinator has taken over, and OSError if uploads fail for ``GIVE_UP_S`` seconds.
    """
    folder.open()
    last, changed_s = without_logs(folder.committed), time.monotonic()
    uploaded_s, again_s, failing_s = changed_s, 0.0, None
    warned = False
    while not stop.wait(POLL_S):
        now, now_s = without_logs(scan(folder.folder)), time.monotonic()
        if now != last:
            differing = next((path for path in sorted(now) if now[path] != last.get(path)), "a deleted file")
            last, changed_s = now, now_s
            if now_s - uploaded_s > UNSETTLED_S and not warned:
                warned = True
                tell(
                    f"{folder.folder}: found changes all the time, last in {differing}; expected no change for "
                    f"{SETTLE_S:g} s. Write logs elsewhere, or name them *.log: until then, nothing is uploaded"
                )
        elif now == without_logs(folder.committed):
            uploaded_s = now_s
        elif now_s - changed_s >= SETTLE_S and now_s >= again_s:
            try:
                _upload(folder)
                uploaded_s, failing_s = time.monotonic(), None
            except ChangedError:
                changed_s = time.monotonic()
            except OSError as error:
                failing_s = failing_s or now_s
                if time.monotonic() - failing_s > GIVE_UP_S:
                    raise
                again_s = time.monotonic() + AGAIN_S
                tell(f"cannot upload the checkpoints ({error.strerror or error}); trying again in {AGAIN_S:g} s")
    _upload_last(folder)


def upload(plan: Plan) -> None:
    """Upload the folder of the plan's script after its ranks have ended. Raise ChangedError, FencedError, OSError."""
    folder = staged_folder(plan)
    folder.open()
    _upload_last(folder)


def _upload_last(folder: StagedFolder) -> None:
    for tries in range(FINAL_TRIES):
        try:
            _upload(folder, final=True)
        except ChangedError:
            if tries == FINAL_TRIES - 1:
                raise
            time.sleep(POLL_S)
        else:
            return


def _upload(folder: StagedFolder, *, final: bool = False) -> None:
    began_s = time.monotonic()
    entry = folder.upload(final=final)
    if entry is not None:
        mb = sum(file.nbytes for file in entry.files.values()) / 1e6
        seconds = time.monotonic() - began_s
        tell(f"uploaded {len(entry.files)} files, {mb:.1f} MB in all, to {folder.log.store.uri} in {seconds:.1f} s")


def _watch_until_sigterm(plan: Plan) -> None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    os.nice(10)  # The ranks come first.
    watch(staged_folder(plan), stop)


if __name__ == "__main__":
    sys.exit(main())
