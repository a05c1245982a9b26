"""Checkpoints in the trainer's report: the last one of dltrain, and the uploads of a script's folder to a store."""

from typing import Annotated

from pydantic import Field

from dlcontract.record import Count, Seconds, UnixTime, UntrustedRecord

MAX_UPLOAD_MESSAGE = 1024


class CheckpointMark(UntrustedRecord):
    step: Count
    unix_s: UnixTime
    path: Annotated[str, Field(max_length=1024)] = ""
    duration_s: Annotated[
        Seconds | None, Field(description="Seconds that writing the checkpoint took. None: unknown.")
    ] = None
    nbytes: Annotated[Count | None, Field(description="Bytes of its files. None: unknown.")] = None


class Upload(UntrustedRecord):
    """A committed upload: the store has the commit marker and all its files, so that ranks can resume from it.

    ``path``: URI of the commit marker. ``name``: the folder or file at the top of the checkpoint folder that has
    changed last. ``nbytes``, ``files``: all files of the commit, also those of earlier uploads.
    """

    unix_s: UnixTime
    path: Annotated[str, Field(max_length=1024)]
    name: Annotated[str, Field(max_length=253)] = ""
    nbytes: Count = 0
    files: Count = 0
    new_nbytes: Annotated[Count, Field(description="Bytes of the files that the commit before does not have.")] = 0
    duration_s: Annotated[
        Seconds | None,
        Field(description="Seconds from the start of the upload to the commit. None: an earlier run has made it."),
    ] = None
    step: Annotated[
        Count | None,
        Field(description="Last step that the script had reported when it wrote the first file. None: unknown."),
    ] = None


class UploadProblem(UntrustedRecord):
    """Why nothing was uploaded since ``unix_s``, although the script has written files."""

    reason: Annotated[str, Field(pattern=r"^[A-Z][A-Za-z0-9]*$", max_length=64)]
    message: Annotated[str, Field(max_length=MAX_UPLOAD_MESSAGE)]
    unix_s: UnixTime


class Uploads(UntrustedRecord):
    """The uploads of a job so far. ``failures``: number of attempts to upload that have failed."""

    count: Count = 0
    failures: Count = 0
    seconds: Annotated[Seconds, Field(description="Sum of the durations.")] = 0.0
    nbytes: Annotated[int, Field(ge=0, le=2**63 - 1, description="Sum of the new bytes of all uploads.")] = 0
    last: Annotated[
        Upload | None, Field(description="The commit with which ranks resume. None: nothing is committed.")
    ] = None
    problem: Annotated[UploadProblem | None, Field(description="None: uploads work, or nothing is to upload.")] = None
