"""Tests that commands in the documentation exist, with their options, modules and scripts."""

import argparse
from importlib.util import find_spec
from itertools import pairwise

import pytest

import helm_engine
from devcluster import cli as cluster
from devcluster.images import cli as images
from dljob.cli.entry import parser
from support.documentation import ROOT, commands

PARSERS = {"dljob": parser(), "hack/cluster": cluster._parser(), "hack/images": images._parser()}
PARSERS |= dict.fromkeys(("helm", "hack/helm"), helm_engine._parser())  # hack/helm takes the arguments of helm.


def problems(program: argparse.ArgumentParser, words: list[str]) -> list[str]:
    """Return what ``program`` does not know of ``words``: a command, an option, or a value of an option with choices."""
    for action in program._actions:
        if isinstance(action, argparse._SubParsersAction) and words and not words[0].startswith("-"):
            if words[0] in action.choices:
                return problems(action.choices[words[0]], words[1:])
            return [] if words[0].isupper() else [f"no command '{words[0]}'"]
    found = []
    for word, following in zip(words, [*words[1:], ""], strict=False):
        option, _, value = word.partition("=")
        if option == "--":
            break
        if not option.startswith("-") or option in ("-", "-h", "--help"):
            continue
        known = program._option_string_actions.get(option)
        if known is None:
            found.append(f"no option '{option}'")
        elif known.choices and (value or following) not in {"", *known.choices}:
            found.append(f"{option}: no choice '{value or following}'")
    return found


def test_commands_and_options_exist() -> None:
    shown = [(code.place, words) for code, words in commands() if words[0] in PARSERS]
    assert len(shown) > 100
    wrong = [f"{place}: {words}: {each}" for place, words in shown for each in problems(PARSERS[words[0]], words[1:])]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["plan", "job.yaml", "--cluster", "c.yaml"], []),
        (["plans"], ["no command 'plans'"]),
        (["plan", "--clusters=c.yaml"], ["no option '--clusters'"]),
        (["plan", "job.yaml", "--compare", "plans"], ["--compare: no choice 'plans'"]),
    ],
)
def test_unknown_words_are_found(words: list[str], expected: list[str]) -> None:
    assert problems(PARSERS["dljob"], words) == expected


def test_scripts_and_modules_exist() -> None:
    wrong = []
    for code, words in commands():
        if words[0].startswith("hack/") and not (ROOT / words[0]).exists():
            wrong.append(f"{code.place}: found {words[0]}; expected a file")
        for option, module in pairwise(words):
            ours = module.startswith(("benchmarks", "dljob", "dltrain"))
            if option == "-m" and ours and find_spec(module) is None:
                wrong.append(f"{code.place}: found {module}; expected a module")
    assert not wrong, "\n".join(wrong)
