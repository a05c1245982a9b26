"""The coordinator's record of the uploads of a script's checkpoint folder. It does no I/O and reads no clock."""

from bisect import bisect_right
from collections import deque

from dlcontract import Upload, UploadProblem, Uploads, reasons
from dltrain.protocol.rank_messages import RankMessage
from dltrain.protocol.upload_messages import NotUploaded, Uploaded

MAX_STEPS = 8192
STEP_S = 1.0
"""Any three successive steps whose time is kept span so many seconds at least. ``MAX_STEPS`` of them therefore last for
more than an hour, which is longer than an upload takes."""


class UploadRecord:
    """Accumulate the messages about uploads. ``uploads``: those so far; None: none of this job's messages has come."""

    def __init__(self, uploads: Uploads | None = None) -> None:
        self.uploads = uploads
        self._times_s: deque[float] = deque(maxlen=MAX_STEPS)
        self._steps: deque[int | None] = deque(maxlen=MAX_STEPS)
        """The steps of these times; None: the ranks were launched then, and resume from an unknown step."""

    def launched(self, now_s: float) -> None:
        """Record that the ranks are launched, which may repeat steps. ``now_s``: as in ``stepped``."""
        self._note(None, now_s)

    def stepped(self, step: int, now_s: float) -> None:
        """Record that the script has reported ``step``. ``now_s``: present time on a monotonic clock."""
        self._note(step, now_s)

    def _note(self, step: int | None, now_s: float) -> None:
        if len(self._times_s) > 1 and now_s < self._times_s[-2] + STEP_S:
            self._times_s.pop()
            self._steps.pop()
        self._times_s.append(now_s)
        self._steps.append(step)

    def with_step(self, message: RankMessage, now_s: float) -> RankMessage:
        """Return ``message``. If it reports an upload, add the step of the checkpoint, as far as it is known.

        It is the last step that the script had reported when it wrote the first file of the checkpoint, or one that it
        had reported less than ``STEP_S`` before. If the message arrives late, it may be one that was reported just
        after. It is unknown if these ranks had reported no step before, or only to an earlier coordinator. ``now_s``:
        time of arrival on the clock of ``stepped``.
        """
        if not isinstance(message, Uploaded) or message.upload is None or message.age_s is None:
            return message
        before = bisect_right(self._times_s, now_s - message.age_s)
        if before == 0:
            return message
        upload = message.upload.model_copy(update={"step": self._steps[before - 1]})
        return message.model_copy(update={"upload": upload})

    def record(self, message: Uploaded | NotUploaded) -> bool:
        """Record one message. Return True if the job's report should be sent at once because of it."""
        known = self.uploads or Uploads()
        if isinstance(message, NotUploaded):
            self.uploads = _with_problem(known, message)
            return (known.problem is None) != (message.reason is None) or (
                known.problem is not None and known.problem.reason != message.reason
            )
        last = message.upload
        if last is None or last.duration_s is None:
            self.uploads = known.model_copy(update=_resumed(known, last))
        else:
            if message.age_s is None and known.last is not None:  # Only logs or deletions are new.
                last = last.model_copy(update={"step": known.last.step})
            self.uploads = Uploads(
                count=known.count + 1,
                failures=known.failures,
                seconds=min(1e9, known.seconds + (last.duration_s or 0.0)),
                nbytes=min(2**63 - 1, known.nbytes + last.new_nbytes),
                last=last,
            )
        return True


def _resumed(known: Uploads, last: Upload | None) -> dict[str, object]:
    """Return what changes in ``known`` if the ranks resume from the commit ``last``, or from the start (None)."""
    if last is not None and known.last is not None and known.last.path == last.path:
        last = known.last  # It has the step and the duration, which the store does not know.
    # A store that can be read may still reject files: only a commit shows that it does not.
    failed = known.problem is not None and known.problem.reason == reasons.UPLOAD_FAILED
    return {"last": last, "problem": known.problem if failed else None}


def _with_problem(known: Uploads, message: NotUploaded) -> Uploads:
    if message.reason is None:
        return known.model_copy(update={"problem": None})
    before = known.problem
    since = before.unix_s if before is not None and before.reason == message.reason else message.unix_s
    problem = UploadProblem(reason=message.reason, message=message.message, unix_s=since)
    return known.model_copy(update={"problem": problem, "failures": known.failures + message.failed})
