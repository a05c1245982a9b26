"""The one exception that the command line turns into a line and exit code 2."""


class BadInputError(Exception):
    """Something the user gave is wrong: what was found, what was expected, what to do."""
