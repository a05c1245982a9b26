"""Start a rank, create its ``Trainer`` from the environment, and end the rank with a report and an exit code."""

import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, get_args

import torch
from pydantic import ValidationError

from dlcontract import (
    DATASET_VARIABLE,
    DDP_BUCKET_NBYTES,
    MEASURABLE,
    CheckpointRef,
    DatasetRef,
    ModelRef,
    OptimizerRef,
    Plan,
    Precision,
    Rank,
)
from dltrain.batch.shares import apportion
from dltrain.comm.process_group import ProcessGroup
from dltrain.comm.selection import AUTO
from dltrain.device import rank_device as devices
from dltrain.device.precision import check_units
from dltrain.host import heap
from dltrain.host.cgroup import threads
from dltrain.protocol.errors import BadInputError, MisuseError, failure
from dltrain.protocol.rank_messages import EXIT_OK, PLAN_ENV, AttemptPlan, Failed, Finished, Hello
from dltrain.protocol.reporter import RankReporter
from dltrain.protocol.volume_layout import job_directory
from dltrain.record.local_run import LocalRun
from dltrain.train.trainer import Trainer

PRECISIONS: dict[str, Precision] = {precision: precision for precision in get_args(Precision)}
STRATEGIES = {"Data": AUTO, "Optimizer": "Ring", "Sharded": "Torch", "Pipeline": "Ring", "Tensor": "Ring"}
"""Parallelism strategies of local runs, and the collective of each."""
_MICRO_BATCHES_PER_STAGE = 4
"""Number of micro-batches for each pipeline stage of a local run. Stages then wait for a fifth of a step at most."""
REPORT_VARIABLE = "DLTRAIN_REPORT"
"""Name of the environment variable with the folder for the run report of a local run."""
ECHO_S = 3.0
"""Seconds that ranks other than 0 wait before they print an input error, if no agent runs.

Most such errors occur on all ranks. During the wait, rank 0 prints the message and exits, and mpirun ends the other
ranks. The message therefore appears only once.
"""


def read_plan() -> Plan | None:
    """Return the plan that the agent has written for this rank, or None without an agent.

    Raise BadInputError if the plan cannot be read.
    """
    path = os.environ.get(PLAN_ENV)
    if not path:
        return None
    try:
        return AttemptPlan.parse(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        found = f"{path}: {error}"
        raise BadInputError(f"${PLAN_ENV}", found, "a plan of schema 1", "start the rank with dljob-agent") from None


def local_plan(
    world_size: int,
    *,
    batch: int,
    epochs: int,
    steps: int | None = None,
    seed: int,
    collective: str,
    checkpoints: str | os.PathLike[str] | None,
    model: ModelRef | None = None,
    dataset: DatasetRef | None = None,
    optimizer: OptimizerRef | None = None,
    precision: str = "FP32",
    activation_checkpointing: bool = False,
    strategy: str = "Data",
    deferred_init: bool = False,
) -> Plan:
    """Return a plan for a run of ``world_size`` ranks on this machine, without an operator.

    ``batch``: global batch size, which is divided equally. ``epochs``: number of passes over the dataset. ``steps``:
    number of steps, in place of ``epochs``. ``collective``: name of the all-reduce algorithm, or Auto.
    ``checkpoints``: directory, or an s3:// URI; None: no checkpoints. ``model``: by default, the running script.
    ``dataset``: by default, the path in $DLJOB_DATASET.
    ``optimizer``: by default, SGD (``OptimizerRef()``). ``precision``: FP32, BF16 or FP16.
    ``activation_checkpointing``: True to let blocks keep only their inputs. ``strategy``: Data, Optimizer, Sharded,
    Pipeline or Tensor. With the last two, all ranks split one model. ``deferred_init``: as in ``dltrain.init``.
    Raise BadInputError for an invalid ``batch``, ``collective``, ``precision`` or ``strategy``.
    """
    if not isinstance(batch, int) or batch < world_size:
        raise BadInputError(
            "batch",
            str(batch),
            f"a whole number of at least {world_size}, so that each rank has a sample",
            "raise batch",
        )
    if collective not in (names := (AUTO, *MEASURABLE, "Torch", "DDP")):
        raise BadInputError("collective", repr(collective), ", ".join(names), "choose one of these collectives")
    if precision not in PRECISIONS:
        raise BadInputError("precision", repr(precision), ", ".join(PRECISIONS), "choose one of these precisions")
    if strategy not in STRATEGIES:
        raise BadInputError("strategy", repr(strategy), ", ".join(STRATEGIES), "choose one of these strategies")
    if strategy != "Data" and collective == AUTO:
        collective = STRATEGIES[strategy]
    splits = strategy in ("Pipeline", "Tensor")
    shares = (batch,) * world_size if splits else apportion(batch, [1] * world_size)
    gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name().replace(" ", "-") if gpu else "cpu"
    host = socket.gethostname()
    return Plan(
        job=Path(sys.argv[0]).stem or "script",
        namespace="local",
        uid="local",
        number=1,
        ranks=tuple(
            Rank(rank=r, pod=host, host="127.0.0.1", group="local", device=device, local_rank=r, gpu=gpu, share=share)
            for r, share in enumerate(shares)
        ),
        global_batch=batch,
        collective="Ring" if collective == AUTO else collective,
        measure_collective=collective == AUTO and world_size > 1,
        parallelism=strategy,
        micro_batches=min(batch, _MICRO_BATCHES_PER_STAGE * world_size) if strategy == "Pipeline" else 1,
        min_ranks=world_size if splits or strategy == "Sharded" else 1,
        **({"bucket_nbytes": DDP_BUCKET_NBYTES} if collective == "DDP" else {}),
        model=model or ModelRef(command=tuple(sys.argv), deferred=deferred_init),
        dataset=dataset or DatasetRef(path=os.environ.get(DATASET_VARIABLE)),
        optimizer=optimizer or OptimizerRef(),
        epochs=epochs if steps is None else None,
        steps=steps,
        seed=seed,
        checkpoint=_local_checkpoints(checkpoints),
        rebalance=False,
        precision=PRECISIONS[precision],
        activation_checkpointing=activation_checkpointing,
    )


def _local_checkpoints(given: str | os.PathLike[str] | None) -> CheckpointRef:
    """Return where a local run keeps its checkpoints. ``given``: a directory, an s3:// URI, or None for none."""
    place = None if given is None else os.fspath(given)
    if place is None or not place.startswith("s3://"):
        return CheckpointRef(enabled=place is not None, directory=place or ".", choose_interval=True)
    scratch = Path(tempfile.gettempdir()) / f"dltrain-checkpoints-{os.getuid()}"
    return CheckpointRef(directory=str(scratch), uri=place, choose_interval=True)


def _report_folder(plan: Plan) -> Path | None:
    """Return the folder for the report of a local run, or None to write no report.

    The folder is $DLTRAIN_REPORT or, if this is not set, the folder of the checkpoints, if they are enabled.
    """
    if given := os.environ.get(REPORT_VARIABLE):
        return Path(given)
    return job_directory(plan) if plan.checkpoint.on_volume else None


def _named(error: ValidationError) -> BadInputError:
    """Convert pydantic's error about an invalid argument of a local run (without a manifest) to a BadInputError."""
    first = error.errors()[0]
    expected = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    return BadInputError(".".join(map(str, first["loc"])) or "plan", repr(first["input"]), expected, "correct it")


def start(reporter: RankReporter, make_plan: Callable[[int], Plan] | None = None) -> Trainer:
    """Join the process group, announce this rank to the agent, and return its Trainer.

    ``make_plan``: returns a plan for a number of ranks. It is called if no agent provides one. Raise BadInputError if
    there is no plan, or if the number of ranks differs from the plan's.
    """
    plan = read_plan()
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
    reporter.rank = rank
    if plan is None and make_plan is None:
        raise BadInputError(f"${PLAN_ENV}", "nothing", "the path of a plan", "start the rank with dljob-agent")
    size = int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))
    if plan is None:
        assert make_plan is not None, "checked above"
        try:
            plan = make_plan(size)
        except ValidationError as error:
            raise _named(error) from None
        if rank == 0 and not reporter.connected:
            local = LocalRun(plan, _report_folder(plan))
            reporter.observe, reporter.resumed, reporter.closed = local.take, local.resumed, local.end
    if rank >= len(plan.ranks):
        raise BadInputError("plan.ranks", f"rank {rank}", f"ranks below {len(plan.ranks)}", "start only planned ranks")
    heap.retain_freed_memory()
    device, name = devices.find_device(plan.ranks[rank])
    if device.type == "cpu":
        heap.allocate_reusable_blocks()
    reporter.send(Hello(rank=rank, pid=os.getpid(), device=name))
    reporter.mark("imported")
    process_group = ProcessGroup.start()
    process_group.expect(len(plan.ranks))
    devices.check(process_group, plan, device)
    check_units(plan, device)
    torch.set_num_threads(threads(process_group.local_size))
    reporter.mark("rendezvous")
    return Trainer(plan, process_group, reporter, device, name)


def finish(trainer: Trainer) -> None:
    """Report the run's success to the agent and leave the process group together with all other ranks."""
    trainer.close()
    trainer.reporter.send(Finished(rank=trainer.rank, outcome=trainer.outcome()))
    end(trainer)


def end(trainer: Trainer) -> None:
    """Leave the process group together with all other ranks, without reporting a result to the agent."""
    trainer.close()
    trainer.process_group.close()
    trainer.reporter.close()


def fail(error: BaseException, reporter: RankReporter) -> int:
    """Report ``error``, which ends this rank, to the agent and in the log. Return the exit code for this process.

    The caller must exit with this code. This function itself does not end the process.
    """
    news = failure(error, reporter.rank, socket.gethostname())
    reporter.send(Failed(rank=reporter.rank, failure=news))
    if news.log_tail:
        traceback.print_exception(error)
    else:
        if not reporter.connected and reporter.rank and isinstance(error, BadInputError | MisuseError):
            time.sleep(ECHO_S)
        print(f"dltrain: {news.reason}: {news.message}", file=sys.stderr, flush=True)  # noqa: T201
    reporter.close()
    assert news.exit_code is not None, "failure() sets it"
    return news.exit_code


def run(body: Callable[[Trainer], None], make_plan: Callable[[int], Plan] | None = None) -> int:
    """Start a rank, run ``body`` and end the rank. Return the exit code, with which the process must then exit.

    ``body``: the training. ``make_plan``: returns a plan for a number of ranks if no agent provides one.
    """
    reporter = RankReporter.open()
    trainer: Trainer | None = None
    try:
        trainer = start(reporter, make_plan)
        body(trainer)
        finish(trainer)
        return EXIT_OK
    except SystemExit as exit_:
        if trainer is not None and trainer.stopped:
            end(trainer)
        return exit_.code if isinstance(exit_.code, int) else 1
    except BaseException as error:  # noqa: BLE001 - every cause must reach the user
        code = fail(error, reporter)
        if trainer is not None:
            trainer.abandon()
        return code


def leave(code: int) -> NoReturn:
    """Exit the process with ``code`` immediately, without destructors, because one could wait for a lost rank."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
