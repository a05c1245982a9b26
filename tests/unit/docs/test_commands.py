"""Tests that the commands in the documentation exist, with their options and the files that they name."""

import argparse
from importlib.util import find_spec
from pathlib import Path

import pytest

from devcluster import cli as cluster
from devcluster.images import cli as images
from dljob.cli.entry import parser
from support.documentation import ROOT, Code, commands

PARSERS = {"dljob": parser(), "hack/cluster": cluster._parser(), "hack/images": images._parser()}


def problems(program: argparse.ArgumentParser, words: list[str]) -> list[str]:
    """Return what ``program`` does not know of ``words``: commands, options, and values of options with choices."""
    found = []
    for action in program._actions:
        if isinstance(action, argparse._SubParsersAction) and words and not words[0].startswith("-"):
            if words[0] not in action.choices:
                return [f"no command '{words[0]}'"]
            return problems(action.choices[words[0]], words[1:])
    for word, value in zip(words, [*words[1:], ""], strict=True):
        option, _, given = word.partition("=")
        if option == "--":
            break
        if not option.startswith("-") or option in ("-", "-h", "--help"):
            continue
        known = program._option_string_actions.get(option)
        if known is None:
            found.append(f"no option '{option}'")
        elif known.choices and known.nargs is None and (given or value) and (given or value) not in known.choices:
            found.append(f"{option}: no choice '{given or value}'")
    return found


def test_commands_and_options_exist() -> None:
    checked, wrong = 0, []
    for code, words in commands():
        if words[0] in PARSERS:
            checked += 1
            wrong += [f"{code.place}: {' '.join(words)}: {each}" for each in problems(PARSERS[words[0]], words[1:])]
    assert checked > 100
    assert not wrong, "\n".join(wrong)


def test_scripts_and_modules_exist() -> None:
    wrong = []
    for code, words in commands():
        if words[0].startswith(("hack/", ".ci/", "benchmarks/")) and not (ROOT / words[0]).exists():
            wrong.append(f"{code.place}: found {words[0]}; expected a file")
        if words[0] in ("python", "python3", "hack/env") and "-m" in words:
            module = words[words.index("-m") + 1]
            if module.startswith(("dljob", "dltrain", "benchmarks")) and find_spec(module) is None:
                wrong.append(f"{code.place}: found {module}; expected a module")
    assert not wrong, "\n".join(wrong)
