"""The first process (PID 1) of a node's namespaces. It mounts folders, runs the node's daemons and reaps orphans.

`nodes.nodes` starts this process with one argument, the path of the node's JSON file. It is the first process of a PID
namespace, so when it ends, the kernel ends all processes in the node: daemons, shims and containers.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_MS_BIND, _MS_REC, _MS_SHARED = 4096, 16384, 1 << 20
_RESTART_S = 1.0
_libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: str, kind: str, flags: int = 0, data: str = "") -> None:
    """Call mount(2). Raise OSError with the target in its message."""
    if _libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode()):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), target)


def arrange(node: dict[str, Any]) -> None:
    """Mount separate /run, /proc, /var/log and /var/lib, so that the node does not write to those of the machine.

    ``node``: the content of the node's JSON file.
    """
    mount("", "/", "", _MS_REC | _MS_SHARED)  # kubelet and containerd propagate mounts among each other
    mount("proc", "/proc", "proc")
    mount("tmpfs", "/run", "tmpfs", 0, "mode=755")
    Path("/run/lock").mkdir()
    for source, target in node["binds"].items():
        mount(source, target, "", _MS_BIND)
    # kubelet would change these settings for the whole machine. It does not, because it reads the desired values here.
    for name, value in node["sysctls_shown"].items():
        shown = Path("/run/sysctl", name.replace("/", "."))
        shown.parent.mkdir(exist_ok=True)
        shown.write_text(f"{value}\n")
        mount(str(shown), f"/proc/sys/{name}", "", _MS_BIND)
    for name, value in node["sysctls"].items():
        Path("/proc/sys", name).write_text(f"{value}\n")
    socket.sethostname(node["name"])


def wait_for_socket(path: str) -> None:
    """Wait until a process accepts connections on the Unix socket `path`."""
    while True:
        with socket.socket(socket.AF_UNIX) as client:
            if client.connect_ex(path) == 0:
                return
        time.sleep(0.02)


def wait_for_api(address: str, port: int, ca: str) -> None:
    """Wait until the API server is healthy. A kubelet that starts earlier would wait for seconds before a retry."""
    tls = ssl.create_default_context(cafile=ca)
    while True:
        try:
            with (
                socket.create_connection((address, port), timeout=2) as plain,
                tls.wrap_socket(plain, server_hostname=address) as secure,
            ):
                secure.sendall(b"GET /readyz HTTP/1.0\r\n\r\n")
                if b" 200 " in secure.recv(64):
                    return
        except OSError:
            pass
        time.sleep(0.05)


def start(daemon: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Start a daemon and append its output to its log. Return its process.

    ``daemon``: {"command": command line, "log": path of the log}.
    """
    with Path(daemon["log"]).open("ab") as log:
        return subprocess.Popen(daemon["command"], stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/")


def main() -> None:
    node = json.loads(Path(sys.argv[1]).read_text())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    arrange(node)
    running: dict[int, dict[str, Any]] = {}
    for daemon in node["daemons"]:
        if daemon["after"] == "containerd":
            wait_for_socket(node["containerd_socket"])
        elif daemon["after"] == "api":
            wait_for_api(*node["api"])
        running[start(daemon).pid] = daemon
    while True:
        pid, status = os.wait()  # daemons, and orphans such as containerd's shims
        if pid in running:
            daemon = running.pop(pid)
            print(
                f"{daemon['command'][0]} ended with {os.waitstatus_to_exitcode(status)}: starting it again", flush=True
            )
            time.sleep(_RESTART_S)
            running[start(daemon).pid] = daemon


if __name__ == "__main__":
    main()
