"""A program that uses ordinary features of Python: its name, arguments, workers, exit handlers and sys.exit."""

import atexit
import multiprocessing
import os
import random
import sys
import threading
from pathlib import Path


class Result:
    """Pickled by name, so that a worker finds it only if its __main__ is this file."""

    def __init__(self, value: int) -> None:
        self.value = value


def work(queue: "multiprocessing.Queue[Result]") -> None:
    queue.put(Result(42))


if __name__ == "__main__":
    assert Path(__file__).name == "ordinary_program.py" and sys.argv[1:] == ["--flag", "a b", ""], sys.argv
    assert sys.path[0] == str(Path(__file__).resolve().parent), sys.path
    assert sys.stdin.read() == "" and threading.active_count() == 1
    for method in ("spawn", "fork"):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        worker = context.Process(target=work, args=(queue,))
        worker.start()
        assert queue.get(timeout=20).value == 42
        worker.join()
    import numpy as np
    import torch

    assert torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"]), torch.get_num_threads()
    print("random", random.getrandbits(64), np.random.randint(2**62), flush=True)
    atexit.register(lambda: print("exit handlers ran"))
    sys.exit()
