"""``hack/crd-current``: build, start, test, end."""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from crdserver import build, serve
from devcluster.embedded import packages
from devcluster.errors import ClusterError
from devcluster.progress import Progress

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 300


def main() -> int:
    parser = argparse.ArgumentParser(prog="hack/crd-current", description=sys.modules["crdserver"].__doc__)
    parser.add_argument("--refresh", action="store_true", help="build from what unstable has today, not from the cache")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest")
    args = parser.parse_args()
    progress = Progress()
    try:
        packages.install({"etcd": "etcd-server", "openssl": "openssl"}, progress)
        binary = build.server(progress, refresh=args.refresh)
        with TemporaryDirectory(prefix="crd-current-") as folder, serve.serving(binary, Path(folder)) as address:
            progress.say(f"apiextensions-apiserver {build.version(binary)} serves on {address.url}")
            env = {"DLJOB_CRD_SERVER": address.url, "DLJOB_CRD_SERVER_PEM": folder}
            command = [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                "tests/crd_current",
                *args.pytest,
            ]
            return subprocess.run(command, cwd=ROOT, env={**os.environ, **env}, timeout=LIMIT_S, check=False).returncode
    except ClusterError as error:
        print(f"hack/crd-current: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
