"""What every document of the contract shares: a schema number, strictness, and bounds of its values."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

SCHEMA = 1

Text = Annotated[str, Field(max_length=8192)]
Name = Annotated[str, Field(min_length=1, max_length=253)]
# What a report may claim is bounded: JSON's integers are not, and a date or a float made of 10**400 is an error.
Count = Annotated[int, Field(ge=0, le=2**53)]
Seconds = Annotated[float, Field(ge=0, le=1e9)]
UnixTime = Annotated[float, Field(ge=0, le=2.5e11, description="Seconds; up to the year 9892.")]


class Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class UntrustedRecord(Record):
    """Part of a report. A trainer may be newer than the operator, such as after a rollback or with an image of the
    user's: what it says beyond this is passed over, or its jobs would never end. A plan is obeyed whole or not at all.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


def schema_of(text: str | bytes) -> Any:
    """The schema number a document claims, or None: to tell 'newer than I know' from 'broken'."""
    import json

    document = json.loads(text)
    return document.get("schema") if isinstance(document, dict) else None
