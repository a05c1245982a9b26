"""A rank without torch that talks to its agent like ``dltrain.builtin.rank``, and fails on request.

Usage: ``speaking_rank.py STEPS [PACE_S] [KEY=VALUE…]``. ``fail_rank=N fail_step=N fail_code=N`` ends that rank once per
checkpoint directory. ``mpi=1`` joins MPI and all-reduces in every step. ``silent_rank=N`` sends no progress of that rank.
``back=N`` resumes N steps before the last one. ``skip=1`` stops without a checkpoint. ``busy=S`` announces after the first step that there will be no progress for that long, and makes no more steps.
"""

import os
import sys
import time
from pathlib import Path

from dlcontract import CheckpointMark, Failure, Outcome, RankMeasure
from dltrain.protocol.rank_messages import (
    EXIT_PEER_LOST,
    EXIT_STOPPED,
    AttemptPlan,
    Busy,
    Checkpointed,
    CheckpointSkipped,
    Failed,
    Finished,
    Hello,
    Step,
)
from dltrain.protocol.reporter import RankReporter


def main() -> int:
    steps = int(sys.argv[1])
    pace_s = float(sys.argv[2]) if len(sys.argv) > 2 and "=" not in sys.argv[2] else 0.02
    options = dict(argument.split("=", 1) for argument in sys.argv[2:] if "=" in argument)
    plan = AttemptPlan.parse(Path(os.environ["DLTRAIN_PLAN"]).read_bytes())
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    reporter = RankReporter.open()
    reporter.rank = rank
    reporter.send(Hello(rank=rank, pid=os.getpid(), device=options.get("device", "cpu")))
    reporter.mark("imported")
    print(f"rank {rank} of {size} is process {os.getpid()}, uid {os.getuid()}", flush=True)
    comm = join() if "mpi" in options else None
    reporter.mark("rendezvous")
    directory = Path(plan.checkpoint.directory)
    progress = directory / f"progress-{rank}"
    step = max(0, int(progress.read_text()) - int(options.get("back", "0"))) if progress.exists() else 0
    failed_before = directory / "failed"
    while step < steps:
        stop = reporter.stop.wait(pace_s)
        if comm is not None:
            try:
                stop = comm.allreduce(int(stop)) > 0
            except Exception:
                return EXIT_PEER_LOST
        if stop:
            mark = CheckpointMark(step=step, unix_s=time.time())
            if "skip" in options:
                if rank == 0:
                    reporter.send(CheckpointSkipped(rank=rank, step=step, needed_s=9.0, left_s=1.0))
                return EXIT_STOPPED
            reporter.send(Checkpointed(rank=rank, mark=mark, duration_s=0.0, nbytes=0))
            return EXIT_STOPPED
        step += 1
        written = progress.with_suffix(".new")
        written.write_text(str(step))
        written.replace(progress)  # A rank may be killed at any time, and the next one reads the file.
        measure = RankMeasure(rank=rank, device="cpu", share=plan.ranks[rank].share)
        if str(rank) != options.get("silent_rank"):
            reporter.send(
                Step(
                    rank=rank, step=step, steps=steps, step_s=pace_s, samples_per_s=1.0, loss=1 / step,
                    world_size=size, measure=measure,
                )
            )  # fmt: skip
            if step == 1:
                reporter.mark("first_step")
        if "busy" in options and step == 1:
            reporter.send(Busy(rank=rank, what="a test", limit_s=float(options["busy"])))
            print("busy from now on", flush=True)
            time.sleep(float(options["busy"]))
        if str(rank) == options.get("fail_rank") and step == int(options.get("fail_step", "1")):
            code = int(options["fail_code"])
            if code == 1 and not failed_before.exists():
                failed_before.touch()
                failure = Failure(reason="TrainingError", message="ValueError: as requested", rank=rank)
                reporter.send(Failed(rank=rank, failure=failure))
                print("the traceback would be here", flush=True)
                return code
            if code != 1:
                return code
    if comm is not None:
        from mpi4py import MPI

        comm.Barrier()
        MPI.Finalize()
    if rank == 0:
        reporter.send(Finished(rank=0, outcome=Outcome(steps=steps, seconds=1.0, accuracy=0.5)))
    reporter.close()
    return 0


def join():
    import mpi4py

    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    from mpi4py import MPI

    MPI.Init()
    comm = MPI.COMM_WORLD
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    assert comm.Get_size() == int(os.environ["WORLD_SIZE"]), "the rank is not in the expected process group"
    return comm


if __name__ == "__main__":
    sys.stdout.flush()
    os._exit(main())
