"""The command line of `hack/cluster`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from devcluster.errors import ClusterError
from devcluster.kubernetes.release import default_release, parse_release
from devcluster.model import ClusterSpec, parse_cluster, parse_switches
from devcluster.prepare import prepare
from devcluster.progress import Progress
from devcluster.providers import PROVIDERS, choose


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    options = _parser().parse_args(arguments)
    progress = Progress(quiet=options.quiet)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM ends the command like Ctrl-C
    try:
        provider = choose(options.provider, options.name, progress)
        if options.command == "up":
            provider.up(_asked_for(options), options.recreate)
            print(provider.kubeconfig())
        elif options.command == "prepare":
            print(prepare(_asked_for(options), provider, progress))
        elif options.command == "down":
            provider.down()
        elif options.command == "status":
            facts = provider.status()
            print(json.dumps(facts, indent=1))
            return 0 if facts["running"] else 3
        elif options.command == "kubeconfig":
            path = provider.kubeconfig()
            print(path.read_text() if options.raw else path)
        elif options.command == "kubectl":
            client = provider.kubectl()
            words = options.words[1:] if options.words[:1] == ["--"] else options.words
            if not words:
                print(client)
            else:
                os.environ["KUBECONFIG"] = str(provider.kubeconfig())
                os.execv(client, [str(client), *words])
        elif options.command == "load":
            provider.load(options.archives)
        else:
            provider.node(options.action, options.node_name)
    except (ClusterError, ValueError) as failure:
        print(f"hack/cluster: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("hack/cluster: stopped", file=sys.stderr)
        return 130
    return 0


def _asked_for(options: argparse.Namespace) -> ClusterSpec:
    """Return the cluster that the options of the command `up` describe. Raise ValueError for invalid options."""
    kubernetes = str(options.kubernetes.resolve()) if options.kubernetes else ""
    if options.kubernetes_version:
        if kubernetes:
            raise ValueError("--kubernetes and --kubernetes-version: found both; expected one of them")
        kubernetes = str(parse_release(options.kubernetes_version))
    return replace(
        parse_cluster(options.name, options.node, options.nodes),
        kubernetes=kubernetes,
        feature_gates=parse_switches("--feature-gates", options.feature_gates),
        runtime_config=parse_switches("--runtime-config", options.runtime_config),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hack/cluster", description="A Kubernetes cluster for development and tests.")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--name", default=os.environ.get("DLJOB_CLUSTER", "dev"), help="name of the cluster (default: dev)"
    )
    common.add_argument("--provider", choices=PROVIDERS, help="default: kind where Docker works, else embedded")
    common.add_argument("--quiet", action="store_true", help="print no progress")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    up = argparse.ArgumentParser(add_help=False)
    shared = [common, up]
    up.add_argument("--nodes", type=int, help="number of nodes (default: 3, or the number of --node options)")
    up.add_argument(
        "--node",
        action="append",
        default=[],
        metavar="SPEC",
        help="one node: device=LABEL,cpu=CORES,memory=4Gi,gpu=PRODUCT:COUNT,name=NAME, each optional; repeatable",
    )
    up.add_argument("--kubernetes", type=Path, metavar="DIR", help="use the programs in this folder (embedded only)")
    up.add_argument(
        "--kubernetes-version", metavar="X.Y.Z", help=f"release to run (default {default_release()}, the newest)"
    )
    up.add_argument(
        "--feature-gates", default="", metavar="NAME=true,…", help="feature gates of all components of Kubernetes"
    )
    up.add_argument("--runtime-config", default="", metavar="GROUP/VERSION=true,…", help="APIs to serve as well")
    up.add_argument("--recreate", action="store_true", help="replace a cluster that runs with other nodes")
    commands.add_parser("up", parents=shared, help="start the cluster; print the path of its kubeconfig")
    commands.add_parser("prepare", parents=shared, help="fill the cache with programs and images; print the images")
    commands.add_parser("down", parents=[common], help="delete the cluster and everything that it created")
    commands.add_parser(
        "status", parents=[common], help="print the cluster's state as JSON; exit with 3 if it does not run"
    )
    kubeconfig = commands.add_parser("kubeconfig", parents=[common], help="print the path of the cluster's kubeconfig")
    kubeconfig.add_argument(
        "--raw", action="store_true", help="print the content of the kubeconfig instead of its path"
    )
    kubectl = commands.add_parser(
        "kubectl", parents=[common], help="run the kubectl of the cluster's release; without arguments, print its path"
    )
    kubectl.add_argument("words", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="for example: -- get nodes")
    load = commands.add_parser("load", parents=[common], help="load images into every node")
    load.add_argument("archives", nargs="+", type=Path, metavar="IMAGE.tar", help="Docker or OCI archive of an image")
    node = commands.add_parser("node", parents=[common], help="inject or end a fault of a node")
    node.add_argument("action", choices=("stop", "start", "cut", "slow", "heal"))
    node.add_argument("node_name", metavar="NAME")
    return parser
