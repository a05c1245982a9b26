"""Helm in tests: changes of the operator's release on the test cluster, with the project's own Helm."""

import subprocess
from pathlib import Path

from support.cluster.kubectl import ROOT, Kubectl

SYSTEM = "dljob-system"


def run(*command: str | Path, timeout_s: float) -> str:
    """Return the output of a command. Raise AssertionError with the end of its output if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout


def helm(kubectl: Kubectl, verb: str, *words: str, wait_s: int = 180) -> None:
    """Run a Helm command on the operator's release. Except for uninstall, wait until its pods are ready."""
    wait = () if verb == "uninstall" else ("--wait", "--timeout", f"{wait_s}s")
    where = ("--namespace", SYSTEM, "--kubeconfig", kubectl.kubeconfig)
    command = (ROOT / "hack/env", "--extra", "quickstart", ROOT / "hack/helm", verb, "dljob")
    run(*command, *words, *where, *wait, timeout_s=wait_s + 60)
