"""Let Kueue decide when a job runs: render the job's Workload, read Kueue's decision in it, and render the answers.

dljob is an external framework of Kueue, so Kueue does not know DLJobs. The operator therefore creates the ``Workload``
of a job itself and follows its status, as Kueue's own controllers do for the kinds that they know. This package does no
I/O: other packages read and write the Workload.
"""

from dljob.kueue.answers import finished, pods_ready, released
from dljob.kueue.manifest import DIGEST_ANNOTATION, partial_minimum, workload
from dljob.kueue.turn import Admitted, Problem, Stage, Turn, Within, admitted, turn, within

__all__ = [
    "DIGEST_ANNOTATION",
    "Admitted",
    "Problem",
    "Stage",
    "Turn",
    "Within",
    "admitted",
    "finished",
    "partial_minimum",
    "pods_ready",
    "released",
    "turn",
    "within",
    "workload",
]
