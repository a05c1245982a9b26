"""The exception for problems that the user can solve."""


class BadInputError(Exception):
    """A problem that the user can solve: invalid input, or a failed request to the API server.

    The message says what was found, what was expected and what to do. The command line prints it and ends with exit
    code 2. The SDK raises it as a ``DLJobError``.
    """
