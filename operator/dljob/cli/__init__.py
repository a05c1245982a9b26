"""The command line ``dljob plan | run | top | serve``, also available as ``kubectl dljob``.

Exit codes: 0 success; 1 no plan is possible, or the job failed; 2 invalid input, explained in one line; 130
interrupted.
"""

from dljob.cli.entry import main

__all__ = ["main"]
