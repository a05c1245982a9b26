"""Describe the command line ``dljob`` for its page of the reference, from its argument parser."""

import argparse
from collections.abc import Iterator

from dljob.cli.entry import EXAMPLES, parser

INTRODUCTION = """\
# Command line

This page is for users of the command `dljob`. It lists every command with its arguments and options; `dljob COMMAND
--help` prints the same. In a clone of dljob, `pip install ./operator/contract ./operator` installs it;
`'./operator[operator]'` adds what the commands need that reach a cluster, `'./operator[suggest]'` what `suggest`
needs, and `'./operator[plot]'` what `plan --plot` needs. The installation contains the kubectl plug-in: `kubectl
dljob` has the same commands and options.

Commands that reach a cluster use the current context of the kubeconfig (`KUBECONFIG`, or `~/.kube/config`). Without a
`proxy-url` there, the proxy in `HTTPS_PROXY` applies, except for the hosts in `NO_PROXY`, as for kubectl.
`suggest`, `serve`, `plan --cluster` and `probe --local` need no cluster.

| Exit code | Meaning |
|---|---|
| 0 | Success |
| 1 | No plan is possible, the job has failed, `run --timeout` has expired, or `probe` could not measure a type |
| 2 | Invalid input, or an error of the API server, which is printed in one line |
| 130 | Ctrl-C |

Examples:
"""


def page() -> str:
    """Return the page as Markdown, without the note that it is generated."""
    top = parser()
    found = next(action for action in top._actions if isinstance(action, argparse._SubParsersAction))
    lines = [INTRODUCTION, "```console", *_examples(), "```"]
    for name, command in found.choices.items():
        lines += ["", f"## dljob {name}", "", f"`{_usage(name, command)}`", "", _prose(command.description), ""]
        lines += ["| Argument or option | Meaning |", "|---|---|", *_rows(command)]
        lines += ["", _prose(command.epilog)] if command.epilog else []
    return "\n".join(lines) + "\n"


def _examples() -> Iterator[str]:
    for line in EXAMPLES.splitlines()[1:]:
        command, _, meaning = line.strip().partition("  ")
        yield f"$ {command}{' ' * max(1, 46 - len(command))}# {meaning.strip()}"


def _usage(name: str, command: argparse.ArgumentParser) -> str:
    arguments = [_value(action) for action in _shown(command) if not action.option_strings]
    return " ".join(["dljob", name, *arguments, "[options]"])


def _rows(command: argparse.ArgumentParser) -> Iterator[str]:
    for action in _shown(command):
        value = _value(action)
        named = ", ".join(f"`{option} {value}`" if value else f"`{option}`" for option in action.option_strings)
        if not action.help:
            raise ValueError(
                f"{command.prog}: found no help for {named or value}; expected a help text for each argument"
            )
        meaning = _prose(action.help % {"default": action.default, "prog": command.prog})
        yield f"| {named or f'`{value}`'} | {meaning[:1].upper()}{meaning[1:]} |"


def _shown(command: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the arguments and then the options of a command, without ``--help``."""
    found = [action for action in command._actions if not isinstance(action, argparse._HelpAction)]
    return sorted(found, key=lambda action: bool(action.option_strings))


def _value(action: argparse.Action) -> str:
    """Return the name of the value of an argument or option, such as FILE; empty for an option without a value."""
    if action.nargs == 0:
        return ""
    if action.choices:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return str(action.metavar or action.dest.upper())


def _prose(text: str | None) -> str:
    """Return a help text as Markdown: angle brackets and pipes would otherwise be markup."""
    return (text or "").replace("<", "&lt;").replace("|", "\\|")
