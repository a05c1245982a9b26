"""The forecasts in the status of a job: for a waiting job, and for a job that holds devices."""

from datetime import datetime
from typing import Annotated

from pydantic import Field

from dljob.api.base import ApiModel


class QueueStatus(ApiModel):
    """Place of a waiting job in the queue, and the forecast of its start. It is updated when it changes notably."""

    position: Annotated[int, Field(ge=1, description="Place among all waiting jobs. 1: the first in line.")]
    jobs: Annotated[int, Field(ge=1, description="Number of waiting jobs.")]
    earliest_start: Annotated[
        datetime | None,
        Field(description="Predicted start if run times are short (10th percentile) and no new job arrives."),
    ] = None
    forecast_start: Annotated[
        datetime | None,
        Field(
            description="The most likely start if new jobs arrive as in the last hour. Unset if the start is unknown."
        ),
    ] = None
    latest_start: Annotated[
        datetime | None,
        Field(description="Predicted start if run times are long (90th percentile) and new jobs arrive."),
    ] = None
    latest_finish: Annotated[
        datetime | None, Field(description="Predicted end of the training with the 90th percentile of all run times.")
    ] = None


class ForecastSize(ApiModel):
    """A number of nodes for which the planner predicted the whole training."""

    nodes: Annotated[int, Field(ge=1)]
    total_seconds: Annotated[
        float, Field(ge=0, description="Median time of the whole training on this number of nodes.")
    ]


class RunForecast(ApiModel):
    """Forecast of a job that holds devices, for queues and tools that decide whether to stop or resize it."""

    time: Annotated[datetime, Field(description="When the forecast was made.")]
    remaining_seconds: Annotated[float, Field(ge=0, description="Median of the remaining training time.")]
    remaining_seconds_p10: Annotated[
        float | None, Field(ge=0, description="10th percentile of the remaining training time.")
    ] = None
    remaining_seconds_p90: Annotated[float, Field(ge=0, description="90th percentile of the remaining training time.")]
    unsaved_seconds: Annotated[
        float,
        Field(
            ge=0,
            description="Training time since the last checkpoint. This time is lost if the pods are killed. Pods that "
            "get their grace period write a checkpoint first.",
        ),
    ]
    restart_seconds: Annotated[
        float,
        Field(
            ge=0,
            description="Time from the creation of new pods to their first step. Every stop of the job costs this "
            "time.",
        ),
    ]
    deadline_slack_seconds: Annotated[
        float | None,
        Field(
            description="Time from the predicted end of the training (90th percentile) to its deadline: the earlier of "
            "objective.deadline and scheduling.finishBy. Negative: the job is predicted to end too late. Unset for a "
            "job without a deadline, or that does not train."
        ),
    ] = None
    sizes: Annotated[
        tuple[ForecastSize, ...],
        Field(
            max_length=8,
            description="The numbers of nodes with the shortest predicted training times, the fastest first.",
        ),
    ] = ()
