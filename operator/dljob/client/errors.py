"""The exception for problems that the user can solve."""


class BadInputError(Exception):
    """A problem that the user can solve: invalid input, or a failed request to the API server.

    The message says what was found, what was expected and what to do. The command line prints it and ends with exit
    code 2. The SDK raises it as a ``DLJobError``.
    """


class RefusedChangeError(BadInputError):
    """A job with the name of a manifest exists, and must not be changed to the manifest."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name}: {problem}")
        self.problem = problem
