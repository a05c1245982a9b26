"""Start the observer in a Python interpreter of rank 0, and then run the image's own ``sitecustomize``.

Every Python imports a module of this name when it starts. The agent appends this folder to the rank's PYTHONPATH, so
that it also works if a shell script starts Python. No error in here may reach the script.
"""

import sys

if sys.version_info >= (3, 8):  # noqa: UP036 - the Python of any image may read this
    try:
        import importlib
        import importlib.util
        import os

        _own = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib takes longer to import
        _folder = os.path.dirname(_own)  # noqa: PTH120
        _spec = importlib.util.spec_from_file_location(
            "_dljob_observation",
            os.path.join(_folder, "__init__.py"),  # noqa: PTH118
            submodule_search_locations=[_folder],
        )
        _asked = os.environ.get("DLTRAIN_OBSERVE") in ("on", str(os.getpid()))  # ``observer.start`` explains it.
        if _asked and _spec is not None and _spec.loader is not None:
            _package = importlib.util.module_from_spec(_spec)
            sys.modules["_dljob_observation"] = _package
            _spec.loader.exec_module(_package)
            importlib.import_module("_dljob_observation.observer").start(os.environ)
    except Exception:  # noqa: BLE001 - the script must run whatever happens here
        pass

    try:
        import importlib.machinery

        _others = [entry for entry in sys.path if os.path.abspath(entry or ".") != _own]  # noqa: PTH100
        _next = importlib.machinery.PathFinder.find_spec("sitecustomize", _others)
        if _next is not None and _next.loader is not None:
            _module = importlib.util.module_from_spec(_next)
            sys.modules["sitecustomize"] = _module
            _next.loader.exec_module(_module)
    except Exception as _error:  # noqa: BLE001 - Python itself only prints such an error
        sys.stderr.write("Error in sitecustomize: %r\n" % (_error,))  # noqa: UP031
