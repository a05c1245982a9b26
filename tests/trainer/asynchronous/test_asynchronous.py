"""Tests of asynchronous and stale-synchronous training: the staleness bound, and convergence."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlcontract import ModelRef, OptimizerRef
from dltrain.asynchronous.clocks import Clocks
from dltrain.asynchronous.run import Run
from dltrain.checkpoint.writer import CheckpointManager
from dltrain.comm.process_group import ProcessGroup
from dltrain.protocol import rank_messages
from dltrain.protocol.reporter import RankReporter
from support.trainer.plans import make_plan, saving
from support.trainer.ranks import BODIES, run_ranks
from support.trainer.resume import stop_and_resume


@given(st.integers(1, 5), st.integers(1, 12), st.none() | st.integers(0, 4), st.randoms(use_true_random=False))
def test_clocks_enforce_the_bound_without_deadlock(workers: int, total: int, bound: int | None, chance: Any) -> None:
    """In any order of workers, none begins a step more than the bound ahead, one can always proceed, and all finish. The
    staleness of an update is the number of other updates since its worker read the parameters."""
    clocks = Clocks([0] * workers, total, bound)
    busy: set[int] = set()
    order: list[int] = []
    begun = [0] * workers
    while not clocks.over:
        ready = [w for w in range(workers) if w not in busy and clocks.may_begin(w)]
        assert ready or busy, "deadlock: no worker is busy and none may begin"
        if ready and (not busy or chance.random() < 0.5):
            worker = chance.choice(ready)
            assert bound is None or clocks.done[worker] - min(clocks.done) <= bound
            clocks.read(worker)
            begun[worker] = len(order)
            busy.add(worker)
        else:
            worker = chance.choice(sorted(busy))
            others = len(order) - begun[worker]
            assert clocks.step(worker) == others
            order.append(worker)
            busy.remove(worker)
    assert clocks.done == [total] * workers


@pytest.mark.mpi
@pytest.mark.parametrize(("ranks", "bound"), [(4, "2"), pytest.param(4, "none", marks=pytest.mark.long)])
def test_a_slow_worker_holds_up_others_by_the_bound_and_no_more(ranks: int, bound: str, tmp_path: Path) -> None:
    board = tmp_path / "board"
    board.write_bytes(np.zeros((2, ranks - 1), dtype=np.int64).tobytes())
    ended = run_ranks(ranks, BODIES / "training/asynchronous.py", str(ranks), bound, board)
    apart = bound if bound != "none" else "11"
    assert f"{ranks - 1} workers, at most {apart} steps apart" in ended.output, ended.output


@pytest.mark.mpi
@pytest.mark.parametrize("kind", ["StaleSynchronous", pytest.param("Asynchronous", marks=pytest.mark.long)])
def test_asynchronous_workers_learn_digits_and_resume_after_a_stop(kind: Any, tmp_path: Path) -> None:
    """With a bound of 3, the accuracy is 97 % (synchronous 98 %). The checkpoint records the step of every worker.

    The order of updates differs between runs. After 20 epochs, the accuracy varied from 96.9 to 99.2 % on a busy machine;
    after 30, from 98.3 to 98.9 %.
    """
    bound = 3 if kind == "StaleSynchronous" else None
    optimizer = OptimizerRef() if bound else OptimizerRef(name="Adam", learning_rate=2e-3)
    epochs, required = (30, 0.97) if bound else (8, 0.9)
    plan = make_plan(
        4, shares=[50, 40, 30, 0], model=ModelRef(name="digits-cnn"), epochs=epochs, collective="ParameterServer",
        synchronization=kind, staleness_bound=bound, optimizer=optimizer, checkpoint=saving(tmp_path),
    )  # fmt: skip
    steps = 12 * epochs
    listener = stop_and_resume(plan, tmp_path, evaluations=1, steps=steps)
    accuracy = {message.rank: message.outcome.accuracy for message in listener.of(rank_messages.Finished)}
    assert accuracy[0] == accuracy[1] == accuracy[2] is not None and accuracy[0] >= required, accuracy
    updates = [message for message in listener.of(rank_messages.Step) if message.rank != 3]
    assert any(message.staleness for message in updates) and all(message.ahead is not None for message in updates)
    assert {message.step for message in updates} >= {steps}
    if bound:
        assert max(message.ahead for message in updates if message.ahead is not None) <= bound + 1, (
            "a worker reports after a step and before the next check"
        )


@pytest.mark.parametrize(("grace_s", "fits"), [(30.0, False), (600.0, True)])
def test_stop_writes_no_checkpoint_that_the_grace_period_would_cut_off(
    grace_s: float, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    saved: list[bool] = []
    monkeypatch.setattr(Run, "save", lambda self, *, durable: saved.append(durable))
    monkeypatch.setattr(Run, "wait_for_checkpoint", lambda self: None)
    plan, group, reporter = make_plan(checkpoint=saving(tmp_path)), ProcessGroup(), RankReporter(None)
    manager = CheckpointManager(plan, group, reporter)
    manager._writer = SimpleNamespace(needed_s=60.0, last=None)
    run = Run.__new__(Run)
    run.plan, run.clocks = plan, Clocks([7, 9], 20, None)
    run.trainer = SimpleNamespace(process_group=group, reporter=reporter, checkpoint_manager=manager)
    reporter.ask_to_stop(grace_s)
    with pytest.raises(SystemExit):
        run.pause()
    assert saved == [fits]
    assert ("stopping after step 7 without a checkpoint" in capfd.readouterr().err) is not fits
