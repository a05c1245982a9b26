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
        Rule(
            "shared",
            "!has(self.shared) || !has(self.claimName)",
            "shared has no effect on an existing claim: remove it or remove claimName",
            lambda v: v.claim_name is None or v.shared is None,
        ),
    )

    claim_name: Annotated[
        DnsSubdomain | None, Field(description="An existing claim; ReadWriteMany for several nodes.")
    ] = None
    storage_class_name: Annotated[
        DnsSubdomain | None,
        Field(description="Storage class of the claim that dljob creates. Default: the cluster's default class."),
    ] = None
    shared: Annotated[
        bool | None,
        Field(
            description="True: the claim that dljob creates is ReadWriteMany, so that a job that starts on one node "
            "can move to several. The storage class must support it. Default: only if the first plan has several nodes."
        ),
    ] = None
    size: Annotated[Bytes, Field(description="Size of the claim that dljob creates, such as 10Gi.")] = "1Gi"
    reclaim_policy: Annotated[
        ReclaimPolicy,
        Field(description="Whether deleting the job deletes the claim that dljob created (Delete) or not (Retain)."),
    ] = ReclaimPolicy.RETAIN


class Checkpoint(ApiModel):
    rules = (
        Rule(
            "interval",
            "!has(self.interval) || self.interval == 'Auto' || self.interval.matches('[1-9]')",
            "interval must be more than 0: set a time such as 60s, or set enabled: false for no checkpoints",
            lambda c: c.interval == AUTO_INTERVAL or duration_s(c.interval) > 0,
        ),
    )

    enabled: Annotated[
        bool, Field(description="Whether to write checkpoints. Without them the job needs no volume.")
    ] = True
    volume: Annotated[CheckpointVolume, Field(description="Volume of the checkpoints.")] = CheckpointVolume()
    interval: Annotated[
        AutoDuration,
        Field(
            description="Time between checkpoints, such as 90s or 1h30m. Auto: 60s before the first checkpoint, then "
            "√(2 · cost of a checkpoint · time between faults), at most 30 minutes."
        ),
    ] = AUTO_INTERVAL
    keep: Annotated[int, Field(ge=1, le=100, description="Number of checkpoints to keep.")] = 3
