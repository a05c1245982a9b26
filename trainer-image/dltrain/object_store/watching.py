"""Upload the checkpoint folder of this pod whenever it has settled, alone or together with the folders of other pods.

``Alone`` is for a job in one pod. In a job on several nodes, the pod of rank 0 is ``Leading``: it combines the parts
that all pods have uploaded, and writes the commit marker. The others are ``Following``: each publishes its part
(``parts`` says how the pods agree).
"""

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Protocol

from dlcontract import reasons
from dltrain.object_store.content import Changes, Content, Seen, union, without_logs
from dltrain.object_store.parts import End, Part, PartExchange, Round, confirmed
from dltrain.object_store.reading import tell
from dltrain.object_store.staged_folder import SETTLE_S, WRITERS, ChangedError, StagedFolder, is_emptied, scan

POLL_S = 1.0
ASK_S = 2.0
"""Seconds between two requests of one pod about the parts of other pods, while nothing is uploaded."""
AGAIN_S = 15.0
"""Seconds between two attempts to upload the folder while the store returns errors."""
GIVE_UP_S = 300.0
"""Seconds for which uploads may fail before the ranks are restarted, which shows the error in the job's status."""
TRIES_AGAIN = f"The agent tries again every {AGAIN_S:g} s. After {GIVE_UP_S / 60:g} minutes, the ranks restart"
UNSETTLED_S = 60.0
"""Seconds without an upload of a folder that changes all the time, after which a warning names the reason.

If the folder settles after the warning, the next one comes after twice as long: a large checkpoint takes minutes to
write."""
LATE_S = 20.0
"""Seconds that pods which have written parts before, or may do so, have to begin with their part of a checkpoint.

A folder that has not changed yet looks as settled as one of a pod that writes nothing. Before the first commit of a
job, all pods may write."""
FINAL_TRIES = 5
LEFT_TO_OTHERS = "uploaded the last files of rank 0's pod; the commit waits for the other pods"
"""Message after which the agent of rank 0's pod may report the end of its ranks: the last pod waits for the commit."""


class Work(Protocol):
    """The part of this pod in uploading checkpoints. ``folder``: the folder with its checkpoints."""

    folder: StagedFolder

    def open(self) -> None:
        """Continue with the content of the folder and the commit from which it comes. Raise OSError, DamagedError."""

    def settled(self, state: Mapping[str, Seen]) -> None:
        """Do what is due while the folder, without logs, is in the settled ``state``.

        Raise ChangedError if it changes meanwhile, FencedError if another coordinator has taken over, and OSError if
        the store fails.
        """

    def finish(self, *, exited: bool) -> None:
        """Upload the folder after the ranks of this pod have ended. Raise as ``settled`` does.

        ``exited``: True if all ranks exited with code 0. Otherwise, they were killed when they were asked to stop.
        """


class Alone:
    """A folder that has the whole checkpoint."""

    def __init__(self, folder: StagedFolder) -> None:
        self.folder = folder

    def open(self) -> None:
        self.folder.open()

    def settled(self, state: Mapping[str, Seen]) -> None:
        committed = self.folder.committed
        if state != without_logs(committed) and not is_emptied(committed, state):
            self.folder.upload()

    def finish(self, *, exited: bool) -> None:
        lacks_files = is_emptied(self.folder.committed, scan(self.folder.folder)) and not exited
        if lacks_files or end_of(self.folder, self.folder.content, exited) is End.INTERRUPTED:
            tell(
                "discarded the changes since the last checkpoint, because ranks were killed less than "
                f"{SETTLE_S:g} s after they had written or deleted files, or had deleted all files"
            )
        else:
            self.folder.upload(final=True)


class Following:
    """The folder of a pod that publishes its part for the leader."""

    def __init__(self, folder: StagedFolder, exchange: PartExchange, pod: str) -> None:
        self.folder, self._exchange, self._pod = folder, exchange, pod
        self._start = self._content = Content()
        self._part = Part(folder.log.run, 0, Changes(), 0, 0)
        self._is_published = True
        """False if the store failed when the part was written. The leader may then know an older part only."""
        self._ask_s = 0.0

    def open(self) -> None:
        self.folder.open()
        self._start = self._content = self.folder.content
        number = self._exchange.round().number
        self._part = Part(self.folder.log.run, 0, Changes(), number, number)

    def settled(self, state: Mapping[str, Seen]) -> None:
        changed = state != without_logs(self._content.seen)
        if not changed and time.monotonic() < self._ask_s:
            return
        self._ask_s = time.monotonic() + ASK_S
        latest = self._exchange.round()
        if without_logs(scan(self.folder.folder)) != state:
            raise ChangedError("a file")
        if changed:
            self._upload(latest.number, state)
        elif latest.number > self._part.until or not self._is_published:
            self._publish(confirmed(self._part, latest.number))
        self._drop(latest.dropped)

    def finish(self, *, exited: bool) -> None:
        end = end_of(self.folder, self._content, exited)
        self._upload(self._exchange.round().number, without_logs(scan(self.folder.folder)), end)
        if self._exchange.round().ended and all(part.end is not None for part in self._exchange.parts().values()):
            while not self._exchange.round().is_final:
                time.sleep(POLL_S)  # The agent ends this process if the attempt ends, such as after an error.

    def _upload(self, number: int, state: Mapping[str, Seen], end: End | None = None) -> None:
        """Upload the folder and publish the part. ``state``: its state before the round ``number`` was read."""
        began_s, before = time.monotonic(), self._content.files
        content = self._content = self.folder.upload_content(self._content, state)
        changes = Changes.between(self._start, content)
        self._publish(Part(self.folder.log.run, self.folder.uploads, changes, number, number, end))
        new = [file.nbytes for path, file in content.files.items() if before.get(path) != file]
        if new:
            seconds, uri = time.monotonic() - began_s, self.folder.log.store.uri
            tell(f"uploaded {len(new)} files, {sum(new) / 1e6:.1f} MB, of this pod to {uri} in {seconds:.1f} s")

    def _publish(self, part: Part) -> None:
        self._part, self._is_published = part, False
        self._exchange.publish(self._pod, part)
        self._is_published = True

    def _drop(self, files: Collection[tuple[str, Seen]]) -> None:
        """Delete uploaded files whose folder rank 0 has deleted, as a shared volume would lose them.

        Otherwise, parts of old checkpoints would fill the disk of this node. ``files``: their (path, state). A file
        that the script has written again since has another state, and stays.
        """
        here = scan(self.folder.folder) if files else {}
        for path, state in self._content.seen.items():
            if (path, state) in files and here.get(path) == state:
                (self.folder.folder / path).unlink(missing_ok=True)


class Leading:
    """The folder of rank 0's pod, and the commits of the parts of all pods. ``pods``: their names, this pod first."""

    def __init__(self, folder: StagedFolder, exchange: PartExchange, pods: Sequence[str]) -> None:
        self.folder, self._exchange, self._pods = folder, exchange, pods
        self._start = self._content = self._committed = Content()
        """The content with which all pods have started, that of this pod's last upload, and that of the last commit."""
        self._start_writers: Mapping[str, str] = {}
        self._writers: set[str] = set()
        """Pods that have written some file of an earlier commit."""
        self._at_commit: Mapping[str, Changes] = {}
        self._folders: dict[tuple[str, Seen], Path] = {}
        """(path, state) of files of other pods → the innermost folder around the file that this pod has had as well."""
        self._number = 0
        self._begun: Mapping[str, Seen] | None = None
        """The state of this pod's folder before and after the current round began; None if there is no such round."""
        self._pending_s: float | None = None
        self._ask_s = 0.0
        self._warn_s = float("inf")
        self._tolerated = False
        """True if the log has named agents of an earlier release."""

    def open(self) -> None:
        self.folder.open()
        self._start = self._content = self._committed = self.folder.content
        self._number = self._exchange.round().number
        about = {} if self.folder.base is None else self.folder.base.about
        self._start_writers = dict(about.get(WRITERS, {}))
        writers = {self._start_writers.get(path, self._pods[0]) for path in self._start.seen}
        is_known = WRITERS in about and writers <= set(self._pods)
        self._writers = writers if is_known else set(self._pods)

    def settled(self, state: Mapping[str, Seen]) -> None:
        now_s = time.monotonic()
        if now_s < self._ask_s:
            return
        self._ask_s = now_s + ASK_S
        parts = self._parts()
        self._upload(state)
        content, writers, changes = self._union(parts)
        before, now = self._committed.seen, content.seen
        if without_logs(now) == without_logs(before) or is_emptied(before, now):
            self._begun, self._pending_s = None, None
            self.folder.notices.solved(reasons.PARTS_MISSING)
            return
        if self._pending_s is None:
            self._pending_s, self._warn_s = now_s, now_s + UNSETTLED_S
            self._tell_missing(parts)
        is_old = self._begun != state or any(part.after >= self._number for part in parts.values())
        if is_old:
            self._begin(state)
        late = [pod for pod, part in parts.items() if is_old or not part.had_at(self._number)]
        late += self._late(changes, now_s)
        if not late:
            self._commit(content, writers, changes, parts, self._pending_s)
        elif not is_old and now_s >= self._warn_s:
            self._warn_s = float("inf")
            text = (
                f"a checkpoint waits for the folders of the pods {', '.join(sorted(set(late)))}: expected no change in "
                f"them for {SETTLE_S:g} s. Until then, it is not complete"
            )
            tell(text)
            text = f"{text}. Look at the lines [checkpoints] in their logs"
            self.folder.notices.problem(reason=reasons.PARTS_MISSING, message=text)

    def finish(self, *, exited: bool) -> None:
        began_s = time.monotonic() if self._pending_s is None else self._pending_s
        end = end_of(self.folder, self._content, exited)
        self._content = self.folder.upload_content(self._content, without_logs(scan(self.folder.folder)))
        self._exchange.announce(Round(self._number, ended=True))
        parts, has_told = self._parts(), False
        while not all(part.end is not None for part in parts.values()):
            if not has_told:
                tell(LEFT_TO_OTHERS)
            has_told = True
            time.sleep(POLL_S)  # The agent ends this process if the attempt ends, such as after a lost pod.
            parts = self._parts()
        self._tell_missing(parts)
        content, writers, changes = self._union(parts)
        ends = {self._pods[0]: end, **{pod: part.end for pod, part in parts.items()}}
        torn = [pod for pod, each in ends.items() if each is End.INTERRUPTED]
        if any(each is not End.EXITED for each in ends.values()):
            torn += self._late(changes, time.monotonic())
            torn += self._pods[:1] if is_emptied(self._committed.seen, content.seen) else []
        if content.seen != self._committed.seen and not torn:
            self._commit(content, writers, changes, parts, began_s)
        elif torn and without_logs(content.seen) != without_logs(self._committed.seen):
            killed = ", ".join(dict.fromkeys(torn))
            tell(
                f"discarded the changes since the last checkpoint, because ranks of the pods {killed} were killed "
                "before they had written theirs, or meanwhile"
            )
        self._exchange.announce(Round(self._number, ended=True, is_final=True))

    def _late(self, changes: Mapping[str, Changes], now_s: float) -> list[str]:
        """Return the pods that have not changed since the last commit, but may still begin with their part."""
        if self._pending_s is not None and now_s - self._pending_s >= LATE_S:
            return []
        writing = self._writers & changes.keys()
        return sorted(pod for pod in writing if changes[pod].state == self._at_commit.get(pod, Changes()).state)

    def _parts(self) -> dict[str, Part]:
        """Return the parts of the other pods."""
        found = self._exchange.parts()
        return {pod: found[pod] for pod in self._pods[1:] if pod in found}

    def _tell_missing(self, parts: Mapping[str, Part]) -> None:
        """Name the pods that have published no part although ranks run. Their agents are of an earlier release.

        Agents of this release publish a part before any rank starts. For the others, the leader does what the earlier
        releases do: only the folder of rank 0 is uploaded.
        """
        missing = [pod for pod in self._pods[1:] if pod not in parts]
        if missing and not self._tolerated:
            self._tolerated = True
            tell(
                f"the agents of the pods {', '.join(missing)} are of an earlier release, which uploads no files of "
                "these pods"
            )

    def _upload(self, state: Mapping[str, Seen]) -> None:
        if state != without_logs(self._content.seen):
            self._content = self.folder.upload_content(self._content, state)

    def _union(self, parts: Mapping[str, Part]) -> tuple[Content, dict[str, str], dict[str, Changes]]:
        changes = {self._pods[0]: Changes.between(self._start, self._content)}
        changes |= {pod: part.changes for pod, part in parts.items()}
        self._note_folders(parts)
        content, writers = union(self._start, self._start_writers, changes, self._dropped())
        return content, writers, changes

    def _dropped(self) -> set[tuple[str, Seen]]:
        """Return (path, state) of files whose folder was on this node, too, and rank 0 has deleted it since.

        A folder that rank 0 has not created yet is therefore not taken for one that it has deleted.
        """
        return {file for file, folder in self._folders.items() if not folder.is_dir()}

    def _note_folders(self, parts: Mapping[str, Part]) -> None:
        files = [*self._start.seen.items(), *(each for p in parts.values() for each in p.changes.written.seen.items())]
        found = {}
        for file in files:
            top = self.folder.folder
            around = (top / parent for parent in PurePosixPath(file[0]).parents if parent.name)
            folder = self._folders.get(file) or next((each for each in around if each.is_dir()), None)
            if folder is not None:
                found[file] = folder
        self._folders = found

    def _begin(self, state: Mapping[str, Seen]) -> None:
        """Begin a new round for this ``state`` of the folder, which must be the same before and after it begins."""
        self._begun = None
        self._number += 1  # Before the request, because a request that fails may have had an effect.
        self._exchange.announce(Round(self._number, frozenset(self._dropped())))
        if without_logs(scan(self.folder.folder)) != state:
            raise ChangedError("a file")
        self._begun = state

    def _commit(
        self,
        content: Content,
        writers: dict[str, str],
        changes: dict[str, Changes],
        parts: Mapping[str, Part],
        began_s: float,
    ) -> None:
        runs = [part.run for part in parts.values()]
        entry = self.folder.commit(content, writers, runs, lambda key: any(part.needs(key) for part in parts.values()))
        if not self._at_commit:
            self._writers = {writers.get(path, self._pods[0]) for path in content.seen}
        self._writers |= {pod for pod, each in changes.items() if each.written.seen}
        self.folder.notices.committed(self.folder.log, entry, self._committed, time.monotonic() - began_s)
        self._committed, self._at_commit = content, changes
        self._begun, self._pending_s = None, None


def watch(work: Work, stop: threading.Event, exited: Callable[[], bool] = lambda: True) -> None:
    """Upload the folder of ``work`` whenever it has settled, until ``stop`` is set, and then a last time.

    ``exited``: returns True, when ``stop`` is set, if all ranks of this pod have exited with code 0. Raise FencedError
    if another coordinator has taken over, and OSError if uploads fail for ``GIVE_UP_S`` seconds.
    """
    work.open()
    folder = work.folder
    last, changed_s = without_logs(folder.committed), time.monotonic()
    settled_s, again_s, failing_s = changed_s, 0.0, None
    warned, unsettled_s = False, UNSETTLED_S
    while not stop.wait(POLL_S):
        folder.note_time()
        now, now_s = without_logs(scan(folder.folder)), time.monotonic()
        if now != last:
            differing = next((path for path in sorted(now) if now[path] != last.get(path)), "a deleted file")
            last, changed_s = now, now_s
            if now_s - settled_s > unsettled_s and not warned:
                warned = True
                text = (
                    f"{folder.folder}: found changes all the time, last in {differing:.200}; expected no change for "
                    f"{SETTLE_S:g} s. Write logs elsewhere, or name them *.log: until then, nothing is uploaded"
                )
                tell(text)
                folder.notices.problem(reason=reasons.FOLDER_CHANGES, message=text)
        elif now_s - changed_s >= SETTLE_S and now_s >= again_s:
            try:
                work.settled(now)
                settled_s, failing_s = time.monotonic(), None
                warned, unsettled_s = False, 2 * unsettled_s if warned else unsettled_s
                folder.notices.solved(reasons.UPLOAD_FAILED, reasons.FOLDER_CHANGES)
            except ChangedError:
                changed_s = time.monotonic()
            except OSError as error:
                failing_s = failing_s or now_s
                if time.monotonic() - failing_s > GIVE_UP_S:
                    raise
                settled_s = again_s = time.monotonic() + AGAIN_S
                found = str(error.strerror or error)
                tell(f"cannot upload the checkpoints ({found}); trying again in {AGAIN_S:g} s")
                folder.notices.upload_failed(folder.log.store.uri, found, TRIES_AGAIN)
    finish(work, exited=exited())


def finish(work: Work, *, exited: bool) -> None:
    """Upload the folder of ``work``, which is open, after the ranks of this pod have ended. Raise as ``watch`` does.

    ``exited``: True if all of them exited with code 0.
    """
    for tries in range(FINAL_TRIES):
        try:
            work.finish(exited=exited)
        except ChangedError:
            if tries == FINAL_TRIES - 1:
                raise
            time.sleep(POLL_S)
        else:
            return


def end_of(folder: StagedFolder, uploaded: Content, exited: bool) -> End:
    """Return how the ranks of this pod have ended, just now. ``uploaded``: content that was complete before.

    ``exited``: True if all of them exited with code 0.
    """
    if exited:
        return End.EXITED
    return End.KILLED if folder.newest_change_s(uploaded.seen) <= time.time() - SETTLE_S else End.INTERRUPTED
