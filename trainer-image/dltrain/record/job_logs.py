"""The last output of each rank, packed so that it outlives the pods in the ConfigMap ``<job>-logs``.

The run report is packed there, too, see ``run_report.files``.
"""

import gzip
from collections.abc import Mapping
from dataclasses import dataclass

from dltrain.protocol.agent_messages import RankEnded

LIMIT_NBYTES = 256 * 2**10
"""Maximum size in bytes of all files in the ConfigMap together, after compression and base64 encoding.

A ConfigMap may have 1 MiB.
"""

REPORT_LIMIT_NBYTES = LIMIT_NBYTES // 2
"""Maximum size in bytes of the run report's files in the ConfigMap, a part of ``LIMIT_NBYTES``."""

ATTEMPT_FILE = "attempt"
"""Name of the file beside the stored output with the name of the newest attempt (launch of all ranks) it is from."""


def stored_nbytes(data: bytes) -> int:
    """Return the size in bytes that the file content ``data`` takes in a ConfigMap, which stores it in base64."""
    return 4 * -(-len(data) // 3)


def order(attempt: str) -> tuple[int, int]:
    """Return a key that sorts the names of attempts, which are ``TERM.NUMBER``, by time."""
    term, _, number = attempt.partition(".")
    return (int(term), int(number)) if term.isdecimal() and number.isdecimal() else (0, 0)


@dataclass(frozen=True)
class RankOutput:
    """The last output of one rank. ``failed``: True if the rank ended with an error."""

    text: str
    failed: bool

    @classmethod
    def of(cls, end: RankEnded) -> "RankOutput":
        """Return the output in the message of a pod's agent that a rank ended."""
        return cls(end.output or end.tail, failed=end.exit_code != 0)


def packed(outputs: Mapping[int, RankOutput], limit_nbytes: int = LIMIT_NBYTES) -> dict[str, bytes]:
    """Return the ``outputs`` (by rank number) as files: file name → gzip-compressed output.

    ``limit_nbytes``: maximum size of all files together, in base64. Outputs of failed ranks are packed first, then
    those of other ranks, in the order of their numbers. If an output does not fit, only its end is stored. If not even
    the last few hundred characters fit, the output is omitted.
    """
    files: dict[str, bytes] = {}
    left = limit_nbytes
    for rank in sorted(outputs, key=lambda each: (not outputs[each].failed, each)):
        text = outputs[rank].text
        while text:
            data = gzip.compress(text.encode(), mtime=0)
            if (nbytes := stored_nbytes(data)) <= left:
                files[f"rank-{rank}.log.gz"] = data
                left -= nbytes
                break
            text = text[-len(text) // 2 :] if len(text) > 256 else ""
    return files
