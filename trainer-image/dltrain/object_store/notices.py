"""What the process that copies checkpoints tells its agent: commits, and why nothing is uploaded.

The agent of rank 0's pod passes a pipe to the process. Without a pipe, such as in other pods, nothing is sent.
"""

import os
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import PurePosixPath

from dlcontract import MAX_UPLOAD_MESSAGE, Upload, reasons
from dltrain.object_store.commit_log import CommitLog, Entry
from dltrain.object_store.content import Content, is_log
from dltrain.object_store.reading import tell
from dltrain.protocol.upload_messages import NotUploaded, Uploaded, UploadMessage

MAX_PATH, MAX_NAME = 1024, 253


class UploadNotices:
    """Sends messages about uploads to the agent. ``fd``: descriptor of the pipe to it; None: nobody listens."""

    def __init__(self, fd: int | None = None) -> None:
        self._fd = fd
        self._problem: str | None = None
        """Reason of the last message that nothing is uploaded; None: a later message has revoked it."""

    def committed(self, log: CommitLog, entry: Entry, before: Content, duration_s: float) -> None:
        """Log and send that this process has committed ``entry``. ``before``: the content of the commit before."""
        mb = sum(file.nbytes for file in entry.files.values()) / 1e6
        tell(f"uploaded {len(entry.files)} files, {mb:.1f} MB in all, to {log.store.uri} in {duration_s:.1f} s")
        self._problem = None
        self._send(uploaded(log.uri(entry), entry, before, duration_s, time.time()))

    def resumes(self, log: CommitLog, entry: Entry | None) -> None:
        """Send that the ranks resume from ``entry``, which an earlier process has committed; None: from the start."""
        self._problem = None
        self._send(Uploaded(upload=None) if entry is None else uploaded(log.uri(entry), entry))

    def problem(self, reason: str, message: str, *, failed: bool = False) -> None:
        """Send why nothing is uploaded. ``failed``: True if an attempt to upload has failed."""
        self._problem = reason
        text = _printable(message, MAX_UPLOAD_MESSAGE)
        self._send(NotUploaded(reason=reason, message=text, failed=failed, unix_s=time.time()))

    def solved(self, *solved: str) -> None:
        """Revoke the last message that nothing is uploaded if its reason is one of ``solved``."""
        if self._problem in solved:
            self._problem = None
            self._send(NotUploaded())

    def upload_failed(self, uri: str, error: str, next_step: str) -> None:
        """Send that an attempt to upload to ``uri`` has failed. ``next_step``: what the agent does about it."""
        text = (
            f"spec.checkpoint.uri: found {error:.500} while files were uploaded to {uri}; expected a store that can be "
            "reached and written. Look at the store, its free space, and the permissions of the credentials in "
            f"spec.checkpoint.secretName. {next_step}"
        )
        self.problem(reason=reasons.UPLOAD_FAILED, message=text, failed=True)

    def _send(self, message: UploadMessage) -> None:
        if self._fd is not None:
            with suppress(OSError):  # The agent has ended. The next one asks the store.
                os.write(self._fd, message.model_dump_json().encode() + b"\n")


def uploaded(
    path: str, entry: Entry, before: Content | None = None, duration_s: float | None = None, now_unix_s: float = 0.0
) -> Uploaded:
    """Return the message about the commit ``entry`` with the URI ``path``.

    ``before``: the content of the commit before; None: unknown, because an earlier process has made this one.
    ``now_unix_s``: the present time. Raise DamagedError if ``entry`` is invalid.
    """
    content = Content.of(entry)
    had = set() if before is None else {file.key for file in before.files.values()}
    new = {name for name, file in content.files.items() if file.key not in had}
    name, first_ns = _checkpoint(content, new)
    return Uploaded(
        upload=Upload(
            unix_s=max(0.0, entry.unix_s),
            path=_printable(path, MAX_PATH),
            name=_printable(name, MAX_NAME),
            nbytes=sum(file.nbytes for file in content.files.values()),
            files=len(content.files),
            new_nbytes=0 if before is None else sum(content.files[each].nbytes for each in new),
            duration_s=duration_s,
        ),
        age_s=None if before is None or first_ns is None else max(0.0, now_unix_s - first_ns / 1e9),
    )


def _printable(text: str, limit: int) -> str:
    """Return at most ``limit`` characters of ``text``, with ? for each that cannot be printed.

    Names of files may have any bytes. Those that are no UTF-8 cannot be sent.
    """
    return "".join(char if char.isprintable() else "?" for char in text[:limit])


def _checkpoint(content: Content, new: Collection[str]) -> tuple[str, int | None]:
    """Return (name of the checkpoint, time in ns at which its first new file was written; None without one).

    It is the folder at the top that has the newest of the files ``new`` or, if none of them is in a folder, the newest
    of these files. Small files at the top, such as ``latest`` of DeepSpeed, only point to a folder. Logs do not count,
    unless there is nothing else. If only logs are new, the checkpoint is the newest of those that are there.
    """
    no_logs = [path for path in content.files if not is_log(path)]
    files = [path for path in no_logs if path in new] or no_logs or list(content.files)
    in_folders = [path for path in files if "/" in path]
    newest = max(in_folders or files, key=lambda path: (content.times_ns[path], path), default=None)
    if newest is None:
        return "", None
    name = PurePosixPath(newest).parts[0]
    written = [content.times_ns[path] for path in no_logs if path in new and PurePosixPath(path).parts[0] == name]
    return name, min(written, default=None)
