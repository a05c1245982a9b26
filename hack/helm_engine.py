"""Helm without its binary: the engine from the wheel ``helm-python-sdk``, with the options of ``helm`` itself.

Users: hack/helm, hack/quickstart, tests/chart. Where no wheel fits the platform, ``helm`` on PATH is run with
the same arguments.
"""

import argparse
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import yaml

try:
    import helm_python as helm
except ImportError:  # no wheel for this platform: ``main`` runs a helm binary instead
    FOUND = False
else:
    FOUND = True

_UNIT_S = {"ms": 0.001, "s": 1, "m": 60, "h": 3600}


def seconds(text: str) -> int:
    """Convert a duration such as ``90s`` or ``5m`` (a value of ``helm --timeout``) to whole seconds, at least 1."""
    parts = re.findall(r"([0-9]+)(ms|s|m|h)", text)
    if not parts or "".join(f"{n}{u}" for n, u in parts) != text:
        raise argparse.ArgumentTypeError(f"found {text!r}; expected a duration such as 90s or 5m")
    return max(1, round(sum(int(number) * _UNIT_S[unit] for number, unit in parts)))


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return ``base`` with the values of ``over`` in it. Nested maps are merged; ``over`` replaces all other values."""
    both = base.keys() & over.keys()
    nested = {k: merged(base[k], over[k]) for k in both if isinstance(base[k], dict) and isinstance(over[k], dict)}
    return {**base, **over, **nested}


def values(files: list[str], sets: list[tuple[str, str]]) -> dict[str, Any]:
    """Return the values from ``--values`` files, overridden by ``sets``.

    ``sets``: pairs (option, text) in the order of the command line. The option is ``set``, ``set_string`` or
    ``set_json``, and the text is its value, such as 'replicas=2'.
    """
    result: dict[str, Any] = {}
    for file in files:
        result = merged(result, yaml.safe_load(Path(file).read_text()) or {})
    for kind, expression in sets:
        parse = {
            "set": helm.parse_set_string,
            "set_string": helm.parse_set_string_values,
            "set_json": helm.parse_set_json,
        }[kind]
        result = merged(result, parse(expression))
    return result


def render(chart: Path, release: str, namespace: str, given: dict[str, Any]) -> dict[str, str]:
    """Check the values ``given`` against the chart's schema, render the chart without a cluster, and return the texts.

    The result is {path of template: rendered text}.

    Raise helm_python.HelmError with Helm's message if the values or a template are invalid.
    """
    with helm.Chart.load(chart) as loaded:
        loaded.validate_schema(given)
        return loaded.render(given, name=release, namespace=namespace)


class _Set(argparse.Action):
    """argparse action that appends --set, --set-string and --set-json to one list, in the order of the command line."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, value: Any, option: str | None = None) -> None:
        namespace.sets = [*namespace.sets, (self.dest, value)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hack/helm", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("install", "upgrade", "rollback", "uninstall", "template", "lint"):
        command = commands.add_parser(name)
        if name != "lint":
            command.add_argument("release")
        if name == "rollback":
            command.add_argument(
                "revision", type=int, nargs="?", help="revision to restore; default: the one before the last"
            )
        elif name != "uninstall":
            command.add_argument("chart", type=Path)
            command.add_argument("-f", "--values", action="append", default=[], metavar="FILE")
            for option in ("--set", "--set-string", "--set-json"):
                command.add_argument(option, action=_Set, metavar="KEY=VALUE", default=argparse.SUPPRESS)
            command.set_defaults(sets=[])
        command.add_argument("-n", "--namespace", default="default")
        if name not in ("lint", "template"):
            command.add_argument("--kubeconfig", default=None)
            command.add_argument("--wait", action="store_true", help="wait until the installed objects are ready")
            command.add_argument("--timeout", type=seconds, default=300, metavar="DURATION")
        if name in ("install", "upgrade"):
            command.add_argument("--create-namespace", action="store_true")
        if name == "upgrade":
            command.add_argument("-i", "--install", action="store_true", help="install when there is no release yet")
            reuse = command.add_mutually_exclusive_group()
            reuse.add_argument("--reuse-values", action="store_true", help="start from the last release's values")
            reuse.add_argument(
                "--reset-then-reuse-values",
                action="store_true",
                help="start from the values of this chart, with those that were set for the last release",
            )
        if name == "uninstall":
            command.add_argument("--ignore-not-found", action="store_true")
    _add_get(commands)
    return parser


def _add_get(commands: Any) -> None:
    """Add the command ``get values`` to the subparsers ``commands``."""
    get = commands.add_parser("get").add_subparsers(dest="what", required=True)
    command = get.add_parser("values", help="print the values that were set for a release, as YAML")
    command.add_argument("release")
    command.add_argument("-a", "--all", action="store_true", help="also print the values of the chart")
    command.add_argument("-o", "--output", choices=("yaml",), default="yaml")
    command.add_argument("-n", "--namespace", default="default")
    command.add_argument("--kubeconfig", default=None)


def _upgrade(config: Any, args: argparse.Namespace, given: dict[str, Any], common: dict[str, Any]) -> dict[str, Any]:
    if args.install:
        try:
            status = config.status(args.release).get("status", "")
        except helm.HelmNotFoundError:
            status = ""
        if status.startswith("pending-") or status == "uninstalling":
            print(f"release {args.release} is {status}: an earlier run was cut off; removing it first", file=sys.stderr)
            config.uninstall(args.release, wait="watcher", timeout=args.timeout)
            status = ""
        if status in ("", "uninstalled"):
            return dict(
                config.install(args.chart, args.release, given, **common, create_namespace=args.create_namespace)
            )
    if args.reset_then_reuse_values:  # The engine has no such option.
        given = merged(config.get_values(args.release), given)
    return dict(
        config.upgrade(
            args.chart,
            args.release,
            given,
            **common,
            reset_values=args.reset_then_reuse_values,
            reuse_values=args.reuse_values,
        )
    )


def _run(args: argparse.Namespace) -> int:
    if args.command == "lint":
        report = helm.lint(args.chart, values(args.values, args.sets), namespace=args.namespace)
        for message in report["messages"]:
            print(f"{message['path']}: {message['error']}")
        return bool(report["errors"])
    if args.command == "template":
        texts = render(args.chart, args.release, args.namespace, values(args.values, args.sets))
        for path, text in sorted(texts.items()):
            if text.strip() and not path.endswith("NOTES.txt"):
                print(f"---\n# Source: {path}\n{text.strip()}")
        return 0
    with helm.Config(namespace=args.namespace, kubeconfig_path=args.kubeconfig) as config:
        if args.command == "get":
            print(yaml.safe_dump(dict(config.get_values(args.release, all_values=args.all))), end="")
            return 0
        wait = "watcher" if args.wait else None
        if args.command == "uninstall":
            config.uninstall(args.release, wait=wait, timeout=args.timeout, ignore_not_found=args.ignore_not_found)
            print(f"release {args.release}: uninstalled")
            return 0
        if args.command == "rollback":
            config.rollback(args.release, version=args.revision, wait=wait, timeout=args.timeout)
            print(f"release {args.release}: rolled back, revision {config.status(args.release).get('version', '?')}")
            return 0
        given = values(args.values, args.sets)
        common: dict[str, Any] = {"namespace": args.namespace, "wait": wait, "timeout": args.timeout}
        if args.command == "install":
            done = dict(
                config.install(args.chart, args.release, given, **common, create_namespace=args.create_namespace)
            )
        else:
            done = _upgrade(config, args, given, common)
        print(f"release {args.release}: {done.get('status', 'deployed')}, revision {done.get('revision', 1)}")
    return 0


def main() -> int:
    if not FOUND:
        binary = shutil.which("helm")
        if binary is None:
            print(
                "helm: found neither the wheel helm-python-sdk nor helm on PATH; install one of them", file=sys.stderr
            )
            return 1
        os.execv(binary, ["helm", *sys.argv[1:]])
    args = _parser().parse_args()
    try:
        return _run(args)
    except helm.HelmError as error:
        print(f"hack/helm {args.command}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
