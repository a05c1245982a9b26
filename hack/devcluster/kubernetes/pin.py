"""Move hack/kubernetes to another release: `hack/kubernetes/pin 1.37.3` rewrites go.mod and go.sum."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from devcluster.errors import ClusterError
from devcluster.kubernetes import build
from devcluster.kubernetes.release import MODULE, default_release, parse_release


def main() -> int:
    """Run the command and return its exit status."""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print(f"usage: hack/kubernetes/pin VERSION    (now {default_release()})")
        return 0 if sys.argv[1:] in (["-h"], ["--help"]) else 2
    try:
        release = parse_release(sys.argv[1])
        with tempfile.TemporaryDirectory(prefix="dljob-pin-") as scratch:
            module = Path(scratch, "work", "module")
            module.mkdir(parents=True)
            shutil.copy(MODULE / "main.go", module)
            build.write_module(module, release)
            build.tidy(module)
            for name in ("go.mod", "go.sum"):
                shutil.copy(module / name, MODULE / name)
    except (ClusterError, ValueError) as failure:
        print(f"hack/kubernetes/pin: {failure}", file=sys.stderr)
        return 1
    print(f"hack/kubernetes: Kubernetes {release}. Run hack/test full, then commit go.mod and go.sum")
    return 0


if __name__ == "__main__":
    sys.exit(main())
