"""The error of data that cannot be used as it is."""


class DataError(ValueError):
    """Data that the user has to correct, or an option that does not fit the data.

    The message names the file, the row or the column, says what was found and what was expected, and what to do.
    """
