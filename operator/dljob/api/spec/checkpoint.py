"""``spec.checkpoint``: how training state is saved."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from dljob.api.base import AUTO_INTERVAL, ApiModel, AutoDuration, Bytes, DnsSubdomain, Rule, duration_s


class ReclaimPolicy(StrEnum):
    RETAIN = "Retain"
    DELETE = "Delete"


class CheckpointVolume(ApiModel):
    rules = (
        Rule(
            "claimName",
            "!has(self.claimName) || !has(self.storageClassName)",
            "storageClassName has no effect on an existing claim: remove it or remove claimName",
            lambda v: v.claim_name is None or v.storage_class_name is None,
        ),
    )

    claim_name: Annotated[
        DnsSubdomain | None, Field(description="An existing claim (ReadWriteMany for several nodes).")
    ] = None
    storage_class_name: Annotated[
        DnsSubdomain | None,
        Field(description="Class of the claim that dljob creates; default: the cluster's."),
    ] = None
    size: Annotated[Bytes, Field(description="Size of the claim that dljob creates, such as 10Gi.")] = "1Gi"
    reclaim_policy: Annotated[
        ReclaimPolicy, Field(description="Whether the claim that dljob created goes when the job is deleted.")
    ] = ReclaimPolicy.RETAIN


class Checkpoint(ApiModel):
    rules = (
        Rule(
            "interval",
            "!has(self.interval) || self.interval == 'Auto' || self.interval.matches('[1-9]')",
            "interval must be more than 0, such as 60s, and enabled false for no checkpoints",
            lambda c: c.interval == AUTO_INTERVAL or duration_s(c.interval) > 0,
        ),
    )

    enabled: Annotated[bool, Field(description="Whether to write checkpoints; false also needs no volume.")] = True
    volume: Annotated[CheckpointVolume, Field(description="Where checkpoints are kept.")] = CheckpointVolume()
    interval: Annotated[
        AutoDuration,
        Field(
            description="Time between checkpoints, such as 90s or 1h30m. Auto: the first one after 60s, then by what "
            "they cost and how often there are faults, √(2 · cost · time between faults), at most 30 minutes."
        ),
    ] = AUTO_INTERVAL
    keep: Annotated[int, Field(ge=1, le=100, description="How many checkpoints are kept.")] = 3
