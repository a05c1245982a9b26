"""The agent's log: one line per message, with the job's uid, the number of its plan and the name of its attempt.

An attempt is one launch of all ranks.
"""

import logging
import re
import sys
from collections.abc import Callable

UID_LENGTH = 8
"""Number of characters of the job's uid, from its beginning, in each line of the log.

The names of the job's Secret and Workload contain the same characters, so they can be found from a log line."""
CONTINUED = "  | "
"""The text at the start of each line of a traceback in the log. The message of an exception may contain line breaks.
Because of this text, it cannot imitate a line that the agent itself logs."""
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")


class LogLines(logging.Formatter):
    """A formatter that writes each message on one line, and appends the job's uid, the plan and the attempt.

    Messages contain text from ranks. Line breaks and other control characters are therefore escaped, so that a rank
    cannot forge lines of the agent's log.
    """

    def __init__(self) -> None:
        super().__init__("[agent] %(asctime)s %(levelname)s %(message)s")
        self.uid = ""
        """The job's uid; empty until the agent has read its settings."""
        self.running: Callable[[], tuple[int, str]] = lambda: (0, "")
        """Function that returns (number of the current plan, name of the current attempt).

        The number is 0 if the agent has no plan, and the name is empty if no attempt runs.
        """

    def format(self, record: logging.LogRecord) -> str:
        first, *traceback = super().format(record).split("\n")
        return "\n".join((first, *(f"{CONTINUED}{_escaped(line)}" for line in traceback)))

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name in logging
        text = _escaped(super().formatMessage(record))
        if not self.uid:
            return text
        plan, attempt = self.running()
        return f"{text} [uid={self.uid[:UID_LENGTH]} plan={plan} attempt={attempt or 'none'}]"


def _escaped(text: str) -> str:
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def set_up() -> LogLines:
    """Make the module ``logging`` write to stderr in the format of this module. Return the formatter.

    As soon as the agent has read its settings, the caller sets two attributes of the formatter: ``uid``, the job's uid,
    and ``running``, a function that returns the number of the plan and the name of the attempt.
    """
    lines, handler = LogLines(), logging.StreamHandler(sys.stderr)
    handler.setFormatter(lines)
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    return lines
