"""The exception that the command line prints as one line, with exit code 2."""


class BadInputError(Exception):
    """Invalid input of the user. ``main`` prints the message and ends with exit code 2.

    The message says what was found, what was expected and what to do.
    """
