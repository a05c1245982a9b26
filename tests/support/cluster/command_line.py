"""Run the command line against a real cluster, with the permissions of a kubeconfig."""

import os
import subprocess
import sys
from pathlib import Path

from support.cluster.kubectl import ROOT, Kubectl

COMMAND = (sys.executable, "-m", "dljob.cli")


def environment(kubectl: Kubectl) -> dict[str, str]:
    paths = os.pathsep.join(str(ROOT / part) for part in ("operator", "operator/contract"))
    return os.environ | {"KUBECONFIG": kubectl.kubeconfig, "PYTHONPATH": paths}


def dljob(kubectl: Kubectl, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [*COMMAND, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment(kubectl),
    )


def started(kubectl: Kubectl, output: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start a command that goes on. ``output``: the file that gets what it prints, also to standard error."""
    with output.open("w") as file:
        return subprocess.Popen(
            [*COMMAND, *arguments], stdout=file, stderr=subprocess.STDOUT, text=True, env=environment(kubectl)
        )
