"""The error of data that cannot be used as it is."""

from collections.abc import Iterator
from contextlib import contextmanager


class DataError(ValueError):
    """Data that the user has to correct, or an option that does not fit the data.

    The message names the file, the row or the column, says what was found and what was expected, and what to do.
    """


@contextmanager
def permission_checked() -> Iterator[None]:
    """Raise DataError for a file or folder that this user may not read. Other errors of a file system may pass."""
    try:
        yield
    except PermissionError as error:
        raise DataError(
            f"{error.filename}: found a file or folder that this user may not read; expected readable data. "
            "Change its permissions or its owner."
        ) from None
