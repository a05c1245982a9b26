"""Refuse the modules of dltrain that need a newer Python than this one, with an error that names the version.

``dltrain.report``, ``busy``, ``stop_requested`` and the callbacks for training libraries work from Python 3.8 on. An
injected agent shows dltrain to the Python of any image, so that these modules use no newer syntax and no newer part of
the standard library.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

_AVAILABLE = re.compile(
    r"dltrain\.(data|(protocol|reporting)(\..*)?|integrations(\.(accelerate|huggingface|lightning|logged_values))?)"
)
"""Matches the modules that ``import dltrain`` needs, and the callbacks."""


def allows(name: str) -> bool:
    """Return True if the module ``name`` of dltrain works from Python 3.8 on."""
    return _AVAILABLE.fullmatch(name) is not None


class _Refusal:
    """A finder of modules that raises ImportError for those of dltrain that need a newer Python."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> None:
        if name.startswith("dltrain.") and not allows(name):
            found = "%d.%d" % sys.version_info[:2]  # noqa: UP031
            raise ImportError(
                f"{name}: found Python {found}; expected Python 3.11 or newer. Use an image with a newer Python. "
                "dltrain.report, busy, stop_requested and the callbacks of dltrain.integrations work from 3.8 on",
                name=name,
            )


def refuse_other_modules() -> None:
    """Raise ImportError from now on where a script imports another part of dltrain than its reports need."""
    sys.meta_path.insert(0, _Refusal())
