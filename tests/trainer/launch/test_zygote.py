"""Tests of the zygote: the end of one rank must not end the zygote, which serves all ranks of the pod."""

import socket
import tempfile
from pathlib import Path

import pytest

from dltrain.launch.zygote import Order, Serving
from support.trainer.ranks import alone, run

LAST = Order(("-c", ""), {}, "/")


@pytest.mark.parametrize("first", [0, 1])
def test_connection_closed_by_another_event_of_the_round_is_not_read(first: int) -> None:
    """Two connections are ready at once and the first closes the other, as when a rank and its client end together."""
    with socket.socket(socket.AF_UNIX) as listener, tempfile.TemporaryDirectory() as folder:
        listener.bind(f"{folder}/zygote")
        listener.listen()
        serving = Serving(listener)
        pairs = [socket.socketpair() for _ in range(2)]
        read: list[int] = []

        def ready(index: int) -> Order | None:
            read.append(index)
            serving._close(pairs[1 - index][0])
            return None

        for index, (ours, _) in enumerate(pairs):
            serving.selector.register(ours, 1, lambda _, index=index: ready(index))
        for _, theirs in (pairs[first], pairs[1 - first]):
            theirs.sendall(b"x")
        ours, theirs = socket.socketpair()
        serving.selector.register(ours, 1, lambda _: LAST if read else None)
        theirs.sendall(b"x")
        assert serving.run() is LAST
        assert len(read) == 1
        serving.selector.close()
        for each in (*pairs[0], *pairs[1], ours, theirs):
            each.close()


SPAWNS = """
import os
import torch
from torch.utils.data import DataLoader, Dataset

class Squares(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        return torch.tensor(i * i)

def main():
    os.chdir("/")
    print("file", __file__)
    print("rows", [x.item() for x in DataLoader(Squares(), None, num_workers=1, multiprocessing_context="spawn")])

if __name__ == "__main__":
    main()
"""


def test_script_with_a_relative_path_knows_its_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed bug: __file__ was wrong after os.chdir. Spawned workers of a DataLoader also use it."""
    script = tmp_path / "train.py"
    script.write_text(SPAWNS)
    command = alone("train.py")  # starts the zygote, which has another directory than the script
    monkeypatch.chdir(tmp_path)
    ended = run(command, 400.0)
    assert ended.code == 0, ended.output
    assert f"file {script}" in ended.output and "rows [0, 1, 4, 9]" in ended.output


def test_missing_script_is_a_command_that_was_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed bug: a job whose source lacks the script showed a traceback of the agent's own modules."""
    for name in ("a.py", "b.py"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    ended = run(alone("train.py"), 400.0)
    assert ended.code == 127 and "Traceback" not in ended.output, ended.output
    assert f"cannot start: found no file train.py in {tmp_path}; " in ended.output
    assert ended.output.rstrip().endswith("The folder has: a.py, b.py")
    ended = run(alone("src/train.py"), 400.0)
    assert ended.code == 127 and f"found no folder {tmp_path}/src" in ended.output, ended.output


FAILS = {
    "def train():\n    raise KeyError('x')\n\ntrain()\n": """\
Traceback (most recent call last):
  File "{script}", line 4, in <module>
    train()
  File "{script}", line 2, in train
    raise KeyError('x')
KeyError: 'x'
""",
    "def train(:\n": """\
  File "{script}", line 1
    def train(:
              ^
SyntaxError: invalid syntax
""",
}


@pytest.mark.parametrize(("text", "expected"), FAILS.items(), ids=["error", "syntax"])
def test_error_of_a_script_is_shown_as_by_an_interpreter(
    text: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fixed bug: each traceback began with six lines about modules of the agent."""
    (tmp_path / "train.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    ended = run(alone("train.py"), 400.0)
    assert (ended.code, ended.output) == (1, expected.format(script=tmp_path / "train.py"))


def test_error_goes_to_the_hook_of_the_script_and_ends_it_after_its_exit_handlers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = "sys.excepthook = lambda kind, error, traceback: print('hook', kind.__name__, traceback.tb_lineno)"
    (tmp_path / "train.py").write_text(f"import atexit, sys\natexit.register(print, 'end')\n{hook}\n1 / 0\n")
    monkeypatch.chdir(tmp_path)
    ended = run(alone("train.py"), 400.0)
    assert (ended.code, ended.output) == (1, "hook ZeroDivisionError 4\nend\n")


def test_forks_of_one_zygote_draw_other_random_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed bug: if a script did not seed torch, all ranks of a pod had the same generator, also after a restart."""
    code = "import numpy, random, torch\nprint(torch.rand(1).item(), random.random(), numpy.random.rand())"
    first, second = (run(alone("-c", code), 400.0).output.split() for _ in range(2))
    assert len(first) == len(second) == 3 and not set(first) & set(second)


def test_script_finds_its_own_command_and_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed bug: a script that starts itself again with ``sys.orig_argv`` started the zygote."""
    (tmp_path / "train.py").write_text("import sys\nprint(sys.orig_argv[1:], __loader__.get_filename('__main__'))\n")
    monkeypatch.chdir(tmp_path)
    ended = run(alone("-u", "train.py", "--lr", "1"), 400.0)
    assert ended.output == f"['-u', 'train.py', '--lr', '1'] {tmp_path / 'train.py'}\n"


FINALIZES = """
import json
import os
from pathlib import Path
import torch.distributed

torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
FILE = "history.json"

class History:
    def __init__(self, again):
        self.rows = [1, 2]
        self.itself = self if again else None
    def __del__(self):
        Path(FILE).write_text(json.dumps(self.rows))
        print("written", os.path.getsize(FILE))

class Last:
    def __del__(self):
        print(*closing)

history = [History(False), History(True)]
closing = ["closed"]
last = Last()
"""


def test_finalizers_of_a_script_can_use_its_modules_and_constants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fixed bug: at the end of a torchrun script, __del__ failed with a NameError and wrote nothing. The exit code was 0."""
    (tmp_path / "train.py").write_text(FINALIZES)
    monkeypatch.chdir(tmp_path)
    ended = run(alone("train.py"), 400.0, MASTER_ADDR="127.0.0.1")
    assert ended.code == 0, ended.output
    assert ended.output.count("written 6") == 2 and "Error" not in ended.output
    assert "closed" in ended.output, "a variable that was defined before the object"


OUTLIVED = """
import threading
import torch.distributed

torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)

def report(wait):
    while True:
        wait(0.0)
        len(history)

class Slow:
    def __del__(self):
        pause.wait(0.3)  # The other threads run meanwhile, as they do while the threads of gloo end.

pause = threading.Event()
history = []
slow = Slow()
for _ in range(3):
    threading.Thread(target=report, args=(threading.Event().wait,), daemon=True).start()
"""


def test_daemon_threads_that_outlive_a_script_print_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed bug: a daemon thread that ran at the end of a torchrun script found no variables, and printed a traceback."""
    (tmp_path / "train.py").write_text(OUTLIVED)
    monkeypatch.chdir(tmp_path)
    ended = run(alone("train.py"), 400.0, MASTER_ADDR="127.0.0.1")
    assert (ended.code, ended.output) == (0, "")
