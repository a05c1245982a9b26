"""``dljob-agent``: PID 1 of every trainer pod.

The agent starts, watches and ends the ranks of its pod, and reports their progress.

Exit codes: 0 after SIGTERM if the job was over or this pod had no ranks; 143 after SIGTERM otherwise; 64 for a wrong
configuration; 1 if another coordinator superseded this one, or after an internal error.
"""

import os
import signal
from typing import NoReturn


def main() -> NoReturn:
    """Run the agent until SIGTERM. See the module for the exit codes of the process.

    The kernel discards a signal to PID 1 that has no handler. So the handler is set before the agent is imported, which
    takes a second on a busy node. Otherwise a pod that is deleted meanwhile would stay for its whole grace period.
    """
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # No rank runs yet. ``Agent.run`` sets another handler.
    from dltrain.agent import agent

    agent.run()


if __name__ == "__main__":
    main()
