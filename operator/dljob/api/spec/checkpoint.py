"""``spec.checkpoint``: how training state is saved."""

import re
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from dljob.api.base import (
    AUTO_INTERVAL,
    AUTO_SIZE,
    ApiModel,
    AutoBytes,
    AutoDuration,
    Bytes,
    DnsSubdomain,
    Rule,
    duration_s,
)

_URI = r"^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9!_.*'()-]+)*/{0,1}$"
"""A bucket, by the rules for names of buckets, and a prefix of characters that are safe in keys of objects."""


def _cel_text(text: str) -> str:
    """Return ``text`` as a string literal of CEL."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


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
        DnsSubdomain | None,
        Field(description="Name of an existing volume claim. Pods on several nodes need a ReadWriteMany claim."),
    ] = None
    storage_class_name: Annotated[
        DnsSubdomain | None,
        Field(description="Storage class of the claim that dljob creates. Default: the cluster's default class."),
    ] = None
    shared: Annotated[
        bool | None,
        Field(
            description="True: the claim that dljob creates is ReadWriteMany, so that a job that starts on one node "
            "can move to several. The storage class must support it. Default: if the first plan has several nodes, or "
            "if the job may use several and the class is known to share its volumes, such as CephFS, EFS, Azure Files, "
            "Filestore and NFS."
        ),
    ] = None
    size: Annotated[Bytes, Field(description="Size of the claim that dljob creates, such as 10Gi.")] = "1Gi"
    reclaim_policy: Annotated[
        ReclaimPolicy,
        Field(description="Delete: deleting the job deletes the claim that dljob created. Retain: the claim stays."),
    ] = ReclaimPolicy.RETAIN


class Checkpoint(ApiModel):
    rules = (
        Rule(
            "interval",
            "!has(self.interval) || self.interval == 'Auto' || self.interval.matches('[1-9]')",
            "interval must be more than 0: set a time such as 60s, or set enabled: false for no checkpoints",
            lambda c: c.interval == AUTO_INTERVAL or duration_s(c.interval) > 0,
        ),
        Rule(
            "uri",
            f"!has(self.uri) || self.uri.matches({_cel_text(_URI)})",
            "uri must name a bucket, and may name a prefix in it, such as s3://bucket/prefix: other schemes and other "
            "characters are not supported",
            lambda c: c.uri is None or re.fullmatch(_URI, c.uri) is not None,
        ),
        Rule(
            "uri",
            "!has(self.uri) || !has(self.volume) || "
            "!(has(self.volume.claimName) || has(self.volume.storageClassName) || has(self.volume.shared))",
            "uri cannot be combined with volume.claimName, volume.storageClassName and volume.shared, because "
            "checkpoints in an object store need no claim: remove uri, or remove these fields of volume",
            lambda c: c.uri is None or (c.volume.claim_name is c.volume.storage_class_name is c.volume.shared is None),
        ),
        Rule(
            "secretName",
            "!has(self.secretName) || has(self.uri)",
            "secretName is for checkpoints in an object store: set uri, or remove secretName",
            lambda c: c.secret_name is None or c.uri is not None,
        ),
        Rule(
            "stagingSize",
            "!has(self.stagingSize) || has(self.uri)",
            "stagingSize is for checkpoints in an object store: set uri, or remove stagingSize",
            lambda c: c.staging_size is None or c.uri is not None,
        ),
        Rule(
            "stagingSize",
            "!has(self.stagingSize) || type(self.stagingSize) == int || self.stagingSize == 'Auto' || "
            "self.stagingSize.matches('[1-9]')",
            "stagingSize must be more than 0: set Auto or a size such as 20Gi",
            lambda c: c.staging_size in (None, AUTO_SIZE) or any(digit in c.staging_size for digit in "123456789"),
        ),
    )

    enabled: Annotated[bool, Field(description="true: write checkpoints. false: the job needs no volume.")] = True
    volume: Annotated[CheckpointVolume, Field(description="Volume of the checkpoints.")] = CheckpointVolume()
    uri: Annotated[
        str | None,
        Field(
            max_length=1024,
            description="Location of the checkpoints in an object store with the S3 protocol, in place of a volume: "
            "s3://BUCKET/PREFIX. Each job has a folder of its own there. The folder $DLJOB_CHECKPOINT_DIR of a script "
            "is then on the disk of each node: what the ranks write there is uploaded when it settles on all nodes, "
            "and restored before the ranks start.",
        ),
    ] = None
    secret_name: Annotated[
        DnsSubdomain | None,
        Field(
            description="Secret with the credentials for uri: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, for other "
            "stores than AWS, AWS_ENDPOINT_URL and AWS_REGION. Default: those of the pod, such as a workload identity."
        ),
    ] = None
    staging_size: Annotated[
        AutoBytes | None,
        Field(
            description="Space on each node for checkpoints that are uploaded or restored, such as 50Gi, requested as "
            "ephemeral storage. Auto, the default with uri: 2Gi plus four times the size of the training state for "
            "built-in models and dltrain.init; for other scripts twelve times, or 20Gi if the model is not described."
        ),
    ] = None
    interval: Annotated[
        AutoDuration,
        Field(
            description="Time between checkpoints, such as 90s or 1h30m. Auto: 60s before the first checkpoint, then "
            "√(2 · cost of a checkpoint · time between faults), at most 30 minutes."
        ),
    ] = AUTO_INTERVAL
    keep: Annotated[int, Field(ge=1, le=100, description="Number of checkpoints to keep.")] = 3

    @property
    def on_volume(self) -> bool:
        """Return True if the checkpoints are on a volume; False without checkpoints, and for an object store."""
        return self.enabled and self.uri is None

    @property
    def creates_claim(self) -> bool:
        """Return True if dljob creates the PersistentVolumeClaim for the checkpoints."""
        return self.on_volume and self.volume.claim_name is None
