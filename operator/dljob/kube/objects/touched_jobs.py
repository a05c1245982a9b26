"""Collect the keys of jobs of which a cached object changed, for the one reader that derives something from them."""

from collections.abc import Iterable


class TouchedJobs:
    """Keys (namespace and name) of the jobs of which an object changed since the reader last took them.

    Nothing is collected unless the reader runs. A replica of the operator that does not lead has no reader, and would
    otherwise keep the key of each job that its watches ever reported.
    """

    def __init__(self) -> None:
        self._keys: set[tuple[str, str]] | None = None
        """None while no reader runs."""

    def begin(self) -> None:
        """Collect keys from now on. The reader must look at all jobs once after this call."""
        self._keys = set()

    def end(self) -> None:
        """Drop all keys, and collect no others."""
        self._keys = None

    def note(self, keys: Iterable[tuple[str, str]]) -> None:
        if self._keys is not None:
            self._keys.update(keys)

    def take(self) -> set[tuple[str, str]]:
        """Return the keys that were collected since the last call."""
        if not self._keys:
            return set()
        taken, self._keys = self._keys, set()
        return taken
