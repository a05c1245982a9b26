"""The settings of the operator whose decisions are compared, by the names that the results show."""

from collections.abc import Callable
from functools import partial

from benchmarks.scheduling.joint_foresight import Knowledge, spread_of
from benchmarks.scheduling.operator_policy import Operator

DEFAULT, IN_ORDER = "dljob", "dljob, in order"
POLICIES: dict[str, Callable[[float], Operator]] = {
    DEFAULT: lambda noise: Operator(spread_of(noise), all_jobs=True),
    f"{DEFAULT}, finishBy": lambda noise: Operator(spread_of(noise), all_jobs=True, finish_by=True),
    IN_ORDER: lambda noise: Operator(spread_of(noise)),
    "dljob, waiting jobs": lambda noise: Operator(spread_of(noise), together=True),
    "dljob, in order, finishBy": lambda noise: Operator(spread_of(noise), finish_by=True),
}
"""``dljob``: the operator's default, all jobs together. ``in order``: with the chart value queue.assignment: InOrder.
``finishBy``: for jobs whose deadlines are in their specs."""
FLOORS: dict[str, Callable[[float], Operator]] = {
    f"{DEFAULT}, {knows}": partial(lambda knows, noise: Operator(spread_of(noise), all_jobs=True, knows=knows), knows)
    for knows in (Knowledge.RUN_TIMES, Knowledge.ARRIVALS)
}
"""The same decisions as ``DEFAULT``. Their forecasts know the truth, and show which errors ignorance causes."""
