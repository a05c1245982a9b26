"""The last output of each rank, packed so that it outlives the pods in the ConfigMap ``<job>-logs``.

The run report is packed there, too, see ``run_report.files``.
"""

import gzip
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from dltrain.protocol.agent_messages import RankEnded

LIMIT_NBYTES = 256 * 2**10
"""Maximum size in bytes of all files in the ConfigMap together, after compression and base64 encoding.

A ConfigMap may have 1 MiB.
"""

REPORT_LIMIT_NBYTES = LIMIT_NBYTES // 2
"""Maximum size in bytes of the run report's files in the ConfigMap, a part of ``LIMIT_NBYTES``."""

ATTEMPT_FILE = "attempt"
"""Name of the file beside the stored output with the name of the newest attempt (launch of all ranks) it is from."""

EARLIER_FILE = "earlier-attempts.json"
"""Name of the file with the attempts of the files that are not from the newest attempt, as JSON {file: attempt}.

A pod without a coordinator stores the output of its own ranks only, so output of earlier attempts may remain beside it.
"""


def stored_nbytes(data: bytes) -> int:
    """Return the size in bytes that the file content ``data`` takes in a ConfigMap, which stores it in base64."""
    return 4 * -(-len(data) // 3)


def order(attempt: str) -> tuple[int, int]:
    """Return a key that sorts the names of attempts, which are ``TERM.NUMBER``, by time."""
    term, _, number = attempt.partition(".")
    return (int(term), int(number)) if term.isdecimal() and number.isdecimal() else (0, 0)


def added(stored: Mapping[str, bytes], files: Mapping[str, bytes], attempt: str) -> dict[str, bytes]:
    """Return the changes with which ``files`` from ``attempt`` are added to the files ``stored``: name → content.

    The changes include the files that name the attempt of each stored file.
    """
    newest = stored.get(ATTEMPT_FILE, b"").decode(errors="replace")
    known = _earlier(stored.get(EARLIER_FILE, b""))
    remaining = [name for name in stored if name not in files and name not in (ATTEMPT_FILE, EARLIER_FILE)]
    attempts = {name: known.get(name, newest) for name in remaining}
    earlier = {name: each for name, each in attempts.items() if each not in ("", attempt)}
    changes = {**files, ATTEMPT_FILE: attempt.encode()}
    if earlier or EARLIER_FILE in stored:
        changes[EARLIER_FILE] = json.dumps(earlier, sort_keys=True).encode()
    return changes


def _earlier(data: bytes) -> dict[str, str]:
    """Parse the content of ``EARLIER_FILE``. Return an empty dictionary if it is not valid."""
    try:
        found = json.loads(data)
    except ValueError:
        return {}
    return {str(name): str(attempt) for name, attempt in found.items()} if isinstance(found, dict) else {}


@dataclass(frozen=True)
class RankOutput:
    """The last output of one rank. ``failed``: True if the rank ended with an error."""

    text: str
    failed: bool

    @classmethod
    def of(cls, end: RankEnded) -> "RankOutput":
        """Return the output in the message of a pod's agent that a rank ended."""
        return cls(end.output or end.tail, failed=end.exit_code != 0)


def packed(
    outputs: Mapping[int, RankOutput], limit_nbytes: int = LIMIT_NBYTES, within_s: float = inf
) -> dict[str, bytes]:
    """Return the ``outputs`` (by rank number) as files: file name → gzip-compressed output.

    ``limit_nbytes``: maximum size of all files together, in base64. Outputs of failed ranks are packed first, then
    those of other ranks, in the order of their numbers. If an output does not fit, only its end is stored. If not even
    the last few hundred characters fit, this output and all further ones are omitted: to try thousands of them would
    take seconds. ``within_s``: omit the outputs that are left after this many seconds.
    """
    files: dict[str, bytes] = {}
    left, end_s = limit_nbytes, time.monotonic() + within_s
    for rank in sorted(outputs, key=lambda each: (not outputs[each].failed, each)):
        if not outputs[rank].text:
            continue
        if time.monotonic() >= end_s or (data := _end_that_fits(outputs[rank].text, left)) is None:
            break
        files[f"rank-{rank}.log.gz"] = data
        left -= stored_nbytes(data)
    return files


def _end_that_fits(text: str, limit_nbytes: int) -> bytes | None:
    """Return the text, or its end if it does not fit in ``limit_nbytes``; None if not even a short end fits."""
    while stored_nbytes(data := gzip.compress(text.encode(), mtime=0)) > limit_nbytes:
        if len(text) <= 256:
            return None
        text = text[-len(text) // 2 :]
    return data
