"""Messages of the process that copies a script's checkpoint folder to an object store: JSON lines through a pipe.

The agent of rank 0's pod, whose process writes the commits, forwards them to the coordinator as messages of rank 0.
The processes of other pods send none.
"""

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from dlcontract import MAX_UPLOAD_MESSAGE, Record, Upload

MAX_LINE_NBYTES = 16 * 2**10


class Uploaded(Record):
    """The store has this commit, with which the ranks resume; None: it has none.

    ``age_s``: seconds since the script wrote the first file of the checkpoint; None: an earlier run has made the
    commit, or only logs and deletions are new. The agents' clocks need not agree.
    """

    type: Literal["uploaded"] = "uploaded"
    rank: int = 0
    upload: Upload | None
    age_s: Annotated[float | None, Field(ge=0)] = None


class NotUploaded(Record):
    """Nothing can be uploaded since ``unix_s`` because of ``reason``; None: uploads work again.

    ``failed``: True if an attempt to upload has failed. False: the folder cannot be uploaded yet.
    """

    type: Literal["not_uploaded"] = "not_uploaded"
    rank: int = 0
    reason: Annotated[str | None, Field(pattern=r"^[A-Z][A-Za-z0-9]*$", max_length=64)] = None
    message: Annotated[str, Field(max_length=MAX_UPLOAD_MESSAGE)] = ""
    failed: bool = False
    unix_s: Annotated[float, Field(ge=0, le=2.5e11)] = 0.0


UploadMessage = Annotated[Uploaded | NotUploaded, Field(discriminator="type")]
upload_message_adapter: TypeAdapter[UploadMessage] = TypeAdapter(UploadMessage)
