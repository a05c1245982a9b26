"""Pods that upload the parts of a checkpoint together, without agents and with a clock of their own."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dltrain.object_store.client import ObjectStore
from dltrain.object_store.commit_log import CommitLog
from dltrain.object_store.content import Changes, without_logs
from dltrain.object_store.parts import Part, PartExchange
from dltrain.object_store.staged_folder import StagedFolder, scan
from dltrain.object_store.watching import Following, Leading

LATER = 2e9
"""A time at which all files of a test have settled."""


@dataclass
class Pods:
    """The pods ``a``, ``b``, … of a job, each with a disk of its own, in one attempt after another."""

    directory: Path
    names: list[str] = field(default_factory=lambda: ["a", "b"])
    attempt: int = 0
    now_s: float = 0.0
    work: dict[str, Leading | Following] = field(default_factory=dict)

    def folder(self, pod: str) -> StagedFolder:
        folder = self.directory / pod / "job"
        folder.parent.mkdir(exist_ok=True)
        log = CommitLog(ObjectStore("s3://models/job"), 1)
        return StagedFolder(folder, log, 2, has_parts=len(self.names) > 1)

    def start(self) -> None:
        """Restore the folders of all pods, and start a new attempt."""
        self.attempt += 1
        name, store = f"1.{self.attempt}", ObjectStore("s3://models/job")
        sequence = self.folder(self.names[0]).restore(LATER)
        self.work = {}
        for pod in self.names[1:]:
            folder = self.folder(pod)
            folder.restore_sequence(sequence)
            PartExchange(store, name).publish(pod, Part(folder.log.run, 0, Changes(), 0, 0))
            self.work[pod] = Following(self.folder(pod), PartExchange(store, name), pod)
        self.work[self.names[0]] = Leading(self.folder(self.names[0]), PartExchange(store, name), self.names)
        for work in self.work.values():
            work.open()

    def write(self, pod: str, **files: str) -> None:
        for name, text in files.items():
            path = self.directory / pod / "job" / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def read(self, pod: str) -> dict[str, str]:
        folder = self.directory / pod / "job"
        return {path: (folder / path).read_text() for path in sorted(scan(folder))}

    def turn(self, *pods: str) -> None:
        """Let the folders of ``pods`` (all: without arguments), which have settled, do what is due."""
        for pod in pods or self.names:
            self.now_s += 1e-3
            self.work[pod]._ask_s = 0.0  # The time between two requests has passed.
            self.work[pod].settled(without_logs(scan(self.directory / pod / "job")))

    def turns(self, count: int = 4) -> None:
        for _ in range(count):
            self.turn()

    def commits(self) -> list[set[str]]:
        return [set(entry.files) for entry in self.folder("a").log.commits()]


class Clock:
    """The clock of the pods, and the end of a wait: it lets the other pods go on."""

    def __init__(self, pods: Pods) -> None:
        self._pods = pods
        self.unix_s = time.time()
        self.on_sleep: Callable[[], None] = lambda: None

    def time(self) -> float:
        return self.unix_s

    def monotonic(self) -> float:
        return self._pods.now_s

    def sleep(self, _: float) -> None:
        self.on_sleep()
