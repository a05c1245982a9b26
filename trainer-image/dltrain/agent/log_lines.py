"""The agent's log: one line per message, with the job's uid and the numbers of its plan and attempt."""

import logging
import re
import sys
from collections.abc import Callable

UID_LENGTH = 8
"""Number of characters of the uid in each line. The names of the job's Secret and Workload have the same part."""
CONTINUED = "  | "
"""Each line of a traceback begins with this text, so that an exception cannot forge lines of the log."""
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")


class LogLines(logging.Formatter):
    """Formats messages. Ranks write parts of them, and must not be able to forge lines."""

    def __init__(self) -> None:
        super().__init__("[agent] %(asctime)s %(levelname)s %(message)s")
        self.uid = ""
        """The job's uid; empty until the agent has read its settings."""
        self.running: Callable[[], tuple[int, str]] = lambda: (0, "")
        """Function that returns the number of the current plan (0: none) and the name of the attempt (empty: none)."""

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
    """Log to stderr. Return the formatter, whose attributes the caller sets."""
    lines, handler = LogLines(), logging.StreamHandler(sys.stderr)
    handler.setFormatter(lines)
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    return lines
