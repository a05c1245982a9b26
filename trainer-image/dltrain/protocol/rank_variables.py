"""Names of the environment variables that an agent sets for its ranks, and the signal that it sends them.

``agent.member.local_ranks`` sets them, and ``host.cgroup`` decides the number of threads (OMP_NUM_THREADS). This module
needs the standard library only, so that scripts can report from any Python interpreter from 3.8 on.
"""

import signal

SOCKET_ENV = "DLTRAIN_SOCKET"
PLAN_ENV = "DLTRAIN_PLAN"
OBSERVE_ENV = "DLTRAIN_OBSERVE"
"""Name of the environment variable with which an agent asks a rank to observe its script (``observation``): on.

The observed process replaces the value with its process id, so that only this process reports."""
MEMORY_ENV = "DLTRAIN_MEMORY"
"""Name of the environment variable with the path of the pod's in-memory directory. It stores a copy of the training
state, from which ranks resume after a restart in the same pod."""

WHERE = signal.SIGUSR2
"""The signal that an agent sends to a hung rank. The rank writes the stack of each thread to its log."""
