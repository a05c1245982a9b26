"""Prepare a Python interpreter of a rank, and then run the image's own ``sitecustomize``.

Every Python imports a module of this name when it starts. The agent puts this folder before the PYTHONPATH of each rank
that runs a script for torchrun or an MPI program, so that it also works if a shell script starts Python. A
launcher such as torchrun then becomes its script, gloo's threads end before the interpreter does, and rank 0 is
observed. No error in here may reach the script.
"""

import sys

if sys.version_info >= (3, 5):  # noqa: UP036 - the Python of any image may read this
    import contextlib
    import importlib
    import importlib.machinery
    import importlib.util
    import os

    _own = os.path.abspath(__file__)  # noqa: PTH100 - pathlib takes longer to import
    _dltrain = os.path.dirname(os.path.dirname(os.path.dirname(_own)))  # noqa: PTH120

    def _running():  # type: () -> set[str]
        """Return the files of the ``sitecustomize`` that run now, above this one. Some also run the next one."""
        found, frame = set(), sys._getframe(1).f_back
        while frame is not None:
            if frame.f_globals.get("__name__") == "sitecustomize":
                found.add(os.path.abspath(frame.f_code.co_filename))  # noqa: PTH100 - load_module shares __file__
            frame = frame.f_back
        return found

    def _package(name):  # type: (str) -> str
        """Import a package of dltrain under a name of its own, without importing dltrain. Return that name."""
        folder, alias = os.path.join(_dltrain, name), "_dljob_" + name  # noqa: PTH118
        spec = importlib.util.spec_from_file_location(
            alias,
            os.path.join(folder, "__init__.py"),  # noqa: PTH118
            submodule_search_locations=[folder],
        )
        if spec is None or spec.loader is None:
            raise ImportError(folder)
        sys.modules[alias] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[alias])
        return alias

    _ran = _running()
    if _own not in _ran and sys.version_info >= (3, 8):
        with contextlib.suppress(Exception):  # The script must run whatever happens here.
            _launcher = importlib.import_module(_package("startup") + ".nested_launcher")
            _launcher.replace_launcher(os.environ)
            _launcher.replace_launches(os.environ)

        with contextlib.suppress(Exception):
            importlib.import_module("_dljob_startup.gloo_threads").end_at_exit()

        with contextlib.suppress(Exception):
            if os.environ.get("DLTRAIN_OBSERVE") in ("on", str(os.getpid())):  # ``observer.start`` explains it.
                importlib.import_module(_package("observation") + ".observer").start(
                    os.environ, importlib.import_module("_dljob_startup.imports").after_import
                )

    try:
        for _entry in list(sys.path):
            _next = importlib.machinery.PathFinder.find_spec("sitecustomize", [_entry])
            if _next is None or _next.loader is None or os.path.abspath(_next.origin or "") in _ran.union([_own]):  # noqa: PTH100
                continue
            _module = importlib.util.module_from_spec(_next)
            sys.modules["sitecustomize"] = _module
            _next.loader.exec_module(_module)
            break
    except Exception as _error:  # noqa: BLE001 - Python itself only prints such an error
        sys.stderr.write("Error in sitecustomize: %r\n" % (_error,))  # noqa: UP031
