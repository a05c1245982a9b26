"""Base of the contract's documents: schema number, strict validation and bounds of values."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

SCHEMA = 1

Text = Annotated[str, Field(max_length=8192)]
Name = Annotated[str, Field(min_length=1, max_length=253)]
# Values of a report are bounded, because JSON integers are not, and 10**400 fits neither a date nor a float.
Count = Annotated[int, Field(ge=0, le=2**53)]
Seconds = Annotated[float, Field(ge=0, le=1e9)]
UnixTime = Annotated[float, Field(ge=0, le=2.5e11, description="Seconds; up to the year 9892.")]


class Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class UntrustedRecord(Record):
    """Base class of a report and its parts. Unknown fields are ignored.

    A trainer may be newer than the operator, such as after a rollback or with a custom image. If the operator rejected
    new fields, the trainer's jobs would never end. Unknown fields of a plan, in contrast, are rejected.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


def schema_of(text: str | bytes) -> Any:
    """Return the value of the key ``schema`` in a JSON document, or None if it has no such key.

    Call this for a plan or report that cannot be parsed. A number above ``SCHEMA`` shows that a later release has
    written the document; otherwise, the document is invalid. Raise ValueError if the text is not JSON.
    """
    import json

    document = json.loads(text)
    return document.get("schema") if isinstance(document, dict) else None
