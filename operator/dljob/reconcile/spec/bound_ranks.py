"""Jobs whose ranks read a data stream: their next plans have as many ranks as the checkpoint has positions.

Each rank has its own position in a stream. In the middle of an epoch, the streams of another number of ranks would
begin and end at other samples, so the trainer refuses such a plan, and the job would fail. The operator therefore makes
none: running jobs move only to plans with as many ranks, and jobs that have stopped wait until one is possible.
"""

from dataclasses import replace

from dlcontract import Report, Role
from dljob.api import DLJobSpec, DLJobStatus
from dljob.job.plan.stored import StoredPlan
from dljob.planner import Request


def bound_ranks(
    spec: DLJobSpec | None, before: DLJobStatus, accepted: StoredPlan | None, report: Report | None
) -> int | None:
    """Return the only number of ranks with which a job can continue from its checkpoint; None: any number.

    The status has it from the last report. It counts while there is no report, such as after the operator has raised
    the term. Without checkpoints, the next training begins at step 0, with any number of ranks.
    """
    if spec is None or not spec.checkpoint.enabled or (accepted is not None and not accepted.plan.checkpoint.enabled):
        return None
    if report is not None:
        return report.bound_ranks
    return before.progress.bound_ranks if before.progress is not None else None


def limited(request: Request, ranks: int | None, accepted: StoredPlan | None) -> Request:
    """Return the request with the only number of ranks that plans may have; None: any number.

    If the present plan has a parameter server, which reads no data, the next plan has one, too.
    """
    if ranks is None:
        return request
    served = accepted is not None and any(rank.role is Role.SERVER for rank in accepted.plan.ranks)
    return replace(request, bound_ranks=ranks, collective=request.collective or ("ParameterServer" if served else None))


def why(ranks: int) -> str:
    """Return the text that says why a job keeps its number of ranks."""
    return (
        f"it keeps {ranks} ranks, because each rank reads its own part of a data stream, and the checkpoint has the "
        f"positions of {ranks} ranks"
    )
