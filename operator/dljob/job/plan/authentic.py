"""Sign stored plans and check their signatures, to tell the operator's plans from those that somebody edited.

Users who may edit ConfigMaps can edit the plan of a job. The operator therefore signs each plan with a key that users
cannot read, and records the plan in the job's status (``status.planRecord``), which users cannot write. The record
identifies the plan without the key. The signature identifies a plan that was stored just before the operator stopped,
so that the status does not have its record yet. All functions are pure: ``dljob.kube`` stores the key.
"""

import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import dlcontract
from dljob.job.observed import JobSeen
from dljob.job.plan.stored import OPERATOR_KEY

KEY_NBYTES = 32
"""Length of a key in bytes: the length of the hash, as RFC 2104 recommends for HMAC."""
SIGNED_KEYS = (dlcontract.PLAN_KEY, OPERATOR_KEY, dlcontract.FAILURES_KEY)
"""Keys of the plan's ConfigMap that the operator writes and reads. Other keys have no effect and are not signed."""
MAX_SIGNATURE = 128
"""Number of characters of a signature that are read. Those of the operator have at most 92."""
_VERSION = "v1"
"""Version of the signed text. A release with another version must also accept signatures of this one."""


class Edit(StrEnum):
    """Why a stored plan is not the operator's. The values are reasons of the condition PlanEdited."""

    WRONG = "SignatureWrong"
    MISSING = "SignatureMissing"
    OUTDATED = "PlanOutdated"


@dataclass(frozen=True)
class PlanKey:
    """The key with which the operator signs plans."""

    secret: bytes = field(repr=False)

    @property
    def id(self) -> str:
        """Return a text that identifies the key and does not disclose it."""
        return hashlib.sha256(b"dljob plan key\0" + self.secret).hexdigest()[:8]


@dataclass(frozen=True)
class Record:
    """The operator's record of the plan that it stored last, in the status of the job.

    ``serial``: a number that increases with each signed plan of the job, so that an earlier plan, whose signature is
    valid too, cannot be stored again. ``digest``: digest of the stored plan; empty if the job has had none.
    """

    serial: int
    digest: str

    def __str__(self) -> str:
        return f"{self.serial}:{self.digest}"

    @classmethod
    def parse(cls, text: object) -> "Record | None":
        """Parse the text of ``str``. Return None for any other value."""
        serial, _, digest = text.partition(":") if isinstance(text, str) else ("", "", "")
        return cls(int(serial), digest) if serial.isascii() and serial.isdecimal() and len(serial) < 16 else None


NO_PLAN = Record(0, "")
"""The record of a job that has had no plan. Only a plan with a signature can follow."""


def record_of(job: JobSeen) -> Record | None:
    """Return the record in the status of a job; None if an operator that signs plans has not written the status yet."""
    return Record.parse(job.status.get("planRecord"))


def signed_part(data: Mapping[str, str]) -> dict[str, str]:
    """Return the part of the ConfigMap's data that is signed."""
    return {key: data[key] for key in SIGNED_KEYS if key in data}


def digest(job: JobSeen, data: Mapping[str, str]) -> str:
    """Return a digest of a job's stored plan (the ConfigMap's data), bound to the job's namespace, name and UID."""
    return hashlib.sha256(_text(job, data)).hexdigest()[:32]


def sign(job: JobSeen, data: Mapping[str, str], serial: int, key: PlanKey) -> str:
    """Return the signature of a job's stored plan, for the annotation ``SIGNATURE_ANNOTATION`` of the ConfigMap.

    It is an HMAC-SHA256 of the plan, the serial number, and the job's namespace, name and UID.
    """
    return f"{_VERSION}:{key.id}:{serial}:{_mac(job, data, serial, key)}"


def serial_of(job: JobSeen, data: Mapping[str, str], signature: str, keys: Mapping[str, PlanKey]) -> int | None:
    """Return the serial number in a signature, or None if the signature is not valid. ``keys``: id → key.

    ``data``: data of the plan's ConfigMap.
    """
    version, _, rest = signature.partition(":")
    key_id, _, rest = rest.partition(":")
    serial, _, mac = rest.partition(":")
    key = keys.get(key_id)
    if version != _VERSION or key is None or not (serial.isascii() and serial.isdecimal() and len(serial) < 16):
        return None
    expected = _mac(job, data, int(serial), key)
    return int(serial) if hmac.compare_digest(mac.encode(), expected.encode()) else None


def key_id_of(signature: str) -> str | None:
    """Return the id of the key in a signature; None if the text is not a signature of this version."""
    parts = signature.split(":")
    return parts[1] if len(parts) == 4 and parts[0] == _VERSION else None


def edit(job: JobSeen, data: Mapping[str, str], signature: str, keys: Mapping[str, PlanKey]) -> Edit | None:
    """Return why a stored plan is not what the operator stored last; None if it is.

    A plan without a signature counts if an earlier release wrote the job's status: the status then has conditions and
    no record. Users can write neither. A new job has no conditions, so that nobody can store a plan before the operator
    does. ``data``: data of the plan's ConfigMap. ``keys``: id → key.
    """
    record = record_of(job)
    if record is not None and record.digest == digest(job, data):
        return None
    if not signature:
        return None if record is None and job.status.get("conditions") else Edit.MISSING
    serial = serial_of(job, data, signature, keys)
    if serial is None:
        return Edit.WRONG
    return Edit.OUTDATED if record is not None and serial <= record.serial else None


def _mac(job: JobSeen, data: Mapping[str, str], serial: int, key: PlanKey) -> str:
    return hmac.new(key.secret, f"{_VERSION}:{serial}:".encode() + _text(job, data), hashlib.sha256).hexdigest()


def _text(job: JobSeen, data: Mapping[str, str]) -> bytes:
    """Return the canonical text of a job's plan: equal for equal data, and different for all others."""
    parts = [job.namespace, job.name, job.uid, sorted(signed_part(data).items())]
    return json.dumps(parts, separators=(",", ":")).encode()
