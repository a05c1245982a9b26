"""The last output of each rank, packed so that it outlives the pods in the ConfigMap ``<job>-logs``."""

import gzip
from collections.abc import Mapping
from dataclasses import dataclass

LIMIT_NBYTES = 256 * 2**10
"""Bytes of all files together, compressed and in base64. A ConfigMap holds 1 MiB."""


@dataclass(frozen=True)
class RankOutput:
    """The last output of one rank. ``failed``: the rank ended with an error."""

    text: str
    failed: bool


def packed(outputs: Mapping[int, RankOutput], limit_nbytes: int = LIMIT_NBYTES) -> dict[str, bytes]:
    """Return file name → gzip-compressed output, within the limit: failed ranks first, then by rank.

    If an output does not fit, its end is kept. Outputs that do not fit at all are left out.
    """
    files: dict[str, bytes] = {}
    left = limit_nbytes
    for rank in sorted(outputs, key=lambda each: (not outputs[each].failed, each)):
        text = outputs[rank].text
        while text:
            data = gzip.compress(text.encode(), mtime=0)
            nbytes = 4 * -(-len(data) // 3)
            if nbytes <= left:
                files[f"rank-{rank}.log.gz"] = data
                left -= nbytes
                break
            text = text[-len(text) // 2 :] if len(text) > 256 else ""
    return files
