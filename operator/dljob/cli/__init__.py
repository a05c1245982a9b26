"""``dljob plan | run | top | serve``, also as ``kubectl dljob``.

Exit codes: 0 done; 1 no plan is possible, or the job failed; 2 wrong input, with one line that says what; 130
interrupted.
"""

from dljob.cli.entry import main

__all__ = ["main"]
