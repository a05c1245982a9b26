"""What the container's cgroup tells about memory. Users: ``localranks``."""

from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


def oom_kills(root: Path = ROOT) -> int | None:
    """Processes of this container that the kernel killed for memory so far; None where it cannot be read.

    cgroup v2: ``memory.events``; v1: ``memory/memory.oom_control``. Both have a line ``oom_kill N``.
    """
    for path in (root / "memory.events", root / "memory" / "memory.oom_control"):
        try:
            text = path.read_text()
        except OSError:
            continue
        for line in text.splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return None
