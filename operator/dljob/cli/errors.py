"""The exception that the command line prints as one line, with exit code 2."""


class BadInputError(Exception):
    """A problem that the user can solve: invalid input, or a failed request to the API server.

    ``main`` prints the message and ends with exit code 2. The message says what was found, what was expected and what
    to do.
    """
