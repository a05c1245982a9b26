"""Logging of the operator's process. Messages are text or JSON, with one JSON object per line."""

import json
import logging
import re
import sys
from datetime import UTC, datetime

ABOUT = ("job", "uid", "plan", "attempt")
"""Names of the attributes that log records about a job have, and that the formatters add to the message.

``job``: the job's namespace and name. ``uid``: its UID. ``plan``: number of its plan; 0: no plan. ``attempt``: number
of restarts of its ranks plus 1.
"""


_CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")
"""Matches control characters except the tab. Programs that show logs take some of them for the end of a line."""


class TextFormatter(logging.Formatter):
    """A formatter that writes each message as one line, and each line of a traceback with ``CONTINUED`` before it.

    Messages and exceptions may contain text from users, who must not be able to forge lines of the log. Therefore,
    control characters such as line ends are escaped.
    """

    CONTINUED = "  | "

    def format(self, record: logging.LogRecord) -> str:
        first, *traceback = super().format(record).split("\n")
        return "\n".join((first, *(f"{self.CONTINUED}{_escaped(line)}" for line in traceback)))

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name in logging
        text = _escaped(super().formatMessage(record))
        about = _about(record)
        return f"{text} [{' '.join(f'{key}={value}' for key, value in about.items())}]" if about else text


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_about(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _escaped(text: str) -> str:
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def _about(record: logging.LogRecord) -> dict[str, object]:
    return {key: getattr(record, key) for key in ABOUT if hasattr(record, key)}


def set_up(level: str, form: str) -> None:
    """Set up the logging of this process: messages go to stderr. ``form``: ``text`` or ``json``.

    ``level``: lowest level of the messages that are logged: debug, info, warning or error. kopf, the
    library for watches, logs every watch event, so only its warnings and errors are logged, unless ``level`` is debug.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonFormatter() if form == "json" else TextFormatter("%(asctime)s %(levelname).1s %(name)s: %(message)s")
    )
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    if level != "debug":
        logging.getLogger("kopf").setLevel(logging.WARNING)
    logging.getLogger("aiohttp").setLevel(logging.WARNING)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
