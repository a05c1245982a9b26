"""The command line ``dljob plan | run | top | logs | report | serve``, also available as ``kubectl dljob``.

Exit codes: 0 success; 1 no plan is possible, the job failed, or ``dljob run --timeout`` expired; 2 invalid input or an
error of the API server, explained in one line; 130 interrupted.
"""

from dljob.cli.entry import main

__all__ = ["main"]
