"""Tests of options in seconds: numbers for which no command can wait are refused before anything happens."""

import pytest

from dljob.cli import main

OPTIONS = {
    "top": (["top", "-A", "--watch", "--interval"], "above 0"),
    "run": (["run", "job.yaml", "--timeout"], "of at least 0"),
    "get-model": (["get-model", "digits", "model", "--timeout"], "of at least 0"),
    "probe": (["probe", "--timeout"], "above 0"),
}


@pytest.mark.parametrize("text", ["inf", "-inf", "nan", "1e+300", "-1"])
@pytest.mark.parametrize("command", OPTIONS)
def test_numbers_that_are_no_time_are_refused(command: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Fixed bug: ``top --interval inf`` printed a table and ended with a stack trace."""
    arguments, least = OPTIONS[command]
    assert main([*arguments[:-1], f"{arguments[-1]}={text}"]) == 2
    expected = f"expected a number of seconds {least} and at most 31536000 (one year)"
    assert capsys.readouterr().err == f"dljob: {arguments[-1]}: found {text}; {expected}\n"
