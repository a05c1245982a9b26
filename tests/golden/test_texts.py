"""Tests of texts that users read against golden files: help of the command line, and messages for invalid specs.

``hack/update-golden`` writes these files, those of ``test_golden.py`` and the plans in the documentation. Review the
difference.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from dljob.api import DLJobSpec
from dljob.cli.entry import parser
from dljob.job.spec_errors import in_words
from support.manifests.golden import assert_golden
from support.specs.cases import BAD, CASES
from support.specs.small_specs import MINIMAL, with_field

HERE = Path(__file__).resolve().parent / "texts"


def helps() -> Iterator[str]:
    top = parser()
    yield top.format_help()
    for action in top._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from (command.format_help() for command in action.choices.values())


def errors() -> Iterator[str]:
    """Yield the message for each invalid spec of ``support.specs.cases``."""
    specs = {name: with_field(path, value)["spec"] for name, (path, value, _) in BAD.items()}
    specs |= {name: {**MINIMAL, **changes} for name, (changes, words) in CASES.items() if words}
    for name, spec in specs.items():
        try:
            DLJobSpec.model_validate({key: value for key, value in spec.items() if value is not None})
        except ValidationError as error:
            yield f"{name}\n  {in_words(error)}\n"


TEXTS = {"cli-help.txt": helps, "invalid-specs.txt": errors}


@pytest.mark.parametrize("name", TEXTS)
def test_texts_match_the_golden_file(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr("sys.argv", ["dljob"])
    assert_golden(HERE / name, "\n".join(TEXTS[name]()))
