"""DLProfile: what was learned about one model on one device type; written by the operator, kept across jobs."""

from datetime import datetime
from typing import Annotated

from pydantic import Field

from dljob.api.base import ApiModel


class ComputePoint(ApiModel):
    """Measured compute time of one step at one batch size."""

    batch: Annotated[int, Field(ge=1, description="Samples on the device.")]
    seconds: Annotated[float, Field(gt=0, description="Median time of forward, backward and update.")]
    observations: Annotated[int, Field(ge=1, description="Steps behind the figure.")] = 1


class DLProfileSpec(ApiModel):
    model: Annotated[str, Field(description="Model, as spec.model.name or a digest of the user's program.")]
    device: Annotated[str, Field(description="Device type.")]


class DLProfileStatus(ApiModel):
    compute: Annotated[tuple[ComputePoint, ...], Field(max_length=64, description="Measured compute times.")] = ()
    link_latency_seconds: Annotated[float | None, Field(ge=0, description="Latency (alpha) of a message.")] = None
    link_bandwidth_bytes_per_second: Annotated[
        float | None, Field(gt=0, description="Effective bandwidth (1/beta) between ranks.")
    ] = None
    observed_jobs: Annotated[int, Field(ge=0, description="Runs that taught this profile.")] = 0
    updated: datetime | None = None


class DLProfile(ApiModel):
    spec: DLProfileSpec
    status: DLProfileStatus = DLProfileStatus()
