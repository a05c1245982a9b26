"""Small files of a job beside its checkpoints, on the volume or in the object store."""

import os

from dlcontract import Plan
from dltrain.protocol.volume_layout import checkpoint_place, job_directory


class JobFiles:
    """Files beside a job's checkpoints, on the volume or in the object store. The plan must have checkpoints."""

    def __init__(self, plan: Plan) -> None:
        self._folder = job_directory(plan)
        self._store = None
        if plan.checkpoint.uri is not None:
            from dltrain.object_store.client import ObjectStore  # takes time, and only these jobs need it

            self._store = ObjectStore(checkpoint_place(plan))

    def read(self, name: str) -> bytes:
        """Return the content of a file. Raise FileNotFoundError if it is missing, OSError if it cannot be read."""
        return (self._folder / name).read_bytes() if self._store is None else self._store.read(name)

    def write(self, name: str, content: bytes) -> None:
        """Write a file atomically, in place of an existing one. Raise OSError."""
        if self._store is not None:
            self._store.write(name, content)
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        temporary = self._folder / f".{name}.{os.getpid()}"
        temporary.write_bytes(content)
        temporary.replace(self._folder / name)
