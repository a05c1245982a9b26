"""Byte-compile the modules that a program imports, and no others. Both Dockerfiles run this script in a build step.

    python precompile.py MODULE… [-c STATEMENT]

The script imports each MODULE and executes the Python STATEMENT. Then it compiles all modules that were imported.

The root file system of pods is read-only, so Python would compile other modules in memory at every start. The .pyc
files are marked as unchecked, because Python would compare them with the times of the source files, and image layers
change these times.
"""

import importlib
import py_compile
import sys
from pathlib import Path


def main() -> None:
    names, _, statement = " ".join(sys.argv[1:]).partition(" -c ")
    for name in names.split():
        importlib.import_module(name)
    exec(statement, {})  # imports modules that the program imports only after its start
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    sources = sorted(one for one in files if one and one.endswith(".py") and one.startswith(sys.prefix))
    for source in sources:
        py_compile.compile(source, doraise=True, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    size = sum(Path(one).stat().st_size for one in sources)
    print(f"compiled {len(sources)} modules, {size / 1e6:.1f} MB of source")


if __name__ == "__main__":
    main()
