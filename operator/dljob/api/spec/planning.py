"""``spec.planning``, ``spec.objective``, ``spec.nodes``, ``spec.batchSizeRange``: objective and limits of the plan."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from dljob.api.base import ApiModel, Duration, Rule, duration_s


class PlanningMode(StrEnum):
    AUTO = "Auto"
    PLAN_ONLY = "PlanOnly"
    FIXED = "Fixed"


class Resize(StrEnum):
    AUTO = "Auto"
    NEVER = "Never"


class Minimize(StrEnum):
    TIME = "Time"
    ENERGY = "Energy"
    COST = "Cost"
    CARBON = "Carbon"


class BatchSizeRange(ApiModel):
    """Range of global batch sizes from which the planner may choose."""

    rules = (
        Rule(
            "min",
            "!has(self.min) || self.min <= self.max",
            "min must not be larger than max: lower min or raise max",
            lambda b: b.min is None or b.min <= b.max,
        ),
    )

    min: Annotated[
        int | None, Field(ge=1, le=2**31 - 1, description="Smallest batch size. Default: globalBatchSize.")
    ] = None
    max: Annotated[int, Field(ge=1, le=2**31 - 1, description="Largest batch size.")]


MAX_NODES = 10_000


class NodeRange(ApiModel):
    rules = (
        Rule(
            "min",
            "!has(self.max) || !has(self.min) || self.min <= self.max",
            "min must not be larger than max: lower min or raise max",
            lambda n: n.min <= n.max,
        ),
    )

    min: Annotated[
        int,
        Field(
            ge=1,
            le=MAX_NODES,
            description="Minimum number of nodes. The job waits until this many nodes are free. If it loses nodes, it "
            "may continue on this many.",
        ),
    ] = 1
    max: Annotated[
        int,
        Field(
            ge=1,
            le=MAX_NODES,
            description="Maximum number of nodes. kubectl scale and autoscalers set this field. The default is no "
            "limit: the planner chooses.",
        ),
    ] = MAX_NODES


class Objective(ApiModel):
    rules = (
        Rule(
            "deadline",
            "!has(self.deadline) || self.deadline.matches('[1-9]')",
            "deadline must be more than 0, such as 2h",
            lambda o: o.deadline is None or duration_s(o.deadline) > 0,
        ),
    )

    minimize: Annotated[
        Minimize,
        Field(
            description="What the plan minimizes: Time, Energy (J), Cost (US dollars) or Carbon (g of CO2 equivalent "
            "of the energy)."
        ),
    ] = Minimize.TIME
    deadline: Annotated[
        Duration | None,
        Field(
            description="Longest run time, such as 2h, counted from status.startTime, without the time in which the "
            "job is suspended or preempted or waits for devices (status.waitedSeconds). The predicted p90 run time of "
            "the plan must not exceed this deadline. While the job runs, the condition DeadlineAtRisk compares the "
            "remaining steps with the remaining time. The job continues after the deadline."
        ),
    ] = None


class FixedGroup(ApiModel):
    """One group of a plan that the user sets: a number of nodes with one device type."""

    device: Annotated[str, Field(min_length=1, max_length=63, description="Device type, as in spec.devices.")]
    nodes: Annotated[int, Field(ge=1, le=10000, description="Number of nodes.")]
    ranks_per_node: Annotated[int, Field(ge=1, le=64, description="Ranks, one per device, on each node.")] = 1
    batch_per_rank: Annotated[
        int | None,
        Field(
            ge=1,
            description="Local batch size: samples per step on each rank. Default: chosen by measured or predicted "
            "speed.",
        ),
    ] = None


class Planning(ApiModel):
    rules = (
        Rule(
            "groups",
            "(has(self.mode) && self.mode == 'Fixed') == (has(self.groups) && size(self.groups) > 0)",
            "mode Fixed needs groups, and groups need mode Fixed: list the node groups, or choose mode Auto",
            lambda p: (p.mode is PlanningMode.FIXED) == bool(p.groups),
        ),
    )

    mode: Annotated[
        PlanningMode,
        Field(
            description="Auto: plan the job and run it. PlanOnly: show the plan in status and run nothing. Fixed: run "
            "on the nodes and devices that the field groups lists, and plan only the rest."
        ),
    ] = PlanningMode.AUTO
    groups: Annotated[tuple[FixedGroup, ...], Field(max_length=16, description="The plan, for mode Fixed.")] = ()
    resize: Annotated[
        Resize | None,
        Field(
            description="Auto (default): the running job moves to a better plan when nodes become free, or when "
            "it is late or early for its deadline, and the gain repays the restart. It moves to a smaller plan when "
            "its nodes are gone for good. Never: the job keeps its plan. This field has no effect with other modes "
            "than Auto."
        ),
    ] = None
    uneven: Annotated[
        bool,
        Field(
            description="true: local batch sizes depend on the speed of the device. false: all ranks have the same "
            "local batch size."
        ),
    ] = True
    candidates: Annotated[int, Field(ge=1, le=20, description="Number of candidates in status.plan.")] = 5
