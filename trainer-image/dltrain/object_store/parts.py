"""The parts of one checkpoint that several pods upload, and how they agree that all parts belong together.

Nothing says when a script has written a checkpoint. In one folder, it is complete if nothing has changed for a while.
With a folder on each node, all of them must be complete **at the same moment**, or the commit would mix the parts of
two checkpoints. The clocks of nodes differ, so the moment is an event: the first pod (leader) writes a new number, the
round, to the store. Each other pod publishes its part with two numbers:

- ``after``: the round that it read after it had seen the folder in this state. The state is older than later rounds.
- ``until``: the round that it had read before it last saw the folder in this state.

So the folder was in this state when each round in ``after < round <= until`` began. If that holds for all parts, and
the leader saw its own folder unchanged before and after it began the round, then all states existed together at its
beginning, whatever was slow, repeated or reordered. Then the leader writes the commit marker. Until then, the files of
all parts are objects that nothing names, as those of any interrupted upload. If a pod is lost, its part misses, and
there is no marker; the agents then end the attempt.

At the end of the ranks, the order is the same for all: a pod uploads, writes that it has ended, and then reads who else
has. So the last pod to end sees that all have, and reports the end of its ranks only after the leader's last commit.
No pod waits for ranks that still train, which would hide a hang from the coordinator.

The objects are below ``attempts/ATTEMPT/``, so that a pod of
an earlier attempt is never heard.

Messages between agents would do as well. The store was chosen because the processes that copy are already separate from
the agents, every pod reads and writes it anyway, and agents of earlier releases do not know such messages.
"""

import json
import re
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from dltrain.object_store.client import ObjectStore
from dltrain.object_store.commit_log import DATA, StoredFile
from dltrain.object_store.content import Changes, Content, Seen

ATTEMPTS = "attempts/"
_PART = re.compile(r".*/parts/([^/]+)/(\d{10})\.json")
_FILE = re.compile(rf"{DATA}([^/]+)/(\d+)/")


class End(StrEnum):
    """How the ranks of a pod have ended."""

    EXITED = "exited"
    """All ranks have exited with code 0, so their files are complete."""
    KILLED = "killed"
    """A rank was killed or failed when it was asked to stop, but the folder had settled before."""
    INTERRUPTED = "interrupted"
    """A rank was killed or failed, and may have left incomplete files."""


@dataclass(frozen=True)
class Part:
    """The part of a pod: the changes in its folder since the attempt began, and the rounds at whose beginning it had
    them.

    ``run``: name of the pod's folder in the store. ``uploads``: number of its last upload. ``end``: how the ranks of
    the pod have ended, after which the folder changes no more; None while they run.
    """

    run: str
    uploads: int
    changes: Changes
    after: int
    until: int
    end: "End | None" = None

    def had_at(self, number: int) -> bool:
        """Return True if the folder of the pod was in this state when the round ``number`` began."""
        return self.after < number and (number <= self.until or self.end is not None)

    def needs(self, key: str) -> bool:
        """Return True if the pod has uploaded the object ``key`` for this part or is uploading it for the next one."""
        found = _FILE.match(key)
        if found is None or found[1] != self.run:
            return False
        return int(found[2]) > self.uploads or any(file.key == key for file in self.changes.written.files.values())

    def to_json(self) -> str:
        written = self.changes.written
        content = {
            "run": self.run, "uploads": self.uploads, "after": self.after, "until": self.until, "end": self.end,
            "files": {path: [file.key, file.nbytes, file.sha256] for path, file in written.files.items()},
            "deleted": sorted(self.changes.deleted),
        }  # fmt: skip
        return json.dumps(content | written.about)

    @classmethod
    def of(cls, text: bytes) -> "Part":
        """Parse a part. Raise ValueError or KeyError if it is invalid."""
        found = json.loads(text)
        files = {path: StoredFile(*each) for path, each in found["files"].items()}
        written = Content(files, {path: int(found["mtimes_ns"][path]) for path in files}, found["links"])
        changes = Changes(written, frozenset(found["deleted"]))
        end = None if found["end"] is None else End(found["end"])
        return cls(found["run"], int(found["uploads"]), changes, int(found["after"]), int(found["until"]), end)


@dataclass(frozen=True)
class Round:
    """What the leader has written last.

    ``number``: number of the round. ``dropped``: (path, state) of files that other pods must delete, because rank 0 has
    deleted their folder. ``ended``: True if the ranks of the leader's pod have ended and their files are uploaded.
    ``is_final``: True if the last commit of the attempt is written.
    """

    number: int = 0
    dropped: frozenset[tuple[str, Seen]] = frozenset()
    ended: bool = False
    is_final: bool = False


class PartExchange:
    """The objects with which the pods of one attempt (launch of all ranks) agree about the parts of a checkpoint."""

    def __init__(self, store: ObjectStore, attempt: str) -> None:
        self.store, self._prefix = store, f"{ATTEMPTS}{attempt}/"
        self._parts: dict[str, tuple[int, Part]] = {}
        self._published: dict[str, str] = {}

    def round(self) -> Round:
        """Return the last round; one with the number 0 if there was none. Raise OSError."""
        try:
            found: dict[str, Any] = json.loads(self.store.read(f"{self._prefix}round.json"))
        except FileNotFoundError:
            return Round()
        dropped = {(str(path), state if isinstance(state, str) else tuple(state)) for path, state in found["dropped"]}
        return Round(int(found["number"]), frozenset(dropped), found["ended"] is True, found["final"] is True)

    def announce(self, latest: Round) -> None:
        """Write ``latest``, as the leader. With a new number, this begins a new round. Raise OSError."""
        content = {
            "number": latest.number, "dropped": list(latest.dropped), "ended": latest.ended, "final": latest.is_final,
        }  # fmt: skip
        self.store.write(f"{self._prefix}round.json", json.dumps(content).encode())

    def publish(self, pod: str, part: Part) -> None:
        """Replace the part of ``pod``, which is this pod. Raise OSError.

        Each part is a new object, so that one listing shows the leader which parts are new.
        """
        folder = f"{self._prefix}parts/{pod}/"
        before = self._published.get(pod) or max(self.store.list(folder), default="")
        found = _PART.fullmatch(before)
        self._published[pod] = f"{folder}{1 + int(found[2]) if found else 1:010d}.json"
        self.store.write(self._published[pod], part.to_json().encode())
        if before:
            try_to_delete(self.store, [before])

    def parts(self) -> dict[str, Part]:
        """Return the newest part of each pod that has published one. Raise OSError."""
        newest: dict[str, int] = {}
        for key in self.store.list(f"{self._prefix}parts/"):
            if (found := _PART.fullmatch(key)) is not None:
                newest[found[1]] = max(int(found[2]), newest.get(found[1], 0))
        for pod, number in newest.items():
            if self._parts.get(pod, (0, None))[0] < number:
                try:
                    text = self.store.read(f"{self._prefix}parts/{pod}/{number:010d}.json")
                except FileNotFoundError:
                    continue  # The pod has replaced it meanwhile. The next listing shows the new one.
                try:
                    self._parts[pod] = (number, Part.of(text))
                except (KeyError, TypeError, ValueError, AttributeError) as error:
                    raise OSError(f"found an invalid part of pod {pod} ({type(error).__name__}: {error})") from None
        return {pod: part for pod, (_, part) in self._parts.items()}


def try_to_delete(store: ObjectStore, keys: Collection[str]) -> None:
    """Delete small objects that nothing reads any more. If the store refuses, they stay."""
    with suppress(OSError):
        store.delete(keys)


def confirmed(part: Part, number: int) -> Part:
    """Return ``part`` after its pod has seen the same state again, after it had read the round ``number``."""
    return replace(part, until=max(part.until, number))
