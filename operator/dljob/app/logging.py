"""Logging of the operator's process. Messages are text or JSON, with one JSON object per line."""

import json
import logging
import sys
from datetime import UTC, datetime

ABOUT = ("job", "uid", "plan", "attempt")
"""Names of the attributes that log records about a job have.

They are the job's namespace and name, uid, number of its plan (0: no plan), and number of restarts plus 1.
"""


class TextFormatter(logging.Formatter):
    """Writes each message as one line. Users write parts of messages, and must not be able to forge further lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name in logging
        text = super().formatMessage(record).replace("\r", "\\r").replace("\n", "\\n")
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


def _about(record: logging.LogRecord) -> dict[str, object]:
    return {key: getattr(record, key) for key in ABOUT if hasattr(record, key)}


def set_up(level: str, form: str) -> None:
    """Log to stderr. ``form``: ``text`` or ``json``.

    kopf logs every watch event, so only its warnings and errors are logged, unless ``level`` is ``debug``.
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
