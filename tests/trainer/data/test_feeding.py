"""Batches made ahead: the same ones whoever makes them, whatever happens; errors that say whose; and no orphans."""

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, default_collate

from dltrain.batch.sampling import Part, Sampler
from dltrain.data.feeding import feed as feeding
from dltrain.data.feeding import serialization
from dltrain.data.feeding.device_copy import DeviceCopier
from dltrain.data.feeding.feed import Carried, Feed
from dltrain.data.feeding.loader import MAX_BATCHES_AHEAD, Loader
from dltrain.data.feeding.source import Request, Source
from dltrain.data.feeding.worker_pool import Workers
from dltrain.host import cgroup
from dltrain.launch.zygote import Order, Serving, _PartialRequest
from dltrain.protocol import rank_messages
from dltrain.protocol.errors import SampleError, WorkerLostError
from dltrain.train.trainer import Trainer
from support.trainer.listener import Listener
from support.trainer.plans import make_plan, write
from support.trainer.ranks import BODIES, ROOT, command, end, environment, run, start

SCRIPT = BODIES / "feeding.py"
CPU = torch.device("cpu")
WITHIN_S = 60.0


class Augmented(Dataset[tuple[torch.Tensor, int]]):
    """Noise from all the generators that datasets draw from."""

    def __init__(self, fails_at: int = -1) -> None:
        self.images = torch.arange(40.0).view(40, 1)
        self.fails_at = fails_at

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == self.fails_at:
            raise KeyError("no label")
        return self.images[index] + torch.rand(3) + float(np.random.rand()) + random.random(), index


def taken(loader: Loader, shares: Sequence[tuple[int, ...]], steps: Sequence[int]) -> list[Any]:
    """Rank 1's batches of ``steps`` in this order, one after the other under each of ``shares``."""
    sampler, now, found = Sampler(loader.samples, 8, 5), list(shares), []

    def part_of(step: int) -> Part:
        return sampler.part(step, now[0], 1)

    with Feed(loader, part_of, 5, 14) as feed:
        for step in steps:
            found.append(feed.take(step, part_of(step)))
            if len(now) > 1:
                now.pop(0)
    return found


SHARES = [(4, 4)] * 4 + [(2, 6)] * 3 + [(7, 1)] * 2 + [(4, 4)]
STEPS = [0, 1, 2, 3, 3, 4, 5, 5, 6, 7, 8, 9, 10, 11, 12, 13]
"""Over three epochs; two steps are given up and computed again, once as shares move."""


@pytest.mark.parametrize(("workers", "prefetch"), [(1, None), (2, 5)])
def test_batches_are_the_same_whoever_makes_them(workers: int, prefetch: int | None) -> None:
    """To the last bit, also when shares move and steps are given up; a resumed run begins in the middle."""
    alone = taken(Loader(Augmented(), CPU, workers=0), SHARES, STEPS)
    ahead = taken(Loader(Augmented(), CPU, workers=workers, prefetch=prefetch), SHARES, STEPS)
    resumed = taken(Loader(Augmented(), CPU, workers=workers), SHARES[8:], STEPS[8:])
    for mine, other in [*zip(ahead, alone, strict=True), *zip(resumed, alone[8:], strict=True)]:
        assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))


def test_a_sample_looks_the_same_on_any_rank_and_different_in_each_epoch() -> None:
    loader = Loader(Augmented(), CPU, workers=0)

    def looks(indices: Sequence[int], epoch: int) -> dict[int, torch.Tensor]:
        x, y = loader.fetch(Request(np.array(indices), epoch, 5))
        return dict(zip(y.tolist(), x, strict=True))

    one, other, later = looks([3, 7, 9], 0), looks([9, 3], 0), looks([3, 7, 9], 1)
    assert all(torch.equal(one[i], other[i]) for i in (3, 9))
    assert not any(torch.equal(one[i], later[i]) for i in one)
    assert len({float(x[0] - i) for i, x in one.items()}) == 3


def test_tensors_are_fetched_by_a_thread_once_that_costs_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """And datasets that cost nothing stay with the rank. Batches are the same."""
    tensors = (torch.randn(40, 50), torch.arange(40))

    def fetches() -> Iterator[str]:
        return (thread.name for thread in threading.enumerate() if thread.name == "fetch")

    with monkeypatch.context() as patched:
        patched.setattr(feeding, "MIN_FETCH_S", 1e9)
        here = taken(Loader(tensors, CPU), SHARES, STEPS)
    started = []
    original = feeding.Thread
    monkeypatch.setattr(feeding, "Thread", lambda make: started.append(make) or original(make))
    monkeypatch.setattr(feeding, "MIN_FETCH_S", 0.0)
    monkeypatch.setattr(feeding, "MIN_FETCH_FRACTION", 0.0)
    ahead = taken(Loader(tensors, CPU), SHARES, STEPS)
    assert len(started) == 1, "after the steps that were measured"
    assert all(torch.equal(a, b) for m, o in zip(ahead, here, strict=True) for a, b in zip(m, o, strict=True))
    assert not list(fetches()), "it ends with the training"


def test_a_dataset_that_cannot_be_sent_stays_with_the_rank(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """And says why, once; told to use workers, it is an error."""
    dataset = Augmented()
    dataset.lock = threading.Lock()  # type: ignore[attr-defined]
    monkeypatch.setattr(feeding, "MIN_FETCH_S", 0.0)
    monkeypatch.setattr(feeding, "MIN_FETCH_FRACTION", 0.0)
    assert len(taken(Loader(dataset, CPU, max_workers=2), SHARES, STEPS)) == len(STEPS)
    assert capfd.readouterr().err.count("cannot be sent to worker processes") == 1
    with pytest.raises(ValueError, match="dataset: cannot be sent to worker processes: TypeError: cannot pickle"):
        taken(Loader(dataset, CPU, workers=1), SHARES, STEPS)


class Homebound(Augmented):
    """Needs what only the rank has, such as a variable of a module that the script has set."""

    def __init__(self, kills: bool = False) -> None:
        super().__init__()
        self.home, self.kills = os.getpid(), kills

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if os.getpid() != self.home:
            if self.kills:
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyError("no label")
        return super().__getitem__(index)


@pytest.mark.parametrize(("dataset", "collate_fn", "why"), [
    (Homebound(), None, "of the dataset: KeyError: 'no label'"),
    (Homebound(kills=True), None, "data worker 0 of 1 ended with signal 9"),
    (Augmented(), lambda samples: [*default_collate(samples), threading.Lock()], "cannot be sent by a worker: TypeError"),
])  # fmt: skip
def test_workers_that_nobody_asked_for_end_no_training(
    dataset: Any, collate_fn: Any, why: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What the rank can make it makes; told to use workers, it is an error."""
    monkeypatch.setattr(feeding, "MIN_FETCH_S", 0.0)
    monkeypatch.setattr(feeding, "MIN_FETCH_FRACTION", 0.0)
    alone = Loader(Augmented(), CPU, workers=0)
    with Feed(Loader(dataset, CPU, max_workers=1, collate_fn=collate_fn), part_of, 3, 10**9) as feed:
        step, deadline, said, after = 0, time.monotonic() + WITHIN_S, "", 0
        while after < 3:
            assert time.monotonic() < deadline, "nobody said so"
            assert torch.equal(feed.take(step, part_of(step))[0], alone.fetch(request_of(step))[0])
            after += why in (said := said + capfd.readouterr().err)
            step += 1
    assert said.count("dltrain: cannot use data workers") == 1
    with pytest.raises((SampleError, WorkerLostError), match=why):
        taken(Loader(dataset, CPU, workers=1, collate_fn=collate_fn), SHARES, STEPS)


def test_a_dataset_is_copied_unasked_only_where_there_is_room(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(feeding, "MIN_FETCH_S", 0.0)
    monkeypatch.setattr(feeding, "MIN_FETCH_FRACTION", 0.0)
    monkeypatch.setattr(cgroup, "free_nbytes", lambda: 1000)
    assert len(taken(Loader(Augmented(), CPU, max_workers=2), SHARES, STEPS)) == len(STEPS)
    assert capfd.readouterr().err.count("the dataset's copies for data workers do not fit into memory: found ") == 1


def test_as_many_batches_may_be_on_their_way_as_a_loader_allows() -> None:
    """Before a drop and after it: else the rank waits for a worker to listen, which waits for the rank to."""
    with contextlib.closing(Workers(Loader(Augmented(), CPU).source, 1)) as workers:
        for _ in range(2):
            workers.drop()
            tickets = [workers.ask(request_of(step)) for step in range(MAX_BATCHES_AHEAD)]
        assert workers.get(tickets[-1])[0][1].tolist() == request_of(MAX_BATCHES_AHEAD - 1).indices.tolist()


class Signed(Augmented):
    """Samples say which process made them."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return super().__getitem__(index)[0], os.getpid()


def test_workers_take_over_where_samples_cost_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once they are ready; until then the rank makes the very same batches."""
    monkeypatch.setattr(feeding, "MIN_FETCH_S", 0.0)
    monkeypatch.setattr(feeding, "MIN_FETCH_FRACTION", 0.0)
    alone, loader, makers = Loader(Signed(), CPU, workers=0), Loader(Signed(), CPU, max_workers=1), set[int]()
    with Feed(loader, part_of, 3, 10**9) as feed:
        step, deadline = 0, time.monotonic() + WITHIN_S
        while len(makers) < 2:
            assert time.monotonic() < deadline, "nobody took over"
            x, pids = feed.take(step, part_of(step))
            assert torch.equal(x, alone.fetch(request_of(step))[0])
            makers |= set(pids.tolist())
            step += 1
    assert step > 7 and os.getpid() in makers


def part_of(step: int) -> Part:
    return Part(step, np.arange(4) + step % 30, 1.0, 4, False)


def request_of(step: int) -> Request:
    return Request(part_of(step).indices, step, 3)


def _only_in(pid: int) -> Augmented:
    if os.getpid() != pid:
        raise ModuleNotFoundError("No module named 'codec'")
    return Augmented()


class Bound(Augmented):
    def __reduce__(self) -> Any:
        return _only_in, (os.getpid(),)


def test_a_dataset_that_does_not_arrive(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(feeding, "MIN_FETCH_S", 0.0)
    monkeypatch.setattr(feeding, "MIN_FETCH_FRACTION", 0.0)
    with Feed(Loader(Bound(), CPU, max_workers=1), part_of, 3, 10**9) as feed:
        step, deadline, said = 0, time.monotonic() + WITHIN_S, ""
        while "No module named 'codec'" not in (said := said + capfd.readouterr().err):
            assert time.monotonic() < deadline, "nobody said so"
            feed.take(step, part_of(step))
            step += 1
    with pytest.raises(WorkerLostError, match="could not be transferred: ModuleNotFoundError: No module named"):
        taken(Loader(Bound(), CPU, workers=1), SHARES, STEPS)


def test_the_last_words_of_who_closes_with_messages_unread_are_heard() -> None:
    """Such as the failed transfer of a dataset, while batches were already requested."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with near:
        with far:
            serialization.send(near, b"asked", None)
            serialization.send(far, b"failed", "why")
        assert serialization.receive(near) == (b"failed", "why")
        assert serialization.receive(near) is None


def test_workers_behind_a_thread_as_on_a_gpu() -> None:
    """What was asked for and dropped is not mistaken for what is asked for next, and nothing waits for it at the end."""
    loader = Loader(Augmented(), CPU, workers=0)
    with contextlib.closing(Carried(Workers(loader.source, 2), lambda batch: [*batch, "moved"])) as lane:
        first = [lane.ask(request_of(step)) for step in range(4)]
        x, _, moved = lane.get(first[0])[0]
        assert moved == "moved" and torch.equal(x, loader.fetch(request_of(0))[0])
        lane.drop()
        again = [lane.ask(request_of(step)) for step in range(7, 13)]
        for ticket, step in zip(again[:4], range(7, 11), strict=True):
            assert torch.equal(lane.get(ticket)[0][0], loader.fetch(request_of(step))[0])


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(40))

    def __len__(self) -> int:
        return 40


@pytest.mark.parametrize(
    ("dataset", "arguments", "message"),
    [
        (Augmented(), {"workers": -1}, "workers: found -1; expected 0 or more"),
        (
            Augmented(),
            {"workers": 3, "prefetch": 2},
            "prefetch: found 2 batches for 3 workers; expected one per worker",
        ),
        (Augmented(), {"workers": 0, "prefetch": 2}, "prefetch: found 2 with workers=0; expected workers"),
        ((torch.zeros(3),), {"workers": 2}, "workers: found 2 for samples in memory; expected no workers"),
        ((torch.zeros(3),), {"collate_fn": list}, "collate_fn: found one with a dataset of tensors"),
        ((torch.zeros(3), torch.zeros(2)), {}, r"dataset: found tensors of \[2, 3\] samples; expected equal lengths"),
        (iter([1]), {}, "dataset: found list_iterator; expected a map-style dataset"),
        (
            DataLoader(Augmented()),
            {},
            r"found a DataLoader; expected its dataset. Pass t.loader\(loader.dataset\)",
        ),
        (Stream(), {}, "dataset: found Stream, an IterableDataset; expected a map-style dataset"),
        (Augmented(), {"workers": 2, "prefetch": 1000}, "prefetch: found 1000; expected at most 128"),
    ],
)
def test_what_a_loader_refuses(dataset: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Loader(dataset, CPU, **arguments)


def test_steps_refuse_what_is_no_loader_of_theirs() -> None:
    with pytest.raises(ValueError, match=r"loader: found DataLoader; expected the result of t.loader\(dataset\)"):
        next(Trainer.steps(cast(Trainer, None), cast(Loader, DataLoader(Augmented()))))


def test_a_dataset_of_the_users_may_have_attributes_of_ours() -> None:
    dataset = Augmented()
    dataset.train_samples = "images"  # type: ignore[attr-defined]
    assert Loader(dataset, CPU).samples == 40


def test_a_packed_sequence_moves_as_one() -> None:
    """It is a tuple, of which a part stays on the CPU."""
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    moved = DeviceCopier(torch.device("meta")).now({"x": packed})["x"]
    assert (moved.data.device.type, moved.batch_sizes.device.type) == ("meta", "cpu")


def test_mapped_files_are_mapped_again_not_copied(tmp_path: Path) -> None:
    """They may be larger than memory."""
    np.arange(10**6, dtype=np.int32).tofile(tmp_path / "tokens.bin")
    tokens = np.memmap(tmp_path / "tokens.bin", np.int32, "r", offset=40)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        fd = serialization.pack((tokens, tokens[5:7]))
        assert os.fstat(fd).st_size < 4096
        socket.send_fds(ours, [b"head"], [fd])
        os.close(fd)
        whole, part = (serialization.receive(theirs) or (b"", ()))[1]
    assert isinstance(whole, np.memmap) and np.array_equal(whole, tokens) and part.tolist() == [15, 16]


@pytest.mark.parametrize("content", [
    {"x": torch.arange(12).view(3, 4)[:, ::2], "flag": torch.tensor(True), "none": torch.empty(0, 3)},
    [torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.randn(3, 4).t(), torch.ones(1).expand(2, 3)],
    [torch.randn(3).bfloat16(), torch.randn(5, requires_grad=True).detach(), "text", 7, None],
    (np.arange(5.0), np.array([], np.int8), b"bytes", torch.ones(2, dtype=torch.complex64).conj()),
])  # fmt: skip
def test_parcels_hold_anything(content: Any) -> None:
    """And what was received may be written to, and outlives its message."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        serialization.send(ours, b"head", content)
        found = serialization.receive(theirs)
        assert found is not None and found[0] == b"head"
        ours.close()
        assert serialization.receive(theirs) is None
    mine, other = (list(c.values()) if isinstance(c, dict) else list(c) for c in (found[1], content))
    for a, b in zip(mine, other, strict=True):
        if isinstance(b, torch.Tensor):
            assert a.dtype == b.dtype and torch.equal(a, b)
            assert a.stride() == torch.empty_like(b).stride() or 0 in b.stride()
            a.zero_()
        else:
            assert np.array_equal(a, b) if isinstance(b, np.ndarray) else a == b


def test_an_error_names_the_sample_wherever_it_was_made() -> None:
    message = "sample 13 of the dataset: KeyError: 'no label'"
    for workers in (0, 2):
        with pytest.raises(SampleError, match=message) as caught:
            taken(Loader(Augmented(13), CPU, workers=workers), [(0, 8)], range(14))
        text = str(caught.value.__cause__)
        assert ("in a data worker" in text and "in __getitem__" in text) if workers else text == "'no label'"


def test_an_error_in_what_nobody_wants_any_more_is_none() -> None:
    """The sample may be another rank's by now, or this one's at another step: then it is told."""
    source = Loader(Augmented(2), CPU).source
    with contextlib.closing(Workers(source, 1)) as workers:
        workers.ask(request_of(0))
        x, y = workers.get(workers.ask(request_of(3)))[0]
        assert y.tolist() == [3, 4, 5, 6] and torch.equal(x, Loader(Augmented(), CPU).fetch(request_of(3))[0])


class Greedy(Augmented):
    """Dies of what the kernel sends for lack of memory."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def test_a_worker_killed_for_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's count, which only a container has, rises meanwhile."""
    counts = iter([3, 4])
    monkeypatch.setattr(cgroup, "oom_kills", lambda: next(counts))
    workers = Workers(Loader(Greedy(), CPU).source, 1)
    with contextlib.closing(workers), pytest.raises(MemoryError, match="data worker 0 of 1 was killed by the kernel"):
        workers.get(workers.ask(Request(np.arange(2), 0, 0)))


@pytest.mark.mpi
def test_ranks_train_the_same_with_workers_though_shares_move_and_a_rank_dies(tmp_path: Path) -> None:
    """With and without workers to the last bit. And as one process: a sample looks the same on any rank, and none is
    lost or counted twice."""

    def results(*arguments: str) -> dict[str, Any]:
        plan = make_plan(2, shares=[6, 6], global_batch=12, epochs=3, min_ranks=1)
        folder = tmp_path / "-".join(arguments)
        folder.mkdir()
        with Listener(folder) as listener:
            process = start(
                command(2, SCRIPT, *arguments, ulfm=True),
                DLTRAIN_PLAN=write(plan, folder),
                DLTRAIN_SOCKET=listener.path,
            )
            output = end(process, 60).output
            assert {news.alive for news in listener.of(rank_messages.Shrunk)} == {(0,)}, output
        return found_in(output)

    ahead, here = (results(workers, "disturb") for workers in ("1", "0"))
    assert ahead == here and len(here["digests"]) == 25, "24 steps, one of them twice"
    alone = found_in(run([sys.executable, str(SCRIPT), "0", "none"]).output)
    assert np.allclose(here["parameters"], alone["parameters"], rtol=0, atol=1e-6)


def found_in(output: str) -> dict[str, Any]:
    (line,) = (line for line in output.splitlines() if line.startswith("{"))
    found: dict[str, Any] = json.loads(line)
    return found


@pytest.mark.parametrize(("what", "message"), [
    ("raise", "dltrain.protocol.errors.SampleError: sample 7 of the dataset: OSError: cannot read picture-7.png"),
    ("kill", r"data worker [01] of 2 ended with signal 9 \(SIGKILL\) while it loaded a batch"),
])  # fmt: skip
def test_what_ends_a_worker_reaches_the_status(what: str, message: str, tmp_path: Path) -> None:
    with Listener(tmp_path) as listener:
        assert run([sys.executable, str(SCRIPT), "2", what], DLTRAIN_SOCKET=listener.path).code == 1
        listener.wait_for(rank_messages.Failed, 1)
    (failed,) = listener.of(rank_messages.Failed)
    assert failed.failure.reason == "TrainingError" and "\n" not in failed.failure.message
    assert re.search(message, failed.failure.message), failed.failure.message
    assert "in __getitem__" in failed.failure.log_tail or what == "kill"


def test_workers_end_with_their_killed_rank() -> None:
    process = start([sys.executable, str(SCRIPT), "2", "hold"])
    assert process.stdout is not None
    while "holding" not in (line := process.stdout.readline()):
        assert line, "it ended"
    family = descendants(process.pid)
    assert len(family) == 3, "a zygote and two workers"
    process.kill()
    process.communicate()
    gone(family)


def test_under_an_agent_workers_are_forks_of_its_zygote(tmp_path: Path) -> None:
    """They cost no second import, and end with the rank that is killed."""
    path = str(tmp_path / "zygote.sock")
    with socket.socket(socket.AF_UNIX) as listener, Listener(tmp_path) as agent:
        listener.bind(path)
        listener.listen()
        fd = listener.fileno()
        zygote = subprocess.Popen(
            [sys.executable, "-m", "dltrain.launch.zygote", str(fd)], env=environment(), pass_fds=(fd,)
        )
        order = Order((str(SCRIPT), "2", "hold"), environment(DLTRAIN_SOCKET=agent.path), str(ROOT))
        reading, writing = os.pipe()
        with socket.socket(socket.AF_UNIX) as connection, os.fdopen(reading) as output:
            connection.connect(path)
            fields = {"argv": order.argv, "env": order.env, "cwd": order.cwd}
            socket.send_fds(connection, [json.dumps(fields).encode() + b"\n"], [writing])
            os.close(writing)
            rank = json.loads(connection.recv(4096))["pid"]
            while "holding" not in (line := output.readline()):
                assert line, "it ended"
            family = descendants(zygote.pid)
            assert len(family) == 3 and rank in family and not descendants(rank)
        gone(family)
        zygote.kill()
        zygote.wait()


def test_a_zygote_whose_parent_has_ended_does_not_begin() -> None:
    """As when a rank is killed while it starts one."""
    with socket.socket(socket.AF_UNIX) as listener:
        fd = listener.fileno()
        others = str(os.getppid())
        command = [sys.executable, "-m", "dltrain.launch.zygote", str(fd), others]
        assert subprocess.run(command, env=environment(), pass_fds=(fd,), timeout=WITHIN_S, check=False).returncode == 1


def test_a_zygote_that_cannot_fork_says_so_and_serves_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a pod has too many processes; the ranks that run are not ended for it."""
    ours, theirs = socket.socketpair()
    reading, writing = os.pipe()

    def fork() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", fork)
    with socket.socket(socket.AF_UNIX) as listener, ours, os.fdopen(reading) as output:
        serving, partial = Serving(listener), _PartialRequest()
        partial.data, partial.fds = json.dumps({"argv": ["-m", "x"], "env": {}, "cwd": "/"}).encode(), [writing]
        assert serving._fork(theirs, partial) is None
        assert output.read() == "dltrain: cannot start -m x: [Errno 11] Resource temporarily unavailable\n"
        assert ours.recv(1) == b"", "whoever asked is told by the end of the connection"
        serving.selector.close()


def descendants(pid: int) -> set[int]:
    found: set[int] = set()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        children = {int(child) for child in path.read_text().split()}
        found |= children.union(*(descendants(child) for child in children))
    return found


def gone(pids: set[int]) -> None:
    """Wait until none of them runs; one that nobody reaped does not."""
    deadline = time.monotonic() + WITHIN_S
    while left := {pid for pid in pids if running(pid)}:
        assert time.monotonic() < deadline, f"{left} still run"
        time.sleep(0.01)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Noise(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(2)


def test_a_sample_of_a_subset_draws_alike_in_every_split() -> None:
    source = Source(Subset(Subset(Noise(), range(9)), range(2, 8)))
    whole, part = (source.make(Request(np.arange(first, 6), 0, 0)) for first in (0, 3))
    assert torch.equal(whole[3:], part) and len(set(whole.flatten().tolist())) == 12


def test_arrays_are_samples_as_tensors_are(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(12.0).reshape(6, 2))
    source = Source((np.load(tmp_path / "x.npy", mmap_mode="r"), np.arange(6)))
    assert source.samples == 6
    x, y = source.make(Request(np.array([4, 1]), 0, 0))
    assert (x.tolist(), y.tolist()) == ([[8, 9], [2, 3]], [4, 1])
    with pytest.raises(ValueError, match=r"dataset: found .*; expected a tuple of tensors or arrays of numbers"):
        Source((np.array(["a", "b"]), np.arange(2)))
