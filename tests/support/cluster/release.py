"""The last release of dljob, for tests of upgrades."""

from pathlib import Path

import pytest

import releases


def last_release(made: pytest.TempPathFactory) -> Path:
    """Return the source of the last release, unpacked into a new folder."""
    last = releases.releases()[-1]
    folder = made.mktemp("release") / last.version
    releases.unpack(last.version, folder)
    return folder
