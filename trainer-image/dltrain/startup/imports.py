"""Call a function after the script has imported a module, without importing it earlier.

This module must run in the Python of any image. It therefore needs the standard library of Python 3.8 only, and imports
nothing of dltrain.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any


def after_import(name: str, then: Callable[[Any], None]) -> None:
    """Call ``then`` with the module ``name``: at once if the script has imported it, otherwise after its import."""
    module = sys.modules.get(name)
    if module is None:
        sys.meta_path.insert(0, _Awaiting(name, then))
    else:
        then(module)


class _Awaiting:
    """A finder of modules that calls ``then`` with the module ``name`` after the script has imported it.

    It stays until then, because a script may look for the module before, without importing it.
    """

    def __init__(self, name: str, then: Callable[[Any], None]) -> None:
        self._name, self._then = name, then
        self._is_asking = self._is_done = False

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        if name != self._name or self._is_asking or self._is_done:
            return None
        self._is_asking = True  # Another finder may ask all of them, as this one does.
        try:
            found = (finder.find_spec(name, path, target) for finder in sys.meta_path if hasattr(finder, "find_spec"))
            spec = next((spec for spec in found if spec is not None), None)
        finally:
            self._is_asking = False
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                load(module)
                self._imported(module)

            with contextlib.suppress(AttributeError):  # A loader that cannot be changed: ``then`` is not called.
                spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _imported(self, module: Any) -> None:
        """Call ``then`` once. This finder stays in the list, over which another thread may iterate."""
        if not self._is_done:
            self._is_done = True
            self._then(module)
