"""Run by a fork as ``forked_planner.py PID …``: make plans in the place of the process PID, whose input and errors it uses.

The process PID is a stand-in (``support/trainer/stand_in.py``), and its standard output is that of this fork.
"""

import os
import sys

from dljob.controller.planning.worker import main

for number, mode in ((0, os.O_RDONLY), (2, os.O_WRONLY | os.O_APPEND)):
    os.dup2(os.open(f"/proc/{sys.argv[1]}/fd/{number}", mode), number)
main()
