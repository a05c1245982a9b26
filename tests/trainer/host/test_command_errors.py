"""Tests of the errors about commands that cannot be started: which are certain, and what they say."""

import errno
import subprocess
from pathlib import Path

import pytest

from dltrain.host.command_errors import CommandNotFoundError, command_error, missing_script

PATH = {"PATH": "/usr/bin:/bin"}


def started(argv: list[str], cwd: str, env: dict[str, str] = PATH) -> OSError:
    """Return the error of a command that cannot be started, from the real exec."""
    try:
        subprocess.run(argv, cwd=cwd, env=env, check=False)
    except OSError as error:
        return command_error(argv, env, cwd, error)
    raise AssertionError("it started")


@pytest.mark.parametrize(
    ("command", "text", "mode", "expected"),
    [
        ("no-such-program", None, 0, "a program in a folder of PATH (/usr/bin:/bin)"),
        ("./train", None, 0, "a file of the image or of spec.trainer.source"),
        ("./train", "#!/bin/sh\n", 0o644, "chmod +x"),
        ("./train", "#!/no/such/interpreter\n", 0o755, "names an interpreter of the image"),
        ("./train", "\x7fno program", 0o755, "a program for this machine"),
    ],
    ids=["no program", "no file", "not executable", "no interpreter", "other format"],
)
def test_message_names_the_command_and_the_remedy(
    command: str, text: str | None, mode: int, expected: str, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "train").write_text(text)
        (tmp_path / "train").chmod(mode)
    error = started([command, "--lr", "0.1"], str(tmp_path))
    assert isinstance(error, CommandNotFoundError)
    assert f"found {command} --lr 0.1, which cannot be started" in str(error) and expected in str(error)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["torchrun --nproc-per-node 2 train.py"], "command: [torchrun, --nproc-per-node, '2', train.py]"),
        (["torchrun train.py", "--lr", "0.1"], "command: [torchrun, train.py, --lr, '0.1']"),
        (["cd /app && torchrun train.py"], "command: [sh, -c, 'cd /app && torchrun train.py']"),
        (["python train.py > $HOME/log"], "command: [sh, -c, 'python train.py > $HOME/log']"),
        (["echo it's"], "command: [sh, -c, 'echo it''s']"),
        (["LR=0.1", "torchrun", "train.py"], "command: [env, LR=0.1, torchrun, train.py]"),
        (["LR=0.1 torchrun train.py"], "command: [sh, -c, 'LR=0.1 torchrun train.py']"),
        (["cd /app;" + 100 * "echo again; "], "command: [sh, -c, 'cd /app;echo again; "),
    ],
)
def test_command_line_that_only_a_shell_understands_gets_its_list(
    command: list[str], expected: str, tmp_path: Path
) -> None:
    """Fixed bug: the message about a command in one string advised to choose another image, or it was tried again."""
    error = started(command, str(tmp_path))
    assert isinstance(error, CommandNotFoundError) and expected in str(error), error
    assert "image" not in str(error).partition("expected")[2]


def test_file_whose_name_has_a_space_is_still_a_file(tmp_path: Path) -> None:
    (tmp_path / "my train").write_text("#!/bin/sh\n")
    assert "chmod +x" in str(started(["./my train"], str(tmp_path)))


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.EIO, errno.ESTALE])
def test_errors_that_may_be_gone_after_a_restart_stay_as_they_are(code: int) -> None:
    error = OSError(code, "no")
    assert command_error(["train"], PATH, "/", error) is error


def test_missing_working_directory_is_no_missing_command(tmp_path: Path) -> None:
    assert not isinstance(started(["sh", "-c", "true"], str(tmp_path / "gone")), CommandNotFoundError)


def test_long_commands_and_paths_are_cut(tmp_path: Path) -> None:
    assert len(str(started(["no-such-program", "x" * 10_000], str(tmp_path), {"PATH": "/bin:" + "y" * 10_000}))) < 1000


def test_only_a_script_is_looked_up(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    for argv in (("train.py",), ("-u", "train.py", "x"), ("-m", "train"), ("-c", "1"), ()):
        assert missing_script(argv, str(tmp_path)) is None
    assert "found no file other.py" in str(missing_script(("-u", "other.py"), str(tmp_path)))
