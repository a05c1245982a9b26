"""The error about a command that cannot be started in this pod, because the image or the manifest is wrong."""

import errno
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

NOT_FOUND = 127
"""Exit code of a rank whose command or script does not exist, as in a shell."""
CANNOT_START = "cannot start: "
"""Text before the error in the log of a rank that could not be started."""
MAX_LISTED = 10
"""Number of files that the message about a missing script names."""
CERTAIN = frozenset(
    {
        errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ENOEXEC, errno.EISDIR, errno.ELOOP,
        errno.ENAMETOOLONG,
    }
)  # fmt: skip
"""Errors of execve that come from the file itself. Others, such as too little memory, may be gone after a restart."""
MAX_QUOTED = 200
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_SHELL = re.compile(r"[|&;<>()$`\\\"'*?~#]")
"""Characters that a shell interprets."""
_PLAIN = re.compile(r"(?!(?:true|false|yes|no|on|off|y|n|null)$)[./-]*[a-z_][\w./=-]*", re.IGNORECASE)
"""A word that is a string in YAML without quotes."""
_REMEDY = "Correct the path, or add the file to the image or to spec.trainer.source"
_NO_FORMAT = (
    "a program for this machine, or a script whose first line names its interpreter. Choose an image for the "
    "architecture of the node, or begin the command with the interpreter"
)
_NOT_EXECUTABLE = (
    "a file that the user of the pod may execute. Set its execute bit (chmod +x), or begin the command with its "
    "interpreter, such as python or sh"
)


class CommandNotFoundError(OSError):
    """The command cannot be started in this pod, and a restart cannot help. The text says why."""


def command_error(argv: Sequence[str], env: Mapping[str, str], cwd: str, error: OSError) -> OSError:
    """Return the error to raise after ``error``, with which the start of ``argv`` failed.

    It is CommandNotFoundError if a restart cannot help, and ``error`` itself otherwise. ``env``: the environment in
    whose PATH programs are found. ``cwd``: the working directory.
    """
    program = argv[0]
    if error.errno not in CERTAIN or (error.filename is not None and os.fspath(error.filename) == cwd):
        return error
    if error.errno == errno.ENOEXEC:
        expected = _NO_FORMAT
    elif error.errno in (errno.EACCES, errno.EPERM):
        expected = _NOT_EXECUTABLE
    elif (words := _as_list(argv)) is not None and not os.path.exists(os.path.join(cwd, program)):  # noqa: PTH110, PTH118 - pathlib raises for long names
        expected = (
            "the name of a program, because no shell divides the command into words. Write command: "
            f"[{quoted(', '.join(map(_yaml, words)))}]"
        )
    elif os.sep not in program:
        expected = (
            f"a program in a folder of PATH ({quoted(env.get('PATH', ''))}). Correct the name, or choose an image that "
            "has it"
        )
    elif os.path.exists(os.path.join(cwd, program)):  # noqa: PTH110, PTH118
        expected = (
            "a script whose first line names an interpreter of the image. Correct that line, or choose an image that "
            "has the interpreter"
        )
    else:
        expected = (
            f"a file of the image or of spec.trainer.source (working directory: {cwd}). Correct the path, or choose an "
            "image that has the file"
        )
    found = f"found {quoted(shlex.join(argv))}, which cannot be started ({error.strerror}: {quoted(program)!r})"
    return CommandNotFoundError(f"{found}; expected {expected}")


def _as_list(argv: Sequence[str]) -> list[str] | None:
    """Return the list of words for a command ``argv`` that is written like a line for a shell; None for others."""
    program, *rest = argv
    if not any(letter.isspace() for letter in program):
        return ["env", *argv] if _ASSIGNMENT.match(program) else None
    if _SHELL.search(program) or _ASSIGNMENT.match(program):
        return ["sh", "-c", program, *rest]
    return [*program.split(), *rest]


def _yaml(word: str) -> str:
    text = quoted(word)
    return text if _PLAIN.fullmatch(text) else "'" + text.replace("'", "''") + "'"


def quoted(text: str) -> str:
    return text if len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]}…"


def missing_script(argv: tuple[str, ...], cwd: str) -> str | None:
    """Return a message if the script that the arguments ``argv`` of the interpreter name does not exist; else None.

    ``cwd``: the working directory of the rank.
    """
    match without_u(argv):
        case ("-m" | "-c", *_) | ():
            return None
        case (file, *_):
            path = Path(cwd) / file
            return None if path.exists() else missing(path)
    return None


def missing(path: Path) -> str:
    """Return the message about a script that does not exist. It names the files of its folder, at most MAX_LISTED."""
    if not path.parent.is_dir():
        return f"found no folder {path.parent}; expected the folder of the script {path.name}. {_REMEDY}"
    names = sorted(each.name for each in path.parent.iterdir())
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    listed = ", ".join(names[:MAX_LISTED]) + more or "no files"
    found = f"found no file {path.name} in {path.parent}; expected the script of the command. {_REMEDY}"
    return f"{found}. The folder has: {listed}"


def without_u(argv: tuple[str, ...]) -> tuple[str, ...]:
    """Return the arguments without a leading ``-u`` (unbuffered output). A rank's output is always line-buffered."""
    return argv[1:] if argv[:1] == ("-u",) else argv
