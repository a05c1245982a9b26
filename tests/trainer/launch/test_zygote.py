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
