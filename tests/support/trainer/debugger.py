"""A debugger that attaches to a process. Until it ends, the parent of the process does not see the end of the process."""

import subprocess
import sys

_SEIZE = """
import ctypes, signal, sys
assert ctypes.CDLL(None).ptrace(0x4206, int(sys.argv[1]), 0, 0) == 0  # PTRACE_SEIZE
print(flush=True)
signal.pause()
"""


def debugging(pid: int) -> subprocess.Popen[bytes]:
    """Start a debugger, and return it when it has attached to the process ``pid``."""
    debugger = subprocess.Popen([sys.executable, "-c", _SEIZE, str(pid)], stdout=subprocess.PIPE)
    assert debugger.stdout is not None
    attached = debugger.stdout.readline() == b"\n"
    debugger.stdout.close()
    assert attached, f"cannot attach to process {pid}"
    return debugger
