"""Exceptions of the SDK. ``DLJobError`` is the base of all."""

from dljob.job.spec_errors import Problem


class DLJobError(Exception):
    """A call of the SDK failed. The text says what was found, what was expected and what to do."""


class InvalidJobError(DLJobError):
    """dljob or the API server rejected a manifest, or a change of a job."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("; ".join(problem.message for problem in problems))
        self.problems = problems
        """All problems, at least one. Each has ``field``, ``found``, ``expected`` and ``message``."""

    @property
    def field(self) -> str:
        """Path of the first invalid field, such as ``spec.nodes.min``. Empty if the message names none."""
        return self.problems[0].field

    @property
    def found(self) -> str:
        return self.problems[0].found

    @property
    def expected(self) -> str:
        return self.problems[0].expected


class ServerError(DLJobError):
    """The API server answered with an error, or did not answer. ``code``: HTTP status code; 0: no answer."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class JobNotFoundError(DLJobError):
    """No job has this name."""


class JobDeletedError(DLJobError):
    """The job no longer exists. A new job may have its name."""


class JobTimeoutError(DLJobError, TimeoutError):
    """The job did not reach a state in time. It continues nevertheless."""


class JobFailedError(DLJobError):
    """The job has failed."""

    def __init__(self, name: str, reason: str, message: str, rank: int | None, last_lines: tuple[str, ...]) -> None:
        output = "".join(f"\n  {line}" for line in last_lines)
        source = "the failed rank" if rank is None else f"rank {rank}"
        super().__init__(f"{name}: {reason}: {message}" + (f"\nLast output of {source}:{output}" if output else ""))
        self.reason, self.message = reason, message
        """Reason in CamelCase, and message of the condition Failed."""
        self.rank = rank
        """The rank that failed first; None if no single rank did, or if it is unknown."""
        self.last_lines = last_lines
        """Last lines of its output. Empty if there are none, or if the user may not read them."""
